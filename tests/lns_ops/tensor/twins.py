"""Layers and their float64 twins: the allowed distance of outputs and gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lns_ops import LNSFormat, LNSTensor, convert_, decode
from tests.lns_ops.lns_formats import half_ulp

FMT = LNSFormat(16, 10)

ROUNDINGS = {"few": 12, "some": 40, "many": 150}
"""Half-ulps in the norm: for a layer of a few operations; for norms and attention; for recurrences
over steps, where errors are fed back."""


def values(x: Any) -> Tensor:
    return (
        decode(x.detach().codes, x.fmt, torch.float64)
        if isinstance(x, LNSTensor)
        else x.detach().double()
    )


def gradients(
    model: nn.Module, inputs: tuple[Tensor, ...], weight: Tensor, **kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    inputs = tuple(x.detach().requires_grad_() if x.dtype.is_floating_point else x for x in inputs)
    out = model(*inputs, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(
        LNSTensor.from_float(weight, FMT) if isinstance(out, LNSTensor) else weight.double()
    )
    found = [x.grad for x in inputs if x.grad is not None] + [
        p.grad for p in model.parameters() if p.grad is not None
    ]
    return out, found


def exact_twin(model: nn.Module) -> nn.Module:
    """Return the float64 twin with the decoded weights."""
    from lns_ops import revert_

    return revert_(copy.deepcopy(model)).double()


def check(model: nn.Module, inputs: tuple[Tensor, ...], half_ulps: float, **kwargs: Any) -> None:
    model = convert_(model, FMT, scope="everywhere")
    exact = exact_twin(model)
    encoded = tuple(
        LNSTensor.from_float(x, FMT) if x.dtype.is_floating_point else x for x in inputs
    )
    wide = {
        k: v.double() if isinstance(v, Tensor) and v.dtype.is_floating_point else v
        for k, v in kwargs.items()
    }
    shape = exact(*(x.double() if x.dtype.is_floating_point else x for x in inputs), **wide)
    weight = values(
        LNSTensor.from_float(
            torch.randn((shape[0] if isinstance(shape, tuple) else shape).shape), FMT
        )
    ).float()
    exact = exact_twin(model)
    out, found = gradients(model, encoded, weight, **kwargs)
    truth, wanted = gradients(
        exact, tuple(values(x) if isinstance(x, LNSTensor) else x for x in encoded), weight, **wide
    )
    assert len(found) == len(wanted)
    for got, want in zip([out, *found], [truth, *wanted], strict=True):
        assert got.shape == want.shape
        assert (values(got) - values(want)).norm() <= half_ulps * half_ulp(FMT) * values(
            want
        ).norm() + 32 * FMT.smallest
