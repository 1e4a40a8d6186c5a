"""Gradients sent during backward: the same bits as when sent after it, in every wire format; and
faults that the tests detect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.sync.buckets import MEGABYTE, BucketSync, buckets
from trainers.sync.synchronous import Synchronous
from trainers.telemetry.metrics import repeatable
from trainers.training.trainer import Training

KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
CAP = 4 * 24 * 24 / MEGABYTE
"""About one bucket per hidden layer."""
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[24, 24, 24]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    layout=Layout(micro_batches=2),
    batch_size=64,
    epochs=3,
    workers=2,
)
TRIALS = {
    "native": (BASE, WireConfig()),
    "native lns": (replace(BASE, precision=KAHAN), WireConfig()),
    "matmul": (
        replace(BASE, precision=PrecisionConfig(format="lns12", scope="matmul")),
        WireConfig(),
    ),
    "bfloat16": (BASE, WireConfig(name="bfloat16")),
    "int8": (replace(BASE, precision=KAHAN), WireConfig(name="int8")),
}
FAST = ["native", "native lns"]
SAME_AS_ONE = ("native", "native lns", "matmul", "bfloat16")
"""Formats that treat every value alike."""


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_buckets_hold_every_parameter_once_from_the_last_to_the_first(
    sizes: list[int], cap: int
) -> None:
    parameters = [torch.zeros(size) for size in sizes]
    found = buckets(parameters, 4 * cap / MEGABYTE)
    assert [id(p) for bucket in found for p in bucket] == [id(p) for p in reversed(parameters)]
    for bucket in found[:-1]:
        assert sum(p.numel() for p in bucket) >= cap
    for bucket in found:
        assert sum(p.numel() for p in bucket[:-1]) < cap


class Forgets(BucketSync):
    """Broken: the first parameter is in no bucket, so its gradient is not summed on any rank."""

    def __init__(self, wire: WireConfig, training: Training) -> None:
        assert training.collectives is not None
        super().__init__(wire, training.collectives, list(training.model.parameters())[1:])


def weights(training: Training) -> list[Tensor]:
    return [storage_of(p.detach()).clone() for p in training.model.parameters()]


def trained(
    config: TrialConfig, rank: int, broken: bool = False
) -> tuple[list[Tensor], list[dict[str, float]], list[int]]:
    """Weights and metrics after an epoch, and the number of buckets already sent when each step
    asked for the sums."""
    training = Training(config, rank=rank, world_size=2)
    assert isinstance(training.sync, Synchronous)
    if broken:
        training.sync._sum = Forgets(config.wire, training)
    left: list[int] = []
    inner = training.sync.gradients

    def watched(parameters: Iterable[Tensor], *, finite: bool) -> bool:
        left.append(getattr(training.sync._sum, "_next", 0))  # type: ignore[attr-defined]
        return inner(parameters, finite=finite)

    training.sync.gradients = watched  # type: ignore[method-assign]
    metrics = [repeatable(training.train_epoch()) for _ in range(1)]
    return weights(training), metrics, left


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def compare(name: str, rank: int) -> dict[str, Any]:
    config, wire = TRIALS[name]
    overlapped = replace(config, wire=replace(wire, bucket_cap_mb=CAP))
    ours, metrics, left = trained(overlapped, rank)
    after, metrics_after, left_after = trained(
        replace(config, wire=replace(wire, bucket_cap_mb=CAP, overlap=False)), rank
    )
    at_once, _, _ = trained(replace(config, wire=wire), rank)
    return {
        "same": same(ours, after) and metrics == metrics_after,
        "as one": same(ours, at_once),
        "left": sorted(set(left)),
        "left after": sorted(set(left_after)),
    }


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {name: compare(name, rank) for name in FAST}
    config = replace(BASE, wire=WireConfig(bucket_cap_mb=CAP))
    whole, broken = trained(config, rank)[0], trained(config, rank, broken=True)[0]
    result["broken caught"] = not same(whole, broken)
    both = [torch.empty_like(broken[0]) for _ in range(2)]
    dist.all_gather(both, broken[0])
    result["replicas part"] = not torch.equal(*both)
    return result


def every_format(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {name: compare(name, rank) for name in TRIALS if name not in FAST}
    for name in ("native", "matmul", "int8"):
        trial, wire = TRIALS[name]
        wild = replace(
            trial,
            precision=trial.precision if name == "matmul" else PrecisionConfig(),
            optimizer=OptimizerConfig(lr=1e38),
        )
        diverging = Training(
            replace(wild, wire=replace(wire, bucket_cap_mb=CAP)), rank=rank, world_size=2
        )
        result[f"{name} diverged"] = [str(diverging.train_epoch()["train/loss"]) for _ in range(2)]
    return result


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(in_worker, tmp_path_factory.mktemp("buckets"))


def check(result: dict[str, Any], name: str) -> None:
    assert result[name]["same"]
    assert result[name]["as one"] or name not in SAME_AS_ONE
    assert result[name]["left"] == [3]  # all were sent when backward was over
    assert result[name]["left after"] == [0]


@pytest.mark.parametrize("name", FAST)
def test_overlapped_buckets_end_with_the_bits_of_those_sent_after_backward(
    workers: list[dict[str, Any]], name: str
) -> None:
    for result in workers:
        check(result, name)


@pytest.mark.slow
def test_every_format_and_divergence(tmp_path: Path) -> None:
    for result in spawned(every_format, tmp_path):
        for name in TRIALS:
            if name not in FAST:
                check(result, name)
        for name in ("native", "matmul", "int8"):
            assert result[f"{name} diverged"] == ["nan", "nan"]


def test_a_parameter_that_is_left_out_is_caught(workers: list[dict[str, Any]]) -> None:
    for result in workers:
        assert result["broken caught"]
        assert result["replicas part"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"wire": WireConfig(bucket_cap_mb=1), "layout": Layout(pp=2, micro_batches=2)},
            r"wire.bucket_cap_mb=1 with layout.pp=2",
        ),
        (
            {"wire": WireConfig(bucket_cap_mb=1), "sync": SyncConfig(name="local_sgd")},
            r"wire.bucket_cap_mb=1 with sync.name=local_sgd",
        ),
    ],
)
def test_where_nothing_can_overlap_buckets_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; use"):
        replace(BASE, **{"workers": 4 if "layout" in values else 2} | values)


def test_keys_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wire.overlap=false without wire.bucket_cap_mb"):
        WireConfig(overlap=False)
    with pytest.raises(ValueError, match=r"wire.bucket_cap_mb=25 with wire.name=powersgd"):
        WireConfig(name="powersgd", bucket_cap_mb=25)
    with pytest.raises(ValueError, match=r"wire.bucket_cap_mb=0: must be"):
        WireConfig(bucket_cap_mb=0)
