"""Sums of products and of squares, and the elementwise part of normalizations, equal their separate
parts bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lns_ops import LNSFormat, lns12, lns16, reference
from lns_ops import functional as lns
from lns_ops.functional.library import kernels_of
from lns_ops.functional.normalization import normalization, normalization_backward
from tests.lns_ops.cuda.codes import random_codes
from tests.lns_ops.functional.reductions import NORMALIZATIONS, REDUCTIONS


def codes(shape: tuple[int, ...], fmt: LNSFormat, seed: int) -> Tensor:
    return torch.from_numpy(random_codes(shape, fmt, seed, 0.05))


@pytest.mark.parametrize("fmt", [lns12, lns16], ids=str)
@pytest.mark.parametrize(("shape", "dims"), REDUCTIONS, ids=str)
def test_sums_are_the_references(shape: tuple[int, ...], dims: list[int], fmt: LNSFormat) -> None:
    x, y = (codes(shape, fmt, seed) for seed in (1, 2))
    kept = [d for d in range(len(shape)) if d not in dims]
    flat = np.ascontiguousarray(x.permute(*dims, *kept).numpy()).reshape(
        -1 if all(shape) else int(np.prod([shape[d] for d in dims])), *(shape[d] for d in kept)
    )
    np.testing.assert_array_equal(
        lns.sum(x, dims, fmt).numpy(), reference.long_sum(flat, 0, fmt), strict=True
    )
    assert torch.equal(
        lns.sum(x, dims, fmt, keepdim=True, times=y),
        lns.sum(lns.mul(x, y, fmt), dims, fmt, keepdim=True),
    )
    if not all(shape[d] for d in dims):
        with pytest.raises(ValueError, match="a mean of 0 values"):
            lns.mean(x, dims, fmt)
        return
    mean = lns.mean(x, dims, fmt, keepdim=True)
    deviation = lns.sub(x, mean, fmt)
    squares = torch.from_numpy(reference.square(deviation.numpy(), fmt))
    assert torch.equal(lns.mean(x, dims, fmt, about=mean), lns.mean(squares, dims, fmt.of_squares))
    assert torch.equal(lns.mean(x, dims, fmt, times=y), lns.mean(lns.mul(x, y, fmt), dims, fmt))


@pytest.mark.parametrize(("shape", "kept", "affine"), NORMALIZATIONS, ids=str)
def test_normalizations_are_four_operations(
    shape: tuple[int, ...], kept: tuple[int, ...], affine: tuple[int, ...]
) -> None:
    x, grad, y = (codes(shape, lns12, seed) for seed in (1, 2, 3))
    mean, scale, along = (codes(kept, lns12, seed) for seed in (4, 5, 6))
    weight, bias = (codes(affine, lns12, seed) for seed in (7, 8))
    normal = lns.mul(lns.sub(x, mean, lns12), scale, lns12)
    out = lns.add(lns.mul(normal, weight, lns12), bias, lns12)
    ops, fmt = kernels_of(x), (12, 6)
    got = ops.normalize(x, mean, scale, weight, bias, *fmt)
    assert torch.equal(got[0], normal)
    assert torch.equal(got[1], out)
    plain, absent = ops.normalize(x, None, scale, None, None, *fmt)
    assert torch.equal(plain, lns.mul(x, scale, lns12))
    assert absent.numel() == 0
    rest = lns.sub(grad, lns.mul(y, along, lns12), lns12)
    assert torch.equal(
        ops.normalize_backward(grad, y, along, scale, *fmt), lns.mul(rest, scale, lns12)
    )


def test_normalizations_subtract_the_mean_of_what_a_mean_has_left() -> None:
    x, y, grad = (codes((5, 30), lns12, seed) for seed in (1, 2, 3))
    made = normalization(x, None, None, [], [1], 1e-3, True, lns12)

    def centred(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = lns.mean(x, [1], lns12, keepdim=True)
        d = lns.sub(x, mean, lns12)
        rest = lns.mean(d, [1], lns12, keepdim=True)
        return lns.sub(d, rest, lns12), mean, rest

    d, mean, rest = centred(x)
    assert torch.equal(made.mean, mean)
    assert torch.equal(made.rest, rest)
    assert torch.equal(
        made.variance, lns.mean(lns.square(d, lns12), [1], lns12.of_squares, keepdim=True)
    )
    assert torch.equal(made.y, lns.mul(d, made.scale, lns12))
    e, _, _ = centred(grad)
    along = lns.mean(e, [1], lns12, keepdim=True, times=y)
    dx, _, _ = normalization_backward(
        grad, y, made.scale, None, None, [], [1], True, [True, False, False], lns12
    )
    assert torch.equal(dx, lns.mul(lns.sub(e, lns.mul(y, along, lns12), lns12), made.scale, lns12))


def test_the_operators_pass_torchs_check() -> None:
    ops, check, fmt = torch.ops.lns_ops, torch.library.opcheck, (12, 6)
    x, y = (codes((5, 3, 1000), lns12, seed) for seed in (1, 2))
    mean, weight = codes((1, 3, 1), lns12, 3), codes((3, 1), lns12, 4)
    check(ops.sum.default, (x, None, [0, 2], "plain", *fmt))
    check(ops.sum.default, (x, y, [2], "products", *fmt, -64))
    check(ops.sum.default, (x, mean, [0, 2], "squares", *fmt))
    check(ops.sum.default, (x, None, [0, 2], "squares", *fmt))
    for w, b, centred in ((weight, weight, True), (None, weight, True), (None, None, False)):
        affine, dims, wanted = (w, b, [3, 1]), [0, 2], [True, w is not None, b is not None]
        check(ops.normalization.default, (x, *affine, dims, 1e-5, centred, *fmt))
        saved = (x, y, mean, *affine)
        check(ops.normalization_backward.default, (*saved, dims, centred, wanted, *fmt))
        check(ops.normalization_backward.default, (*saved, dims, centred, [False] * 3, *fmt))
    average = torch.rand(mean.numel())
    check(ops.track_.default, (average, average.clone(), mean, mean, mean, 1.5, 0.1, *fmt))
    check(ops.track_.default, (None, average, mean, mean, mean, 1.5, 0.1, *fmt))
