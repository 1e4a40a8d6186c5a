"""The best of k configurations, compared with every possible draw."""

from __future__ import annotations

import itertools
import statistics

import pytest

from study.results.budgets import _curve, chances

VALUES = [0.3, 0.1, 0.4, 0.15]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_it_is_the_bootstrap_without_its_chance(k: int, sign: int) -> None:
    best = min if sign == 1 else max
    drawn = sorted(best(draw) for draw in itertools.product(VALUES, repeat=k))
    curve = _curve(VALUES, sign)
    assert curve.mean[k - 1] == pytest.approx(statistics.fmean(drawn))
    inside = [curve.low[k - 1] <= value <= curve.high[k - 1] for value in drawn]
    assert statistics.fmean(inside) >= 0.9
    strictly = [curve.low[k - 1] < value < curve.high[k - 1] for value in drawn]
    assert statistics.fmean(strictly) <= 0.9
    assert chances(len(VALUES), k).sum() == pytest.approx(1)
