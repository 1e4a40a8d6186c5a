"""How one trial runs by Ray Train, under Ray Tune (``executor: train``): for long trials, since Ray Train restarts a gang within the trial.

A function drives ``trainers.worker.build_trainer(...).fit()``. Metrics of rank 0 reach Tune through ``TuneReportCallback``. The Train run's
name is the trial's id, so a driver that is started again continues the run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ray import tune
from ray.train import TrainingFailedError
from ray.tune.integration.ray_train import TuneReportCallback

from study.outcomes import DAMAGED, REFUSED, last_line
from trainers.checkpoint import load_checkpoint
from trainers.config import TrialConfig
from trainers.worker import build_trainer, read_results

DRIVER_RESOURCES = {"node:__internal_head__": 0.001}
"""A sliver of the head node: places the driver of a Ray Train run without taking a CPU."""

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""In a Ray Train run's folder: which checkpoint it will continue from."""


def train_trial(config: dict[str, Any]) -> None:
    """Drive one trial by Ray Train; ``config["plan"]`` as for :class:`study.trial.StudyTrial`, with ``storage`` for Ray
    Train's files and ``max_failures``.

    Ray Train starts a gang with a dead worker again, at most ``max_failures`` times, and one with a deterministic error not at all; then it
    gives up, and so does the study: what is reported under :data:`REFUSED` Tune does not try again. Tune itself only restarts a
    driver whose process died. The last report has the metrics of every epoch, so that none is lost with such a driver.
    """
    plan = json.loads(config["plan"])
    if damaged := set_damaged_aside(Path(plan["storage"]) / config["id"]):
        tune.report({DAMAGED: damaged})
    trainer = build_trainer(
        TrialConfig.from_dict(plan["config"]),
        storage_path=plan["storage"],
        name=config["id"],
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
