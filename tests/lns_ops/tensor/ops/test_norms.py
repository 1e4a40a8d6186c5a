"""Norms are rounded once, even if their squares would leave the format. At 0 their gradients, and
std's, equal torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import LNSFormat, LNSTensor, convert_, decode, encode, lns12, lns16
from tests.lns_ops.lns_formats import half_ulp

FMT = LNSFormat(16, 10)


def gradients_of_the_issue() -> LNSTensor:
    values = torch.full((100_000,), 0.003)
    values[0] = 0.02
    return LNSTensor.from_float(values, lns12)


def test_many_small_numbers_have_the_norm_that_they_have() -> None:
    x = gradients_of_the_issue()
    exact = encode(decode(x.codes, lns12, torch.float64).norm(), lns12)
    for norm in (
        x.norm(),
        torch.linalg.vector_norm(x),
        torch.linalg.norm(x),
        x.reshape(1, -1).norm(dim=1)[0],
    ):
        assert norm.fmt == lns12  # type: ignore[attr-defined]
        assert norm.codes == exact  # type: ignore[attr-defined]
    assert x.norm().item() == pytest.approx(0.953, abs=0.006)


def test_clipping_by_norm_clips_to_the_norm() -> None:
    model = nn.ParameterList(
        [nn.Parameter(gradients_of_the_issue()), nn.Parameter(gradients_of_the_issue()[:10])]
    )
    for parameter in model:
        parameter.grad = parameter.detach().clone()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert total.item() == pytest.approx(0.953, rel=2 * half_ulp(lns12))
    grads: Any = [p.grad for p in model]
    clipped = math.hypot(*(grad.to_float().double().norm().item() for grad in grads))
    assert clipped == pytest.approx(0.1, rel=4 * half_ulp(lns12))


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, 10, -1, -2, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [None, 1, (0, 2)])
def test_every_order_is_rounded_once(order: float, dim: int | tuple[int, ...] | None) -> None:
    x = LNSTensor.from_float(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)), FMT)
    exact = torch.linalg.vector_norm(decode(x.codes, FMT, torch.float64), order, dim)
    norm: Any = torch.linalg.vector_norm(x, order, dim)
    assert torch.equal(norm.codes, encode(exact, FMT))
    if order >= 1 and dim == 1:
        assert torch.equal(
            F.normalize(x, order, dim).codes, (x / x.norm(order, dim, keepdim=True)).codes
        )  # type: ignore[attr-defined]


def test_a_norm_beyond_the_range_saturates() -> None:
    x = LNSTensor.from_float(torch.full((100,), 60000.0), lns12)
    assert x.norm().item() == x.norm(1).item() == pytest.approx(lns12.largest)
    large = LNSTensor.from_float(torch.full((3,), 1e38), lns16)
    assert large.norm(12).item() == pytest.approx(1e38 * 3 ** (1 / 12), rel=3 * half_ulp(lns16))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(),
    "torch.norm": lambda x: torch.norm(x),
    "torch.norm of rows": lambda x: torch.norm(x, dim=1).sum(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=1).sum(),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "norm of order 1": lambda x: x.norm(1),
    "norm of order 1.5": lambda x: x.norm(1.5),
    "norm of order 3": lambda x: x.norm(3),
    "norm of order 0.5": lambda x: x.norm(0.5),
    "norm of order -1": lambda x: x.norm(-1),
    "norm of order 0": lambda x: x.norm(0) + x.sum(),
    "largest": lambda x: x.norm(math.inf),
    "normalize": lambda x: F.normalize(x, dim=1).sum(),
    "std": lambda x: x.std(),
    "std of rows": lambda x: torch.std(x, 1).sum(),
    "std, correction": lambda x: torch.std(x, dim=1, correction=0, keepdim=True).sum(),
    "std_mean": lambda x: torch.std_mean(x, 1)[0].sum(),
}
INPUTS = {
    "zeros": torch.zeros(2, 3),
    "one row of zeros": torch.tensor([[0.0, 0, 0], [1, -2, 4]]),
    "a zero": torch.tensor([[1.0, 0, -4], [1, -2, 4]]),
    "equal": torch.full((2, 3), 2.0),
    "numbers": torch.tensor([[0.5, 2, -4], [1, -2, 8]]),
}


@pytest.mark.parametrize("values", INPUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_torchs_at_zero_too(name: str, values: str) -> None:
    x, exact = (
        LNSTensor.from_float(INPUTS[values], FMT).requires_grad_(),
        INPUTS[values].double().requires_grad_(),
    )
    FUNCTIONS[name](exact).backward()
    FUNCTIONS[name](x).backward()
    assert isinstance(x.grad, LNSTensor)
    assert exact.grad is not None
    wanted = exact.grad
    # torch divides by 1e-12 if a row is zero, LNS by its smallest number
    if name == "normalize":
        wanted = torch.where(
            (INPUTS[values] == 0).all(1, keepdim=True), 1 / FMT.smallest, wanted
        ).clamp(max=FMT.largest)
    error = (decode(x.grad.codes, FMT, torch.float64) - wanted).norm()
    assert (
        error
        <= 24 * half_ulp(FMT) * wanted.norm().clamp_min(float(values == "equal")) + 8 * FMT.smallest
    )


def test_the_gradient_of_a_root_of_zero_is_refused() -> None:
    x = LNSTensor.from_float(torch.tensor([0.0, 4.0]), FMT).requires_grad_()
    with pytest.raises(ValueError, match="division by zero: LNS has no infinity"):
        x.sqrt().sum().backward()


def test_second_derivatives_of_norms() -> None:
    x = LNSTensor.from_float(INPUTS["numbers"], FMT).requires_grad_()
    exact = INPUTS["numbers"].double().requires_grad_()
    for each in (x, exact):
        (gradient,) = torch.autograd.grad(each.norm(), each, create_graph=True)
        (gradient * gradient * each).sum().backward()
    assert (decode(x.grad.codes, FMT, torch.float64) - exact.grad).norm() <= 24 * half_ulp(
        FMT
    ) * exact.grad.norm()  # type: ignore[union-attr, operator]


def test_a_norm_compiles() -> None:
    model = convert_(nn.Linear(4, 4), "lns16", scope="everywhere")

    def loss(x: Tensor) -> Tensor:
        y = model(x)
        return y.norm() + F.normalize(y, dim=-1).sum() + y.std()

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x).codes, loss(x).codes)


def test_the_cosine_of_a_zero_row_has_torchs_gradient() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    y, other = LNSTensor.from_float(x.detach()), torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    F.cosine_similarity(x, other).sum().backward()
    F.cosine_similarity(y.requires_grad_(), LNSTensor.from_float(other)).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(y.grad.to_float(), x.grad, rtol=0.01)
