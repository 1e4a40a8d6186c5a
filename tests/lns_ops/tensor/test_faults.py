"""Errors of encoding name operation, value and place; bounds keep values away from the edges of
domains; numbers are on the tensors' device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lns_ops
from lns_ops import LNSFormat, LNSTensor, NonFiniteError, lns8, lns12, lns16


def lns(*values: float, fmt: LNSFormat = lns16) -> LNSTensor:
    return LNSTensor.from_float(torch.tensor(values), fmt)


def gradient_of_acos() -> None:
    angles = lns(0.5, 1.0).requires_grad_().acos().to_float()
    angles.sum().backward()  # type: ignore[no-untyped-call]


def layer(scope: str) -> object:
    model = lns_ops.convert_(nn.Linear(2, 2), "lns16", scope=scope)
    return model(torch.tensor([[1.0, float("inf")]]))


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "decoded": (lambda: lns(-1.0, 2.0).asin(), r"asin: .*nan at index \(1,\) of shape \(2,\)"),
    "gradient": (gradient_of_acos, r"the gradient of acos: .*-inf at index \(1,\)"),
    "met": (lambda: lns(1.0) + torch.tensor([float("nan")]), "add: .*nan at index"),
    "layer": (lambda: layer("everywhere"), r"an input of a Linear: .*inf at index \(0, 1\)"),
    "product": (lambda: layer("matmul"), r"a product in LNS: .*inf at index \(0, 1\)"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_an_error_of_encoding_names_the_operation_and_the_value(name: str) -> None:
    call, said = FAULTS[name]
    with pytest.raises(NonFiniteError, match=said):
        call()


@pytest.mark.parametrize("fmt", [lns16, lns12, lns8])
def test_a_bound_beside_an_edge_keeps_values_off_it(fmt: LNSFormat) -> None:
    x = lns(-2.0, -1.0, 0.0, 1.0, 2.0, fmt=fmt)
    inside = x.clamp(-1 + 1e-4, 1 - 1e-4).to_float()
    assert inside.abs().max() < 1
    assert inside[2] == 0
    assert x.clamp(min=1 + 1e-4).to_float().min() == 1 + fmt.epsilon
    assert x.clamp(min=1e-30 * fmt.smallest).to_float().min() == pytest.approx(fmt.smallest)
    assert x.clamp(max=-1e-30 * fmt.smallest).to_float().max() == pytest.approx(-fmt.smallest)
    assert F.hardtanh(x, -1 + 1e-4, 1 - 1e-4).to_float().abs().max() < 1
    for low, high in ((-1.0, 1.0), (0.3, 1.7)):  # other bounds are rounded to nearest
        expected = [float(lns(v, fmt=fmt).to_float()) for v in (low, high)]
        found = x.clamp(low, high).to_float()
        assert [float(found.min()), float(found.max())] == expected


def test_a_gradient_behind_a_bound_is_finite() -> None:
    x = lns(0.5, 1.0).requires_grad_()
    x.clamp(max=1 - 1e-4).acos().to_float().sum().backward()  # type: ignore[no-untyped-call]
    assert isinstance(x.grad, LNSTensor)


ON_ANY_DEVICE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "scatter": lambda x, i: x.scatter(-1, i, -2.5),
    "masked_fill": lambda x, i: x.masked_fill(i > 0, 0.3),
    "clamp": lambda x, i: x.clamp(-0.5, 0.5),
    "threshold": lambda x, i: F.threshold(x, 0.1, 20.0),
    "where": lambda x, i: torch.where(i > 0, x, 0.25),
    "add": lambda x, i: 2.0 + x - 0.1,
    "large": lambda x, i: x * 1e39 + 1e39,
    "div": lambda x, i: 1.0 / x,
    "lerp": lambda x, i: x.lerp(x, 0.3),
    "compare": lambda x, i: (x > 0.3) | (x == 1.0),
    "maximum": lambda x, i: x.clamp_min(0.2),
    "full_like": lambda x, i: torch.full_like(x, 0.7),
    "pad": lambda x, i: F.pad(x, (1, 1), value=0.5),
    "hardshrink": lambda x, i: F.hardshrink(x, 0.5),
    "leaky_relu": lambda x, i: F.leaky_relu(x, 0.1),
    "elu": lambda x, i: F.elu(x, 1.5),
    "addcmul": lambda x, i: torch.addcmul(x, x, x, value=0.3),
    "nan_to_num": lambda x, i: x.nan_to_num(0.0),
}


@pytest.mark.parametrize("name", list(ON_ANY_DEVICE))
def test_numbers_are_where_tensors_are(name: str) -> None:
    """On torch's fake GPU: a number that becomes a tensor on the CPU is refused there."""
    with FakeTensorMode():
        codes = torch.empty(3, 4, dtype=torch.int16, device="cuda")
        index = torch.empty(3, 4, dtype=torch.int64, device="cuda")
        result = ON_ANY_DEVICE[name](LNSTensor(codes, lns16), index)
        assert isinstance(result, Tensor)
        assert result.is_cuda
