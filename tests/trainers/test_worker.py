"""The Ray Train path with real workers: two processes, one of them killed in the middle."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.train import UserCallback

from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.training import Training
from trainers.worker import build_trainer, resources

CONFIG = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[16]),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    batch_size=128,
    epochs=6,
    workers=2,
)


class Killer(UserCallback):
    """Writes down every report; kills one of the two workers after the second. Runs in Ray Train's controller process."""

    def __init__(self, log: Path, kill: bool) -> None:
        self.log, self.kill = log, kill

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([m["epoch"] for m in metrics]) + "\n")
        if self.kill and len(self.log.read_text().splitlines()) == 2:
            victim = train_workers()[-1]
            os.kill(victim, signal.SIGKILL)
            self.log.with_suffix(".killed").write_text(str(victim))


def train_workers() -> list[int]:
    """Process ids of Ray Train's workers, which are siblings of the controller that asks."""
    siblings = psutil.Process().parent().children(recursive=True)
    return [p.pid for p in siblings if "TrainWorker" in " ".join(p.cmdline())]


@pytest.mark.slow
def test_killed_worker_restarts_and_ends_bit_equal(ray_cluster: None, tmp_path: Path) -> None:
    assert resources(CONFIG) == [{"CPU": 1.0}] * 2
    finals = {}
    for kill in (False, True):
        log = tmp_path / f"reports-{kill}"
        result = build_trainer(CONFIG, storage_path=str(tmp_path), name=f"kill-{kill}", callbacks=[Killer(log, kill)]).fit()
        reports = [json.loads(line) for line in log.read_text().splitlines()]
        assert log.with_suffix(".killed").exists() == kill
        assert {tuple(report) for report in reports} == {(float(e), float(e)) for e in range(1, 7)}
        training = Training(replace(CONFIG, workers=1))
        with result.checkpoint.as_directory() as folder:
            training.restore(Path(folder))
        finals[kill] = [p.codes for p in training.model.parameters()], result.metrics["test/error"]
    assert finals[True][1] == finals[False][1]
    assert all(torch.equal(a, b) for a, b in zip(finals[True][0], finals[False][0], strict=True))
