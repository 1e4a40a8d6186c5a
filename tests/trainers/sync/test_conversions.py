"""LNS gradients are sent and added as codes: the conversions of a step, and its result.

A conversion is a call of one of the two kernels in which every conversion on a CPU ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lns_ops import LNSFormat, LNSTensor, cpu, cuda, lns8, lns12, lns16, reference
from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.comm.codecs import make_codec
from trainers.comm.collectives import Collectives
from trainers.config.wire import WireConfig
from trainers.sync.all_reduce import GradientSync
from trainers.sync.buckets import BucketSync

SHAPES = (6, 7), (5,)
"""47 values, which the ranks' shards do not divide evenly."""
VALUES = 47


@dataclass(frozen=True)
class Case:
    """Gradients in ``fmt`` (None: float32), their wire format, and the conversions of a step."""

    fmt: LNSFormat | None
    wire: WireConfig
    conversions: int
    """The number of encodings, which equals the number of decodings."""
    tree: bool = False
    width: int = 2
    """Bytes per value on the wire."""


BUCKETS = WireConfig(bucket_cap_mb=1e-5)
"""One bucket per parameter."""
CASES = {
    "native": Case(lns12, WireConfig(), 0),
    "native, 8 bits": Case(lns8, WireConfig(), 0, width=1),
    "native, buckets": Case(lns16, BUCKETS, 0),
    "native, float32 sum": Case(lns12, WireConfig(sum="float32"), 1),
    "lns16 over lns16": Case(lns16, WireConfig(name="lns16"), 1),
    "lns16 over lns16, LNS sum": Case(lns16, WireConfig(name="lns16", sum="lns"), 0),
    "float32 over lns16, LNS sum": Case(None, WireConfig(name="lns16", sum="lns"), 1),
}
PAIRS = {"native, in pairs": Case(lns12, WireConfig(), 0, tree=True)}


def conversions(action: Callable[[], object]) -> dict[str, int]:
    """Count the calls of ``encode`` and ``decode`` during ``action``, on any thread."""
    with (
        patch.object(cpu, "encode", wraps=cpu.encode) as encode,
        patch.object(cpu, "decode", wraps=cpu.decode) as decode,
    ):
        action()
    return {"encode": encode.call_count, "decode": decode.call_count}


def gradients(rank: int, fmt: LNSFormat | None) -> list[Tensor]:
    """Gradients of a matrix, stored transposed, and of a vector."""
    generator = torch.Generator().manual_seed(rank)
    matrix, vector = (torch.randn(shape, generator=generator) for shape in SHAPES)
    if fmt is None:
        return [matrix, vector]
    return [LNSTensor.from_float(matrix.t(), fmt).t(), LNSTensor.from_float(vector, fmt)]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([storage_of(t).reshape(-1) for t in tensors])


def synchronised(case: Case, rank: int) -> dict[str, Any]:
    """Conversions, bytes and result of one step."""
    parameters = [nn.Parameter(g.clone()) for g in gradients(0, case.fmt)]
    collectives = Collectives()
    sync = (
        GradientSync(case.wire, collectives, tree=case.tree)
        if case.wire.bucket_cap_mb is None
        else BucketSync(case.wire, collectives, parameters)
    )
    for parameter, gradient in zip(parameters, gradients(rank, case.fmt), strict=True):
        parameter.grad = gradient
    if isinstance(sync, BucketSync):
        sync.begin_step(1)
    calls = conversions(lambda: sync(parameters))
    summed = [p.grad for p in parameters if p.grad is not None]
    return {"calls": calls, "sent": collectives.sent, "sum": flat(summed).tolist()}


def of_two_formats(rank: int, sync: GradientSync, parameters: list[nn.Parameter]) -> list[Any]:
    """The sums of an lns12 matrix and an lns16 vector."""
    narrow, wide = gradients(rank, lns12)[0], gradients(rank, lns16)[1]
    for parameter, gradient in zip(parameters, (narrow, wide), strict=True):
        parameter.grad = gradient
    assert sync(parameters)
    return [storage_of(p.grad).flatten().tolist() for p in parameters if p.grad is not None]


def left_by_a_hook(rank: int, value: float) -> dict[str, Any]:
    """A bucket with an lns12 parameter's gradient that a hook has made float32, times ``value``."""
    parameter = nn.Parameter(gradients(0, lns12)[1].clone())
    sync = BucketSync(BUCKETS, Collectives(), [parameter])
    parameter.grad = gradients(rank, None)[1] * value
    sync.begin_step(1)
    return {"finite": sync([parameter]), "sum": parameter.grad.tolist()}


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: synchronised(case, rank) for name, case in CASES.items()}
    mixed = [nn.Parameter(g.clone()) for g in (gradients(0, lns12)[0], gradients(0, lns16)[1])]
    found["at once"] = of_two_formats(rank, GradientSync(WireConfig(), Collectives()), mixed)
    one_bucket = replace(BUCKETS, bucket_cap_mb=1)
    found["in buckets"] = of_two_formats(rank, BucketSync(one_bucket, Collectives(), mixed), mixed)
    found["hook"] = left_by_a_hook(rank, 1.0)
    found["hook, infinite"] = left_by_a_hook(rank, math.inf if rank == 1 else 1.0)
    return found


def in_pairs(rank: int, folder: str) -> dict[str, Any]:
    return {name: synchronised(case, rank) for name, case in PAIRS.items()}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(in_worker, tmp_path_factory.mktemp("three"), world=3)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(in_pairs, tmp_path_factory.mktemp("four"), world=4)


def check_calls(found: dict[str, Any], case: Case) -> None:
    buckets = 1 if case.wire.bucket_cap_mb is None else len(SHAPES)
    times = case.conversions * buckets
    assert found["calls"] == {"encode": times, "decode": times}


@pytest.mark.parametrize("name", CASES)
def test_a_step_converts_codes_never_or_once_for_a_float32_sum(
    three: list[dict[str, Any]], name: str
) -> None:
    for found in three:
        check_calls(found[name], CASES[name])


def test_pairs_are_added_without_conversions(four: list[dict[str, Any]]) -> None:
    for found in four:
        check_calls(found["native, in pairs"], PAIRS["native, in pairs"])


def codes(world: int, fmt: LNSFormat) -> list[Any]:
    return [flat(gradients(rank, fmt)).numpy() for rank in range(world)]


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.fmt and not case.conversions]
)
def test_codes_are_added_as_the_contract_says(three: list[dict[str, Any]], name: str) -> None:
    fmt = CASES[name].fmt
    assert fmt is not None
    expected = reference.sum(np.stack(codes(3, fmt)), 0, fmt)
    for found in three:
        np.testing.assert_array_equal(found[name]["sum"], expected)


@pytest.mark.parametrize("name", ["native, float32 sum", "lns16 over lns16"])
def test_float32_sums_are_encoded_once(three: list[dict[str, Any]], name: str) -> None:
    fmt = CASES[name].fmt
    assert fmt is not None
    first, *others = (reference.decode(c, fmt).astype(np.float32) for c in codes(3, fmt))
    for other in others:
        first = first + other
    for found in three:
        np.testing.assert_array_equal(found[name]["sum"], reference.encode(first, fmt))


@pytest.mark.parametrize("how", ["at once", "in buckets"])
def test_two_formats_travel_in_their_own_codes(three: list[dict[str, Any]], how: str) -> None:
    for found in three:
        for place, fmt in enumerate((lns12, lns16)):
            rows = [storage_of(gradients(rank, fmt)[place]).flatten() for rank in range(3)]
            expected = reference.sum(torch.stack(rows).numpy(), 0, fmt)
            np.testing.assert_array_equal(found[how][place], expected)


def test_float32_gradients_of_lns_parameters_travel_as_codes(three: list[dict[str, Any]]) -> None:
    rows = [storage_of(gradients(rank, lns12)[1]) for rank in range(3)]
    expected = reference.decode(reference.sum(torch.stack(rows).numpy(), 0, lns12), lns12)
    for found in three:
        assert found["hook"]["finite"]
        np.testing.assert_array_equal(np.float32(found["hook"]["sum"]), np.float32(expected))
        assert not found["hook, infinite"]["finite"]


def test_pairs_are_added_as_the_contract_says(four: list[dict[str, Any]]) -> None:
    a, b, c, d = codes(4, lns12)
    expected = reference.add(reference.add(a, b, lns12), reference.add(c, d, lns12), lns12)
    for found in four:
        np.testing.assert_array_equal(found["native, in pairs"]["sum"], expected)


@pytest.mark.parametrize("name", [name for name in CASES if "buckets" not in name])
def test_a_value_takes_the_bytes_of_its_code(three: list[dict[str, Any]], name: str) -> None:
    """Two parts of 16 values each way, and the flag that tells whether every rank is finite."""
    for found in three:
        assert found[name]["sent"] == 2 * 2 * 16 * CASES[name].width + 2 * 2 * 8 // 3


@pytest.mark.gpu
@pytest.mark.skipif(cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}")
@pytest.mark.parametrize("fmt", [lns8, lns12, lns16])
@pytest.mark.parametrize("arithmetic", ["lns", "float32"])
def test_a_gpu_writes_and_adds_the_same_codes(fmt: LNSFormat, arithmetic: str) -> None:
    codec = make_codec(WireConfig(sum=arithmetic), fmt)
    assert codec is not None
    rows = torch.stack([flat(gradients(rank, fmt)) for rank in range(3)])
    here, there = codec.encode(rows), codec.encode(rows.cuda())
    assert torch.equal(there.cpu(), here)
    assert torch.equal(codec.decode(there, VALUES).cpu(), rows)
    assert torch.equal(codec.sum(there, VALUES).cpu(), codec.sum(here, VALUES))
