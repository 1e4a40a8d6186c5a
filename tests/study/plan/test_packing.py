"""Packing of trials into CPUs and GPUs: by hand, and compared with bounds that no order can
beat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.plan.packing import Schedule, pack
from study.plan.trials import PlannedTrial
from trainers.config import TrialConfig

pytestmark = pytest.mark.unit


def trials_of(*shapes: dict[str, object]) -> list[PlannedTrial]:
    """Trials of one epoch with these keys; ``name`` is the row's label."""
    return [
        PlannedTrial(
            id=f"{number}",
            row=str(shape.get("row", "row")),
            seed=0,
            config=dataclasses.replace(
                TrialConfig(epochs=1),
                **dict[str, Any]((key, shape[key]) for key in shape if key != "row"),
            ),
        )
        for number, shape in enumerate(shapes)
    ]


def ten_seconds(trial: PlannedTrial) -> float:
    return 10.0


def use(packed: Schedule, cpus: float, gpus: int = 0) -> float:
    """Utilisation of the limiting resource."""
    have = {"cpus": cpus, "gpus": gpus}
    return max(
        packed.held[name] / (count * packed.makespan) for name, count in have.items() if count
    )


ONE, FOUR = {"workers": 1}, {"workers": 4}
WHOLE, QUARTER = {"device": "cuda", "gpus": 1.0}, {"device": "cuda", "gpus": 0.25}
PAIR = {"device": "cuda", "workers": 2}


@pytest.mark.parametrize(
    ("shapes", "cpus", "gpus", "makespan", "most", "share"),
    [
        ([ONE] * 8, 4, 0, 20, 4, 1.0),
        # gangs wait until all CPUs are free, and small trials run meanwhile
        ([ONE, FOUR] * 4, 4, 0, 50, 4, 1.0),
        ([ONE, FOUR], 4, 0, 20, 1, 50 / 80),
        ([WHOLE] * 12, 16, 1, 120, 1, 1.0),
        ([QUARTER] * 8, 16, 1, 20, 4, 1.0),
        ([QUARTER] * 8, 2, 1, 40, 2, 1.0),  # the CPUs bind
        ([PAIR] * 2, 16, 3, 20, 1, 2 / 3),
        ([PAIR, WHOLE] * 2, 16, 3, 20, 2, 1.0),
        # trials on CPUs run while one waits for the GPU, however long they take
        ([WHOLE, WHOLE, ONE | {"epochs": 3}], 2, 1, 30, 2, 50 / 60),
        ([WHOLE, WHOLE, ONE | {"epochs": 3}], 1, 1, 50, 1, 1.0),
        # halves of two GPUs do not make a whole one
        ([QUARTER, QUARTER, WHOLE], 16, 2, 20, 2, 1.5 / 4),
    ],
)
def test_shapes_are_packed_into_cpus_and_gpus(
    shapes: Sequence[dict[str, object]],
    cpus: int,
    gpus: int,
    makespan: float,
    most: int,
    share: float,
) -> None:
    packed = pack(trials_of(*shapes), cpus, gpus, ten_seconds)
    assert (packed.makespan, packed.most, packed.unfit) == (makespan, most, 0)
    assert use(packed, cpus, gpus) == pytest.approx(share)


def test_a_trial_for_which_the_machine_is_too_small_is_left_out() -> None:
    packed = pack(trials_of(ONE, FOUR, PAIR, ONE), 3, 1, ten_seconds)
    assert (packed.unfit, packed.makespan, packed.epochs) == (2, 10, 2)


def test_the_last_trials_run_longest_first() -> None:
    trials = trials_of(*({"epochs": epochs} for epochs in (1, 1, 1, 1, 1, 5)))
    assert pack(trials, 2, 0, ten_seconds).makespan == 50


@given(
    st.lists(
        st.tuples(st.sampled_from([ONE, FOUR, WHOLE, QUARTER, PAIR]), st.integers(1, 9)),
        min_size=1,
        max_size=30,
    ),
    st.integers(4, 16),
    st.integers(2, 4),
    st.none() | st.integers(1, 5),
)
def test_no_more_is_held_than_there_is(
    drawn: list[tuple[dict[str, object], int]], cpus: int, gpus: int, most: int | None
) -> None:
    trials = trials_of(*({**shape, "epochs": epochs} for shape, epochs in drawn))
    packed = pack(trials, cpus, gpus, ten_seconds, most=most)
    stepwise = pack(trials, cpus, gpus, ten_seconds, most=most, ends=lambda *_: False)
    assert (packed.makespan, packed.held) == (stepwise.makespan, stepwise.held)
    seconds = [10.0 * epochs for _, epochs in drawn]
    assert max(seconds) <= packed.makespan <= sum(seconds)
    assert use(packed, cpus, gpus) <= 1 + 1e-9
    assert packed.most <= (most or len(trials))
    assert (packed.unfit, packed.epochs, packed.saved) == (0, sum(e for _, e in drawn), 0)
