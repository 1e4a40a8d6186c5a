"""Every differentiable operation on long, large and offset inputs, beside float64 on the same ones.

Small samples near zero do not show what sticks, saturates or cancels. Inputs are encoded first, and
float64 gets the values that their codes stand for, so only the operation itself is measured, at two
widths of the fraction: with two more bits rounding errors fall to a quarter and faults stay.

A new operation, or one with a fault at length, gets a row in :data:`CASES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lns_ops import LNSFormat, LNSTensor, decode
from tests.lns_ops.lns_formats import half_ulp

WIDTHS = [LNSFormat(16, 7), LNSFormat(16, 9)]
"""Two formats whose ranges (2^+-128, 2^+-32) hold what the cases make."""

LONG = 100_000
"""The number of terms of a long sum."""

Maker = Callable[[], Any]
"""Makes an input: a float tensor, which is encoded, or anything else, which is passed on."""


def positive(*shape: int) -> Maker:
    """Values of one sign, whose sums grow with every term."""
    return lambda: torch.rand(shape) + 0.5


def normal(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> Maker:
    return lambda: mean + deviation * torch.randn(shape)


def exactly(value: Any) -> Maker:
    return lambda: value


@dataclass(frozen=True)
class Case:
    """An operation on inputs of one kind.

    Attributes:
        name: the operation's name in tests/lns_ops/operations.py.
        kind: what the inputs are: long, large or offset.
        function: the operation.
        inputs: makers of its inputs.
        half_ulps: how far results and gradients may be from float64's, in half-ulps of their norm.
        of_gradients: the same for gradients, where it differs.
        weight: makes the incoming gradients: of one sign, so that their sums grow, or not.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    inputs: tuple[Maker, ...]
    half_ulps: float = 16
    of_gradients: float | None = None
    weight: Callable[..., Maker] = positive


def _places(count: int, rows: int) -> Maker:
    """Indices, of which nine in ten are 0."""

    def made() -> Tensor:
        return torch.randint(rows, (count,)) * (torch.rand(count) < 0.1)

    return made


BY_ROW: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda x, i, y: x.index_add(0, i, y),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[:, None].expand(y.shape), y),
    "index_put": lambda x, i, y: x.index_put((i,), y, accumulate=True),
    "put": lambda x, i, y: x.put(i, y[:, 0], accumulate=True),
    "scatter_reduce.sum": lambda x, i, y: x.scatter_reduce(0, i[:, None].expand(y.shape), y, "sum"),
    "scatter_reduce.mean": lambda x, i, y: x.scatter_reduce(
        0, i[:, None].expand(y.shape), y, "mean"
    ),
}
"""Sums of rows by index."""

TAKEN: dict[str, Callable[..., Tensor]] = {
    "nn.functional.embedding": lambda x, i: F.embedding(i, x),
    "nn.functional.embedding_bag": lambda x, i: F.embedding_bag(i[None], x, mode="sum"),
    "nn.functional.embedding_bag.mean": lambda x, i: F.embedding_bag(i[None], x, mode="mean"),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 2)),
    "take": lambda x, i: x.take(i),
    "index_select": lambda x, i: x.index_select(0, i),
    "__getitem__": lambda x, i: x[i],
    "repeat_interleave": lambda x, i: x.repeat_interleave(len(i) // 3, 0),
    "expand": lambda x, i: x[:, None].expand(-1, len(i), -1),
}
"""Rows taken by index, whose gradients are sums."""

SEGMENTS: dict[str, Callable[..., Tensor]] = {
    "lengths": lambda x: torch.segment_reduce(
        x, "sum", lengths=torch.tensor([3, len(x) - 5, 2])
    ),
    "offsets": lambda x: torch.segment_reduce(
        x, "mean", offsets=torch.tensor([0, 3, len(x) - 2, len(x)])
    ),
}
"""Sums of neighbours."""

CASES = [
    Case("sum", "long", torch.sum, (positive(LONG),)),
    Case("mean", "long", torch.mean, (positive(LONG),)),
    *(
        Case(name, "long", function, (positive(3, 2), _places(LONG, 3), positive(LONG, 2)))
        for name, function in BY_ROW.items()
    ),
    *(
        Case(name, "long", function, (positive(3, 2), _places(LONG, 3)))
        for name, function in TAKEN.items()
    ),
    *(
        Case(f"_segment_reduce.{kind}", "long", function, (positive(LONG),))
        for kind, function in SEGMENTS.items()
    ),
]


def _values(x: Tensor) -> Tensor:
    x = x.detach()
    return decode(x.codes, x.fmt, torch.float64) if isinstance(x, LNSTensor) else x.double()


def _run(case: Case, inputs: list[Any], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and the gradients of all float inputs."""
    leaves = [x.requires_grad_() for x in inputs if _is_real(x)]
    results = [y for y in tree_leaves(case.function(*inputs)) if _is_real(y)]
    made = [y for y in results if y.requires_grad]
    if not weights:
        weights += [_encoded(case.weight(*y.shape)(), y) for y in made]
    given = [
        w if isinstance(y, LNSTensor) else _values(w) for w, y in zip(weights, made, strict=True)
    ]
    given = [w if type(w) is type(y) else w.to(y.dtype) for w, y in zip(given, made, strict=True)]
    found = torch.autograd.grad(made, leaves, given) if made else []
    return results, list(found)


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _encoded(x: Tensor, like: Tensor) -> Tensor:
    return LNSTensor.from_float(x, like.fmt) if isinstance(like, LNSTensor) else x


@pytest.mark.parametrize("fmt", WIDTHS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.kind}")
def test_results_and_gradients(case: Case, fmt: LNSFormat) -> None:
    torch.manual_seed(0)
    made = [make() for make in case.inputs]
    inputs = [LNSTensor.from_float(x, fmt) if _is_real(x) else x for x in made]
    exact = [_values(x) if isinstance(x, LNSTensor) else x for x in inputs]
    weights: list[Tensor] = []
    results, gradients = _run(case, inputs, weights)
    truths, wanted = _run(case, exact, weights)
    of_gradients = case.half_ulps if case.of_gradients is None else case.of_gradients
    for got, want in zip(results, truths, strict=True):
        _compare(case, "result", got, want, case.half_ulps, fmt)
    for i, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
        _compare(case, f"gradient {i}", got, want, of_gradients, fmt)


def _compare(
    case: Case, what: str, got: Tensor, want: Tensor, half_ulps: float, fmt: LNSFormat
) -> None:
    assert got.shape == want.shape
    error, norm = (_values(got) - want.detach()).norm(), want.detach().norm()
    far = float(error / norm) / half_ulp(fmt) if norm else float(error > fmt.smallest)
    assert far <= half_ulps, f"{what} of {case.name}: {far:.1f} half-ulps off, allowed {half_ulps}"
