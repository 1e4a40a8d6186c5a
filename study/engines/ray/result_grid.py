"""The trials of a study as a ``ray.tune.ResultGrid``, read from its ledger."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Checkpoint, Result, ResultGrid

from study.ledger.state import FAILED, FINISHED, STOPPED, StudyState, TrialState
from trainers.object_store import is_url

SCOPES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "avg": statistics.fmean,
    "all": min,
}
"""How a trial's epochs are combined, by name; ``all`` takes the best epoch."""


class StudyResults(ResultGrid):  # type: ignore[misc]
    """One result for each ended trial of a study, in this run or an earlier one.

    A result's ``metrics`` contain the metrics of the last epoch and the test, ``epoch``,
    ``trial_id`` and ``config`` (``trial``, ``row``, ``seed`` and the sampled values).
    ``metrics_dataframe`` has one line per epoch.

    Args:
        state: state of the study.
        folder: folder of the study.
    """

    def __init__(self, state: StudyState, folder: Path) -> None:
        self._folder = folder
        self._metric, self._mode = next(iter(state.config.search.objectives.items()))
        ended = [t for t in state.trials if t.status in (FINISHED, STOPPED, FAILED)]
        self._trials = ended
        self._results = [_result(trial, folder) for trial in ended]

    @property
    def experiment_path(self) -> str:
        """Folder of the study."""
        return str(self._folder)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Return the result with the best metric, by default the study's first objective.

        Args:
            metric, mode: name, and ``min`` or ``max``.
            scope: how a trial's epochs are combined: ``last``, ``all`` (the best) or ``avg``.
            filter_nan_and_inf: whether to leave out trials whose value is not finite.

        Raises:
            ValueError: the mode or the scope is unknown.
            RuntimeError: no trial has such a value.
        """
        metric, mode = metric or self._metric, mode or self._mode
        if mode not in ("min", "max") or scope not in SCOPES:
            raise ValueError(
                f"mode={mode!r}, scope={scope!r}: must be min or max, and last, avg or all; use"
                " for example get_best_result('validation/error', 'min')"
            )
        best = min if mode == "min" else max
        values = {
            place: best(epochs) if scope == "all" else SCOPES[scope](epochs)
            for place, trial in enumerate(self._trials)
            if (epochs := _values(trial, metric))
        }
        if filter_nan_and_inf:
            values = {place: value for place, value in values.items() if math.isfinite(value)}
        if not values:
            raise RuntimeError(
                f"no trial has a finite {metric!r}; a result's metrics have the names that it has"
            )
        return self._results[best(values, key=lambda place: values[place])]

    def get_dataframe(
        self, filter_metric: str | None = None, filter_mode: str | None = None
    ) -> Any:
        """Return a frame of pandas: a trial a line, with its config and last metrics.

        With ``filter_metric`` and ``filter_mode`` the metrics come from the epoch that is best
        by these.
        """
        import pandas as pd

        rows = []
        for result in self._results:
            metrics, frame = dict(result.metrics), result.metrics_dataframe
            if filter_metric in frame and len(frame):
                best = frame[filter_metric].idxmin if filter_mode == "min" else None
                place = best() if best else frame[filter_metric].idxmax()
                metrics |= frame.loc[place].to_dict()
            config = {f"config/{name}": value for name, value in metrics.pop("config").items()}
            rows.append(metrics | config)
        return pd.DataFrame(rows)

    @property
    def num_errors(self) -> int:
        """Number of trials that failed."""
        return sum(trial.status == FAILED for trial in self._trials)

    @property
    def num_terminated(self) -> int:
        """Number of trials that ended otherwise."""
        return len(self._trials) - self.num_errors


def _values(trial: TrialState, metric: str) -> list[float]:
    """Return a metric of every epoch of a trial, or of its test."""
    epochs = trial.metric(metric)
    return [epochs[epoch] for epoch in sorted(epochs)] or [
        value for name, value in trial.test.items() if name == metric
    ]


def _result(trial: TrialState, folder: Path) -> Result:
    import pandas as pd

    epochs = [
        {"epoch": epoch, **trial.reports[epoch]["metrics"]} for epoch in sorted(trial.reports)
    ]
    config = {"trial": trial.id, "row": trial.row, "seed": trial.seed, **trial.params}
    last = epochs[-1] if epochs else {}
    places = [place for place in trial.checkpoints_left() if not is_url(place)]
    return Result(
        metrics={**last, **trial.test, "trial_id": trial.id, "config": config},
        checkpoint=Checkpoint(places[0]) if places else None,
        error=tune.TuneError(trial.error) if trial.status == FAILED else None,
        path=str(folder / "checkpoints" / trial.id),
        metrics_dataframe=pd.DataFrame(epochs),
    )
