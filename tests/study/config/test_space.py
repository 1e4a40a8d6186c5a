"""The search space: configs, and the points drawn from them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from study.config.keys import apply
from study.config.space import RANGES, describe, parse_space, unit_points

pytestmark = pytest.mark.unit

MIXED: dict[str, Any] = {
    "precision": {"choice": [{"format": "float32"}, {"format": "lns12", "kahan_sum": True}]},
    "optimizer.name": {"grid": ["sgd", "adam"]},
    "optimizer.lr": {"loguniform": [1e-3, 1.0]},
    "optimizer.momentum": {"uniform": [0.0, 0.9], "when": {"optimizer.name": "sgd"}},
    "batch_size": {"choice": [32, 64], "when": {"precision.format": ["lns12"]}},
}


@given(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["uniform", "loguniform", "quniform", "randint", "lograndint"]),
)
def test_a_range_keeps_its_limits(unit: float, kind: str) -> None:
    values = {"quniform": [1, 7, 2], "randint": [1, 7], "lograndint": [1, 7]}.get(kind, [1.0, 7.0])
    (domain,) = parse_space({"x": {kind: values}}).domains
    value = domain.at(unit)
    assert 1 <= value <= (6 if kind.endswith("randint") else 7)
    if kind.endswith("randint"):
        assert isinstance(value, int)
    if kind == "quniform":
        assert value in (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("kind", "values"), [("randint", [1, 5]), ("lograndint", [1, 5]), ("quniform", [0, 0.3, 0.1])]
)
def test_every_whole_number_and_multiple_occurs(kind: str, values: list[float]) -> None:
    (domain,) = parse_space({"x": {kind: values}}).domains
    found = {domain.at(unit / 1000) for unit in range(1000)}
    assert found == ({0, 0.1, 0.2, 0.3} if kind == "quniform" else {1, 2, 3, 4})


def test_a_log_range_is_even_in_its_logarithm() -> None:
    (domain,) = parse_space({"x": {"loguniform": [1e-4, 1e4]}}).domains
    assert domain.at(0.5) == pytest.approx(1.0)
    assert domain.at(0.25) == pytest.approx(1e-2)


def test_conditions_look_into_choices_and_prune() -> None:
    space = parse_space(MIXED)
    point = space.point([0.0, 0.5, 0.5, 0.9], {"optimizer.name": "adam"})
    assert list(point) == ["precision", "optimizer.name", "optimizer.lr"]
    point = space.point([0.9, 0.5, 0.5, 0.9], {"optimizer.name": "sgd"})
    assert point["optimizer.momentum"] == pytest.approx(0.45)
    assert point["batch_size"] == 64
    assert space.grid_points() == [{"optimizer.name": "sgd"}, {"optimizer.name": "adam"}]


def test_a_grid_of_lists_is_multiplied_out_without_what_does_not_apply() -> None:
    space = parse_space(
        {
            "a": {"choice": [1, 2]},
            "b": {"grid": [10, 20, 30], "when": {"a": 2}},
            "c": {"choice": ["x", "y"]},
        }
    )
    points = space.all_points()
    assert len(points) == 2 * (1 + 3)
    assert len({tuple(point.items()) for point in points}) == len(points)
    assert all(("b" in point) == (point["a"] == 2) for point in points)


@pytest.mark.parametrize("algorithm", ["random", "sobol"])
def test_more_points_keep_the_first(algorithm: str) -> None:
    few, many = (
        list(unit_points(algorithm, 3, 5, seed=4)),
        list(unit_points(algorithm, 3, 64, seed=4)),
    )
    assert many[:5] == few
    assert all(0 <= x < 1 for point in many for x in point)
    assert few != list(unit_points(algorithm, 3, 5, seed=5))


def test_sobol_covers_evenly() -> None:
    """Each sixteenth of every axis gets its share of 64 points, unlike with random points."""
    points = list(unit_points("sobol", 2, 64, seed=0))
    for axis in range(2):
        assert [
            sum(math.floor(16 * point[axis]) == cell for point in points) for cell in range(16)
        ] == [4] * 16


def test_values_are_set_without_touching_what_was_there() -> None:
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    new = apply(base, {"a.c.d": 5, "a": {"b": 7}})
    assert new == {"a": {"b": 7, "c": {"d": 5}}, "e": 3}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_a_configuration_in_words() -> None:
    assert describe(
        {"optimizer.lr": 0.012345678, "precision": {"format": "lns12", "kahan_sum": True}}
    ) == ("lr=0.01235, precision={format: lns12, kahan_sum: true}")
    assert describe({"a.x": 1, "b.x": None}) == "a.x=1, b.x=null"


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"x": 3}, "space.x: 3 is not a domain"),
        ({"x": {"choise": [1]}}, "exactly one of choice, grid, uniform"),
        ({"x": {"choice": []}}, "space.x.choice: [] must have at least one value"),
        ({"x": {"choice": [1, 2, 1]}}, "has a value twice"),
        (
            {"x": {"uniform": [2, 1]}},
            "low=2 must be below high=1; use for example {uniform: [1, 2]}",
        ),
        ({"x": {"randint": [8, 8]}}, "below high=8 (which is left out); use for example {choice"),
        (
            {"x": {"lograndint": [0, 10]}},
            "must be positive, its logarithm is taken; use for exampl",
        ),
        ({"x": {"uniform": [1]}}, "must be [low, high], finite numbers"),
        ({"x": {"loguniform": [0, 1]}}, "low=0 must be positive"),
        ({"x": {"randint": [0.5, 2]}}, "must be whole numbers"),
        ({"x": {"quniform": [0, 1, 0]}}, "step=0 must be positive"),
        ({"x": {"choice": [1], "when": {"y": 1}}}, "y must be a key of the space before x"),
        ({"x": {"choice": [1], "when": {}}}, "space.x.when: {} must map keys to values"),
    ],
)
def test_what_is_no_space_is_refused(space: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_space(space)


NUMBERS = st.sampled_from([-3, -1.5, 0, 0.0, 0.25, 1, 1.0, 2, 8, 8.5])


@given(kind=st.sampled_from(list(RANGES)), numbers=st.lists(NUMBERS, min_size=3, max_size=3))
def test_what_the_error_of_a_range_shows_is_taken(kind: str, numbers: list[float]) -> None:
    try:
        parse_space({"x": {kind: numbers[: RANGES[kind]]}})
    except ValueError as error:
        shown = str(error).partition("; use for example ")[2]
        assert parse_space({"x": yaml.safe_load(shown)})


def test_what_other_errors_show_is_taken() -> None:
    for spec in (3, {"choise": [1]}, {"choice": []}, {"choice": 1}, {"uniform": [1]}, {}):
        with pytest.raises(ValueError, match="use for example") as refusal:
            parse_space({"x": spec})
        shown = str(refusal.value).partition("; use for example ")[2]
        for example in shown.split(" or "):
            assert parse_space(yaml.safe_load(example))


def test_true_and_1_are_two_choices() -> None:
    """Python considers them equal."""
    space = parse_space({"x": {"choice": [1, True]}, "y": {"choice": [2, 3], "when": {"x": True}}})
    first, _ = space.domains
    assert [first.index(value) for value in (1, True)] == [0, 1]
    assert [first.at(first.unit(value)) is value for value in (1, True)] == [True, True]
    assert space.pruned({"x": 1, "y": 2}) == {"x": 1}
    assert space.pruned({"x": True, "y": 2}) == {"x": True, "y": 2}
