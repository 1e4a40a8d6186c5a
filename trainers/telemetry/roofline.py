"""The measured ceiling of a trial's matrix products: multiply-accumulates a second of the kernel
that it uses, on the machine it runs on.

What a trial reaches is set against the same kernel on one large dense square product, in this
process, with this trial's threads: 512^3 on a CPU, 4096^3 on a GPU, the best of a few. It is what
the kernel gives here and now, not a data sheet's peak; with other work on the same cores it is
less. A product whose operands have many zeros (the pixels of MNIST) may be faster than the ceiling,
since kernels skip them.
"""

from __future__ import annotations

import time
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
    """Multiply-accumulates a second, the best of :data:`REPETITIONS` products.

    Args:
        fmt: of LNS products with sums as ``accumulation`` says; None for torch's product of
            ``dtype``.
        device: ``cpu`` or ``cuda``.
        threads: that torch and the LNS kernels are set to; a figure is kept for each.
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


def _seconds(multiply: object, device: str) -> float:
    assert callable(multiply)
    _wait(device)
    start = time.perf_counter()
    multiply()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
