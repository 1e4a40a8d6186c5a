"""The picture of the answer has the answer's intervals and margins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from study.config import StudyConfig
from study.ledger.state import fold
from study.report.figures.differences import draw_differences
from study.report.figures.style import LIGHT
from study.results.answer import compare_rows
from study.results.summary import summarise
from tests.study.conftest import with_errors

Tiny = Callable[..., StudyConfig]
ERRORS = {"float32": [5.0, 5.2, 5.1], "lns matmul": [6.0, 6.3, 6.2], "lns all": [5.1, 5.1, 5.2]}


def drawn(study: StudyConfig) -> tuple[Any, Any]:
    state = fold(with_errors(study, ERRORS))
    summary = summarise(state)
    figure = draw_differences(state, summary, LIGHT)
    return figure, compare_rows(state, summary)


def rows(within: str) -> str:
    return (
        "rows=[{label: float32, overrides: {}},"
        f" {{label: lns matmul, overrides: {{precision.format: lns12}}, within: {within}}},"
        f" {{label: lns all, overrides: {{precision.format: lns16}}, within: {within}}}]"
    )


@pytest.mark.parametrize("margin", ["null", "0.5"])
def test_lines_are_intervals_and_full_dots_are_decided(tiny: Tiny, margin: str) -> None:
    figure, found = drawn(tiny("differences", "seeds=[0,1,2]", rows(margin)))
    (axes,) = figure.axes
    _, *lines = axes.lines  # the first is at zero
    assert [tuple(line.get_xdata()) for line in lines] == [each.contrast.interval for each in found]
    dots = [dot.get_facecolor()[0].tolist() for dot in axes.collections]
    assert [each.contrast.decided for each in found] == [True, False]
    assert dots[0] != dots[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lns matmul", "lns all"]
    bands = [(band.get_x(), band.get_x() + band.get_width()) for band in axes.patches]
    assert bands == ([] if margin == "null" else [pytest.approx((-0.5, 0.5))] * 2)
    assert ("band" in axes.get_title(loc="left")) == (margin != "null")
    assert axes.get_xlabel() == "Test error minus that of float32, points"


def test_where_nothing_is_compared_there_is_no_picture(tiny: Tiny) -> None:
    assert drawn(tiny("differences", "seeds=[0]", rows("0.5")))[0] is None
    assert drawn(tiny("differences", "seeds=[0,1,2]", rows("null"), "baseline=null"))[0] is None
