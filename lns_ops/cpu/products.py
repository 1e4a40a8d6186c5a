"""Products of powers on the CPU, in one pass (:mod:`lns_ops.cpu.kernels.products`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.arrays import GRAIN, Codes, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import products
from lns_ops.spec.format import LNSFormat

FACTORS = 3
"""Maximum number of factors of a product."""


@lru_cache(maxsize=256)
def _powers(powers: tuple[float, ...]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return three powers, and -1 for each odd one, else 0."""
    given = np.zeros(FACTORS)
    given[: len(powers)] = powers
    return given, -(given % 2 == 1).astype(np.int32)


def _arguments(
    factors: Sequence[Codes], powers: Sequence[float], shift: int, negative: bool, furthest: int,
    fmt: LNSFormat,
) -> tuple[list[Codes], tuple[object, ...]]:  # fmt: skip
    flat = [flattened(x) for x in factors]
    flat += [flat[0]] * (FACTORS - len(flat))
    options = shift, -int(negative), furthest, fmt.bias, fmt.field_mask
    return flat, (*_powers(tuple(powers)), *options)


def product(
    factors: Sequence[Codes], powers: Sequence[float], shift: int, negative: bool, furthest: int,
    fmt: LNSFormat,
) -> Codes:  # fmt: skip
    """Return the codes of a product of powers, clamped once.

    Args:
        factors: up to :data:`FACTORS` arrays of codes of one shape.
        powers: their exponents.
        shift: ulps added to the logarithms.
        negative: whether to flip all signs.
        furthest: the largest magnitude of the logarithm of a power, in ulps.
        fmt: the format.
    """
    flat, options = _arguments(factors, powers, shift, negative, furthest, fmt)
    out = np.empty(factors[0].shape, np.int16)
    run(products.codes, out.size, GRAIN, *flat, out.reshape(-1), *options)
    return out


def product_parts(
    factors: Sequence[Codes], powers: Sequence[float], shift: int, negative: bool, furthest: int,
    fmt: LNSFormat,
) -> tuple[NDArray[np.int32], Codes, Codes]:  # fmt: skip
    """Return logarithms, signs and a mask of nonzero values; the arguments are as for
    :func:`product`."""
    flat, options = _arguments(factors, powers, shift, negative, furthest, fmt)
    shape = factors[0].shape
    logs, signs, alive = (
        np.empty(shape, np.int32),
        np.empty(shape, np.int16),
        np.empty(shape, np.int16),
    )
    found = [part.reshape(-1) for part in (logs, signs, alive)]
    run(products.parts, logs.size, GRAIN, *flat, *found, *options)
    return logs, signs, alive
