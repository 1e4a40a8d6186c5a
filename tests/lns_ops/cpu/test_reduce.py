"""Sums on vector lanes equal the reference bit for bit, for every kernel, at odd shapes, with zeros
and cancellation; also the switch to gathers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lns_ops import LNSFormat, cpu, lns8, lns12, lns16, reference
from lns_ops.cpu import kernel_choice
from lns_ops.cpu.simd import reduce
from lns_ops.functional.elementwise import whole

FORMATS = [lns12, lns16, lns8, LNSFormat(10, 7), LNSFormat(12, 5)]
Codes = NDArray[np.int16]


@pytest.fixture(params=["simd", "avx2"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", request.param)
    try:
        return cpu.kernel_info()["kernel"]
    except ValueError as error:
        pytest.skip(str(error))


def held(fmt: LNSFormat) -> Codes:
    """The format's codes in ascending order, except codes that lanes leave to gathers."""
    codes = fmt.codes()
    magnitude = np.abs(reference.decode(codes, fmt))
    return (
        codes
        if fmt.bits < 16
        else codes[(codes == 0) | (magnitude > 2.0**-30) & (magnitude < 2.0**30)]
    )


def on_lanes(fmt: LNSFormat, K: int, *operands: Codes) -> bool:
    return kernel_choice.lanes_plan(tuple(x.reshape(-1) for x in operands), K, fmt) is not None


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_additions(fmt: LNSFormat, kernel: str) -> None:
    """Any two codes, equal magnitudes, neighbours of opposite sign, zeros; the length is not a
    multiple of a chunk."""
    rng, codes = np.random.default_rng(0), held(fmt)
    x, y = (rng.choice(codes, (61, 777)) for _ in range(2))
    y[::3] = reference.neg(x[::3], fmt)
    place = rng.integers(0, len(codes) - 40, x[1::3].shape)
    x[1::3], y[1::3] = (
        codes[place],
        reference.neg(codes[place + rng.integers(0, 40, place.shape)], fmt),
    )
    x[5], y[8] = 0, 0
    assert on_lanes(fmt, 2, x, y)
    np.testing.assert_array_equal(cpu.add(x, y, fmt), reference.add(x, y, fmt))
    np.testing.assert_array_equal(cpu.sub(x, y, fmt), reference.sub(x, y, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shift", [0, -5])
def test_sums(fmt: LNSFormat, shift: int, kernel: str) -> None:
    rng = np.random.default_rng(1)
    x = reference.encode(rng.standard_normal((3, 100, 137)), fmt)
    x[rng.random(x.shape) < 0.3] = 0
    assert on_lanes(fmt, 137, x)
    for axis in range(3):
        np.testing.assert_array_equal(
            cpu.sum(x, axis, fmt, shift), reference.sum(x, axis, fmt, shift)
        )


@pytest.mark.parametrize("K", [1, 3, 25, 31, 32, 33, 49, 63, 64, 65, 96, 129, 4000])
def test_rows_of_any_length(K: int, kernel: str) -> None:
    """Transposition tiles that extend beyond a row and beyond the array; blocks of two lengths side
    by side."""
    x = reference.encode(
        np.random.default_rng(2).standard_normal(max(9000 // K, 5) * K), lns12
    ).reshape(-1, K)
    assert on_lanes(lns12, K, x)
    np.testing.assert_array_equal(cpu.sum(x, 1, lns12), reference.sum(x, 1, lns12))


def test_threads_divide_the_work(kernel: str) -> None:
    x = reference.encode(np.random.default_rng(3).standard_normal((700, 400)), lns12)
    before = cpu.get_num_threads()
    try:
        cpu.set_num_threads(3)
        several = (
            cpu.add(x, x[::-1], lns12),
            cpu.sum(x, 1, lns12),
            cpu.sum(x, 0, lns12),
            cpu.repeat(x[0], 280_000, 1),
        )
    finally:
        cpu.set_num_threads(before)
    alone = (
        cpu.add(x, x[::-1], lns12),
        cpu.sum(x, 1, lns12),
        cpu.sum(x, 0, lns12),
        cpu.repeat(x[0], 280_000, 1),
    )
    for got, wanted in zip(several, alone, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_what_does_not_fit_sixteen_bits_is_gathered(kernel: str) -> None:
    x = np.random.default_rng(4).choice(lns16.codes(), (100, 100))
    assert not on_lanes(lns16, 2, x, x)
    assert not on_lanes(
        LNSFormat(16, 10), 2, *(reference.encode(np.ones((100, 100)), LNSFormat(16, 10)),) * 2
    )
    assert not on_lanes(lns12, 2, np.zeros((100, 100), np.int16), np.zeros((100, 100), np.int16))
    assert not on_lanes(lns12, 2, x[:2, :2], x[:2, :2])
    assert reduce.plan([(1, 5)], 2, lns12, "gather") is None
    np.testing.assert_array_equal(cpu.add(x, x.T, lns16), reference.add(x, x.T, lns16))


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 1), (2, 1, 5), (7,), (2, 3, 1, 4), (0, 3), ()])
def test_broadcasts_are_torchs(shape: tuple[int, ...]) -> None:
    for keep in itertools.product([False, True], repeat=len(shape)):
        for drop in range(len(shape) + 1):
            sizes = [size if kept else 1 for size, kept in zip(shape, keep, strict=True)][drop:]
            x = torch.randint(-999, 999, sizes, dtype=torch.int16)
            filled = whole(x, torch.Size(shape))
            assert filled.is_contiguous()
            assert torch.equal(filled, x.expand(shape))
