"""Matrix products whose running sums are rounded to a binary float, on NVIDIA GPUs."""

from __future__ import annotations

import atexit
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lns_ops.cuda import runtime

_SIDE = 16
"""Rows and columns of threads in a thread block."""
_CYCLES = {1: 25, 2: 62, 4: 226}
"""A scheduler's cycles for a term of a warp whose threads have so many rows and columns each, as
measured on an H200 with sums one after the other."""
_LATENCY = {1: 147, 2: 237, 4: 430}
"""Cycles from a term to the next where a scheduler has two warps, measured likewise."""
_MOST_PARTS = 1 << 26
"""Most sums of blocks that are kept apart: 256 MiB."""
_FORMAT = "ddIIi"
_LAYOUTS = {"rounded_product": "PPPPqqqqqqqqq" + _FORMAT, "add_parts": "PPqq" + _FORMAT}


@lru_cache(maxsize=64)
def _kernel(name: str, wide: int, tree: bool, device: int) -> runtime.CudaKernel:
    defines = f"-DWIDE={wide}", f"-DTREE={int(tree)}"
    source = runtime.kernel_source("rounded_sums.cu")
    function = runtime.compile_function(source, f"lns_{name}", defines, device)
    return runtime.CudaKernel(function, _LAYOUTS[name], 0)


atexit.register(_kernel.cache_clear)  # before CuPy goes; see lns_ops.cuda.runtime


class _Plan(NamedTuple):
    """How the work is shared: a thread has ``wide x wide`` results, a thread block ``share`` terms.

    Several results of a thread hide each other's latency; more thread blocks use more
    multiprocessors.
    """

    wide: int
    share: int

    def tiles(self, M: int, N: int) -> int:
        return -(-M // (_SIDE * self.wide)) * -(-N // (_SIDE * self.wide))

    def cycles(self, M: int, N: int, K: int, multiprocessors: int) -> int:
        """Return the estimated cycles of a product."""
        warps = _SIDE * _SIDE // 32 // 4  # of a thread block, on each of four schedulers
        thread_blocks = self.tiles(M, N) * -(-K // self.share)
        waves = -(-thread_blocks // multiprocessors)
        busy = waves * warps * _CYCLES[self.wide]
        return self.share * max(_LATENCY[self.wide], busy)


@lru_cache(maxsize=256)
def _plan(M: int, N: int, K: int, block: int, multiprocessors: int) -> _Plan:
    """Return the plan of the least estimated cycles."""
    blocks = -(-K // block)
    shares = {K}
    if M * N * blocks <= _MOST_PARTS:
        shares |= {-(-blocks // parts) * block for parts in (2, 4, 8, 16, 32, 64) if parts < blocks}
    plans = [_Plan(wide, share) for wide in _CYCLES for share in sorted(shares, reverse=True)]
    return min(plans, key=lambda plan: plan.cycles(M, N, K, multiprocessors))


def rounded_product(
    x_MK: Tensor,
    y_KN: Tensor,
    *,
    mantissa_bits: int,
    min_exponent: int,
    largest: float,
    saturates: bool,
    block: int,
    promote: bool,
    tree: bool,
) -> Tensor:
    """Return ``x @ y`` as :func:`lns_ops.cpu.rounded_product` does, with the same bits.

    The operands may have any strides. Where there are few results, the blocks of their terms are
    summed by several thread blocks, and their sums added by a second kernel.
    """
    (M, K), N, device = x_MK.shape, y_KN.shape[1], x_MK.get_device()
    out = torch.empty(M, N, dtype=torch.float32, device=x_MK.device)
    if K == 0:
        return out.zero_()
    if not out.numel():
        return out
    plan = _plan(M, N, K, block, runtime.multiprocessor_count(device))
    blocks = -(-K // block)
    parts = None if plan.share >= K else out.new_empty(blocks, M, N)
    to_format = (
        largest, largest if saturates else math.inf, 52 - mantissa_bits << 20,
        min_exponent + 1023 << 20, int(promote),
    )  # fmt: skip
    _kernel("rounded_product", plan.wide, tree, device)(
        (plan.tiles(M, N), -(-K // plan.share), 1), _SIDE * _SIDE, device,
        x_MK.data_ptr(), y_KN.data_ptr(), out.data_ptr(), runtime.pointer_of(parts), M, N, K,
        *x_MK.stride(), *y_KN.stride(), block, plan.share, *to_format,
    )  # fmt: skip
    if parts is not None:
        _kernel("add_parts", 1, False, device)(
            (-(-M * N // (_SIDE * _SIDE)), 1, 1), _SIDE * _SIDE, device,
            parts.data_ptr(), out.data_ptr(), blocks, M * N, *to_format,
        )  # fmt: skip
    return out
