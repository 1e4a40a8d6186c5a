"""For Tune scripts of your own: a study's trials as a trainable, its search as a searcher, and a
callback that records a script's trials in a ledger.

The keys of a Tune config are the keys of a trial, dotted (``optimizer.lr``) or nested. ``row`` is
the label of a row of the study (by default its first), ``seed`` a seed (by default its first).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, ClassVar

from ray import tune
from ray.tune.result import AUTO_RESULT_KEYS, TRAINING_ITERATION
from ray.tune.search import Searcher

from study.config import StudyConfig
from study.config.compose import override_trial
from study.config.keys import flatten
from study.config.metric import DERIVED
from study.engines.ask_tell import Suggestion, ask, tell
from study.engines.ray.trial_supervisor import SLIVER
from study.errors import UserError, refusals
from study.ledger.events import Event
from study.ledger.log import Ledger
from study.ledger.state import ENDED, PLANNED, fold
from study.plan.candidates import rows_of
from study.plan.trials import Base, PlannedTrial
from trainers.workers.messages import ExecutorPlan
from trainers.workers.resources import IN_PROCESS, RAY_TRAIN, WorkerResources

NAMES = ("trial", "row", "seed")
"""Keys of a Tune config that are not keys of a trial's config."""
TEST = "test/"
"""Prefix of final metrics."""


def planned_trial(study: StudyConfig, config: dict[str, Any], number: int = 1) -> PlannedTrial:
    """Return the trial of a Tune config.

    Args:
        study: the study whose base trial and rows the config changes.
        config: keys of a trial, ``row`` and ``seed``; ``trial`` is ignored.
        number: number of the configuration.

    Raises:
        ValueError: the row is unknown, or the config is not valid.
    """
    rows = {row.label: row for row in rows_of(study)}
    label = config.get("row", next(iter(rows)))
    if label not in rows:
        raise ValueError(f"row={label!r}: no such row; use one of {', '.join(rows)}")
    params = flatten({name: value for name, value in config.items() if name not in NAMES})
    override_trial(study.trial.to_dict(), params, "config")  # raises for unknown keys
    seed = int(config.get("seed", study.seeds[0]))
    return Base(study, rows[label]).trial(seed, number, params)


class TrialTrainable(tune.Trainable):  # type: ignore[misc]
    """Trains a trial in a Tune script: one step is one epoch.

    A trial of one worker trains in Tune's actor. The workers of a trial of several are started by
    Ray Train. A result has the epoch's metrics, ``epoch``, and after the last epoch the test
    metrics and ``done``. :func:`tune_trainable` makes the class of a study.
    """

    study: ClassVar[dict[str, Any]] = {}

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the resources of a trial. Ray Train requests the resources of several workers."""
        shape = WorkerResources.of(cls._planned(config).config)
        return tune.PlacementGroupFactory([SLIVER] if shape.workers > 1 else shape.bundles)

    @classmethod
    def _planned(cls, config: dict[str, Any]) -> PlannedTrial:
        return planned_trial(StudyConfig.from_dict(cls.study), config)

    def setup(self, config: dict[str, Any]) -> None:
        """Choose how the trial trains."""
        from trainers.workers.executors import Context, make_executor

        self._planned_trial = self._planned(config)
        alone = self._planned_trial.config.workers == 1
        study = StudyConfig.from_dict(self.study)
        plan: ExecutorPlan = {
            "executor": IN_PROCESS if alone else RAY_TRAIN,
            "storage": str(study.folder / "train"),
            "max_failures": study.max_failures,
        }
        name = f"{self._planned_trial.id}-{self.trial_id}"
        self._executor = make_executor(Context(trial=name, plan=plan))
        self._begun = False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the trial and take the next one."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train one epoch and return its metrics."""
        if not self._begun:
            self._begin([])
        metrics = self._executor.step()
        return {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the trial's state; for several workers Ray Train writes its own checkpoints."""
        self._executor.save(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from a checkpoint."""
        self._begin([str(checkpoint)])

    def cleanup(self) -> None:
        """End the trial."""
        if self._begun:
            self._begun = False
            self._executor.end()

    def _begin(self, checkpoints: list[str]) -> None:
        self._executor.begin(self._planned_trial.config, checkpoints)
        self._begun = True


def tune_trainable(study: StudyConfig) -> type[TrialTrainable]:
    """Return the trainable of a study's trials, for a ``ray.tune.Tuner`` of your own.

    Args:
        study: the study whose base trial, rows and seeds a Tune config changes.

    Example::

        mine = study.create("quickstart", name="mine")
        tuner = tune.Tuner(
            study.tune_trainable(mine.config),
            param_space={
                "precision.format": tune.grid_search(["float32", "lns12", "posit(8)"]),
                "workers": tune.grid_search([1, 2]),
                "optimizer.lr": tune.loguniform(0.01, 1.0),
            },
            run_config=tune.RunConfig(callbacks=[study.LedgerCallback(mine)]),
        )
    """
    return type("TrialTrainable", (TrialTrainable,), {"study": study.to_dict()})


class StudySearcher(Searcher):  # type: ignore[misc]
    """A study's search as a searcher for your own trainable.

    It suggests what the study's ``ask`` returns (``trial``, ``row``, ``seed`` and the sampled
    values), and tells the study the last result of each trial, so the ledger is complete when the
    ``Tuner`` ends. The same script resumes the study. Use it without :class:`LedgerCallback`.

    Args:
        study: a study that :func:`study.create` or :func:`study.load` returned.

    Example::

        search = study.StudySearcher(study.create("mine.yaml"))
        tune_config = tune.TuneConfig(search_alg=search, num_samples=-1)
    """

    def __init__(self, study: Any) -> None:
        self._folder: Path = study.folder
        wanted = study.config.search.objectives
        self._metrics = [name for name in wanted if name not in DERIVED]
        self._open: dict[str, Suggestion] = {}
        super().__init__(metric=self._metrics[0], mode=wanted[self._metrics[0]])

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial's config; None if results are needed first."""
        found = ask(self._folder)
        if found is None:
            return None if self._open else Searcher.FINISHED
        self._open[trial_id] = found
        return {"trial": found.trial, "row": found.row, "seed": found.seed, **found.params}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the study a trial's last result, or that it failed."""
        suggestion = self._open.pop(trial_id, None)
        if suggestion is None:
            return
        metrics = metrics_of(result or {})
        if error or any(name not in metrics for name in self._metrics):
            lacking = f"its last result has no {', '.join(self._metrics)}"
            tell(self._folder, suggestion, error="failed in Ray Tune" if error else lacking)
        else:
            tell(self._folder, suggestion, metrics)

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        """Accept any metric: a study has its own objectives."""
        return True

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the ledger has the search state."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: the ledger has the search state."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class LedgerCallback(tune.Callback):  # type: ignore[misc]
    """Records the trials of a Tune script in a study's ledger: configs, metrics of each epoch and
    ends. ``report``, ``status``, ``export`` and MLflow then show them as any study's.

    A trial that Tune's scheduler ends early is recorded as stopped. A config that the ledger has
    already is not recorded again.

    Args:
        study: a study that :func:`study.create` or :func:`study.load` returned. Configs with keys
            that are not a trial's need a loop of your own in it (``trial.trainable``), and these
            keys as ``trainable.args.NAME``.

    Raises:
        UserError: another process writes the study, or its ledger is damaged.

    Example::

        mine = study.create("mine.yaml")
        run_config = tune.RunConfig(callbacks=[study.LedgerCallback(mine)])
    """

    def __init__(self, study: Any) -> None:
        self._folder: Path = study.folder
        self._ledger: Ledger | None = None
        self._trials: dict[str, str] = {}
        """Ids of the study's trials by Tune's trial id."""

    def setup(self, *_: Any, **__: Any) -> None:
        """Open the ledger."""
        try:
            self._ledger = Ledger(self._folder)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._state = fold(self._ledger.history)
        self._ledger.listen(self._state.apply)
        plan = self._state.plan.copy()
        plan.pop("time")
        known = self._state.known
        plan["trials"] = [t for t in plan["trials"] if known[t["id"]].status != PLANNED]
        self._ledger.append(plan)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Record a new trial and its start."""
        if trial.trial_id in self._trials:
            return
        with refusals():
            planned = planned_trial(self._state.config, trial.config, len(self._state.trials) + 1)
        known = next((each for each in self._state.trials if each.id == planned.id), None)
        if known is not None and known.status in ENDED:
            return
        self._trials[trial.trial_id] = planned.id
        pid, host = os.getpid(), socket.gethostname()
        started: Event = {"event": "started", "trial": planned.id, "pid": pid, "host": host}
        added: Event = {"event": "added", "planned": planned.to_dict()}
        self._append(*([] if known is not None else [added]), started)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        """Record a result as an epoch."""
        name = self._trials.get(trial.trial_id)
        epoch = int(result.get("epoch", result[TRAINING_ITERATION]))
        metrics = {k: v for k, v in metrics_of(result).items() if not k.startswith(TEST)}
        if name is not None and metrics and epoch not in self._state.known[name].reports:
            self._append(
                {
                    "event": "report",
                    "trial": name,
                    "epoch": epoch,
                    "metrics": metrics,
                    "seconds": float(result["time_this_iter_s"]),
                }
            )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Record a trial's end, with its test metrics."""
        name = self._trials.pop(trial.trial_id, None)
        if name is None:
            return
        known, last = self._state.known[name], metrics_of(trial.last_result or {})
        test = {key: value for key, value in last.items() if key.startswith(TEST)}
        whole = bool(test) or known.epoch >= known.epochs
        self._append(
            {"event": "finished", "trial": name, "metrics": test}
            if whole
            else {"event": "stopped", "trial": name, "by": "Ray Tune"}
        )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Record a failed trial."""
        name = self._trials.pop(trial.trial_id, None)
        if name is not None:
            lines = str(trial.get_error() or "its actor died").strip().splitlines()
            self._append({"event": "failed", "trial": name, "error": lines[-1]})

    def on_experiment_end(self, trials: list[Any], **_: Any) -> None:
        """Record the end of the script's run, and close the ledger."""
        ended = all(trial.status in ENDED for trial in self._state.trials)
        failed = any(trial.status == "failed" for trial in self._state.trials)
        outcome = ("failed" if failed else "finished") if ended else "stopped"
        self._append({"event": "ended", "outcome": outcome})
        assert self._ledger is not None
        self._ledger.close()

    def _append(self, *events: Event) -> None:
        assert self._ledger is not None
        self._ledger.append_all(list(events))

    def __getstate__(self) -> dict[str, Any]:
        return {}


def metrics_of(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a Tune result: its numbers other than Tune's own."""
    ours = ("epoch", "done", "trial_id", "should_checkpoint", *AUTO_RESULT_KEYS)
    return {
        name: float(value)
        for name, value in result.items()
        if name not in ours and isinstance(value, int | float)
    }
