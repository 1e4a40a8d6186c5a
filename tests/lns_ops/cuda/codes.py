"""Formats and codes that the tests of the CUDA kernels share."""

from __future__ import annotations

import numpy as np
import torch

from lns_ops import LNSFormat, lns8, lns12, lns16

FORMATS = [
    lns16,
    lns12,
    lns8,
    LNSFormat(14, 7),
    LNSFormat(15, 6),
    LNSFormat(15, 7),
    LNSFormat(9, 0),
    LNSFormat(16, 9),
    LNSFormat(16, 12),
    LNSFormat(12, 10),
]
"""Formats with underflow in the accumulator (15 and 16 bits), each table layout, no fraction bits,
a very small range."""


def random_codes(
    shape: tuple[int, ...], fmt: LNSFormat, seed: int, spread: float = 1.0
) -> np.ndarray:
    """Codes over the whole range (spread 1) or close to one, with zeros, extremes and the negative
    zero, which no operation produces."""
    rng = np.random.default_rng(seed)
    field = rng.integers(1, fmt.field_mask + 1, shape)
    field = np.clip(fmt.bias + ((field - fmt.bias) * spread).astype(np.int64), 1, fmt.field_mask)
    field = np.where(
        rng.random(shape) < 0.02, 1, np.where(rng.random(shape) < 0.02, fmt.field_mask, field)
    )
    codes = np.where(rng.random(shape) < 0.5, field | fmt.sign_mask, field)
    codes = np.where(rng.random(shape) < 0.05, 0, codes)
    return np.where(rng.random(shape) < 0.01, fmt.sign_mask, codes).astype(np.int16)


def gpu(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes)).cuda()


def assert_same(got: torch.Tensor, wanted: np.ndarray) -> None:
    values = got.cpu().numpy()
    assert values.shape == wanted.shape
    assert values.dtype == wanted.dtype
    got_flat, wanted_flat = values.reshape(-1), wanted.reshape(-1)
    at = np.flatnonzero(
        got_flat.view(f"u{wanted.itemsize}") != wanted_flat.view(f"u{wanted.itemsize}")
    )
    assert at.size == 0, (
        f"{at.size} of {wanted.size} differ, first at {at[:5]}: {got_flat[at[:5]]} for"
        f" {wanted_flat[at[:5]]}"
    )
