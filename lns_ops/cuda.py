"""LNS arithmetic on NVIDIA GPUs: the kernels of ``lns_ops/kernels`` through CuPy, equal to :mod:`lns_ops.reference` bit for bit.

Functions take and return torch CUDA tensors of int16 codes, share memory with them and run on torch's current stream, so they can be
captured in a CUDA graph (after one call outside, which compiles and uploads tables). Kernels are compiled by NVRTC for the device
found and the format asked for, once; CuPy keeps the machine code on disk (CUPY_CACHE_DIR).

Nothing here waits for the GPU. What LNS has no code for (a NaN to encode, a zero divisor, the root of a negative) is counted on the
device and becomes zero (an infinity the largest magnitude); :func:`check_faults` reads the counts and raises.

CuPy is optional. Without it, or without a device, :func:`unavailable` says why and every function raises; nothing falls back.
"""

from __future__ import annotations

import atexit
import ctypes
import struct
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lns_ops.format import (
    MANTISSA_BITS,
    LNSFormat,
    NonFiniteError,
    decode_significands,
    encode_thresholds,
    single_significands,
    stochastic_steps,
)
from lns_ops.gaussian import decay_table, gaussian_tables, longest_decay_table, stochastic_tables
from lns_ops.reference import BLOCK, adam_codes, adam_scalars

REPLICATED_FRACTION_BITS = 7
"""Up to here 32 copies of the table of G fit in a multiprocessor's shared memory, which the fast GEMM needs."""
_SHARED_FRACTION_BITS = 9
"""Up to here eight copies fit, which the fast elementwise sums need."""
_THREADS = 512
_FAULTS = (
    ("NaN or infinity to encode: LNS has no code for either; clean the input first", NonFiniteError),
    ("division by zero: LNS has no infinity; mask zero divisors first", ValueError),
    ("square root of a negative number: LNS values are real; mask or clamp the input first", ValueError),
    (
        "a function of a number for which it has no finite real value, such as log of zero: mask or clamp the input first",
        ValueError,
    ),
)


@lru_cache(maxsize=1)
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"LNS on a CUDA tensor needs CuPy, which does not import here ({error}): pip install 'lns-study[gpu]', or move the tensor "
            "to the CPU"
        ) from error
    return cupy


def unavailable() -> str | None:
    """Why there is no CUDA backend here, or None if there is one."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        _cupy()
    except RuntimeError as error:
        return str(error)
    return None


def kernel_info() -> dict[str, str]:
    """The kernel in use, or ``none`` and why."""
    reason = unavailable()
    if reason is not None:
        return {"kernel": "none", "why": reason}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "kernel": f"cupy sm_{properties.major}{properties.minor}",
        "why": f"{properties.name}, CuPy {_cupy().__version__}, NVRTC {'.'.join(map(str, _cupy().cuda.nvrtc.getVersion()))}",
    }


# --- compiling and launching ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _source(name: str) -> str:
    """The source of a kernel file, with what it includes in place."""
    file = resources.files("lns_ops") / "kernels" / name
    lines = file.read_text().replace("#pragma once\n", "").splitlines(keepends=True)
    return "".join(_source(line.split('"')[1]) if line.startswith('#include "') else line for line in lines)


_thread = threading.local()


class _Kernel:
    """A compiled kernel with the memory layout of its arguments, as ``struct`` writes it."""

    def __init__(self, function: Any, layout: str, shared: int) -> None:
        if shared > 48 << 10:
            function.max_dynamic_shared_size_bytes = shared
        self._pointer = function.kernel.ptr
        self._function = function  # keeps the module loaded
        self._arguments = struct.Struct("@" + layout)
        self._shared = shared
        self._launch = _driver().launchKernel
        self._resident: dict[int, int] = {}

    def __call__(self, grid: tuple[int, int, int], threads: int, device: int, *arguments: float) -> None:
        values = ctypes.create_string_buffer(self._arguments.size)
        self._arguments.pack_into(values, 0, *arguments)
        size = ctypes.c_size_t(self._arguments.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._BUFFER_SIZE, ..._END
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(values), 2, ctypes.addressof(size), 0)
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(grid, threads, device, *arguments)
            return
        if not getattr(_thread, "ready", False):
            # A thread of torch's, such as autograd's, may not have met the runtime yet and have no context.
            _cupy().cuda.Device(device).use()
            _thread.ready = True
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._launch(self._pointer, *grid, threads, 1, 1, self._shared, stream, 0, ctypes.addressof(extra))

    def resident(self, device: int) -> int:
        """Thread blocks of ``_THREADS`` that the device holds at once."""
        if device not in self._resident:
            with torch.cuda.device(device):
                _cupy().cuda.Device(device).use()
                a_multiprocessor = _driver().occupancyMaxActiveBlocksPerMultiprocessor(self._pointer, _THREADS, self._shared)
            self._resident[device] = a_multiprocessor * _multiprocessors(device)
        return self._resident[device]


@lru_cache(maxsize=1)
def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    _cupy()
    return driver


@atexit.register
def _forget() -> None:
    """Unload modules while CuPy is still whole: at the end of the interpreter its destructors would only complain."""
    for cache in (_elementwise, _float32_update, _gemm, _gemm_exact, _shared_base):
        cache.cache_clear()
    if "cupy" in sys.modules:
        sys.modules["cupy"].clear_memo()


def _compile(source: str, name: str, options: tuple[str, ...], device: int) -> Any:
    cupy = _cupy()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # torch's context exists and is current
        with cupy.cuda.Device(device):
            return cupy.RawModule(code=source, options=("-std=c++17", *options)).get_function(name)


@lru_cache(maxsize=16)
def _shared_base(device: int) -> int:
    """Where dynamic shared memory begins in the shared window: a constant of the device that kernels are compiled with."""
    source = r"""extern "C" __global__ void base(unsigned* out) {
        extern __shared__ unsigned memory[];
        *out = (unsigned)__cvta_generic_to_shared(memory);
    }"""
    out = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
    _Kernel(_compile(source, "base", (), device), "P", 16)((1, 1, 1), 1, device, out.data_ptr())
    return int(out)


def _defines(fmt: LNSFormat, device: int, **more: int) -> tuple[str, ...]:
    tables = gaussian_tables(fmt.fraction_bits)
    values = {
        "BITS": fmt.bits,
        "FRACTION_BITS": fmt.fraction_bits,
        "LAST": len(tables.plus) - 1,
        "DRIFT": -int(tables.minus[1:].min(initial=0)),
        "SHARED_BASE": _shared_base(device),
        **more,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


class _Tables(NamedTuple):
    """Tables on a device; see the heads of the ``.cu`` files for what they hold."""

    packed: Tensor
    signed: Tensor
    gauss: Tensor
    cells: Tensor
    thresholds: Tensor
    significands: Tensor
    significands_double: Tensor


_FAULTS_OF_STREAMS: dict[tuple[int, int], Tensor] = {}
"""Counters of the streams that have their own, by device and CUDA's handle of the stream."""


@lru_cache(maxsize=16)
def _faults_of_device(device: int) -> Tensor:
    return torch.zeros(len(_FAULTS), dtype=torch.int32, device=torch.device("cuda", device))


def _faults(device: int) -> Tensor:
    """Where kernels that are launched now count their faults."""
    if _FAULTS_OF_STREAMS:
        own = _FAULTS_OF_STREAMS.get((device, torch._C._cuda_getCurrentRawStream(device)))
        if own is not None:
            return own
    return _faults_of_device(device)


def count_faults_apart(stream: torch.cuda.Stream) -> None:
    """Count the faults of kernels on ``stream`` by themselves from now on: :func:`check_faults` called on it reads those alone.

    For programs in which several threads compute on one device, each on a stream of its own.
    """
    key = stream.device.index, stream.cuda_stream
    if key not in _FAULTS_OF_STREAMS:
        with torch.cuda.stream(stream):
            _FAULTS_OF_STREAMS[key] = torch.zeros(len(_FAULTS), dtype=torch.int32, device=stream.device)


def _upload(table: np.ndarray[Any, Any], device: int) -> Tensor:
    return torch.from_numpy(np.array(table)).to(torch.device("cuda", device))


@lru_cache(maxsize=64)
def _tables(fraction_bits: int, device: int) -> _Tables:
    plus, minus = (table.astype(np.int64) for table in gaussian_tables(fraction_bits))
    drift = -int(minus[1:].min(initial=0))
    packed = ((plus + drift) & 0xFFFF) | ((minus + drift) << 16)
    packed[0] = (plus[0] + drift) | (0x8000 << 16) - (1 << 32)  # G-(0): a negative half-word, which reads as NaN
    signed = (plus & 0xFFFF) | (np.append(-0x8000, minus[1:]) << 16)
    thresholds = encode_thresholds(fraction_bits)
    starts = np.arange(2 << fraction_bits, dtype=np.int64) << (MANTISSA_BITS - fraction_bits - 1)
    below = np.searchsorted(thresholds, starts + (1 << MANTISSA_BITS), side="left")
    mantissas = (np.append(thresholds, 2 << MANTISSA_BITS) - (1 << MANTISSA_BITS)) >> (MANTISSA_BITS - 23)
    cells = np.stack([below, mantissas[below]], axis=1).astype(np.int32)

    def upload(table: np.ndarray[Any, Any]) -> Tensor:
        return _upload(table, device)

    return _Tables(
        upload(packed[::-1].astype(np.int32)),
        upload(signed[::-1].astype(np.int32)),
        upload(np.stack([plus, minus], axis=1).astype(np.int32)),
        upload(cells),
        upload(thresholds),
        upload(single_significands(fraction_bits)),
        upload(decode_significands(fraction_bits)),
    )


def check_faults(device: int | torch.device | None = None) -> None:
    """Wait for ``device`` (default: the current one) and raise what its LNS kernels have counted since the last call.

    On a stream with counters of its own (:func:`lns_ops.cuda.count_faults_apart`): what the kernels on that stream have counted.

    Raises:
        NonFiniteError: (a ValueError) a NaN or an infinity was encoded.
        ValueError: a divisor was zero, or a root's argument negative.
    """
    if unavailable() is not None:
        return
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if chosen.type != "cuda":
        return
    counts = _faults(torch.cuda.current_device() if chosen.index is None else chosen.index)
    found = counts.tolist()
    if any(found):
        counts.zero_()
    for count, (message, error) in zip(found, _FAULTS, strict=True):
        if count:
            raise error(f"{message} ({count} values on {chosen})")


# --- elementwise ---------------------------------------------------------------------------------------------------------------

_BINARY_LAYOUT = "PPPqqqiiPPP"
_ELEMENTWISE: dict[str, str] = {
    "add": _BINARY_LAYOUT,
    "sub": _BINARY_LAYOUT,
    "mul": _BINARY_LAYOUT,
    "div": _BINARY_LAYOUT,
    "square_root": "PPqiP",
    **{
        f"sgd{momentum}{rounding}": "PPPPPqqiiiPPP"
        for momentum in ("", "_momentum")
        for rounding in ("", "_kahan", "_stochastic")
    },
    **{
        f"adam{decay}{rounding}": "PPPPPPPPPiqqiiiiPiiiiiPPP"
        for decay in ("", "_l2", "_decoupled")
        for rounding in ("", "_kahan", "_stochastic")
    },
    "sum": "PPqqiiP",
    "encode": "PPqiPP",
    "encode_double": "PPqPP",
    "decode": "PPqiP",
    "decode_double": "PPqiP",
}
_WITH_TABLE = ("add", "sub", *(name for name in _ELEMENTWISE if name.startswith(("sgd", "adam"))))
_FLOAT32_UPDATES = {
    **{name.replace("sgd", "sgd_float32"): "PPPPPqqffiPPPP" for name in _WITH_TABLE if name.startswith("sgd")},
    **{name.replace("adam", "adam_float32"): "PPPPPPPPiqqffffffiPPPP" for name in _WITH_TABLE if name.startswith("adam")},
}
_COPIES = 8


@lru_cache(maxsize=512)
def _elementwise(name: str, bits: int, fraction_bits: int, device: int) -> _Kernel:
    fmt = LNSFormat(bits, fraction_bits)
    fast = fraction_bits <= _SHARED_FRACTION_BITS
    shared = len(gaussian_tables(fraction_bits).plus) * 4 * _COPIES if fast and name in _WITH_TABLE else 0
    defines = {"FAST": int(fast), "COPIES": _COPIES}
    updates, adam = name.startswith(("sgd", "adam")), name.startswith("adam")
    if updates:
        fine, behind = len(stochastic_tables(fraction_bits).plus), fraction_bits <= REPLICATED_FRACTION_BITS
        defines |= {"ADAM_KERNELS": int(adam), "FINE_LAST": fine - 1, "SHARED_TABLES": int(behind)}
        if behind:
            shared += 8 * fine * name.endswith("stochastic") + 4 * longest_decay_table(fraction_bits) * adam
    source = _source("updates.cu" if updates else "elementwise.cu")
    function = _compile(source, f"lns_{name}", _defines(fmt, device, **defines), device)
    return _Kernel(function, _ELEMENTWISE[name], shared)


@lru_cache(maxsize=256)
def _float32_update(name: str, bits: int, fraction_bits: int, device: int) -> _Kernel:
    defines = {"FAST": 0, "ADAM_KERNELS": int(name.startswith("adam"))}
    options = _defines(LNSFormat(bits, fraction_bits), device, **defines)
    return _Kernel(_compile(_source("updates_float32.cu"), f"lns_{name}", options, device), _FLOAT32_UPDATES[name], 0)


@lru_cache(maxsize=16)
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _grid(n: int, device: int, *, per_thread: int = 8, kernel: _Kernel | None = None, waves: int = 8) -> tuple[int, int, int]:
    """Thread blocks for ``n`` elements; of a ``kernel`` that fills tables first no more than the device holds at once, ``waves`` times.

    More than one wave keeps accesses that happen together closer together: 3 to 8 % more bandwidth on an H200.
    """
    blocks = -(-n // (per_thread * _THREADS))
    return min(blocks, waves * kernel.resident(device) if kernel is not None else (1 << 31) - 1), 1, 1


def _aligned(*tensors: Tensor | None) -> int:
    return int(all(t is None or t.data_ptr() % 16 == 0 for t in tensors))


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _repetition(y: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """``(div, mod)`` such that element i of ``shape`` meets element ``i // div % mod`` of contiguous ``y``; None if there are none."""
    sizes = [1] * (len(shape) - y.dim()) + list(y.shape)
    full = [d for d, size in enumerate(shape) if size != 1]
    kept = [d for d in full if sizes[d] != 1]
    if not kept:
        return None
    run = [d for d in full if kept[0] <= d <= kept[-1]]
    if run != kept:
        return None
    div = 1
    for d in full:
        if d > kept[-1]:
            div *= shape[d]
    return div, y.numel()


def _binary(name: str, x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    cuda = x if x.is_cuda else y
    device = cuda.get_device()
    if not x.is_cuda:
        x = torch.full(shape, int(x), dtype=torch.int16, device=cuda.device)
    x = x.expand(shape).contiguous()
    z = torch.empty(shape, dtype=torch.int16, device=cuda.device)
    code, div, mod = 0, 1, x.numel()
    if not y.is_cuda:
        code, mod = int(y), 0
    else:
        repetition = _repetition(y, shape) if y.shape != shape else None
        if repetition is None:
            y = y.expand(shape).contiguous()
        else:
            y, (div, mod) = y.contiguous(), repetition
    if x.numel():
        tables, kernel = _tables(fraction_bits, device), _elementwise(name, bits, fraction_bits, device)
        kernel(
            _grid(x.numel(), device, kernel=kernel), _THREADS, device,
            x.data_ptr(), y.data_ptr(), z.data_ptr(), x.numel(), div, mod, code, _aligned(x, y if mod else None, z),
            tables.signed.data_ptr(), tables.gauss.data_ptr(), _faults(device).data_ptr(),
        )  # fmt: skip
    return z


def add(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """``x + y``, broadcast; one of them may be a 0-dim CPU tensor."""
    return _binary("add", x, y, bits, fraction_bits) if x.is_cuda else _binary("add", y, x, bits, fraction_bits)


def sub(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """``x - y``, broadcast."""
    return _binary("sub", x, y, bits, fraction_bits)


def mul(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """``x y``, broadcast."""
    return _binary("mul", x, y, bits, fraction_bits) if x.is_cuda else _binary("mul", y, x, bits, fraction_bits)


def div(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """``x / y``, broadcast; zero divisors are counted (:func:`check_faults`) and give zero."""
    return _binary("div", x, y, bits, fraction_bits)


def sqrt(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Square root; negatives are counted and give zero."""
    x, device = x.contiguous(), x.get_device()
    z = torch.empty_like(x)
    if x.numel():
        _elementwise("square_root", bits, fraction_bits, device)(
            _grid(x.numel(), device),
            _THREADS,
            device,
            x.data_ptr(),
            z.data_ptr(),
            x.numel(),
            _aligned(x, z),
            _faults(device).data_ptr(),
        )
    return z


def sum(x: Tensor, dim: int, bits: int, fraction_bits: int, shift: int = 0) -> Tensor:
    """Sum along ``dim`` in the contract's order; ``shift`` ulps are added to its logarithm before it is stored in the format."""
    moved = x.movedim(dim, 0).contiguous()
    device = x.get_device()
    out = torch.empty(moved.shape[1:], dtype=torch.int16, device=x.device)
    if out.numel():
        K, N = moved.shape[0], out.numel()
        columns = _sum_columns(K, N, _multiprocessors(device))
        _elementwise("sum", bits, fraction_bits, device)(
            (-(-N // columns), 1, 1), _THREADS, device,
            moved.data_ptr(), out.data_ptr(), K, N, columns, shift, _tables(fraction_bits, device).gauss.data_ptr(),
        )  # fmt: skip
    return out


def _sum_columns(K: int, N: int, multiprocessors: int) -> int:
    """Columns that a thread block of the sum kernel takes, beside as many blocks of terms as its threads are left for.

    32 for coalesced loads; more where that leaves threads without terms, as long as every multiprocessor has two thread blocks.
    """
    columns, blocks = min(32, 1 << (N - 1).bit_length()), -(-K // BLOCK)
    while 2 * columns * blocks <= _THREADS and 4 * columns * multiprocessors <= N:
        columns *= 2
    return columns


def encode(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Codes nearest in logarithm; NaN and infinities are counted (:func:`check_faults`)."""
    double = x.dtype == torch.float64 or not x.dtype.is_floating_point
    x, device = x.contiguous().to(torch.float64 if double else torch.float32), x.get_device()
    out = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    if x.numel():
        tables, kernel = (
            _tables(fraction_bits, device),
            _elementwise("encode_double" if double else "encode", bits, fraction_bits, device),
        )
        grid = _grid(x.numel(), device, per_thread=4, kernel=kernel)
        if double:
            kernel(
                grid,
                _THREADS,
                device,
                x.data_ptr(),
                out.data_ptr(),
                x.numel(),
                tables.thresholds.data_ptr(),
                _faults(device).data_ptr(),
            )
        else:
            kernel(
                grid, _THREADS, device, x.data_ptr(), out.data_ptr(), x.numel(), _aligned(x, out), tables.cells.data_ptr(),
                _faults(device).data_ptr(),
            )  # fmt: skip
    return out


def decode(codes: Tensor, bits: int, fraction_bits: int, dtype: torch.dtype) -> Tensor:
    """Values of ``codes`` as float64 for ``dtype`` float64, else rounded to float32 and then to ``dtype``."""
    double = dtype == torch.float64
    codes, device = codes.contiguous(), codes.get_device()
    out = torch.empty(codes.shape, dtype=torch.float64 if double else torch.float32, device=codes.device)
    if codes.numel():
        tables, kernel = (
            _tables(fraction_bits, device),
            _elementwise("decode_double" if double else "decode", bits, fraction_bits, device),
        )
        kernel(
            _grid(codes.numel(), device, per_thread=4, kernel=kernel), _THREADS, device,
            codes.data_ptr(), out.data_ptr(), codes.numel(), _aligned(codes, out),
            (tables.significands_double if double else tables.significands).data_ptr(),
        )  # fmt: skip
    return out.to(dtype)


def linear(x: Tensor, y: Tensor, bias: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """``x_MK @ y_KN + bias_N`` in one kernel."""
    return matmul(x, y, bits, fraction_bits, bias=bias.contiguous())


@lru_cache(maxsize=32)
def _fine_table(fraction_bits: int, device: int) -> Tensor:
    """Corrections of additions that round at random: G+ and G- of each distance, with 16 bits behind the ulp."""
    return _upload(np.stack(stochastic_tables(fraction_bits), axis=1), device)


@lru_cache(maxsize=32)
def _adam_tables(beta1: float, beta2: float, eps: float, fmt: LNSFormat, device: int) -> tuple[Tensor, Tensor, Tensor]:
    """The corrections and eps of each step, and the decay table of the second moment."""
    codes = adam_codes(beta1, beta2, eps, fmt)
    tables = codes.correction, codes.eps_hat, decay_table(beta2, fmt.fraction_bits).table
    correction, eps_hat, decay = (_upload(table, device) for table in tables)
    return correction, eps_hat, decay


def _check_in_place(weight: Tensor, grad: Tensor, **updated: Tensor | None) -> None:
    for name, tensor in {"weight": weight, **updated}.items():
        if tensor is not None and (not tensor.is_contiguous() or tensor.shape != weight.shape):
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: must be contiguous, of the weight's shape "
                f"{tuple(weight.shape)}, to be updated in place"
            )
    if grad.shape != weight.shape:
        raise ValueError(f"gradient of shape {tuple(grad.shape)} for a weight of {tuple(weight.shape)}: the shapes must agree")


@lru_cache(maxsize=32)
def _stochastic_encoding(fraction_bits: int, device: int) -> tuple[Tensor, Tensor]:
    """What encoding at random looks up; see ``StochasticEncoder``."""
    mantissas, reciprocals = stochastic_steps(fraction_bits)
    starts = np.arange(2 << fraction_bits, dtype=np.int64) << (22 - fraction_bits)
    base = np.searchsorted(mantissas, starts, side="right") - 1
    steps = np.stack([mantissas, np.append(reciprocals, 0)], axis=1).astype(np.uint32).view(np.int32)
    return _upload(base.astype(np.int32), device), _upload(steps, device)


def _codec(fraction_bits: int, device: int) -> tuple[int, int, int, int]:
    tables, (base, steps) = _tables(fraction_bits, device), _stochastic_encoding(fraction_bits, device)
    return tables.significands.data_ptr(), tables.cells.data_ptr(), base.data_ptr(), steps.data_ptr()


@lru_cache(maxsize=32)
def _adam_scalars(beta1: float, beta2: float, eps: float, device: int) -> Tensor:
    return _upload(adam_scalars(beta1, beta2, eps), device)


def sgd_update_float32_(
    weight: Tensor, grad: Tensor, buffer: Tensor | None, compensation: Tensor | None, step: Tensor | None, lr: float,
    momentum: float | None, key: int | None, bits: int, fraction_bits: int,
) -> None:  # fmt: skip
    """One SGD step in place, as :func:`lns_ops.reference.sgd_update_float32`; ``step`` is read on the device."""
    _check_in_place(weight, grad, buffer=buffer, compensation=compensation)
    grad, device = grad.contiguous(), weight.get_device()
    if weight.numel():
        name = f"sgd_float32{'_momentum' * (momentum is not None)}{_rounding(key, compensation)}"
        kernel = _float32_update(name, bits, fraction_bits, device)
        kernel(
            _grid(weight.numel(), device, kernel=kernel, waves=2), _THREADS, device,
            weight.data_ptr(), grad.data_ptr(), _pointer(None if momentum is None else buffer), _pointer(compensation), _pointer(step),
            weight.numel(), key or 0, -lr, momentum or 0.0, _aligned(weight, grad, buffer, compensation), *_codec(fraction_bits, device),
        )  # fmt: skip


def adam_update_float32_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, root: Tensor, residue: Tensor | None, compensation: Tensor | None, step: Tensor,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float | None, decoupled: bool, key: int | None, bits: int,
    fraction_bits: int,
) -> None:  # fmt: skip
    """One Adam or AdamW step in place, as :func:`lns_ops.reference.adam_update_float32`; ``step`` is read on the device."""
    _check_in_place(weight, grad, exp_avg=exp_avg, root=root, residue=residue, compensation=compensation)
    grad, device = grad.contiguous(), weight.get_device()
    if weight.numel():
        scalars = _adam_scalars(beta1, beta2, eps, device)
        form = "" if weight_decay is None else "_decoupled" if decoupled else "_l2"
        kernel = _float32_update(f"adam_float32{form}{_rounding(key, compensation)}", bits, fraction_bits, device)
        kernel(
            _grid(weight.numel(), device, kernel=kernel, waves=2), _THREADS, device,
            weight.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), root.data_ptr(), _pointer(residue), _pointer(compensation),
            step.data_ptr(), scalars.data_ptr(), len(scalars), weight.numel(), key or 0,
            -lr, beta1, 1 - beta1, beta2, 1 - beta2, weight_decay or 0.0,
            _aligned(weight, grad, exp_avg, root, residue, compensation), *_codec(fraction_bits, device),
        )  # fmt: skip


def _rounding(key: int | None, compensation: Tensor | None) -> str:
    return "_stochastic" if key is not None else "_kahan" if compensation is not None else ""


def sgd_update_(
    weight: Tensor, grad: Tensor, buffer: Tensor | None, compensation: Tensor | None, step: Tensor | None, negative_lr: int,
    momentum: int | None, key: int | None, bits: int, fraction_bits: int,
) -> None:  # fmt: skip
    """One SGD step in place, as :func:`lns_ops.reference.sgd_update`; ``step`` is read on the device."""
    _check_in_place(weight, grad, buffer=buffer, compensation=compensation)
    grad, device = grad.contiguous(), weight.get_device()
    if weight.numel():
        tables = _tables(fraction_bits, device)
        fine = _fine_table(fraction_bits, device) if key is not None else None
        name = f"sgd{'_momentum' * (momentum is not None)}{_rounding(key, compensation)}"
        kernel = _elementwise(name, bits, fraction_bits, device)
        kernel(
            _grid(weight.numel(), device, kernel=kernel, waves=2), _THREADS, device,
            weight.data_ptr(), grad.data_ptr(), _pointer(None if momentum is None else buffer), _pointer(compensation), _pointer(step),
            weight.numel(), key or 0, negative_lr, momentum or 0, _aligned(weight, grad, buffer, compensation),
            tables.signed.data_ptr(), tables.gauss.data_ptr(), _pointer(fine),
        )  # fmt: skip


def adam_update_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, root: Tensor, residue: Tensor | None, compensation: Tensor | None, step: Tensor,
    negative_lr: int, beta1: float, beta2: float, eps: float, weight_decay: int | None, decoupled: bool, key: int | None, bits: int,
    fraction_bits: int,
) -> None:  # fmt: skip
    """One Adam or AdamW step in place, as :func:`lns_ops.reference.adam_update`; ``step`` is read on the device."""
    _check_in_place(weight, grad, exp_avg=exp_avg, root=root, residue=residue, compensation=compensation)
    grad, device, fmt = grad.contiguous(), weight.get_device(), LNSFormat(bits, fraction_bits)
    if weight.numel():
        tables, codes, decay = (
            _tables(fraction_bits, device),
            adam_codes(beta1, beta2, eps, fmt),
            decay_table(beta2, fraction_bits),
        )
        correction, eps_hat, moves = _adam_tables(beta1, beta2, eps, fmt, device)
        fine = _fine_table(fraction_bits, device) if key is not None else None
        form = "" if weight_decay is None else "_decoupled" if decoupled else "_l2"
        kernel = _elementwise(f"adam{form}{_rounding(key, compensation)}", bits, fraction_bits, device)
        kernel(
            _grid(weight.numel(), device, kernel=kernel, waves=2), _THREADS, device,
            weight.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), root.data_ptr(), _pointer(residue), _pointer(compensation),
            step.data_ptr(), correction.data_ptr(), eps_hat.data_ptr(), len(codes.correction), weight.numel(), key or 0,
            negative_lr, codes.beta1, codes.one_minus_beta1, weight_decay or 0,
            moves.data_ptr(), decay.first, decay.first + len(decay.table) - 1, decay.keep, decay.take,
            _aligned(weight, grad, exp_avg, root, residue, compensation),
            tables.signed.data_ptr(), tables.gauss.data_ptr(), _pointer(fine),
        )  # fmt: skip


# --- matrix products -----------------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """A variant of the fast GEMM: ``TN`` columns a lane, ``WM x WN`` warps a tile, ``16 / (WM WN)`` groups over k."""

    TN: int
    WM: int
    WN: int

    @property
    def groups(self) -> int:
        return 16 // (self.WM * self.WN)

    @property
    def rows(self) -> int:
        return 32 * self.WM

    @property
    def columns(self) -> int:
        return 4 * self.TN * self.WN

    def cycles(self, batch: int, M: int, N: int, K: int, multiprocessors: int) -> float:
        """Estimated cycles: waves of tiles, each with its rounds of 64 k a group, by the busiest of the four schedulers.

        A multiply-add takes seven instructions and its share of what surrounds it, which grows as tiles shrink.
        """
        waves = -(-batch * (-(-M // self.rows)) * (-(-N // self.columns)) // multiprocessors)
        blocks = max(1, -(-K // BLOCK))
        rounds = -(-blocks // self.groups)
        warps = self.WM * self.WN * min(self.groups, blocks)
        steps = rounds * BLOCK if self.groups > 1 else -(-K // (8 * self.WN)) * 8 * self.WN
        combine = 0 if self.groups == 1 else rounds * 60 * self.TN * 4
        instructions = 7.2 + 3.2 / self.TN
        return waves * (-(-warps // 4) * steps * 4 * self.TN * instructions + combine + _CYCLES_PER_TILE)


_CYCLES_PER_TILE = 8000
"""Filling the table, the first loads and the last stores."""
TILES = tuple(
    _Tile(*shape) for shape in [(8, 4, 4), (8, 4, 2), (8, 2, 2), (8, 2, 1), (4, 4, 4), (4, 2, 4), (4, 2, 2), (4, 1, 2), (4, 1, 1)]
)
_GEMM_LAYOUT = "PPPPPPiiiqqqqii"


@lru_cache(maxsize=256)
def _choose(batch: int, M: int, N: int, K: int, multiprocessors: int) -> _Tile:
    return min(TILES, key=lambda tile: tile.cycles(batch, M, N, K, multiprocessors))


@lru_cache(maxsize=512)
def _gemm(tile: _Tile, a_k: bool, b_k: bool, bits: int, fraction_bits: int, device: int) -> _Kernel:
    shape = {"TN": tile.TN, "WM": tile.WM, "WN": tile.WN, "A_K": int(a_k), "B_K": int(b_k)}
    function = _compile(_source("gemm.cu"), "lns_gemm", _defines(LNSFormat(bits, fraction_bits), device, **shape), device)
    table = len(gaussian_tables(fraction_bits).plus) * 128
    slabs = 2 * 4 * 8 * tile.WN * (tile.rows + tile.columns) * tile.groups
    totals = 4 * tile.groups * tile.rows * tile.columns if tile.groups > 1 else 0
    return _Kernel(function, _GEMM_LAYOUT, table + max(slabs, totals))


@lru_cache(maxsize=64)
def _gemm_exact(bits: int, fraction_bits: int, device: int) -> _Kernel:
    function = _compile(_source("gemm_exact.cu"), "lns_gemm", _defines(LNSFormat(bits, fraction_bits), device), device)
    return _Kernel(function, "PPPPiiiqqqqqq", 0)


def _unit_stride(x: Tensor) -> tuple[Tensor, bool, int]:
    """``x`` with a unit stride in one of its last two dimensions; whether it is the last one; and the other one's stride."""
    rows, columns = x.shape[-2:]
    if x.stride(-1) == 1 or columns == 1:
        return x, True, x.stride(-2) if rows > 1 else columns
    if x.stride(-2) == 1 or rows == 1:
        return x, False, x.stride(-1)
    return x.contiguous(), True, columns


def matmul(
    x: Tensor,
    y: Tensor,
    bits: int,
    fraction_bits: int,
    *,
    bias: Tensor | None = None,
    relu: bool = False,
    tile: _Tile | None = None,
) -> Tensor:
    """``x_MK @ y_KN`` or ``x_BMK @ y_BKN``, then ``+ bias_N`` and ``max(0, .)`` where asked for, each an LNS operation.

    ``tile`` (one of :data:`TILES`) overrides the choice by shape; results do not depend on it.
    """
    batch = x.shape[0] if x.dim() == 3 else 1
    (M, K), N, device = x.shape[-2:], y.shape[-1], x.get_device()
    out = torch.empty((*x.shape[:-1], N), dtype=torch.int16, device=x.device)
    if out.numel() == 0:
        return out
    tables = _tables(fraction_bits, device)
    if fraction_bits > REPLICATED_FRACTION_BITS:
        _gemm_exact(bits, fraction_bits, device)(
            (-(-N // 16), -(-M // 16), batch), 256, device,
            x.data_ptr(), y.data_ptr(), out.data_ptr(), tables.gauss.data_ptr(), M, N, K,
            x.stride(-2), x.stride(-1), y.stride(-2), y.stride(-1),
            x.stride(0) if x.dim() == 3 else 0, y.stride(0) if y.dim() == 3 else 0,
        )  # fmt: skip
        if bias is not None:
            out = add(out, bias, bits, fraction_bits)
        return out.clamp_min_(0) if relu else out
    x, x_k, lda = _unit_stride(x)
    y, y_n, ldb = _unit_stride(y)
    tile = tile or _choose(batch, M, N, K, _multiprocessors(device))
    batch_x, batch_y = (x.stride(0), y.stride(0)) if x.dim() == 3 else (0, 0)
    columns = _pieces(tile)
    aligned = int(lda % 8 == 0 and batch_x % 8 == 0 and x.data_ptr() % 16 == 0)
    aligned |= 2 * int(ldb % columns == 0 and batch_y % columns == 0 and y.data_ptr() % (2 * columns) == 0)
    _gemm(tile, x_k, not y_n, bits, fraction_bits, device)(
        (-(-N // tile.columns), -(-M // tile.rows), batch), _THREADS, device,
        x.data_ptr(), y.data_ptr(), out.data_ptr(), _pointer(bias), tables.packed.data_ptr(), tables.gauss.data_ptr(),
        M, N, K, lda, ldb, batch_x, batch_y, aligned, int(relu),
    )  # fmt: skip
    return out


def _pieces(tile: _Tile) -> int:
    """Codes of the second operand that a thread loads at once."""
    return tile.columns * 8 * tile.WN // (32 * tile.WM * tile.WN)
