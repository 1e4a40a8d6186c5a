"""Elastic data parallelism: a real cluster loses a node and gains one; and keys with which the
number of workers cannot change."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.train import UserCallback

from trainers.config import DataConfig, ModelConfig, OptimizerConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.workers.messages import HISTORY
from trainers.workers.ray_train_worker import build_trainer, read_results

CONFIG = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[16]),
    optimizer=OptimizerConfig(lr=0.3),
    batch_size=128,
    epochs=30,
    workers=2,
    min_workers=1,
)


class Watcher(UserCallback):
    """Record how many workers report each epoch, and delay the run so that nodes can come and
    go."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([len(metrics), metrics[0]["epoch"]]) + "\n")
        time.sleep(1.0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if ray.is_initialized():
        ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote(num_cpus=0)
def fit(storage: str, log: str, environment: str) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = environment
    trainer = build_trainer(
        CONFIG,
        storage_path=storage,
        name="elastic",
        callbacks=[Watcher(Path(log))],
        resize_seconds=2.0,
    )
    return read_results(trainer.fit().checkpoint)


def seen(log: Path) -> list[list[float]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def until(log: Path, workers: int) -> None:
    """Wait for a report from this number of workers."""
    before = len(seen(log))
    for _ in range(240):
        if any(count == workers for count, _ in seen(log)[before:]):
            return
        time.sleep(1.0)
    raise AssertionError(f"no report by {workers} workers: {seen(log)}")


@pytest.mark.slow
def test_a_group_grows_with_a_node_and_shrinks_when_it_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    running = fit.remote(str(tmp_path), str(log), os.environ.get("PYTHONPATH", ""))
    until(log, 1)
    second = cluster.add_node(num_cpus=1)
    until(log, 2)
    cluster.remove_node(second)
    until(log, 1)
    results = ray.get(running, timeout=300)
    assert [past["epoch"] for past in results[HISTORY]] == [float(epoch) for epoch in range(1, 31)]
    assert results["test/error"] < 0.15


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_workers": 3}, "min_workers=3 with workers=2"),
        ({"layout": Layout(pp=2, micro_batches=2)}, "min_workers=1 with layout.pp=2"),
        ({"wire": WireConfig(name="int8")}, "min_workers=1 with wire.name=int8"),
        (
            {"sync": SyncConfig(name="local_sgd")},
            "min_workers=1 with wire.name=native, sync.name=local_sgd",
        ),
        (
            {"workers": 4},
            r"batch_size=128 with min_workers=1, workers=4, .*: any number .* multiple of 12",
        ),
    ],
)
def test_what_cannot_change_its_number_of_workers_is_refused(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*"):
        replace(CONFIG, **values)
