"""Float inputs of modules in scope everywhere: where they are encoded, and which angles cause a
warning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lns_ops
from lns_ops.tensor import in_float32


class TimeEmbedding(nn.Module):
    """Sinusoids of a time step, in a module with or without a parameter."""

    def __init__(self, owns: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64)) if owns else None
        self.register_buffer("rates", torch.exp(-math.log(10_000.0) * torch.arange(32) / 32))

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * self.rates
        y = torch.cat([angles.sin(), angles.cos()], -1)
        return y if self.gain is None else y * self.gain


class Rotary(nn.Module):
    """Rotation of pairs of channels by float positions."""

    def __init__(self, owns: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8)) if owns else None
        self.register_buffer("rates", 100.0 ** (-torch.arange(4) / 4))

    def forward(self, position: Tensor) -> Tensor:
        angles = position[:, None] * self.rates
        x, y = (torch.ones(1), torch.ones(1)) if self.gain is None else self.gain.chunk(2)
        return torch.cat([x * angles.cos() - y * angles.sin(), x * angles.sin()], -1)


@pytest.mark.parametrize("fmt", ["lns16", "lns12"])
@pytest.mark.parametrize("kind", [TimeEmbedding, Rotary])
def test_positions_are_as_exact_in_a_module_that_owns_a_parameter(
    kind: type[nn.Module], fmt: str
) -> None:
    t = torch.tensor([3.0, 256.0, 999.0])
    expected = kind(False)(t)
    model = lns_ops.convert_(kind(True), fmt, scope="everywhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = in_float32(model(t))
    assert (found - expected).norm() < 2.0 ** -lns_ops.LNSFormat.of(fmt).fraction_bits * 2


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_an_input_that_meets_a_weight_at_once_has_the_bits_of_one_that_is_encoded() -> None:
    model = lns_ops.convert_(Multiplies(), "lns16", scope="everywhere")
    x = torch.randn(5, 4)
    found, expected = model(x), model(lns_ops.LNSTensor.from_float(x, "lns16"))
    assert torch.equal(found.codes, expected.codes)
    x.requires_grad_()
    model(x).to_float().sum().backward()
    assert type(x.grad) is Tensor


def test_the_summary_shows_which_modules_keep_float_inputs() -> None:
    model = nn.Sequential(TimeEmbedding(True), nn.Linear(64, 2))
    text = lns_ops.summary(lns_ops.convert_(model, "lns16", scope="everywhere"))
    assert "float inputs stay float32 until they meet LNS in: 0 (" in text
    plain = lns_ops.convert_(nn.Sequential(nn.Linear(2, 2)), "lns16", scope="everywhere")
    assert "float inputs stay" not in lns_ops.summary(plain)


def test_an_input_of_another_format_is_still_encoded_anew() -> None:
    model = lns_ops.convert_(Multiplies(), "lns12", scope="everywhere")
    out = model(lns_ops.LNSTensor.from_float(torch.randn(5, 4), "lns16"))
    assert out.fmt == lns_ops.lns12


@pytest.mark.parametrize("function", [torch.sin, torch.cos, torch.tan])
def test_angles_that_rounding_turns_warn(function: Callable[[Tensor], Tensor]) -> None:
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    x = lns_ops.LNSTensor.from_float(torch.tensor([1.0, 140.0]), "lns16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(x)
    with pytest.warns(UserWarning, match=r"of up to 996.6 in lns16: angles beyond 145 .* float32"):
        function(lns_ops.LNSTensor.from_float(torch.tensor([1.0, 999.0]), "lns16"))


def test_a_warning_of_angles_comes_once_a_conversion() -> None:
    x = lns_ops.LNSTensor.from_float(torch.tensor([999.0]), "lns16")
    for _ in range(2):
        lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
        with pytest.warns(UserWarning, match="sin of up to"):
            x.sin()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x.sin()
