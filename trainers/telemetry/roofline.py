"""The measured ceiling of a trial's matrix products.

It is the number of multiply-accumulates per second that the trial's kernel reaches on a large dense
square product, in this process, with this trial's threads: 512^3 on a CPU, 4096^3 on a GPU, the
best of a few repetitions. The trial's own rate is compared with it. It is measured on this machine
at this time, so other work on the same cores lowers it; it is not a data sheet's peak. A product
whose operands have many zeros (the pixels of MNIST) can exceed the ceiling, because kernels skip
zeros.
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
    """Return the multiply-accumulates per second of the best of :data:`REPETITIONS` products.

    Args:
        fmt: format of an LNS product; None for torch's product in ``dtype``.
        accumulation: accumulation of LNS sums (:mod:`lns_ops.functional.accumulation`).
        dtype: data type of torch's product.
        device: ``cpu`` or ``cuda``.
        threads: current number of threads of torch and the LNS kernels; part of the cache key.
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
    """Synchronise the current stream of a GPU; do nothing on a CPU."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
