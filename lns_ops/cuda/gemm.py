"""Matrix products on NVIDIA GPUs: a fast kernel with a tile for each shape, and an exact kernel for
formats with large tables.
"""

from __future__ import annotations

import atexit
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lns_ops.cuda.elementwise import add
from lns_ops.cuda.runtime import (
    REPLICATED_FRACTION_BITS,
    THREADS,
    CudaKernel,
    compile_function,
    compile_options,
    device_tables,
    kernel_source,
    multiprocessor_count,
    pointer_of,
)
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import gaussian_tables
from lns_ops.spec.reference import BLOCK


def linear(x: Tensor, y: Tensor, bias: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x_MK @ y_KN + bias_N`` by one kernel."""
    return matmul(x, y, bits, fraction_bits, bias=bias.contiguous())


class Tile(NamedTuple):
    """A variant of the fast GEMM.

    It has ``TN`` columns per lane, ``WM x WN`` warps per tile, and ``16 / (WM WN)`` groups over k.
    """

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
        """Return the estimated cycles of a product.

        The estimate counts waves of tiles, each with its rounds of 64 k per group, for the busiest
        of the four schedulers. A multiply-add takes seven instructions plus its share of
        the surrounding code, which is larger for smaller tiles.
        """
        waves = -(-batch * (-(-M // self.rows)) * (-(-N // self.columns)) // multiprocessors)
        blocks = max(1, -(-K // BLOCK))
        rounds = -(-blocks // self.groups)
        warps = self.WM * self.WN * min(self.groups, blocks)
        steps = rounds * BLOCK if self.groups > 1 else -(-K // (8 * self.WN)) * 8 * self.WN
        combine = 0 if self.groups == 1 else rounds * 60 * self.TN * 4
        instructions = 7.2 + 3.2 / self.TN
        return waves * (
            -(-warps // 4) * steps * 4 * self.TN * instructions + combine + _CYCLES_PER_TILE
        )


_CYCLES_PER_TILE = 8000
"""Number of cycles for filling the table, the first loads and the last stores."""
TILES = tuple(
    Tile(*shape)
    for shape in [
        (8, 4, 4),
        (8, 4, 2),
        (8, 2, 2),
        (8, 2, 1),
        (4, 4, 4),
        (4, 2, 4),
        (4, 2, 2),
        (4, 1, 2),
        (4, 1, 1),
    ]
)
_GEMM_LAYOUT = "PPPPPPiiiqqqqii"


@lru_cache(maxsize=256)
def choose_tile(batch: int, M: int, N: int, K: int, multiprocessors: int) -> Tile:
    """Return the tile with the fewest estimated cycles."""
    return min(TILES, key=lambda tile: tile.cycles(batch, M, N, K, multiprocessors))


@lru_cache(maxsize=512)
def _gemm(
    tile: Tile, a_k: bool, b_k: bool, bits: int, fraction_bits: int, device: int
) -> CudaKernel:
    shape = {"TN": tile.TN, "WM": tile.WM, "WN": tile.WN, "A_K": int(a_k), "B_K": int(b_k)}
    function = compile_function(
        kernel_source("gemm.cu"),
        "lns_gemm",
        compile_options(LNSFormat(bits, fraction_bits), device, **shape),
        device,
    )
    table = len(gaussian_tables(fraction_bits).plus) * 128
    slabs = 2 * 4 * 8 * tile.WN * (tile.rows + tile.columns) * tile.groups
    totals = 4 * tile.groups * tile.rows * tile.columns if tile.groups > 1 else 0
    return CudaKernel(function, _GEMM_LAYOUT, table + max(slabs, totals))


@lru_cache(maxsize=64)
def _gemm_exact(bits: int, fraction_bits: int, device: int) -> CudaKernel:
    function = compile_function(
        kernel_source("gemm_exact.cu"),
        "lns_gemm",
        compile_options(LNSFormat(bits, fraction_bits), device),
        device,
    )
    return CudaKernel(function, "PPPPiiiqqqqqq", 0)


atexit.register(_gemm.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime
atexit.register(_gemm_exact.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime


def _unit_stride(x: Tensor) -> tuple[Tensor, bool, int]:
    """Return ``x`` with a unit stride in one of its last two dimensions, and its layout.

    The layout is whether the last dimension has the unit stride, and the stride of the other.
    """
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
    tile: Tile | None = None,
) -> Tensor:
    """Return ``x_MK @ y_KN`` or ``x_BMK @ y_BKN``, with optional bias and ReLU.

    ``+ bias_N`` and ``max(0, .)`` are each an LNS operation.

    ``tile`` (one of :data:`TILES`) overrides the choice by shape; results do not depend on it.
    """
    batch = x.shape[0] if x.dim() == 3 else 1
    (M, K), N, device = x.shape[-2:], y.shape[-1], x.get_device()
    out = torch.empty((*x.shape[:-1], N), dtype=torch.int16, device=x.device)
    if out.numel() == 0:
        return out
    tables = device_tables(fraction_bits, device)
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
    tile = tile or choose_tile(batch, M, N, K, multiprocessor_count(device))
    batch_x, batch_y = (x.stride(0), y.stride(0)) if x.dim() == 3 else (0, 0)
    columns = _pieces(tile)
    aligned = int(lda % 8 == 0 and batch_x % 8 == 0 and x.data_ptr() % 16 == 0)
    aligned |= 2 * int(
        ldb % columns == 0 and batch_y % columns == 0 and y.data_ptr() % (2 * columns) == 0
    )
    _gemm(tile, x_k, not y_n, bits, fraction_bits, device)(
        (-(-N // tile.columns), -(-M // tile.rows), batch), THREADS, device, x.data_ptr(),
        y.data_ptr(), out.data_ptr(), pointer_of(bias), tables.packed.data_ptr(),
        tables.gauss.data_ptr(), M, N, K, lda, ldb, batch_x, batch_y, aligned, int(relu),
    )  # fmt: skip
    return out


def _pieces(tile: Tile) -> int:
    """Return the number of codes of the second operand that a thread loads at once."""
    return tile.columns * 8 * tile.WN // (32 * tile.WM * tile.WN)
