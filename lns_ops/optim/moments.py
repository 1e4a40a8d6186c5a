"""Operations on codes that optimizers need in addition to arithmetic: fine averages, and
multiplication of weights by a change of their logarithms.

Everything here is integer arithmetic in torch operations, so it gives the same bits on every device
without a special kernel. On a CPU the averages and the random bits come from compiled kernels
(:mod:`lns_ops.cpu.kernels.updates`) with the same results.

A *fine* logarithm has :data:`~lns_ops.spec.gaussian_log.FINE_BITS` = 16 more bits below the ulp. An
average follows its input by ``fine(r') = max(fine(r) + keep, fine(x) + take) + table[X - R]``, with
the table of :class:`lns_ops.spec.gaussian_log.DecayTable`. The residue (int16, -2^15 .. 2^15 - 1)
keeps the difference to the stored root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import updates
from lns_ops.formats.stochastic_rounding import random_bits
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import FINE_BITS, DecayTable, decay_table
from lns_ops.spec.reference import NO_LOG, WEIGHT_SLOT

_GRAIN = 1 << 13
_HALF = 1 << FINE_BITS - 1


def mean_square(beta: float, fraction_bits: int) -> DecayTable:
    """Return the table of ``sqrt(beta r^2 + (1 - beta) x^2)``."""
    return decay_table(beta, fraction_bits)


@lru_cache(maxsize=32)
def sum_square(fraction_bits: int) -> DecayTable:
    """Return the table of ``sqrt(r^2 + x^2)``: the table for beta = 1/2, raised by half an octave.

    Half an octave is a whole number of fine units.
    """
    half = decay_table(0.5, fraction_bits)
    return DecayTable(0, 0, half.first, half.table)


@lru_cache(maxsize=64)
def maximum(beta: float, fraction_bits: int) -> DecayTable:
    """Return the table of ``max(beta r, |x|)``, beta in (0, 1]."""
    return DecayTable(
        round(math.log2(beta) * 2 ** (fraction_bits + FINE_BITS)), 0, 0, np.zeros(1, np.int32)
    )


def follow_(root: Tensor, residue: Tensor, x: Tensor, table: DecayTable, fmt: LNSFormat) -> Tensor:
    """Move the nonnegative ``root`` and its residue by one step of ``table``, in place.

    Returns ``root``.
    Args:
        root: int16 codes, nonnegative, contiguous.
        residue: int16, 2^-16 ulps, of the same shape.
        x: int16 codes of that shape; only its magnitude counts.
    """
    if root.is_cuda:
        new, rest = followed(root, residue, x, table, fmt)
        root.copy_(new)
        residue.copy_(rest)
        return root
    flat = [t.numpy().reshape(-1) for t in (root, residue, x.contiguous())]
    run(
        updates.follow, root.numel(), _GRAIN, *flat, table.table, table.first, table.keep,
        table.take, fmt.bias, fmt.field_mask,
    )  # fmt: skip
    return root


def followed(
    root: Tensor, residue: Tensor, x: Tensor, table: DecayTable, fmt: LNSFormat
) -> tuple[Tensor, Tensor]:
    """Return new values of root and residue, as :func:`follow_` computes them in place.

    It computes as :func:`lns_ops.reference.followed`, on any device.
    """
    (root_log, _), (x_log, _) = _logarithm(root, fmt), _logarithm(x, fmt)
    entries = _on(table.table, root.device)
    index = (x_log - root_log).clamp(table.first, table.first + len(table.table) - 1) - table.first
    both = (root_log != NO_LOG) & (x_log != NO_LOG)
    old = (root_log << FINE_BITS) + residue + table.keep
    fine = torch.maximum(old, (x_log << FINE_BITS) + table.take) + torch.where(
        both, entries[index].long(), 0
    )
    return _stored(fine, fmt)


def _stored(fine: Tensor, fmt: LNSFormat) -> tuple[Tensor, Tensor]:
    """Return the nonnegative code of a fine logarithm, and its residue.

    The residue is 0 if the code is zero or saturated.
    """
    log = fine + _HALF >> FINE_BITS
    code = (log.clamp(max=fmt.max_log) + fmt.bias).clamp_min(0).to(torch.int16)
    code = torch.where(log < fmt.min_log, 0, code).to(torch.int16)
    residue = torch.where((code == 0) | (log > fmt.max_log), 0, fine - (log << FINE_BITS))
    return code, residue.to(torch.int16)


def _logarithm(codes: Tensor, fmt: LNSFormat) -> tuple[Tensor, Tensor]:
    """Return the logarithms in ulps (int64; ``NO_LOG`` for zero), and a mask of the zeros."""
    field = (codes & fmt.field_mask).long()
    zero = field == 0
    return torch.where(zero, NO_LOG, field - fmt.bias), zero


_TABLES: dict[tuple[int, torch.device], tuple[np.ndarray[Any, Any], Tensor]] = {}


def _on(table: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Return a cached host table as a tensor on ``device``, uploaded once.

    The tensor stays valid for CUDA graphs that captured it.
    """
    known = _TABLES.get((id(table), device))
    if known is None:
        known = _TABLES[id(table), device] = (table, torch.from_numpy(table.copy()).to(device))
    return known[1]


_LOGARITHMS: dict[tuple[Any, ...], Tensor] = {}
_KEPT = 64
_CAPTURED: list[Tensor] = []
"""The tables that CUDA graphs read; they are never freed."""


def fine_logarithms(
    x: Tensor, function: Callable[[Tensor], Tensor], of: tuple[Any, ...], fmt: LNSFormat
) -> Tensor:
    """Return ``function`` of every code of ``x`` in 2^-16 ulps, int64, by table look-up.

    Args:
        x: int16 codes.
        function: elementwise, float64 to octaves in float64; called once on the format's values, on
            the host. Its result is rounded to nearest.
        of: the key under which the table is cached; it includes the function's parameters.
    """
    return fine_table(function, of, fmt, x.device)[x.long() & ((1 << fmt.bits) - 1)]


def fine_table(
    function: Callable[[Tensor], Tensor], of: tuple[Any, ...], fmt: LNSFormat, device: torch.device
) -> Tensor:
    """Return the table of :func:`fine_logarithms`, with an entry for each of the 2^bits codes."""
    key = (*of, fmt, device)
    table = _LOGARITHMS.get(key)
    if table is None:
        if len(_LOGARITHMS) >= _KEPT:
            _LOGARITHMS.pop(next(iter(_LOGARITHMS)))
        words = torch.arange(1 << fmt.bits)
        codes = torch.where(words > fmt.field_mask, words | fmt.sign_mask, words).to(torch.int16)
        codes = torch.where(codes & fmt.field_mask == 0, 0, codes)
        table = _LOGARITHMS[key] = fine(function(lns.decode(codes, fmt, torch.float64)), fmt).to(
            device
        )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(table)
    return table


def fine(octaves: Tensor, fmt: LNSFormat) -> Tensor:
    """Convert float octaves to 2^-16 ulps, int64, rounded to nearest and clamped to +-2^40."""
    return (
        (octaves.double() * 2.0 ** (fmt.fraction_bits + FINE_BITS))
        .round()
        .clamp(-(2.0**40), 2.0**40)
        .long()
    )


def multiply_(
    weight: Tensor, fine: Tensor, residue: Tensor | None, limit: Tensor | None, fmt: LNSFormat, *,
    key: int | None = None, step: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute ``weight *= 2^fine`` in place: an integer addition to the logarithm.

    The result is clamped to the format's positive magnitudes.

    Args:
        weight: int16 codes; zeros stay zero.
        fine: int64, 2^-16 ulps.
        residue: int16 rounding error, added at the next step; without it the logarithm is rounded
            to nearest.
        limit: a positive code, the largest magnitude allowed.
        key, step: if given, round the logarithm at random with the random bits of (key, step), so
            that its expected value is exact.
    """
    log, zero = _logarithm(weight, fmt)
    moved = (torch.where(zero, 0, log) << FINE_BITS) + fine + (0 if residue is None else residue)
    bits: Tensor | int = _HALF
    if key is not None:
        assert step is not None
        bits = random_bits(weight, key, step, WEIGHT_SLOT)
    highest: Tensor | int = fmt.max_log if limit is None else limit.long() - fmt.bias
    rounded = moved + bits >> FINE_BITS
    inside = (rounded >= fmt.min_log) & (rounded <= highest)
    log = rounded.clamp_min(fmt.min_log).clamp(max=highest)
    field = (log + fmt.bias).to(torch.int16)
    if residue is not None:
        residue.copy_(torch.where(inside & ~zero, moved - (rounded << FINE_BITS), 0))
    weight.copy_(torch.where(zero, 0, field | (weight & ~fmt.field_mask)))
