"""Costs of operations by format: published figures, what is interpolated between them, and what
training adds."""

from __future__ import annotations

import numpy as np
import pytest

from lns_ops.formats import parse
from trainers.telemetry.costs import (
    ASSUMED,
    FLOAT_ADD,
    INTERPOLATED,
    LOOK_UP_RANGE,
    PUBLISHED,
    RATIO,
    SRAM,
    addition,
    area,
    multiply_add,
    training_picojoules,
)

FORMATS = (
    "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float(4,3)",
    "float(2,1,finite)", "binary8p3", "float8_e4m3fn/channel", "int8", "int8/channel",
    "int4/channel", "fixed(16,8)", "bfp(8,32)", "mxint8", "mxfp8", "mxfp6", "mxfp4", "nvfp4",
    "lns16", "lns12", "lns8/channel", "lns(14,7)/block",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "product_and_sum", "sum_alone"),
    [("float32", 3.7 + 0.9, 0.9), ("float16", 1.1 + 0.9, 0.4), ("int8", 0.2 + 0.1, 0.03)],
)
def test_published_figures_are_taken_as_they_are(
    name: str, product_and_sum: float, sum_alone: float
) -> None:
    for found, expected in ((multiply_add(name), product_and_sum), (addition(name), sum_alone)):
        assert found is not None
        assert found.basis == PUBLISHED
        assert found.energy == pytest.approx((expected,) * 3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_range_holds_its_figure(name: str) -> None:
    for found in (multiply_add(name), multiply_add(name, linear_sums=False), addition(name)):
        assert found is not None
        assert 0 < found.energy.low <= found.energy.likely <= found.energy.high


def test_figures_between_published_ones_say_so_and_lie_between() -> None:
    bfloat16, tf32 = multiply_add("bfloat16"), multiply_add("tf32")
    assert bfloat16 is not None
    assert tf32 is not None
    assert bfloat16.basis == tf32.basis == INTERPOLATED
    assert 0.9 < bfloat16.energy.low < bfloat16.energy.high < 2.0  # eight significant bits of 11
    assert 2.0 < tf32.energy.likely < 4.6


def test_a_whole_number_of_12_bits_follows_the_square_of_the_width() -> None:
    found = multiply_add("fixed(12,8)")
    assert found is not None
    low, likely, high = np.subtract(found.energy, 0.1)
    assert low == pytest.approx(3.1 * (12 / 32) ** 2)
    assert high == pytest.approx(0.2 * (12 / 8) ** 2)
    assert low < likely < high


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_may_take_what_their_synthesis_took(name: str) -> None:
    found, integer = multiply_add(name), multiply_add("int8")
    assert found is not None
    assert integer is not None
    assert found.energy.low == pytest.approx(1.5 * integer.energy.likely)
    assert found.energy.high > 2.8 * integer.energy.likely


def test_logarithms_with_linear_sums_have_the_published_ratios() -> None:
    eight, sixteen = multiply_add("lns8/channel"), multiply_add("lns16")
    assert eight is not None
    assert sixteen is not None
    assert eight.basis == sixteen.basis == RATIO
    assert eight.energy.likely == pytest.approx(0.96 * 0.3)
    assert sixteen.energy.likely == pytest.approx(0.59 * (1.1 + 0.4))
    assert (area("lns8/channel"), area("lns16"), area("float16")) == (1.12, 0.68, None)


def test_sums_in_lns_span_the_look_up() -> None:
    found = multiply_add("lns12", linear_sums=False)
    assert found is not None
    assert found.basis == ASSUMED
    assert found.energy.high - found.energy.low == pytest.approx(LOOK_UP_RANGE[1] - 0.05)


def test_blocks_pay_their_share_of_exponents_and_sums() -> None:
    block, alone = multiply_add("bfp(8,16)"), multiply_add("int8")
    assert block is not None
    assert alone is not None
    assert block.energy.likely - alone.energy.likely == pytest.approx((0.03 + 0.9) / 16)


@pytest.mark.parametrize("name", ["posit(8)", "posit(16)/channel", "takum(8)", "takum_log(12)"])
def test_no_figure_is_made_up(name: str) -> None:
    assert multiply_add(name) is None
    assert addition(name) is None
    assert training_picojoules(name, kahan=True) is None


@pytest.mark.parametrize("kahan", [False, True])
def test_training_adds_moved_bits_and_the_update(kahan: bool) -> None:
    found = training_picojoules("float16", kahan=kahan, products_per_weight=10, reuse=4)
    additions, bits = (4, 32) if kahan else (1, 16)
    update = additions * FLOAT_ADD[16] + 2 * bits * SRAM
    assert found == pytest.approx((2.0 + 2 * 16 * SRAM / 4 + update / 10,) * 3)


@pytest.mark.parametrize("name", FORMATS)
def test_kahan_summation_costs_its_additions_and_bits(name: str) -> None:
    plain, kahan = (training_picojoules(name, kahan=each) for each in (False, True))
    add = addition(name)
    assert plain is not None
    assert kahan is not None
    assert add is not None
    more = 3 * add.energy.likely + 2 * parse(name).compensation.bits * SRAM
    assert kahan.likely - plain.likely == pytest.approx(more / 192)


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="float31"):
        multiply_add("float31")
