"""Compiled networks in simulated formats equal uncompiled ones bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lns_ops import simulate_
from lns_ops.formats import Accumulation, parse
from tests.lns_ops.nn.simulated.test_simulate import NAMES

RECIPES: dict[str, dict[str, Any]] = {
    "gradients of another format": {
        "fmt": "float8_e4m3fn", "gradient_format": "float8_e5m2/channel",
    },
    "rounded sums": {
        "fmt": "bfloat16", "accumulation": Accumulation(format="float(8,13)", block=4),
    },
}  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.mark.parametrize(
    "recipe", [*({"fmt": name} for name in NAMES), *RECIPES.values()], ids=[*NAMES, *RECIPES]
)
def test_compiled_as_one_graph(recipe: dict[str, Any]) -> None:
    torch._dynamo.reset()
    plain, other = (simulate_(network(), **recipe) for _ in range(2))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 8)
    for _ in range(2):
        expected, found = plain(x), compiled(x)
        assert torch.equal(expected, found)
        for y in (expected, found):
            (y.square().sum() * 2**-8).backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.abs().sum() > 0
        assert torch.equal(p.grad, q.grad)


def test_two_lists_of_values_in_one_graph(tmp_path: Any) -> None:
    """They must not be constants of the same name, which torch refuses within autograd
    functions."""
    np.save(tmp_path / "a.npy", np.float32([-1, -0.25, 0, 0.5, 2]))
    first, second = parse(f"table({tmp_path}/a.npy)"), parse("posit(7)")
    x = torch.randn(50)

    def both(x: torch.Tensor) -> torch.Tensor:
        return first.quantize(x) + second.quantize(x)

    expected = both(x)
    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), expected)


def test_a_conversion_to_16_bits_and_back_is_not_left_out() -> None:
    """The code that torch generates computes in float32 between the two conversions, and would not
    round."""
    both = [parse(name) for name in ("float16", "bfloat16")]
    torch.manual_seed(0)
    x = torch.randn(500) * torch.exp2(torch.randint(-140, 120, (500,)).float())
    ends = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 3.4e38, 6e-8, 2.9e-8, 1e-40, -1e-45, np.inf]
    x = torch.cat([x, torch.tensor(ends), -torch.tensor(ends)])

    def rounded(x: torch.Tensor) -> list[torch.Tensor]:
        return [fmt.quantize(x * 2) * 0.5 for fmt in both]

    expected = rounded(x)
    for found, exact in zip(torch.compile(rounded, fullgraph=True)(x), expected, strict=True):
        assert torch.equal(found, exact)
