"""The CPU kernels equal the reference bit for bit: random codes, extremes, exact cancellation, odd
shapes, every layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import lns_ops
from lns_ops import cpu
from lns_ops import reference as ref
from lns_ops._compat import openmp_team
from lns_ops.cpu import kernel_choice
from lns_ops.cpu.compiler import object_cache
from lns_ops.cpu.kernels import elementwise as elementwise_kernels
from lns_ops.format import MANTISSA_BITS, LNSFormat, encode_thresholds, lns12, lns16
from tests.lns_ops.cpu.codes import (
    FORMATS,
    assert_same,
    cancelling_pair,
    every_format,
    gaussian_codes,
    random_codes,
)

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
    """float32 values at, just below and just above the thresholds of f = 7, at every exponent
    including subnormals."""
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
    """All 2^23 fractions of float32 at some exponents, including subnormals (0). Other exponents
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


@pytest.fixture
def torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("torch_threads", [1, 2, 3], indirect=True)
@pytest.mark.usefixtures("torch_threads")
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


@pytest.mark.parametrize(
    ("torch_threads", "shared"), [(1, False), (2, True)], indirect=["torch_threads"]
)
@pytest.mark.usefixtures("torch_threads")
def test_work_is_shared_among_the_threads_that_torch_has(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if openmp_team() is None:
        pytest.skip("torch has no OpenMP of GNU's here")
    teams: list[int] = []

    def counted(address: int, words: bytes, bounds: bytes, threads: int) -> int:
        teams.append(threads)
        return object_cache.share(address, words, bounds, threads)

    monkeypatch.setattr(cpu.compiler.thread_pool._POOL, "threads", 2)
    code = elementwise_kernels.mul.code((np.empty(0, np.int16), np.empty(0, np.int16)))
    monkeypatch.setitem(code.shared.__globals__, "share", counted)  # type: ignore[attr-defined]
    x = np.arange(300_000).astype(np.int16)
    assert_same(cpu.mul(x, x, lns16), ref.mul(x, x, lns16))
    assert teams == ([2] if shared else [])


def test_a_shared_kernel_refuses_what_one_thread_refuses() -> None:
    if openmp_team() is None:
        pytest.skip("torch has no OpenMP of GNU's here")
    code = elementwise_kernels.mul.code((np.empty(0, np.int16), np.empty(0, np.int16)))
    wrong = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match="needs contiguous one-dim"):
        code.shared(bytes(16), 2, wrong, wrong, wrong, 0, 0, 0, 0)  # type: ignore[attr-defined]


FORK_SCRIPT = """
import os, sys, numpy as np, torch
torch.set_num_threads(int(sys.argv[1]))
import lns_ops
from lns_ops import cpu
from lns_ops.format import lns16
torch_threads = torch.get_num_threads()
cpu.set_num_threads(3)
x = np.arange(300000).astype(np.int16)
expected = cpu.add(x, x, lns16)
pid = os.fork()
if pid == 0:
    right = (cpu.add(x, x, lns16) == expected).all() and (torch.ones(1 << 20) + 1).sum() == 1 << 21
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (cpu.add(x, x, lns16) == expected).all()
assert torch.get_num_threads() == torch_threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("torch_threads", ["1", "2"])
def test_kernels_work_after_fork_and_leave_torch_alone(torch_threads: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK_SCRIPT, torch_threads]
    subprocess.run(command, check=True, timeout=120)


LATE_SCRIPT = """
import os, numpy as np, torch
torch.set_num_threads(2)
(torch.ones(1 << 20) + 1).sum()
pid = os.fork()
if pid == 0:
    from lns_ops import cpu, lns16
    cpu.set_num_threads(2)
    x = np.arange(300000).astype(np.int16)
    os._exit(0 if cpu.mul(x, x, lns16).any() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kernels_work_where_they_are_imported_after_fork() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LATE_SCRIPT]
    subprocess.run(command, check=True, timeout=120)


def test_thread_count_comes_from_the_environment() -> None:
    command = [sys.executable, "-c", "from lns_ops import cpu; print(cpu.get_num_threads())"]
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "3"


def test_kernel_info_and_its_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "gather")
    assert cpu.kernel_info()["kernel"] == "gather"
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "fortran")
    with pytest.raises(ValueError, match="gather"):
        cpu.kernel_info()
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "avx2")
    if kernel_choice.missing_features("avx2"):
        with pytest.raises(ValueError, match="needs AVX2"):
            cpu.kernel_info()
    else:
        assert cpu.kernel_info()["kernel"] == "simd avx2"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_device_tells_its_kernel_and_the_reason_by_the_same_words(device: str) -> None:
    told = lns_ops.backends()[device]
    assert isinstance(told, dict)
    assert told.keys() - {"float8_products"} == {"kernel", "reason"}
