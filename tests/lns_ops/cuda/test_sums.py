"""Sums and means over any dimensions, of elements, products and squares, and the elementwise part
of normalizations equal the CPU's bit for bit, for every memory layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lns_ops import LNSFormat, cuda
from lns_ops import functional as lns
from lns_ops.functional.library import kernels_of
from lns_ops.functional.reductions import reduced
from tests.lns_ops.cuda.codes import FORMATS, assert_same, random_codes
from tests.lns_ops.functional.reductions import NORMALIZATIONS, REDUCTIONS, WHOLE_NORMALIZATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]


def codes(shape: tuple[int, ...], fmt: LNSFormat, seed: int, spread: float) -> Tensor:
    return torch.from_numpy(random_codes(shape, fmt, seed, spread))


@pytest.mark.parametrize("spread", [1.0, 0.02])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "dims"), REDUCTIONS, ids=str)
def test_sums_and_means(
    shape: tuple[int, ...], dims: list[int], fmt: LNSFormat, spread: float
) -> None:
    x, y = (codes(shape, fmt, seed, spread) for seed in (1, 2))
    about = codes(tuple(1 if d in dims else n for d, n in enumerate(shape)), fmt, 3, spread)
    gx, gy, g_about = x.cuda(), y.cuda(), about.cuda()
    for keepdim in (False, True):
        assert_same(
            lns.sum(gx, dims, fmt, keepdim=keepdim), lns.sum(x, dims, fmt, keepdim=keepdim).numpy()
        )
    assert_same(lns.sum(gx, dims, fmt, times=gy), lns.sum(x, dims, fmt, times=y).numpy())
    if all(shape[d] for d in dims):
        assert_same(lns.mean(gx, dims, fmt), lns.mean(x, dims, fmt).numpy())
        assert_same(lns.mean(gx, dims, fmt, times=gy), lns.mean(x, dims, fmt, times=y).numpy())
        for given, copy in ((g_about, about), (None, None)):
            assert_same(
                reduced(kernels_of(gx), gx, given, dims, "squares", fmt, False, True),
                reduced(kernels_of(x), x, copy, dims, "squares", fmt, False, True).numpy(),
            )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_terms_that_lie_elsewhere(fmt: LNSFormat) -> None:
    x = codes((33, 6, 48), fmt, 4, 0.1)
    g = x.cuda()
    views = [
        lambda x: x.transpose(0, 2), lambda x: x[1:], lambda x: x[:, :, 1:], lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(-1, 5, -1), lambda x: x.flatten()[3:].view(-1, 1).expand(-1, 3),
    ]  # fmt: skip
    for view in views:
        for dims in ([0], [1], [0, 1], [-1]):
            assert_same(lns.sum(view(g), dims, fmt), lns.sum(view(x), dims, fmt).numpy())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_sums_beyond_the_format_that_cancel(fmt: LNSFormat) -> None:
    """The sum of a thousand largest numbers, as many smallest, and their negatives is zero."""
    largest = torch.full((64, 9), fmt.field_mask, dtype=torch.int16)
    x = torch.cat([largest, largest | fmt.sign_mask, torch.full((64, 9), 1, dtype=torch.int16)])
    for terms in (x, x.flip(0), torch.cat([x, x])):
        assert_same(lns.sum(terms.cuda(), [0], fmt), lns.sum(terms, [0], fmt).numpy())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "kept", "affine"), NORMALIZATIONS, ids=str)
def test_normalizations(
    shape: tuple[int, ...], kept: tuple[int, ...], affine: tuple[int, ...], fmt: LNSFormat
) -> None:
    x, grad, y = (codes(shape, fmt, seed, 0.1) for seed in (1, 2, 3))
    mean, scale, along = (codes(kept, fmt, seed, 0.1) for seed in (4, 5, 6))
    weight, bias = (codes(affine, fmt, seed, 0.1) for seed in (7, 8))
    numbers = (fmt.bits, fmt.fraction_bits)
    for m in (mean, None):
        for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
            assert_same_kernels("normalize", (x, m, scale, w, b), numbers)
    assert_same_kernels("normalize_backward", (grad, y, along, scale), numbers)


def assert_same_kernels(
    name: str, given: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
) -> None:
    """Call a kernel on both devices and compare the results."""
    copies = [None if v is None else v.cuda() for v in given]
    on_gpu, on_cpu = (
        getattr(kernels_of(v[0]), name)(*v, *numbers)  # type: ignore[arg-type]
        for v in (copies, given)
    )
    if isinstance(on_cpu, Tensor):
        on_gpu, on_cpu = (on_gpu,), (on_cpu,)
    for got, wanted in zip(on_gpu, on_cpu, strict=True):
        assert_same(got, wanted.numpy())


@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "dims"), WHOLE_NORMALIZATIONS, ids=str)
def test_normalizations_with_their_statistics_and_gradients(
    shape: tuple[int, ...], dims: list[int], fmt: LNSFormat, spread: float
) -> None:
    x, grad, y = (codes(shape, fmt, seed, spread) for seed in (1, 2, 3))
    scale = codes(tuple(1 if d in dims else n for d, n in enumerate(shape)), fmt, 4, 0.1)
    weight, bias = (codes((shape[1],), fmt, seed, 0.1) for seed in (5, 6))
    seen, numbers = [shape[1], *[1] * (len(shape) - 2)], (fmt.bits, fmt.fraction_bits)
    for w, b, centred in ((weight, bias, True), (None, bias, True), (None, None, False)):
        options = (seen, dims, 1e-5, centred, *numbers)
        assert_same_kernels("normalization", (x, w, b), options)
        for wanted in ([True, w is not None, b is not None], [False] * 3):
            options = (seen, dims, centred, wanted, *numbers)
            assert_same_kernels("normalization_backward", (grad, y, scale, w, b), options)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_running_averages_have_the_bits_of_torchs_operations(fmt: LNSFormat) -> None:
    squares = fmt.of_squares
    mean, variance = (codes((1, 1000, 1), own, 1, 0.1).cuda() for own in (fmt, squares))
    rest = codes((1, 1000, 1), fmt, 2, 0.1).cuda()
    unbiased = lns.mul(variance, lns.encode_number(1.01, squares), squares)
    values = [
        (lns.decode(mean, fmt) + lns.decode(rest, fmt)).reshape(-1),
        lns.decode(unbiased, squares).reshape(-1),
    ]
    got = [torch.rand(1000, device="cuda") for _ in range(2)]
    wanted = [average.clone() for average in got]
    for given in ((0, 1), (0,), (1,)):
        some, same = (
            [averages[i] if i in given else None for i in (0, 1)] for averages in (got, wanted)
        )
        numbers = (1.01, 0.1, fmt.bits, fmt.fraction_bits)
        kernels_of(mean).track_(*some, mean, rest, variance, *numbers)
        for average, value in zip(same, values, strict=True):
            if average is not None:
                average.mul_(1 - 0.1).add_(value, alpha=0.1)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
