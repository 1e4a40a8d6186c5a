"""Averages over windows that do not overlap have the gradient of the convolution that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import LNSTensor, lns8, lns16
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
    """Which took 897 ms instead of 0.6 for windows of 70 x 70 in 2 planes of 140 x 140."""
    monkeypatch.setattr(conv, "input_gradient", None)
    gradient(LNSTensor.from_float(torch.randn(1, 2, 70, 70), lns16), {"kernel_size": 70})
    with pytest.raises(TypeError):
        gradient(LNSTensor.from_float(torch.randn(1, 2, 6, 6), lns16),
                 {"kernel_size": 3, "stride": 1})  # fmt: skip
