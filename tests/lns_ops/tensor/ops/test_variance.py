"""If the squares of deviations are beyond the format's range, quotients by the deviation and their
gradients are still right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lns_ops import LNSFormat, LNSTensor, lns8, lns12, lns16, reference
from lns_ops import functional as lns
from tests.lns_ops.lns_formats import FORMATS

DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (48,), eps=1e-12),
    "RMS norm": lambda x: F.rms_norm(x, (48,), eps=1e-12),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True, eps=1e-12),
    "group norm": lambda x: F.group_norm(x.reshape(8, 8, 48), 4, eps=1e-12),
    "instance norm": lambda x: F.instance_norm(x.reshape(4, 16, 48), eps=1e-12),
    "std": lambda x: x.std(1),
    "std_mean": lambda x: torch.std_mean(x, 0, correction=0, keepdim=True)[0],
}


def relative_error(got: Tensor, exact: Tensor) -> float:
    exact = exact.detach()
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("deviation", [2.0**-10, 2.0**-8, 1.0, 300.0, 2.0**13])
@pytest.mark.parametrize("name", DIVIDED)
def test_every_deviation_in_the_range_divides(name: str, deviation: float) -> None:
    """In lns12 squares leave the range for deviations from 2^8 on, and below 2^-8."""
    torch.manual_seed(0)
    x = LNSTensor.from_float(torch.randn(64, 48) * deviation, lns12).requires_grad_()
    exact = x.detach().to_float().double().requires_grad_()
    got, wanted = DIVIDED[name](x), DIVIDED[name](exact)
    assert relative_error(got.detach().to_float(), wanted) < 0.02
    grad = torch.randn(wanted.shape).double()
    got.backward(LNSTensor.from_float(grad, lns12))
    wanted.backward(grad)
    assert x.grad is not None
    assert exact.grad is not None
    floor = 64 * lns12.smallest * (name.startswith("std"))  # a 48th of the gradient or less
    assert float((x.grad.to_float() - exact.grad).norm()) < 0.03 * float(exact.grad.norm()) + floor


@pytest.mark.parametrize("deviation", [2.0**-10, 1.0, 2.0**13])
def test_running_variances_are_those_of_the_batch_and_serve_in_evaluation(deviation: float) -> None:
    torch.manual_seed(0)
    x = LNSTensor.from_float(torch.randn(64, 5) * deviation, lns12)
    mean, variance, exact = torch.zeros(5), torch.ones(5), x.to_float()
    F.batch_norm(x, mean, variance, training=True, momentum=1.0)
    torch.testing.assert_close(variance, exact.var(0), rtol=0.04, atol=0)  # ulps, of 0.011
    statistics = exact.mean(0), exact.var(0)
    got = F.batch_norm(x, *statistics, eps=1e-12).to_float()
    assert relative_error(got, F.batch_norm(exact, *statistics, eps=1e-12)) < 0.02


def test_a_variance_itself_saturates_and_underflows() -> None:
    x = torch.tensor([-1.0, 1.0])
    assert LNSTensor.from_float(x * 1000, lns12).var().item() == pytest.approx(lns12.largest)
    assert LNSTensor.from_float(x / 1000, lns12).var().item() == 0
    assert LNSTensor.from_float(x * 1000, lns16).var().item() == pytest.approx(2e6, rel=0.01)


@pytest.mark.parametrize("fmt", [lns12, lns8, LNSFormat(14, 8)], ids=str)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=2, max_size=9))
def test_a_power_of_two_changes_no_bit_of_what_is_normalized(
    fmt: LNSFormat, numbers: list[tuple[bool, int]]
) -> None:
    """It shifts every logarithm of inputs and statistics, and does not change the results."""
    values = torch.tensor([(-1.0 if sign else 1.0) * 2.0**n for sign, n in numbers])
    if len(set(values.tolist())) == 1:
        return
    x = LNSTensor.from_float(values[None], fmt)
    factor = fmt.most_scale / 2.0**4
    moved = LNSTensor.from_float(values[None] * factor, fmt)
    assert torch.equal(moved.std(1).codes, (x.std(1) * factor).codes)
    normal, same = (F.layer_norm(v, values.shape, eps=0.0) for v in (x, moved))
    assert torch.equal(normal.codes, same.codes)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_squares_of_every_code_are_the_references(fmt: LNSFormat) -> None:
    codes = fmt.codes()
    squares = lns.square(torch.from_numpy(codes), fmt)
    assert torch.equal(squares, torch.from_numpy(reference.square(codes, fmt)))
    back = lns.within(squares, fmt).numpy()
    assert (back == reference.mul(codes, codes, fmt)).all()


@pytest.mark.parametrize(
    "deviation", [lambda x: x.std(0), lambda x: x.var(), lambda x: torch.std_mean(x, 0)[0]]
)
def test_compiled_deviations_take_other_sizes(deviation: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(deviation, backend="aot_eager")
    for rows in (5, 7, 11):
        x = LNSTensor.from_float(torch.randn(rows, 3), lns12)
        assert torch.equal(compiled(x).codes, deviation(x).codes)


def test_the_gradient_of_a_deviation_of_many_values_is_not_lost_on_the_way() -> None:
    torch.manual_seed(0)
    x = LNSTensor.from_float(torch.randn(300) * 0.1, lns8).requires_grad_()
    exact = x.detach().to_float().requires_grad_()
    x.std().backward()
    exact.std().backward()
    assert x.grad is not None
    assert exact.grad is not None
    held = exact.grad.abs() > 1.2 * lns8.smallest
    assert (x.grad.to_float()[held] != 0).all()
    x.std(correction=299.9999).backward()  # no divisor below the smallest magnitude


@pytest.mark.parametrize(("fmt", "slope"), [(lns12, 10_000.0), (lns8, 16.0)], ids=str)
def test_the_gradient_of_a_deviation_does_not_saturate_on_the_way(
    fmt: LNSFormat, slope: float
) -> None:
    """One value causes the deviation; its distance from the mean in deviations is the root of the
    number of values."""
    x = LNSTensor.from_float(torch.tensor([5.0] + [0.0] * 999), fmt).requires_grad_()
    exact = x.detach().to_float().double().requires_grad_()
    x.std().backward(LNSTensor.from_float(torch.tensor(slope), fmt))
    exact.std().backward(torch.tensor(slope).double())
    assert x.grad is not None
    assert exact.grad is not None
    assert x.grad.to_float()[0].item() == pytest.approx(exact.grad[0].item(), rel=0.2)


def test_compiled_gradients_of_deviations_take_other_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.std(0).sum(), backend="aot_eager")
    for rows in (5, 7, 11):
        torch.manual_seed(rows)
        x = LNSTensor.from_float(torch.randn(rows, 3), lns12)
        both = [x.clone().requires_grad_() for _ in range(2)]
        compiled(both[0]).backward()
        both[1].std(0).sum().backward()
        grads = [v.grad.to_float() for v in both if v.grad is not None]
        torch.testing.assert_close(*grads, rtol=0.03, atol=1e-4)


@pytest.mark.parametrize("dim", [0, (0, 1), np.int64(1), torch.tensor(0), True, None])
def test_dimensions_of_a_deviation_are_torchs(dim: Any) -> None:
    torch.manual_seed(0)
    x = LNSTensor.from_float(torch.randn(4, 5), lns16).requires_grad_()
    exact = x.detach().to_float().requires_grad_()
    for keep in (False, True) if dim is not True else (False,):
        got, wanted = (
            v.std(dim) if dim is True else torch.std(v, dim, keepdim=keep) for v in (x, exact)
        )
        assert got.shape == wanted.shape
        got.sum().backward()
        wanted.sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad.to_float(), exact.grad, rtol=0.05, atol=0.02)


def test_no_dimensions_of_a_deviation_are_all() -> None:
    """As in torch, whose gradient there is infinite."""
    torch.manual_seed(0)
    x, y, z = (LNSTensor.from_float(torch.ones(4, 5).tril(), lns16).requires_grad_() for _ in "xyz")
    for v, dim in ((x, ()), (y, []), (z, None)):
        torch.std_mean(v, dim)[0].backward()
    assert x.grad is not None
    assert y.grad is not None
    assert z.grad is not None
    assert torch.equal(x.grad.codes, z.grad.codes)
    assert torch.equal(y.grad.codes, z.grad.codes)
