"""Products of powers: the CPU's kernel equals the definition in torch's operations bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from lns_ops import LNSFormat, lns8, lns12, lns16
from lns_ops.functional import unclamped

POWERS = [1.0, -1.0, 2.0, -2.0, 3.0, 0.5, -1.5, 2.7, 0.0, 512.0, 1000.0, -70_000.0, 1e6 + 0.5]


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16, LNSFormat(16, 14)], ids=str)
def test_kernel_has_the_bits_of_the_definition(fmt: LNSFormat) -> None:
    torch.manual_seed(0)
    field = torch.randint(0, fmt.field_mask + 1, (3, 40, 30), dtype=torch.int16)
    signs = torch.where(torch.rand(3, 40, 30) < 0.5, fmt.sign_mask, 0).to(torch.int16)
    field[:, ::7, ::5] = 0
    x, y, z = (field | signs) * (field != 0)
    factors = [x, y[:1], z[:, :1]]
    for powers in [(p,) for p in POWERS] + list(itertools.product(POWERS, repeat=2)):
        for number, over in ((1.0, 1.0), (-3.0, 7.0), (1e9, 1.0)):
            chosen = list(zip([*factors, y], (*powers, -1.0, 1.0), strict=False))
            codes, given, *rest = unclamped._arguments(chosen, fmt, number, over)
            expected = unclamped._product(codes, given, *rest)
            found = unclamped.product_parts(chosen, fmt, number, over)
            assert torch.equal(found.logs.expand(expected.logs.shape), expected.logs)
            assert torch.equal(found.signs & found.alive, expected.signs & expected.alive)
            assert torch.equal(found.alive, expected.alive)
            assert torch.equal(
                unclamped.product(chosen, fmt, number, over), unclamped.packed(expected, fmt)
            )


def test_large_whole_powers_do_not_wrap_around() -> None:
    two = torch.tensor([lns16.bias + 128], dtype=torch.int16)
    assert unclamped.product([(two, 1e8)], lns16).item() == lns16.field_mask
    assert unclamped.product([(two, -1e8)], lns16).item() == 0


def test_a_factor_of_zero_makes_zero_and_its_zeroth_power_one() -> None:
    zero = torch.zeros(1, dtype=torch.int16)
    assert unclamped.product([(zero, -1.0)], lns16).item() == 0
    assert unclamped.product([(zero, 0.0)], lns16).item() == lns16.bias
    assert unclamped.product([(zero + lns16.bias, 1.0)], lns16, 0.0).item() == 0


def test_the_operator_is_traced_with_shapes_alone() -> None:
    x = torch.full((4, 1), lns16.bias, dtype=torch.int16)
    y = torch.full((3,), lns16.bias + 128, dtype=torch.int16)
    given = [x, y], [1.0, -1.0], 0, False, 16, 7
    assert torch.library.opcheck(torch.ops.lns_ops.product, given)
    assert torch.library.opcheck(torch.ops.lns_ops.product_parts, given)


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16, LNSFormat(14, 7), LNSFormat(9, 0)], ids=str)
def test_a_wider_format_holds_the_same_values(fmt: LNSFormat) -> None:
    wide = unclamped.roomiest(fmt)
    codes = torch.from_numpy(fmt.codes())
    found = unclamped.widened(codes, fmt)
    assert torch.equal(found, unclamped.packed(unclamped.unpacked(codes, fmt), wide))
    every = torch.from_numpy(wide.codes())
    clamped = unclamped.packed(unclamped.unpacked(every, wide), fmt)
    assert torch.equal(unclamped.narrowed(every, fmt), clamped)
    assert torch.equal(unclamped.narrowed(found, fmt), codes)
