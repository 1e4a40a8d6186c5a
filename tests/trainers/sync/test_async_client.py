"""The parameter server: the bound by itself, and with real processes: bulk synchronous equals
synchronous, staleness is bounded and measured."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import LNSTensor, lns12
from lns_ops.tensor import storage_of
from trainers.comm import process_group
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.sync.async_client import Asynchronous, describe, merged
from trainers.sync.parameter_server import Shard, slices
from trainers.training.trainer import Training

WORLD = 2
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[16]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    batch_size=64,
    epochs=2,
    workers=WORLD,
)
KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
BULK = SyncConfig(name="asynchronous", shards=2)


def asynchronous(staleness: int | None, **options: Any) -> SyncConfig:
    return SyncConfig(name="asynchronous", staleness=staleness, **options)


class IgnoresTheBound(Shard):
    """A broken shard: no replica waits."""

    def may_start(self, clock: int) -> bool:
        return True


def shard_of(staleness: int | None, replicas: int, kind: type[Shard] = Shard) -> Shard:
    config = replace(BASE, workers=replicas, batch_size=64 * replicas, sync=asynchronous(staleness))
    return kind(np.zeros(3, np.float32), config.to_dict())


async def course(shard: Shard, order: list[int], replicas: int, steps: int) -> dict[int, int]:
    """Run replicas that take turns as ``order`` says, each continuing when the shard lets it;
    return the clock gaps."""

    async def replica(rank: int) -> None:
        for clock in range(steps):
            await shard.pull(rank, clock)
            for _ in range(order[(rank * steps + clock) % len(order)]):
                await asyncio.sleep(0)
            await shard.push(rank, np.ones(3, np.float32))

    await asyncio.wait_for(asyncio.gather(*(replica(rank) for rank in range(replicas))), 60)
    return (await shard.recorded())[1]


@given(
    st.integers(2, 4),
    st.one_of(st.none(), st.integers(0, 3)),
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
)
def test_no_replica_is_ever_further_ahead_than_the_bound(
    replicas: int, staleness: int | None, order: list[int]
) -> None:
    gaps = asyncio.run(course(shard_of(staleness, replicas), order, replicas, steps=6))
    assert sum(gaps.values()) == 6 * replicas
    assert max(gaps) <= (5 if staleness is None else staleness)


def test_a_bound_that_is_ignored_is_caught() -> None:
    order = [0] * 6 + [9] * 6
    assert max(asyncio.run(course(shard_of(1, 2), order, 2, steps=6))) <= 1
    assert max(asyncio.run(course(shard_of(1, 2, IgnoresTheBound), order, 2, steps=6))) > 1


def test_updates_are_the_optimizers() -> None:
    """Bulk synchronous: one update with the sum; otherwise one update each. Momentum 0.5, lr 0.3 /
    64 per replica."""

    async def push_all(shard: Shard) -> np.ndarray[Any, Any]:
        for rank in range(2):
            assert (await shard.pull(rank, 0)) is not None
        for rank in range(2):
            await shard.push(rank, np.full(3, 64 * (1.0 + rank), np.float32))
        return (await shard.state())["weight"]

    lr = 0.3 / 128
    np.testing.assert_allclose(asyncio.run(push_all(shard_of(0, 2))), -lr * 64 * 3, rtol=1e-6)
    np.testing.assert_allclose(
        asyncio.run(push_all(shard_of(None, 2))), -lr * 64 * (1 + 2.5), rtol=1e-6
    )


@pytest.mark.parametrize(("aware", "expected"), [(False, 1 + 1 + 1), (True, 1 + 1 + 1 / 2)])
def test_a_stale_gradient_counts_less_where_asked(aware: bool, expected: float) -> None:
    """Three replicas pull together and push one after another: lags of 0, 1 and 2 updates. No
    momentum."""
    config = replace(
        BASE,
        workers=3,
        batch_size=192,
        sync=asynchronous(None, staleness_aware=aware),
        optimizer=OptimizerConfig(lr=0.3),
    )
    shard = Shard(np.zeros(3, np.float32), config.to_dict())

    async def push_all() -> np.ndarray[Any, Any]:
        for rank in range(3):
            await shard.pull(rank, 0)
        for rank in range(3):
            await shard.push(rank, np.full(3, 64.0, np.float32))
        return (await shard.state())["weight"]

    np.testing.assert_allclose(asyncio.run(push_all()), -0.3 / 192 * 64 * expected, rtol=1e-6)
    assert asyncio.run(shard.recorded())[0] == {0: 1, 1: 1, 2: 1}


def test_without_staleness_nothing_can_be_aware_of_it() -> None:
    with pytest.raises(ValueError, match=r"sync.staleness_aware=true, sync.staleness=0: .*; use"):
        asynchronous(0, staleness_aware=True)


def test_a_shard_continues_from_its_state() -> None:
    config = replace(BASE, precision=KAHAN, sync=asynchronous(None))
    values = LNSTensor.from_float(torch.linspace(-1, 1, 7), lns12).codes.numpy()
    gradient = LNSTensor.from_float(torch.linspace(3, -2, 7), lns12).codes.numpy()

    async def steps(shard: Shard, count: int) -> dict[str, Any]:
        for _ in range(count):
            await shard.pull(0, 0)
            await shard.push(0, gradient)
        return await shard.state()

    one, other = Shard(values, config.to_dict()), Shard(np.zeros(7, np.int16), config.to_dict())
    asyncio.run(other.load_state(asyncio.run(steps(one, 3))))
    ends = [asyncio.run(steps(shard, 3)) for shard in (one, other)]
    assert set(ends[0]) == {"weight", "codes/momentum_buffer", "codes/compensation"}
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not np.array_equal(ends[0]["weight"], values)


@given(st.integers(1, 1000), st.integers(1, 9))
def test_slices_cover_everything_evenly(values: int, shards: int) -> None:
    parts = slices(values, shards)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(values))
    assert max(p.stop - p.start for p in parts) - min(p.stop - p.start for p in parts) <= 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_shared_work_is_taken_once(order: list[int]) -> None:
    async def take(shard: Shard) -> list[int]:
        return [await shard.take() for _ in order]

    shard = shard_of(None, 4)
    assert asyncio.run(take(shard)) == list(range(len(order)))
    asyncio.run(shard.restart())
    assert asyncio.run(take(shard))[0] == 0


def test_histograms_are_described() -> None:
    found = describe("version_lag", merged([{0: 1, 5: 1}, {1: 2}]))
    assert found["staleness/version_lag"] == 7 / 4
    assert found["staleness/version_lag_max"] == 5
    assert [found[f"staleness/version_lag_{key}"] for key in ("0", "1", "2", "3", "4_or_more")] == [
        0.25,
        0.5,
        0,
        0,
        0.25,
    ]


def weights(training: Training) -> list[float]:
    return [
        v for p in training.model.parameters() for v in storage_of(p.detach()).flatten().tolist()
    ]


def run(name: str, config: TrialConfig, rank: int, folder: Path) -> dict[str, Any]:
    if name == "ignored":
        training = Training(
            replace(config, sync=SyncConfig(straggler_seconds=0.2)), rank=rank, world_size=WORLD
        )
        assert training.collectives is not None
        training.sync = Asynchronous(config, training.model, training.collectives, IgnoresTheBound)
    else:
        training = Training(config, rank=rank, world_size=WORLD)
    metrics = [training.train_epoch()]
    training.save(folder / name)
    dist.barrier()
    metrics.append(training.train_epoch())
    result: dict[str, Any] = {
        "metrics": metrics,
        "weights": weights(training),
        "test": training.test(),
    }
    return result | (
        resumed(config, rank, folder / name, metrics[1], result["weights"])
        if "bulk" in name
        else {}
    )


def resumed(
    config: TrialConfig, rank: int, folder: Path, metrics: dict[str, float], ends: list[float]
) -> dict[str, Any]:
    """Return whether the second epoch is the same from the checkpoint, with another number of
    shards."""
    again = Training(
        replace(config, sync=replace(config.sync, shards=1)), rank=rank, world_size=WORLD
    )
    again.restore(folder)
    return {
        "same": again.train_epoch()["train/loss"] == metrics["train/loss"]
        and weights(again) == ends
    }


def continued(rank: int, folder: Path) -> dict[str, Any]:
    """Losses of a synchronous trial's second epoch, and of the same epoch through a server from its
    checkpoint."""
    config = replace(BASE, optimizer=OptimizerConfig(lr=0.3))
    whole, served = (
        Training(replace(config, sync=sync), rank=rank, world_size=WORLD)
        for sync in (SyncConfig(), BULK)
    )
    whole.train_epoch()
    whole.save(folder)
    dist.barrier()
    served.restore(folder)
    return {
        "losses": [training.train_epoch()["train/loss"] for training in (whole, served)],
        "epoch": served.epoch,
    }


TRIALS = {
    "synchronous": BASE,
    "bulk": replace(BASE, sync=BULK),
    "lns synchronous": replace(BASE, precision=KAHAN),
    "lns bulk": replace(BASE, sync=BULK, precision=KAHAN),
    "bounded": replace(BASE, sync=asynchronous(2, straggler_seconds=0.2)),
    "ignored": replace(BASE, sync=asynchronous(2, straggler_seconds=0.2)),
    "unbounded": replace(BASE, sync=asynchronous(None, straggler_seconds=0.2), precision=KAHAN),
    "shared": replace(BASE, sync=asynchronous(None, straggler_seconds=0.2, work="shared")),
}


def diverging(rank: int, folder: Path) -> list[str]:
    """One replica's data are not finite; the other must notice and not wait."""
    training = Training(replace(BASE, sync=BULK), rank=rank, world_size=WORLD)
    if rank == 1:
        training.data = training.data._replace(
            train=training.data.train._replace(x=training.data.train.x * float("nan"))
        )
    return [str(training.train_epoch()["train/loss"]) for _ in range(2)]


OTHERS = {"diverging": diverging, "continued": continued}


@ray.remote(num_cpus=1)
def in_worker(rank: int, folder: str, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    process_group.join("gloo", f"file://{folder}/store", rank, WORLD)
    results: dict[str, Any] = {
        name: OTHERS[name](rank, Path(folder) / name)
        if name in OTHERS
        else run(name, TRIALS[name], rank, Path(folder))
        for name in names
    }
    process_group.leave()
    return results | {"pid": os.getpid()}


def in_workers(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The results of these trials from two processes."""
    results: list[dict[str, Any]] = ray.get(
        [in_worker.remote(rank, str(folder), list(names)) for rank in range(WORLD)], timeout=240
    )
    assert len({os.getpid(), *(result["pid"] for result in results)}) == WORLD + 1
    return results


def check_bulk(workers: list[dict[str, Any]], kind: str, size: int) -> None:
    """Two ranks' gradients have one sum in any order; a push and a pull are ``size`` bytes per
    value each."""
    values, steps = 64 * 16 + 16 + 16 * 10 + 10, 10
    for result in workers:
        bulk = result[f"{kind}bulk"]
        assert bulk["weights"] == result[f"{kind}synchronous"]["weights"]
        assert bulk["test"] == result[f"{kind}synchronous"]["test"]
        assert bulk["same"]
        assert [m["staleness/clock_gap_max"] for m in bulk["metrics"]] == [0, 0]
        assert bulk["metrics"][0]["bytes/sent"] == pytest.approx(
            size * values * (steps + steps + 1), rel=0.01
        )
    check_reports(workers)


def check_reports(workers: list[dict[str, Any]]) -> None:
    """All ranks report the same, and the trials learn."""
    for name in TRIALS.keys() & workers[0].keys():
        one, two = (
            [{k: v for k, v in m.items() if k != "samples_per_second"} for m in r[name]["metrics"]]
            for r in workers
        )
        assert one == two
        assert workers[0][name]["test"]["test/error"] < 0.5


@pytest.mark.slow
def test_bulk_synchronous_is_synchronous_and_a_bound_that_is_ignored_is_seen(
    ray_cluster: None, tmp_path: Path
) -> None:
    """The second replica of "ignored" sleeps 0.2 s per step, so the first runs further ahead than
    its bound of 2."""
    workers = in_workers(tmp_path, "synchronous", "bulk", "ignored")
    check_bulk(workers, "", 4)
    for result in workers:
        assert all(m["staleness/clock_gap_max"] > 2 for m in result["ignored"]["metrics"])


ON_ITS_NODE = """
import sys
from torch import nn
import ray
from ray.cluster_utils import Cluster
from tests.trainers.sync.test_async_client import BASE, BULK, replace
from trainers.comm import process_group
from trainers.comm.collectives import Collectives
from trainers.sync.async_client import Asynchronous
from trainers.sync.parameter_server import Shard

class Tells(Shard):
    def node(self):
        return ray.get_runtime_context().get_node_id()

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
ray.init(cluster.address, log_to_driver=False)
process_group.join("gloo", f"file://{sys.argv[1]}/store", 0, 1)
config = replace(BASE, sync=replace(BULK, shards=8))
server = Asynchronous(config, nn.Linear(8, 8), Collectives(), Tells)
nodes = {ray.get(shard.node.remote()) for shard in server._shards}
print(nodes == {ray.get_runtime_context().get_node_id()}, len(server._shards))
process_group.leave()
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_shards_run_on_the_node_of_rank_0(tmp_path: Path) -> None:
    """Others may have another torch. In a separate process, which joins a cluster of two nodes."""
    code = [sys.executable, "-c", ON_ITS_NODE, str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1:] == ["True 8"], done.stdout + done.stderr


@pytest.mark.slow
def test_a_server_continues_from_the_checkpoint_of_another_layout(
    ray_cluster: None, tmp_path: Path
) -> None:
    for result in in_workers(tmp_path, "continued"):
        first, second = result["continued"]["losses"]
        assert first == second
        assert result["continued"]["epoch"] == 2


@pytest.mark.slow
def test_staleness_is_bounded_and_divergence_ends_the_trial(
    ray_cluster: None, tmp_path: Path
) -> None:
    workers = in_workers(
        tmp_path, "lns synchronous", "lns bulk", "bounded", "unbounded", "shared", "diverging"
    )
    check_bulk(workers, "lns ", 2)
    for result in workers:
        assert all(0 < m["staleness/clock_gap_max"] <= 2 for m in result["bounded"]["metrics"])
        assert all(m["staleness/clock_gap_max"] > 2 for m in result["unbounded"]["metrics"])
        first = result["unbounded"]["metrics"][0]
        shares = [
            first[f"staleness/version_lag{key}"] for key in ("_0", "_1", "_2", "_3", "_4_or_more")
        ]
        assert sum(shares) == pytest.approx(1)
        assert first["staleness/steps_min"] == first["staleness/steps_max"] == 10
        for metrics in result["shared"]["metrics"]:
            assert metrics["staleness/steps_min"] + metrics["staleness/steps_max"] == 20
            assert metrics["staleness/steps_min"] < 10
        assert result["diverging"] == ["nan", "nan"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 1, "batch_size": 64}, "sync.name=asynchronous with workers=1, .* one replica"),
        ({"wire": WireConfig(name="int8")}, "wire.name=int8.* with sync.name=asynchronous"),
        ({"device": "cuda"}, "device=cuda with sync.name=asynchronous"),
        (
            {"optimizer": OptimizerConfig(name="adam", lr=0.01), "sync": asynchronous(1)},
            "optimizer.name=adam with sync.staleness=1: each replica's",
        ),
        ({"layout": Layout(pp=2, micro_batches=2), "workers": 4}, r"layout.pp=2"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        replace(BASE, sync=values.pop("sync", BULK), **values)


def test_bounds_that_are_none_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sync.staleness=-1: must be a whole number of at least 0; \w"
    ):
        asynchronous(-1)
    with pytest.raises(
        ValueError, match=r"sync.work=shared, sync.staleness=2: a bound makes .*; \w"
    ):
        asynchronous(2, work="shared")
    with pytest.raises(
        ValueError, match=r"sync.staleness=3 with sync.name=local_sgd: means nothing to it; \w"
    ):
        SyncConfig(name="local_sgd", staleness=3)
