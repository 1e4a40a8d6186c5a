"""Data parallelism with real processes over gloo: sums of gradients, and a trial with equal results
on one worker and on two."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lns_ops import LNSTensor, lns12, reference
from tests.trainers.processes import spawned
from trainers.comm import process_group
from trainers.comm.collectives import Collectives
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.wire import WireConfig
from trainers.sync.all_reduce import GradientSync
from trainers.training.trainer import Training
from trainers.workers.resume import resume

WORLD = 2


def values(rank: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))


def config(precision: PrecisionConfig, workers: int) -> TrialConfig:
    """Batches of 128, so that each of two workers sums one block of 64."""
    return TrialConfig(
        data=DataConfig(name="digits"),
        model=ModelConfig(hidden=[16]),
        precision=precision,
        batch_size=128,
        epochs=2,
        workers=workers,
    )


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    first, second, third = (
        nn.Parameter(LNSTensor.from_float(values(0), lns12)),
        nn.Parameter(values(0)),
        nn.Parameter(values(0)),
    )
    first.grad, second.grad = LNSTensor.from_float(values(rank).t(), lns12).t(), values(rank)
    synchronize = GradientSync(WireConfig(), Collectives())
    assert not synchronize([first, second, third], finite=rank == 0)
    assert torch.equal(second.grad, values(rank))
    assert synchronize([first, second, third])
    assert third.grad is None
    result = {"lns": first.grad.codes.tolist(), "float": second.grad.tolist()}
    for name, precision in {
        "kahan": PrecisionConfig(format="lns12", kahan_sum=True),
        "float32": PrecisionConfig(),
    }.items():
        training = Training(config(precision, WORLD), rank=rank, world_size=WORLD)
        result[name] = [training.train_epoch(), training.train_epoch(), training.test()]
        if rank == 0:
            training.save(Path(folder) / name)
    return result


def restored(rank: int, folder: str) -> dict[str, Any]:
    """Return where two ranks continue (epoch and message) if the second sees the newest checkpoint
    unchanged, not yet, or as another one."""
    trial, root = config(PrecisionConfig(), WORLD), Path(folder)
    training = Training(trial, rank=rank, world_size=WORLD)
    for name in ("1", "2"):
        training.train_epoch()
        training.save(root / name)
    dist.barrier()
    (root / f"rank {rank}").mkdir()
    os.chdir(root / f"rank {rank}")  # so that ranks use the same path but see their own files
    shutil.copytree(root / "1", "older")
    found = {}
    for name, second in {
        "alike": root / "2",
        "missing": Path("nothing"),
        "another": Path("older"),
    }.items():
        Path(name).symlink_to(root / "2" if rank == 0 else second)
        again, beginning = resume(trial, [name, str(root / "1")] if rank == 0 else [], rank, WORLD)
        found[name] = [again.epoch, beginning.damaged]
    return found


def test_ranks_that_see_different_checkpoints_go_on_from_one_that_all_see(tmp_path: Path) -> None:
    one, other = spawned(restored, tmp_path)
    assert [one[name] for name in ("alike", "missing", "another")] == [
        other[name] for name in ("alike", "missing", "another")
    ]
    assert one["alike"] == [2, ""]
    assert one["missing"][0] == one["another"][0] == 1
    assert "no whole checkpoint" in one["missing"][1]
    assert "not the same checkpoint on every rank" in one["another"][1]


def apart(rank: int, folder: str) -> dict[str, Any]:
    """Sum a number on two ranks in the whole group, then in a part of it. Each time one rank is
    later than the time limit for joining the group."""
    process_group.leave()
    process_group.join("gloo", f"file://{folder}/again", rank, WORLD, timedelta(seconds=1))
    sums = []
    for group in (None, process_group.mesh("cpu", dp=WORLD).get_group()):
        if rank == 1:
            time.sleep(2.5)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    return {"sums": sums}


def test_ranks_wait_for_each_other_longer_than_they_may_take_to_meet(tmp_path: Path) -> None:
    assert [result["sums"] for result in spawned(apart, tmp_path)] == [[2, 2], [2, 2]]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("gloo")
    return folder, spawned(in_worker, folder)


def test_workers_are_processes(workers: tuple[Path, list[dict]]) -> None:
    assert len({os.getpid(), *(w["pid"] for w in workers[1])}) == WORLD + 1


def test_gradients_are_summed_in_rank_order(workers: tuple[Path, list[dict]]) -> None:
    codes = [reference.encode(values(rank).numpy(), lns12) for rank in range(WORLD)]
    for result in workers[1]:
        np.testing.assert_array_equal(result["lns"], reference.sum(np.stack(codes), 0, lns12))
        np.testing.assert_allclose(result["float"], (values(0) + values(1)).numpy(), rtol=1e-6)


def single(precision: PrecisionConfig) -> tuple[list[dict[str, float]], Training]:
    training = Training(config(precision, 1))
    return [training.train_epoch(), training.train_epoch(), training.test()], training


def check_close(one: dict[str, float], two: dict[str, float], rel: float) -> None:
    assert one.keys() == {key for key in two if not key.startswith("bytes/")}
    for key in one.keys() - {"samples_per_second"}:
        assert one[key] == pytest.approx(two[key], rel=rel), key


def test_lns_training_on_two_workers_gives_the_bits_of_one(
    workers: tuple[Path, list[dict]],
) -> None:
    metrics, training = single(PrecisionConfig(format="lns12", kahan_sum=True))
    for result in workers[1]:
        for one, two in zip(metrics, result["kahan"], strict=True):
            check_close(one, two, rel=1e-6)
    restored = Training(training.config)
    restored.restore(workers[0] / "kahan")
    for a, b in zip(restored.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(a.codes, b.codes)


def test_float_training_on_two_workers_agrees_with_one(workers: tuple[Path, list[dict]]) -> None:
    metrics, _ = single(PrecisionConfig())
    for one, two in zip(metrics, workers[1][0]["float32"], strict=True):
        check_close(one, two, rel=1e-4)
