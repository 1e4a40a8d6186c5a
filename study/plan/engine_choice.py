"""Which engine runs a study's trials, and what starts the workers of a trial of several.

The engines are processes of this machine (:mod:`study.engines.local`) and Ray Tune
(:mod:`study.engines.ray`). Under Ray Tune a *gang*, the workers of one trial, is started by Ray
Train or forked. Both train the same bits. Ray Train starts a new Python process per worker, which
imports torch, and restarts a gang by itself; forked processes start in milliseconds.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from study.config import StudyConfig
from study.plan.durations import expected_seconds
from study.plan.trials import PlannedTrial
from study.text import duration
from trainers.object_store import is_url
from trainers.workers.resources import WorkerResources

START_SECONDS = 15.0
"""Seconds until Ray Train's workers have started their first epoch, on a machine with 16 cores
(docs/decisions/0080-tuner.md)."""
LONG = 10.0
"""Times :data:`START_SECONDS` that a gang must train for Ray Train to start it by default."""


class Gang(NamedTuple):
    """What starts a trial's workers.

    Attributes:
        by_train: whether Ray Train does.
        why: the reason, to be printed.
    """

    by_train: bool
    why: str


def needs_ray(study: StudyConfig) -> str:
    """Return the setting for which a study's trials need Ray; "" if they need none.

    Those are a cluster, Ray Train, and a parameter server, which is made of Ray's actors.
    """
    if study.address is not None:
        return f"address={study.address!r}"
    if study.gang == "train":
        return "gang=train"
    asynchronous = '"asynchronous"' in json.dumps(study.to_dict())
    return "trial.sync.name=asynchronous" if asynchronous else ""


def by_ray(study: StudyConfig) -> bool:
    """Return whether Ray Tune runs a study's trials: it is asked for, or they need Ray."""
    return study.engine == "ray" or (study.engine == "auto" and needs_ray(study) != "")


def choose_gang(study: StudyConfig, trial: PlannedTrial, seconds: dict[str, float]) -> Gang:
    """Choose what starts a trial's workers.

    Args:
        study: the config.
        trial: the trial.
        seconds: seconds per epoch of earlier trials (:mod:`study.plan.durations`).
    """
    config = trial.config
    if config.workers == 1 and config.min_workers is None:
        return Gang(False, "one worker")
    if study.gang != "auto":
        return Gang(study.gang == "train", f"gang={study.gang}")
    if not by_ray(study):
        return Gang(False, "no Ray on this machine")
    if config.min_workers is not None:
        return Gang(True, "only Ray Train changes the number of workers (trial.min_workers)")
    if config.own_loop:
        return Gang(False, "a loop of your own trains it")
    if config.sync.name == "asynchronous":
        return Gang(False, "asynchronous ranks use a parameter server")
    if is_url(study.storage):
        return Gang(False, "Ray Train's checkpoints are not fetched from an object store")
    expected = expected_seconds(trial, seconds)
    if expected >= LONG * START_SECONDS:
        known = expected < float("inf")
        return Gang(True, f"trains for about {duration(expected)}" if known else "unknown duration")
    return Gang(
        False,
        f"trains for about {duration(expected)}, less than {LONG:g} times the"
        f" {START_SECONDS:g} s in which Ray Train starts",
    )


def resources_of(
    study: StudyConfig, trial: PlannedTrial, seconds: dict[str, float]
) -> WorkerResources:
    """Return the resources and the processes that a trial takes, see :func:`choose_gang`."""
    by_train = choose_gang(study, trial, seconds).by_train
    return WorkerResources.of(trial.config, study.executor, by_train=by_train)
