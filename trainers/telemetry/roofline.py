"""The measured ceiling of a trial's matrix products.

It is the number of multiply-accumulates a second that the kernel of the trial reaches on the
machine that the trial runs on. The rate of a trial is compared with that of the same kernel on one
large dense square product, in this process, with this trial's threads: 512^3 on a CPU, 4096^3 on a
GPU, the best of a few. It is what the kernel gives here and now, not a data sheet's peak; other
work on the same cores lowers it. A product whose operands have many zeros (the pixels of MNIST) may
be faster than the ceiling, since kernels skip zeros.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from lns_ops import LNSFormat
from lns_ops import functional as lns

CPU_SIZE, GPU_SIZE = 512, 4096
REPETITIONS = 4


@lru_cache(maxsize=32)
def kernel_ceiling(
    fmt: LNSFormat | None, accumulation: str, dtype: torch.dtype, device: str, threads: int
) -> float:
    """Return the multiply-accumulates a second of the best of :data:`REPETITIONS` products.

    Args:
        fmt: format of LNS products with sums as ``accumulation`` says; None for torch's product of
            ``dtype``.
        accumulation: how LNS sums are taken (:mod:`lns_ops.functional.accumulation`).
        dtype: type of torch's product.
        device: ``cpu`` or ``cuda``.
        threads: number that torch and the LNS kernels are set to; a result is kept for each number.
    """
    size = GPU_SIZE if device == "cuda" else CPU_SIZE
    x, y = (
        torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).to(device)
        for seed in (0, 1)
    )
    if fmt is not None:
        x, y = lns.encode(x, fmt), lns.encode(y, fmt)
        multiply = lambda: lns.matmul(x, y, fmt, accumulation=accumulation)  # noqa: E731
    else:
        x, y = x.to(dtype), y.to(dtype)
        multiply = lambda: x @ y  # noqa: E731
    return float(size) ** 3 / min(_seconds(multiply, device) for _ in range(REPETITIONS + 1))


def _seconds(multiply: Callable[[], object], device: str) -> float:
    """Return the seconds of one call of ``multiply``, waiting for the device."""
    _wait(device)
    start = time.perf_counter()
    multiply()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    """Wait for the current stream of a GPU; a CPU has nothing to wait for."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
