"""Averages over windows without overlap have the gradient of the equivalent convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import LNSTensor, lns8, lns12, lns16
from lns_ops.functional import convolution as conv
from lns_ops.tensor.ops import pooling

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one window": ((2, 3, 6, 5), {"kernel_size": (6, 5)}),
    "windows": ((2, 3, 8, 9), {"kernel_size": (2, 3)}),
    "gaps": ((1, 2, 11, 9), {"kernel_size": 2, "stride": (3, 4)}),
    "rest": ((1, 2, 7, 7), {"kernel_size": 3}),
    "padded": ((1, 2, 7, 8), {"kernel_size": 4, "padding": (2, 1)}),
    "ceil": ((1, 2, 7, 8), {"kernel_size": 3, "ceil_mode": True, "count_include_pad": False}),
    "3d": ((2, 2, 4, 5, 6), {"kernel_size": (2, 5, 3)}),
    "1d": ((2, 3, 12), {"kernel_size": 5, "padding": 2}),
    "no batch": ((3, 8, 8), {"kernel_size": 4, "divisor_override": 7}),
}


def gradient(x: LNSTensor, options: dict[str, Any]) -> Tensor:
    dims = x.dim() - (1 if x.shape[0] == 3 and x.shape[1] == 8 else 2)
    pool: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    x = x.detach().requires_grad_()
    y = pool(x, **options)
    torch.manual_seed(1)
    y.backward(LNSTensor.from_float(torch.randn(y.shape), x.fmt))
    assert isinstance(x.grad, LNSTensor)
    return x.grad.codes


@pytest.mark.parametrize("fmt", [lns8, lns16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_windows_that_do_not_overlap(name: str, fmt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = CASES[name]
    x = LNSTensor.from_float(torch.randn(shape), fmt)

    def convolved(share: Tensor, shape: Any, kernel: Any, stride: Any, padding: Any) -> Tensor:
        ones = torch.full((1, 1, *kernel), fmt.bias, dtype=torch.int16)
        geometry = conv.Geometry(stride, padding, (1,) * len(kernel))
        size = shape[-len(kernel) :]
        return conv.input_gradient(share, ones, size, geometry, fmt).reshape(shape)

    found = gradient(x, options)
    monkeypatch.setattr(pooling, "_spread", convolved)
    assert torch.equal(found, gradient(x, options))


def test_they_are_no_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """This took 897 ms instead of 0.6 for windows of 70 x 70 in 2 planes of 140 x 140."""
    monkeypatch.setattr(conv, "input_gradient", None)
    gradient(LNSTensor.from_float(torch.randn(1, 2, 70, 70), lns16), {"kernel_size": 70})
    with pytest.raises(TypeError):
        gradient(LNSTensor.from_float(torch.randn(1, 2, 6, 6), lns16),
                 {"kernel_size": 3, "stride": 1})  # fmt: skip


def test_an_average_of_fewer_values_at_the_border_is_one_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean is computed directly only if the sum has left the range."""
    x = LNSTensor.from_float(torch.rand(1, 1, 9, 9) + 1, lns12)
    expected = F.avg_pool2d(x.to_float(), 3, 1, 1, count_include_pad=False)
    monkeypatch.setattr(pooling.lns, "mean", None)
    found = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    assert ((found.to_float() - expected).abs() < 0.02 * expected).all()


@pytest.mark.parametrize("options", [{"stride": 1, "padding": 2}, {"stride": 2, "padding": 1}])
def test_shares_of_overlapping_windows_do_not_underflow(options: dict[str, Any]) -> None:
    """With a gradient of 2^-13 each of 25 windows gets a share below 2^-16, and lns12 lost
    these."""
    torch.manual_seed(0)
    x = LNSTensor.from_float(torch.randn(1, 2, 40, 40), lns12).requires_grad_()
    y = F.avg_pool2d(x, 5, **options, count_include_pad=False)
    grad = LNSTensor.from_float(2**-13 * (1 + torch.rand(y.shape)), lns12)
    y.backward(grad)
    exact = x.detach().to_float().double().requires_grad_()
    F.avg_pool2d(exact, 5, **options, count_include_pad=False).backward(grad.to_float().double())
    found: Any = x.grad
    kept = exact.grad.abs() > 2 * lns12.smallest
    error = (found.to_float().double() - exact.grad)[kept].norm() / exact.grad[kept].norm()
    assert kept.any()
    assert error < 0.02


@pytest.mark.parametrize("include_pad", [True, False])
def test_averages_at_the_border_are_compiled(include_pad: bool) -> None:
    def averaged(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=include_pad)

    x = LNSTensor.from_float(torch.rand(1, 2, 8, 8) * 20_000, lns12).requires_grad_()
    expected: Any = averaged(x)
    found: Any = torch.compile(averaged, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(expected.codes, found.codes)
    (first,), (second,) = (torch.autograd.grad(y.sum(), [x]) for y in (expected, found))
    assert torch.equal(first.codes, second.codes)  # type: ignore[attr-defined]
