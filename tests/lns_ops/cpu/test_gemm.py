"""Matrix products on the CPU equal the reference bit for bit, by every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lns_ops import cpu
from lns_ops import reference as ref
from lns_ops.cpu import kernel_choice
from lns_ops.cpu.simd import piecewise_avx2
from lns_ops.cpu.simd.gemm import plan
from lns_ops.cpu.simd.piecewise_avx512 import evaluate, segments
from lns_ops.format import LNSFormat, lns12, lns16
from lns_ops.spec.gaussian_log import gaussian_tables
from tests.lns_ops.cpu.codes import Codes, assert_same, every_format, gaussian_codes, random_codes

MATMUL_SHAPES = [
    (1, 1, 1),
    (3, 130, 5),
    (17, 64, 129),
    (9, 65, 300),
    (2, 1, 128),
    (33, 200, 257),
    (0, 3, 2),
    (2, 0, 3),
]


@pytest.fixture(params=["gather", "simd", "avx2"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one matrix-product kernel; skips where the processor lacks it."""
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", request.param)
    try:
        cpu.kernel_info()
    except ValueError as error:
        pytest.skip(str(error))
    if request.param == "avx2" and kernel_choice.missing_features("avx512bw", "avx512vbmi"):
        pytest.skip("simd is this kernel here")
    return str(request.param)


@every_format
@pytest.mark.parametrize("make", [random_codes, gaussian_codes])
def test_matmul(fmt: LNSFormat, make: Any, kernel: str) -> None:
    rng = np.random.default_rng(7)
    for M, K, N in MATMUL_SHAPES:
        x_MK, y_KN = make(rng, fmt, M, K), make(rng, fmt, K, N)
        expected = ref.matmul(x_MK, y_KN, fmt)
        assert_same(cpu.matmul(x_MK, y_KN, fmt), expected)
        x_view, y_view = np.ascontiguousarray(x_MK.T).T, np.ascontiguousarray(y_KN.T).T
        assert_same(cpu.matmul(x_view, y_view, fmt), expected)
        assert_same(
            cpu.matmul(x_MK[:, ::-1], y_KN[::-1], fmt), ref.matmul(x_MK[:, ::-1], y_KN[::-1], fmt)
        )


@every_format
def test_matmul_that_cancels(fmt: LNSFormat, kernel: str) -> None:
    """Pairs of equal and opposite products, in the same block and in different blocks."""
    rng = np.random.default_rng(8)
    x, y = gaussian_codes(rng, fmt, 5, 96), gaussian_codes(rng, fmt, 96, 40)
    for order in (np.repeat(np.arange(96), 2), np.tile(np.arange(96), 2)):
        x_MK, y_KN = x[:, order], y[order]
        x_MK[:, 1::2] = ref.neg(x_MK[:, ::2], fmt)
        y_KN[1::2] = y_KN[::2]
        assert_same(cpu.matmul(x_MK, y_KN, fmt), ref.matmul(x_MK, y_KN, fmt))


@every_format
def test_matmul_that_saturates(fmt: LNSFormat, kernel: str) -> None:
    largest = np.full((4, 300), fmt.field_mask, np.int16)
    smallest = np.full((4, 300), 1, np.int16)
    for x_MK in (largest, smallest):
        for y_NK in (largest, smallest):
            assert_same(cpu.matmul(x_MK, y_NK.T, fmt), ref.matmul(x_MK, y_NK.T, fmt))


@settings(max_examples=40, deadline=None)
@given(
    fmt=st.sampled_from([lns16, lns12]), M=st.integers(1, 9), K=st.integers(1, 140),
    N=st.integers(1, 140), seed=st.integers(0, 1 << 32), spread=st.integers(0, 60),
    zeros=st.sampled_from([0.0, 0.1, 0.8]),
)  # fmt: skip
def test_matmul_of_any_shape_and_spread(
    fmt: LNSFormat, M: int, K: int, N: int, seed: int, spread: int, zeros: float
) -> None:
    rng = np.random.default_rng(seed)

    def operand(*shape: int) -> Codes:
        scale = np.exp2(rng.uniform(-spread, spread, shape) / 2)
        return np.where(
            rng.random(shape) < zeros, 0, ref.encode(rng.choice([-1, 1], shape) * scale, fmt)
        ).astype(np.int16)

    x_MK, y_KN = operand(M, K), operand(K, N)
    assert_same(cpu.matmul(x_MK, y_KN, fmt), ref.matmul(x_MK, y_KN, fmt))


@pytest.mark.parametrize("fraction_bits", range(3, 8))
def test_segments_equal_the_tables_everywhere(fraction_bits: int) -> None:
    """The linear pieces of the vector kernel, also far beyond the ends of the tables."""
    pieces = segments(fraction_bits)
    plus, minus = (table.astype(np.int64) for table in gaussian_tables(fraction_bits))
    distance = np.arange(4 * len(plus))
    for parity, table in ((0, plus), (1, minus)):
        wanted = table[np.minimum(distance, len(table) - 1)] << pieces.shape.unit_shift
        np.testing.assert_array_equal(
            evaluate(pieces, distance, parity), np.maximum(wanted, -32768)
        )


@pytest.mark.parametrize("fraction_bits", range(3, 8))
def test_pieces_equal_the_tables_everywhere(fraction_bits: int) -> None:
    """The same for the AVX2 kernel, up to the largest distance of two words."""
    made = piecewise_avx2.pieces(fraction_bits)
    plus, minus = (table.astype(np.int64) for table in gaussian_tables(fraction_bits))
    distance = np.arange((1 << 15) >> made.cut.unit_shift)
    for parity, table in ((0, plus), (1, minus)):
        wanted = table[np.minimum(distance, len(table) - 1)] << made.cut.unit_shift
        np.testing.assert_array_equal(
            piecewise_avx2.evaluate(made, distance, parity), np.maximum(wanted, -32768)
        )


@pytest.mark.parametrize("avx2", [False, True])
def test_lns12_always_takes_the_vector_kernel(avx2: bool) -> None:
    full = (1, lns12.field_mask)
    assert plan(full, full, 4096, lns12, avx2) is not None
    assert plan((1, lns16.field_mask), (1, lns16.field_mask), 64, lns16, avx2) is None


@pytest.mark.parametrize("fmt", [lns12, lns16], ids=str)
def test_every_distance_of_two_terms(fmt: LNSFormat, kernel: str) -> None:
    """Two products at every distance, with equal and opposite signs, the larger one first and
    last."""
    span = np.arange(len(gaussian_tables(fmt.fraction_bits).plus) + 40)
    one = fmt.bias
    for swap in (False, True):
        for sign in (0, fmt.sign_mask):
            terms = np.array([np.full_like(span, one), (one - span) | sign])
            y_KN = terms[:: -1 if swap else 1].astype(np.int16)
            x_MK = np.array([[one, one], [one | fmt.sign_mask, one | fmt.sign_mask]]).astype(
                np.int16
            )
            assert_same(cpu.matmul(x_MK, y_KN, fmt), ref.matmul(x_MK, y_KN, fmt))


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 128, 129, 256, 257, 300, 784])
def test_matmul_at_panel_edges(columns: int, kernel: str) -> None:
    rng = np.random.default_rng(12)
    for fmt in (lns12, lns16):
        x_MK, y_KN = gaussian_codes(rng, fmt, 18, 70), gaussian_codes(rng, fmt, 70, columns)
        assert_same(cpu.matmul(x_MK, y_KN, fmt), ref.matmul(x_MK, y_KN, fmt))


def test_matmul_of_sparse_rows(kernel: str) -> None:
    rng = np.random.default_rng(13)
    x_MK, y_KN = (
        gaussian_codes(rng, lns16, 20, 200, zeros=0.8),
        gaussian_codes(rng, lns16, 200, 260),
    )
    x_MK[3] = 0
    x_MK[:, 64:128] = 0
    assert_same(cpu.matmul(x_MK, y_KN, lns16), ref.matmul(x_MK, y_KN, lns16))
    assert_same(cpu.matmul(np.zeros_like(x_MK), y_KN, lns16), np.zeros((20, 260), np.int16))


def test_matmul_over_many_blocks(kernel: str) -> None:
    rng = np.random.default_rng(14)
    x_MK, y_KN = gaussian_codes(rng, lns12, 2, 5000), gaussian_codes(rng, lns12, 5000, 40)
    y_KN[:2500] = ref.absolute(y_KN[:2500], lns12)
    assert_same(cpu.matmul(x_MK, y_KN, lns12), ref.matmul(x_MK, y_KN, lns12))


def test_matmul_batched() -> None:
    rng = np.random.default_rng(9)
    x_BMK, y_BKN = random_codes(rng, lns12, 3, 4, 70), random_codes(rng, lns12, 3, 70, 9)
    expected = np.stack([ref.matmul(x, y, lns12) for x, y in zip(x_BMK, y_BKN, strict=True)])
    assert_same(cpu.matmul_batched(x_BMK, y_BKN, lns12), expected)
    with pytest.raises(ValueError, match="same B and K"):
        cpu.matmul_batched(x_BMK, y_BKN[:, 1:], lns12)
    with pytest.raises(ValueError, match="same K"):
        cpu.matmul(x_BMK[0], x_BMK[0], lns12)
