"""Where trials are within an epoch, from their processes to the view."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from study.config import StudyConfig
from study.ledger.log import read_ledger
from study.lifecycle import run_study
from tests.study.conftest import SilentView
from trainers.telemetry.tally import Moment

Tiny = Callable[..., StudyConfig]
ONE_ROW = ("trial.epochs=2", "rows=[{label: a}]", "baseline=null")
SLOW = ("trial.precision={format: lns12, scope: everywhere}", "trial.batch_size=4")
GANG = ("trial.workers=2", "trial.sync.straggler_seconds=0.06")


class Steps(SilentView):
    """A view that keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Moment] = []

    def step(self, trial: str, moment: Moment) -> None:
        self.moments.append(moment)


@pytest.mark.parametrize("options", [SLOW, GANG])
def test_a_trial_shows_its_steps_and_the_ledger_is_as_without(
    tiny: Tiny, options: tuple[str, ...]
) -> None:
    """Nothing is sent to a view without steps, and the figures are the same bits."""
    figures, kinds = [], []
    for name, view in (("shown", Steps()), ("not shown", SilentView())):
        study = tiny(name, *ONE_ROW, *options, "tracking_uri=none")
        state = run_study(study, view, lambda line: None).state
        (trial,) = state.trials
        assert trial.status == "finished", trial.error
        reports = {n: event["metrics"]["train/loss"] for n, event in trial.reports.items()}
        figures.append((reports, trial.test))
        kinds.append([event["event"] for event in read_ledger(study.folder)])
        if isinstance(view, Steps):
            moments = view.moments
    assert figures[0] == figures[1]
    assert sorted(set(kinds[0])) == sorted(set(kinds[1]))
    assert {moment["epoch"] for moment in moments} <= {1, 2}
    places = [(moment["epoch"], moment["step"]) for moment in moments]
    assert places == sorted(set(places))
    assert all(0 < moment["step"] <= moment["steps"] for moment in moments)
    assert any(moment["loss"] is not None and moment["loss"] > 0 for moment in moments)
