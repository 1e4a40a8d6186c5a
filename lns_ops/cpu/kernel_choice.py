"""The choice between vector and gather kernels for sums and matrix products, by the processor and
the range of the operands.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import config as numba_config

from lns_ops.cpu.arrays import Codes, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import gather_gemm
from lns_ops.cpu.simd import gemm, reduce
from lns_ops.spec.format import LNSFormat


def lanes_plan(
    operands: tuple[Codes, ...], K: int, fmt: LNSFormat
) -> tuple[Any, gemm.WordLayout] | None:
    """Return how to add flat ``operands`` on vectors, K at a time.

    Returns None if only gathers are possible, or if they are fast enough.
    """
    if operands[0].size < reduce.WORTH:
        return None
    kernel = kernel_info()["kernel"]
    return (
        None
        if kernel == "gather"
        else reduce.plan([survey(x, fmt).span for x in operands], K, fmt, kernel)
    )


class Survey(NamedTuple):
    """The facts of an operand that decide the kernel: field span and number of nonzero codes."""

    span: tuple[int, int]
    nonzero: int


def survey(x: Codes, fmt: LNSFormat) -> Survey:
    """Return the :class:`Survey` of an operand, computed in one pass."""
    flat = flattened(x.T if x.flags.f_contiguous else x)
    found = np.empty(3, np.int64)
    run(gather_gemm.survey, flat.size, flat.size, flat, found, fmt.field_mask)
    low, high, nonzero = found.tolist()
    return Survey((low, high), nonzero)


def kernel_info() -> dict[str, str]:
    """Return which matrix-product kernel is in use, and why.

    Keys: ``kernel`` (``simd avx512bw+vbmi``, ``simd avx2`` or ``gather``) and ``reason``.

    The vector kernels support 3 to 7 fraction bits and operands whose products span less than about
    90 octaves; other calls use gathers in any case.

    Raises:
        ValueError: LNS_OPS_CPU_KERNEL is unknown, or this processor cannot run it.
    """
    forced, no_avx512, no_avx2 = (
        os.environ.get("LNS_OPS_CPU_KERNEL", ""),
        missing_features("avx512bw", "avx512vbmi"),
        missing_features("avx2"),
    )
    if forced not in ("", "gather", "simd", "avx2"):
        raise ValueError(
            f"LNS_OPS_CPU_KERNEL={forced!r}: must be 'gather', 'simd', 'avx2' or unset"
        )
    if forced in ("simd", "avx2") and no_avx2:
        raise ValueError(
            f"LNS_OPS_CPU_KERNEL={forced!r}: needs AVX2, and {no_avx2}; unset it or set it to"
            " 'gather'"
        )
    if forced == "gather" or no_avx2:
        return {"kernel": "gather", "reason": no_avx2 or "LNS_OPS_CPU_KERNEL=gather"}
    if forced == "avx2" or no_avx512:
        return {"kernel": "simd avx2", "reason": no_avx512 or "LNS_OPS_CPU_KERNEL=avx2"}
    return {"kernel": "simd avx512bw+vbmi", "reason": "the processor has AVX-512 BW and VBMI"}


@lru_cache(maxsize=8)
def missing_features(*features: str) -> str:
    """Return why a kernel that needs these features cannot run here; empty if it can."""
    if numba_config.CPU_NAME or numba_config.CPU_FEATURES:
        return "NUMBA_CPU_NAME or NUMBA_CPU_FEATURES overrides the processor's own features"
    found = get_host_cpu_features()
    lacking = [name for name in features if not found.get(name)]
    return f"this processor lacks {' and '.join(lacking)}" if lacking else ""
