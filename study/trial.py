"""How one trial runs under Ray Tune: in one process, or as a gang of Ray Train workers.

*In process* (``workers: 1``): a class Trainable whose step is one epoch. Tune keeps the process for the next trial
(``reuse_actors``), which saves the seconds that importing torch costs; everything that decides a result is made anew from the
config, so nothing leaks from one trial to the next.

*Gang* (``workers > 1``): a function that drives ``trainers.worker.build_trainer(...).fit()``. It takes no CPU itself: a driver that
held one could take the last CPU that its own workers need and wait for ever. Metrics of rank 0 reach Tune through
``TuneReportCallback``. The Train run's name is the trial's id, so a driver that is started again continues the run.

Both end with a report that holds ``test/loss`` and ``test/error``. Both continue after their last checkpoint and end with the same bits as
without a break.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ray import tune
from ray.train import TrainingFailedError
from ray.tune.integration.ray_train import TuneReportCallback

from study.tune_callback import DAMAGED, REFUSED, last_line
from trainers.checkpoint import load_checkpoint
from trainers.config import TrialConfig
from trainers.training import Training

DRIVER_RESOURCES = {"node:__internal_head__": 0.001}
"""A sliver of the head node: places the driver without taking a CPU."""

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""In a Ray Train run's folder: which checkpoint it will continue from."""


class InProcessTrial(tune.Trainable):  # type: ignore[misc]
    """One trial in the process of one Ray actor; ``step`` trains one epoch.

    The Tune config has one key, ``plan``: ``id``, ``config`` (``TrialConfig.to_dict()``) and ``resume_from`` (checkpoint folders of
    earlier runs of the study, newest first).

    A ``ValueError`` says what cannot work, so a second try would not either: it ends the trial with a result that has the message
    under :data:`REFUSED`, where an exception would make Tune start the trial again.
    """

    _refusal = _damaged = ""

    def setup(self, config: dict[str, Any]) -> None:
        """Build the trial, continued from the newest whole checkpoint in ``resume_from``."""
        self._plan = config["plan"]
        self._begin(self._plan["resume_from"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial in this process."""
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train one epoch; after the last, test. A trial restored after its last epoch only tests."""
        skipped = {DAMAGED: self._damaged} if self._damaged else {}
        self._damaged = ""
        try:
            return skipped | ({"done": True, REFUSED: self._refusal} if self._refusal else self._step())
        except ValueError as error:
            self._refusal = str(error)
            return skipped | {"done": True, REFUSED: self._refusal}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the trial's whole state; of one that was refused there is none."""
        if not self._refusal:
            self._training.save(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Continue from a checkpoint that :meth:`save_checkpoint` wrote; from an older one if that is damaged."""
        self._begin([checkpoint, *self._plan["resume_from"]])

    def _begin(self, checkpoints: list[str]) -> None:
        self._refusal = self._damaged = ""
        try:
            self._training, self._damaged = begin(TrialConfig.from_dict(self._plan["config"]), checkpoints)
        except ValueError as error:
            self._refusal = str(error)

    def _step(self) -> dict[str, Any]:
        epochs = self._training.config.epochs
        metrics: dict[str, Any] = self._training.train_epoch() if self._training.epoch < epochs else {"epoch": epochs}
        done = self._training.epoch >= epochs
        return {**metrics, **(self._training.test() if done else {}), "done": done}


def begin(config: TrialConfig, checkpoints: list[str]) -> tuple[Training, str]:
    """A trial continued from the first whole one of ``checkpoints``, from scratch if there is none; the result is the same.

    Returns:
        The trial, and what is wrong with the checkpoints before that one ("" if nothing).

    Raises:
        ValueError: the trial cannot be built.
    """
    damaged: list[str] = []
    for path in checkpoints:
        training = Training(config)
        try:
            training.restore(Path(path))
        except Exception as error:  # whatever a damaged file leads to, the epochs can be computed again
            damaged.append(" ".join(str(error).split()) or type(error).__name__)
        else:
            return training, "; ".join(damaged)
    return Training(config), "; ".join(damaged)


def gang_trial(config: dict[str, Any]) -> None:
    """Drive one data-parallel trial; ``config["plan"]`` as above, with ``storage`` for Ray Train's files and ``max_failures``.

    Ray Train starts a gang with a dead worker again, at most ``max_failures`` times, and one with a deterministic error not at all; then it
    gives up, and so does the study: what is reported under :data:`REFUSED` Tune does not try again. Tune itself only restarts a
    driver whose process died. The last report has the metrics of every epoch, so that none is lost with such a driver.
    """
    from trainers.worker import build_trainer, read_results

    plan = config["plan"]
    if damaged := set_damaged_aside(Path(plan["storage"]) / plan["id"]):
        tune.report({DAMAGED: damaged})
    trainer = build_trainer(
        TrialConfig.from_dict(plan["config"]),
        storage_path=plan["storage"],
        name=plan["id"],
        callbacks=[TuneReportCallback()],
        max_failures=plan["max_failures"],
    )
    try:
        results = read_results(trainer.fit().checkpoint)
    except TrainingFailedError as error:
        results = {REFUSED: describe_failure(error)}
    tune.report(results)


def set_damaged_aside(run: Path) -> str:
    """Move a Ray Train run whose newest checkpoint is damaged out of the way, so that the gang starts from scratch.

    Returns:
        What is wrong with the checkpoint; "" if it is whole or there is none.
    """
    try:
        snapshot = json.loads((run / SNAPSHOT).read_text())
        load_checkpoint(run / snapshot["latest_checkpoint_result"]["checkpoint_dir_name"])
    except (FileNotFoundError, KeyError, TypeError):  # not begun, or no checkpoint yet
        return ""
    except ValueError as error:
        run.rename(run.with_name(f"{run.name}-damaged-{time.time_ns()}"))
        return str(error)
    return ""


def describe_failure(error: TrainingFailedError) -> str:
    """The last line of the first worker's error, which names what happened."""
    of_workers: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes = [*of_workers.values(), getattr(error, "controller_failure", error)]
    return last_line(str(causes[0])) or type(causes[0]).__name__


def in_process_resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    """One process with the trial's threads and, on device cuda, its share of a GPU."""
    trial = config["plan"]["config"]
    bundle = {"CPU": float(trial["threads"])}
    if trial["device"] == "cuda":
        bundle["GPU"] = trial["gpus"]
    return tune.PlacementGroupFactory([bundle])
