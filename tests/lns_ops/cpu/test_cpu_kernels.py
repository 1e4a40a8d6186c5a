"""The CPU kernels equal the reference bit for bit: random codes, extremes, exact cancellation, odd
shapes, every layout."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lns_ops import cpu
from lns_ops import reference as ref
from lns_ops.cpu import kernel_choice
from lns_ops.cpu.simd import piecewise_avx2
from lns_ops.cpu.simd.gemm import plan
from lns_ops.cpu.simd.piecewise_avx512 import evaluate, segments
from lns_ops.format import MANTISSA_BITS, LNSFormat, encode_thresholds, lns8, lns12, lns16
from lns_ops.spec.gaussian_log import gaussian_tables

FORMATS = [
    lns16,
    lns12,
    lns8,
    LNSFormat(16, 14),
    LNSFormat(16, 9),
    LNSFormat(14, 5),
    LNSFormat(2, 0),
    LNSFormat(3, 1),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
Codes = NDArray[np.int16]


def random_codes(
    rng: np.random.Generator, fmt: LNSFormat, *shape: int, zeros: float = 0.1
) -> Codes:
    """Codes spread over the whole format, extremes included, a share of them zero."""
    codes = rng.choice(fmt.codes(), shape)
    extremes = np.array(
        [fmt.field_mask, fmt.field_mask | fmt.sign_mask, 1, 1 | fmt.sign_mask], np.int16
    )
    codes = np.where(rng.random(shape) < 0.1, rng.choice(extremes, shape), codes)
    return np.where(rng.random(shape) < zeros, np.int16(0), codes).astype(np.int16)


def gaussian_codes(
    rng: np.random.Generator, fmt: LNSFormat, *shape: int, zeros: float = 0.1
) -> Codes:
    """Codes of normally distributed numbers: the magnitudes of weights and activations, which take
    the narrow kernel."""
    codes = ref.encode(rng.standard_normal(shape), fmt)
    return np.where(rng.random(shape) < zeros, np.int16(0), codes).astype(np.int16)


def cancelling_pair(rng: np.random.Generator, fmt: LNSFormat, *shape: int) -> tuple[Codes, Codes]:
    """Operands of which a third cancel exactly and a third differ by a few ulps in magnitude."""
    x, y = random_codes(rng, fmt, *shape), random_codes(rng, fmt, *shape)
    kind = rng.integers(0, 3, shape)
    y = np.where(kind == 0, ref.neg(x, fmt), y)
    near = ref.pack(
        rng.random(shape) < 0.5, ref.unpack(x, fmt)[1] + rng.integers(-5, 6, shape), fmt
    )
    return x, np.where(kind == 1, near, y).astype(np.int16)


def assert_same(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    assert actual.dtype == expected.dtype
    assert actual.flags.c_contiguous
    np.testing.assert_array_equal(actual, expected, strict=True)


# -------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_binary_operations(fmt: LNSFormat, name: str) -> None:
    x, y = cancelling_pair(np.random.default_rng(1), fmt, 301, 77)
    assert_same(getattr(cpu, name)(x, y, fmt), getattr(ref, name)(x, y, fmt))


@every_format
def test_division(fmt: LNSFormat) -> None:
    rng = np.random.default_rng(2)
    x, y = random_codes(rng, fmt, 5000), random_codes(rng, fmt, 5000)
    y = np.where(y == 0, np.int16(1), y)
    assert_same(cpu.div(x, y, fmt), ref.div(x, y, fmt))
    with pytest.raises(ValueError, match="division by zero"):
        cpu.div(x, np.zeros_like(x), fmt)


@every_format
def test_square_root_of_every_code(fmt: LNSFormat) -> None:
    codes = fmt.codes()
    assert_same(cpu.sqrt(codes[codes >= 0], fmt), ref.sqrt(codes[codes >= 0], fmt))
    with pytest.raises(ValueError, match="negative"):
        cpu.sqrt(codes, fmt)


@every_format
def test_sign_without_magnitude_reads_as_zero(fmt: LNSFormat) -> None:
    negative_zero = np.array([fmt.sign_mask], np.int16)
    one = np.array([fmt.bias], np.int16)
    for name in ("add", "sub", "mul"):
        assert_same(
            getattr(cpu, name)(negative_zero, one, fmt), getattr(ref, name)(negative_zero, one, fmt)
        )
        assert_same(
            getattr(cpu, name)(one, negative_zero, fmt), getattr(ref, name)(one, negative_zero, fmt)
        )
    assert cpu.decode(negative_zero, fmt)[0] == 0
    assert cpu.sqrt(negative_zero, fmt)[0] == 0
    assert cpu.matmul(negative_zero[:, None], one[:, None], fmt)[0, 0] == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_addition_of_any_two_codes(data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(FORMATS))
    code = st.integers(-fmt.field_mask - 1, fmt.field_mask)
    x, y = (np.array(data.draw(st.lists(code, min_size=8, max_size=8)), np.int16) for _ in range(2))
    assert_same(cpu.add(x, y, fmt), ref.add(x, y, fmt))
    assert_same(cpu.mul(x, y, fmt), ref.mul(x, y, fmt))
    assert not cpu.sub(x, x, fmt).any()


def test_operands_broadcast_and_stride() -> None:
    rng = np.random.default_rng(4)
    x, row, column = (random_codes(rng, lns16, *shape) for shape in ((6, 8), (8,), (6, 1)))
    for y in (row, column, x[:, ::-1], x[0, 0], np.array(x[1, 2]), np.ascontiguousarray(x.T).T):
        assert_same(cpu.add(x, np.asarray(y), lns16), ref.add(x, np.asarray(y), lns16))
    frozen = x.copy()
    frozen.flags.writeable = False
    assert_same(cpu.add(frozen, frozen, lns16), ref.add(x, x, lns16))
    scalar = cpu.add(np.array(x[0, 0]), np.array(x[0, 1]), lns16)
    assert scalar.shape == ()
    assert cpu.mul(x[:0], x[:0], lns16).shape == (0, 8)
    with pytest.raises(ValueError, match="int16 codes"):
        cpu.add(x.astype(np.int32), x.astype(np.int32), lns16)


# ----------------------------------------------------------------------------------------------- en


def threshold_neighbours() -> NDArray[np.float32]:
    """float32 values at, just below and just above the thresholds of f = 7, at every exponent down
    to the subnormals."""
    significands = np.concatenate([[1.0], encode_thresholds(7) / 2.0**MANTISSA_BITS])
    values = np.ldexp(significands[:, None], np.arange(-150, 128)).astype(np.float32).ravel()
    return np.concatenate(
        [values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(3.4e38))]
    )


@every_format
def test_encode_at_thresholds(fmt: LNSFormat) -> None:
    significands = encode_thresholds(fmt.fraction_bits)[:, None] + np.arange(-1, 2)
    exact = np.ldexp(
        significands.astype(np.float64).ravel()[:, None], np.arange(-150, 128) - MANTISSA_BITS
    ).ravel()[:200_000]
    single = exact.astype(np.float32)
    upward, downward = np.nextafter(single, np.float32(3.4e38)), np.nextafter(single, np.float32(0))
    for values in (exact, single, upward, downward, threshold_neighbours()):
        assert_same(cpu.encode(values, fmt), ref.encode(values, fmt))
        assert_same(cpu.encode(-values, fmt), ref.encode(-values, fmt))


@every_format
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_encode_any_finite_bit_pattern(fmt: LNSFormat, dtype: type[np.floating[Any]]) -> None:
    rng = np.random.default_rng(5)
    patterns = (
        rng.integers(0, 256, (200_000, np.dtype(dtype).itemsize), np.uint8).view(dtype).ravel()
    )
    limits = np.array(
        [0, -0.0, np.finfo(dtype).max, np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal],
        dtype,
    )
    values = np.concatenate([patterns[np.isfinite(patterns)], limits, -limits])
    assert_same(cpu.encode(values, fmt), ref.encode(values, fmt))


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254])
def test_encode_every_fraction(exponent: int) -> None:
    """All 2^23 fractions of float32 at some exponents, subnormals (0) among them; other exponents
    only add whole octaves."""
    values = np.arange(exponent << 23, exponent + 1 << 23, dtype=np.uint32).view(np.float32)
    for fmt in (lns16, lns12, LNSFormat(16, 14)):
        assert_same(cpu.encode(values, fmt), ref.encode(values, fmt))


@every_format
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_decode_of_every_code(fmt: LNSFormat, dtype: type[np.floating[Any]]) -> None:
    with np.errstate(over="ignore"):
        values = cpu.decode(fmt.codes(), fmt, dtype)
        np.testing.assert_array_equal(values, ref.decode(fmt.codes(), fmt, dtype), strict=True)
    if dtype is not np.float16:
        assert_same(cpu.encode(values, fmt), fmt.codes())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_encode_refuses_what_has_no_code(bad: float, dtype: type[np.floating[Any]]) -> None:
    values = np.ones(100_000, dtype)
    values[77_777] = bad
    with pytest.raises(ValueError, match="NaN or infinity to encode"):
        cpu.encode(values, lns16)


def test_encode_takes_integers_and_views() -> None:
    whole = np.arange(-20, 20).reshape(8, 5)
    assert_same(cpu.encode(whole, lns16), ref.encode(whole, lns16))
    assert_same(cpu.encode(whole.astype(np.float32).T, lns16), ref.encode(whole.T, lns16))
    assert cpu.encode(np.float32(1.5), lns16).shape == ()


# --------------------------------------------------------------------------------------------------

SUM_SHAPES = [
    (1, 5),
    (200, 3),
    (3, 200),
    (5, 129, 4),
    (64, 130),
    (65, 1),
    (1, 1000),
    (2, 0),
    (0, 2),
    (300,),
]


@every_format
@pytest.mark.parametrize("make", [random_codes, gaussian_codes])
def test_sum_along_each_axis(fmt: LNSFormat, make: Any) -> None:
    rng = np.random.default_rng(6)
    for shape in SUM_SHAPES:
        x = make(rng, fmt, *shape)
        for axis in range(-len(shape), len(shape)):
            assert_same(cpu.sum(x, axis, fmt), ref.sum(x, axis, fmt))
    with pytest.raises(IndexError):
        cpu.sum(x, 1, fmt)


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
    """The straight lines of the vector kernel, far beyond the ends of the tables too."""
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
    """As above, for the AVX2 kernel, to the largest distance of two words."""
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
    """Two products at every distance, of equal and of opposite signs, the larger one first and
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


# --------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("use_momentum", [False, True])
@pytest.mark.parametrize("use_kahan", [False, True])
def test_sgd_update(fmt: LNSFormat, use_momentum: bool, use_kahan: bool) -> None:
    rng = np.random.default_rng(10)
    weight, grad, buffer, compensation = (random_codes(rng, fmt, 70, 101) for _ in range(4))
    grad[::5] = ref.neg(weight[::5], fmt)
    negative_lr, momentum = (int(ref.encode(np.array(value), fmt)[()]) for value in (-0.1, 0.9))
    options = {
        "negative_lr": negative_lr,
        "momentum": momentum if use_momentum else None,
        "buffer": buffer if use_momentum else None,
        "compensation": compensation if use_kahan else None,
    }
    codes = {
        name: np.int16(value) if isinstance(value, int) else value
        for name, value in options.items()
    }
    expected = ref.sgd_update(weight, grad, fmt, **codes)  # type: ignore[arg-type]
    before = grad.copy()
    cpu.sgd_update(weight, grad, fmt, **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(grad, before)
    for actual, wanted in zip((weight, buffer, compensation), expected, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(actual, wanted)


def test_sgd_update_refuses_what_it_cannot_change() -> None:
    weight = np.ones((4, 6), np.int16)
    with pytest.raises(ValueError, match="contiguous int16"):
        cpu.sgd_update(weight.T, weight.T, lns16, negative_lr=1)
    with pytest.raises(ValueError, match="weight's shape"):
        cpu.sgd_update(weight, weight[0], lns16, negative_lr=1)


# ------------------------------------------------------------------------------------------- thread


def test_thread_count_does_not_change_results() -> None:
    rng = np.random.default_rng(11)
    x, y = random_codes(rng, lns16, 300_000), random_codes(rng, lns16, 300_000)
    a, b = gaussian_codes(rng, lns16, 40, 200), gaussian_codes(rng, lns16, 200, 300)
    before = cpu.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            cpu.set_num_threads(threads)
            assert cpu.get_num_threads() == threads
            results.append((cpu.add(x, y, lns16), cpu.matmul(a, b, lns16)))
    finally:
        cpu.set_num_threads(before)
    for total, product in results[1:]:
        assert_same(total, results[0][0])
        assert_same(product, results[0][1])
    with pytest.raises(ValueError, match="positive integer"):
        cpu.set_num_threads(0)


FORK_SCRIPT = """
import os, numpy as np, torch
from lns_ops import cpu
from lns_ops.format import lns16
torch_threads = torch.get_num_threads()
cpu.set_num_threads(3)
x = np.arange(300000).astype(np.int16)
expected = cpu.add(x, x, lns16)
pid = os.fork()
if pid == 0:
    os._exit(0 if (cpu.add(x, x, lns16) == expected).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (cpu.add(x, x, lns16) == expected).all()
assert torch.get_num_threads() == torch_threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kernels_work_after_fork_and_leave_torch_alone() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK_SCRIPT], check=True, timeout=300)


def test_thread_count_comes_from_the_environment() -> None:
    command = [sys.executable, "-c", "from lns_ops import cpu; print(cpu.get_num_threads())"]
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "3"


def test_kernel_info_and_its_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "gather")
    assert cpu.kernel_info()["matmul"] == "gather"
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "fortran")
    with pytest.raises(ValueError, match="gather"):
        cpu.kernel_info()
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "avx2")
    if kernel_choice.missing_features("avx2"):
        with pytest.raises(ValueError, match="needs AVX2"):
            cpu.kernel_info()
    else:
        assert cpu.kernel_info()["matmul"] == "simd avx2"
