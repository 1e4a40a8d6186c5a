"""Integers, to which LNS values are only near, are returned exactly where integers are
requested."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import LNSFormat, LNSTensor, lns8, lns12, lns16
from lns_ops.tensor.integers import limit

FORMATS = [lns16, lns12, lns8, LNSFormat(16, 10)]


def integers(fmt: LNSFormat) -> Tensor:
    return torch.arange(-limit(fmt), limit(fmt) + 1)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "long": lambda x: x.long(),
    "to": lambda x: x.to(torch.int32),
    "floor": lambda x: x.floor().long(),
    "floor_": lambda x: x.clone().floor_().long(),
    "ceil": lambda x: x.ceil().long(),
    "trunc": lambda x: torch.trunc(x).long(),
    "floor_divide": lambda x: (x // 3).long(),
    "remainder": lambda x: (x % 3).long(),
    "fmod": lambda x: torch.fmod(x, 4).long(),
    "div": lambda x: torch.div(x, 7, rounding_mode="floor").long(),
    "frac": lambda x: x.frac().long(),
    "int": lambda x: torch.tensor([int(each) for each in x[:9]]),
    "copy": lambda x: torch.zeros(x.shape, dtype=torch.int64).copy_(x),
}


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_integers_are_given_back(name: str, fmt: LNSFormat) -> None:
    n = integers(fmt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ROUNDINGS[name](LNSTensor.from_float(n.float(), fmt))
    assert torch.equal(got.long(), ROUNDINGS[name](n.float()).long())


def test_what_is_no_integer_is_rounded_as_ever() -> None:
    x = LNSTensor.from_float(torch.randn(500) * 9, lns16)
    fraction = (x.to_float() - x.to_float().round()).abs()
    clear = fraction > 2.0**-6 * x.to_float().abs().clamp_min(1)
    assert clear.any()
    assert torch.equal(x.floor().long()[clear], x.to_float().floor().long()[clear])


def test_integers_that_share_codes_are_warned_of() -> None:
    x = LNSTensor.from_float(torch.tensor([3.0, 1000.0]), lns16)
    with pytest.warns(UserWarning, match=r"integers out of lns16 beyond 184.*integer tensor"):
        assert x.long()[0] == 3


def test_floats_that_are_compared_with_are_encoded() -> None:
    numbers = torch.tensor([0.1, 3.0, 5.0, 0.7])
    x = LNSTensor.from_float(numbers, lns16)
    assert torch.isin(x, numbers).all()
    assert torch.isclose(x, numbers).all()
    edges = numbers.sort().values
    for right in (False, True):
        assert torch.equal(
            torch.bucketize(x, edges, right=right), torch.bucketize(numbers, edges, right=right)
        )


def test_pixels_at_learned_places_are_those_of_float32() -> None:
    """Positions rounded down index an image, as in deformable convolutions and hash grids."""
    image = torch.randn(8, 8)

    def sampled(offset: Tensor) -> Tensor:
        at = torch.arange(8.0)[:, None] + offset
        low = at.floor().clamp(0, 7)
        return image.flatten()[(low.long() * 8 + low.t().long()).flatten()]

    offset = torch.rand(8, 8) * 0.4 + 0.3
    assert torch.equal(sampled(LNSTensor.from_float(offset, lns16)), sampled(offset))


def test_fractions_have_their_gradient() -> None:
    values = torch.tensor([0.3, 2.6, 5.0])
    x = LNSTensor.from_float(values, lns16).requires_grad_()
    (x.frac() + x.floor()).sum().backward()
    assert isinstance(x.grad, LNSTensor)
    assert torch.equal(x.grad.to_float(), torch.ones(3))


def test_the_value_next_to_another() -> None:
    x = LNSTensor.from_float(torch.tensor([1.0, -1.0, 2.0]), lns16)
    above = torch.nextafter(x, x + 1)
    assert torch.equal(above.codes, torch.nextafter(x, torch.full((3,), 9.0)).codes)
    assert (above > x).all()
    assert (torch.nextafter(above, x) == x).all()
    assert torch.equal(torch.nextafter(x, copy.deepcopy(x)).codes, x.codes)


def test_embeddings_by_rounded_numbers() -> None:
    table, x = torch.randn(9, 2), LNSTensor.from_float(torch.arange(9.0), lns16)
    assert torch.equal(F.embedding(x.long(), table), table)


@pytest.mark.parametrize("number", [0.3, 5, 1000])
def test_numbers_that_are_compared_with_are_encoded(number: float) -> None:
    """By the same rule as ``==``, whatever type the number has."""
    x = LNSTensor.from_float(torch.tensor([0.3, 1000.0, 5.0]), lns16)
    expected = x == number
    assert expected.any()
    assert torch.equal(torch.isin(x, number), expected)
    assert torch.equal(torch.isin(x, torch.tensor([number])), expected)
    assert torch.equal(torch.isin(x, test_elements=torch.tensor([number])), expected)
    assert torch.equal(torch.isclose(x, torch.tensor(number), rtol=0.0, atol=0.0), expected)


def test_integer_boundaries_are_as_float_ones() -> None:
    x = LNSTensor.from_float(torch.tensor([0.3, 1000.0, 5.0]), lns16)
    edges = torch.tensor([5, 1000])
    assert torch.equal(torch.bucketize(x, edges), torch.bucketize(x, edges.float()))
    assert torch.bucketize(x, edges, right=True).tolist() == [0, 2, 1]
