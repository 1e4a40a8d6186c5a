"""Repetition of a trial, to compare its metrics bit by bit."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable

from study.config import RowConfig, StudyConfig
from study.errors import UserError, refusals
from study.ledger.state import FINISHED, StudyState, TrialState
from study.plan.identity import factories, trial_id
from study.plan.plan import make_plan
from study.plan.trials import with_code
from trainers.config import TrialConfig

UNTIMED = ("samples_per_second",)
"""Metrics that vary from run to run, left out where results are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
    """Result of repeating a trial; ``differences`` is empty if all metrics have the same bits."""

    trial: TrialState
    again: TrialState
    differences: list[str]


def rerun(
    state: StudyState, trial: TrialState, run: Callable[[StudyConfig], StudyState]
) -> Repetition:
    """Train a trial again from the start, in a temporary study, and compare all metrics.

    Args:
        state: state of the study.
        trial: trial to repeat.
        run: runs a study and returns its state.

    Raises:
        ValueError: the trial has no results to compare with.
    """
    if not trial.reports:
        raise ValueError(
            f"trial {trial.id}: has no results to compare with; choose one that has reported"
        )
    config = TrialConfig.from_dict(trial.config)
    with tempfile.TemporaryDirectory() as storage:
        study = dataclasses.replace(
            state.config, name="rerun", trial=dataclasses.replace(config, seed=TrialConfig.seed),
            rows=[RowConfig(label=trial.row)], seeds=[config.seed], space={},
            search=type(state.config.search)(), baseline=None, claims=[], alerts={},
            digits={}, comparable={},
            limits=type(state.config.limits)(), storage=storage, tracking_uri=None,
        )  # fmt: skip
        with refusals():
            (planned,) = make_plan(study).trials
        if planned.id != trial_id(config):
            raise UserError(
                f"trial {trial.id}: this machine makes another trial of its config{_why(config)};"
                " run it on the machine, and with the code, that trained it"
            )
        (again,) = run(study).trials
    return Repetition(trial=trial, again=again, differences=differences(trial, again))


def _why(config: TrialConfig) -> str:
    """Name the user's code that has changed since the trial ran."""
    try:
        now = factories(with_code(config).to_dict())
    except ValueError as error:
        return f" ({error})"
    then = factories(config.to_dict())
    changed = [one["name"] for one, other in zip(then, now, strict=True) if one != other]
    return f" ({', '.join(changed)} changed)" if changed else " (device=auto?)"


def differences(trial: TrialState, again: TrialState) -> list[str]:
    """Describe the metrics, other than times, that differ between two runs of a trial.

    Only epochs that both runs reported are compared.
    """
    found = []
    for epoch in sorted(set(trial.reports) & set(again.reports)):
        ours, theirs = (_comparable(t.reports[epoch]["metrics"]) for t in (trial, again))
        found += [
            f"epoch {epoch}: {name}: {ours.get(name)} and {theirs.get(name)}"
            for name in _unequal(ours, theirs)
        ]
    if trial.status == again.status == FINISHED:
        found += [
            f"{name}: {trial.test.get(name)} and {again.test.get(name)}"
            for name in _unequal(trial.test, again.test)
        ]
    elif trial.status == FINISHED:
        found.append(f"the repetition {again.status}: {again.error}")
    return found


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name not in UNTIMED and not name.startswith(("time/", "energy/", "telemetry/"))
    }


def _unequal(ours: dict[str, float], theirs: dict[str, float]) -> Iterable[str]:
    for name in ours.keys() | theirs.keys():
        a, b = ours.get(name, math.inf), theirs.get(name, math.inf)
        if a != b and not (math.isnan(a) and math.isnan(b)):
            yield name
