"""Running a plan with Ray Tune, every event into the ledger.

Tune schedules and restarts; the ledger decides what is left to do. Each run is a new Tune experiment (``attempts/0001`` ...),
because Tune cannot be trusted to resume its own: its snapshots lag by seconds. Trials that the ledger calls finished are left
out, interrupted ones begin at the last whole checkpoint that the ledger names and that is still on disk.

In-process trials run first, then gangs, at most as many at a time as fit whole, so that no gang waits for another's CPUs.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.errors import UserError
from study.ledger import Ledger
from study.plan import Plan, PlannedTrial
from study.preflight import cpus_of, local_cpus
from study.state import FAILED, FINISHED, StudyState

ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # Train polls its workers this often; the default adds 2 s to every report
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no CSV, JSON or TensorBoard files: the ledger has it all
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "PYTHONWARNINGS": "ignore",
}
"""Set before Ray starts, unless the user set them; Ray's processes inherit them."""

CHECKPOINTS_KEPT = 2
"""The newest, and the one before it for a machine that dies between writing the newest and noting it."""


def run_plan(plan: Plan, ledger: Ledger, state: StudyState) -> None:
    """Run what is left of a plan; returns when every trial has finished or failed.

    Args:
        plan: the trials.
        ledger: takes every event.
        state: what the ledger holds already; says what is left.

    Raises:
        UserError: ``address`` names no Ray cluster.
        KeyboardInterrupt: Ctrl-C; every trial's process has ended.
    """
    todo = [trial for trial in plan.trials if state.known[trial.id].status != FINISHED]
    if not todo:
        return
    with ray_session(plan.study, gangs=bool(_only(todo, gang=True))):
        folder = _next_attempt(plan.study.folder)
        for name, trials in (("process", _only(todo, gang=False)), ("gang", _only(todo, gang=True))):
            if trials:
                _tune(plan.study, trials, ledger, state, folder, name)


@contextmanager
def ray_session(study: StudyConfig, *, gangs: bool = False) -> Iterator[None]:
    """Ray for the time of a study: the session there is, the cluster at ``address``, or a local one that ends with us.

    Args:
        study: the config.
        gangs: serve the State API (part of Ray's dashboard, on 127.0.0.1): by it Ray Train notices that a killed driver's workers
            still hold their CPUs. Without it the restarted driver would wait for them for ever.

    Raises:
        UserError: nothing answers at ``address``.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    for logger in ("ray.tune", "ray.train"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # a trial's failure is in the ledger, not between the progress lines
    ours = not ray.is_initialized()
    if ours:
        on_sigterm = signal.getsignal(signal.SIGTERM)
        _start_ray(study, gangs)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts in one that aborts the process
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _start_ray(study: StudyConfig, dashboard: bool) -> None:
    import ray

    quiet = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "include_dashboard": dashboard,
        "dashboard_host": "127.0.0.1",
    }
    try:
        if study.address is None:
            with _own_process_groups():
                ray.init(address="local", num_cpus=local_cpus(study), **quiet)
        else:
            ray.init(address=study.address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise UserError(
            f"address={study.address!r}: no Ray cluster answers ({error}); start one with `ray start --head`, or leave address "
            "out for a local one"
        ) from None


_detach = threading.local()
"""``children``: whether processes that this thread forks go into process groups of their own."""


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Processes that this thread starts meanwhile do not hear the signals that are sent to our process group.

    A SIGTERM to the group (from ``timeout``, a batch system, a closed pipeline) would end Ray's own processes at once. We could then
    not end the trials in order, and Ray would make us wait 60 s for its control store. So the signal is ours alone, and we end Ray.
    Ray's processes still die with us: it sets their parent-death signal.
    """
    _detach.children = True
    try:
        yield
    finally:
        _detach.children = False


def _leave_group() -> None:
    if getattr(_detach, "children", False):
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)  # subprocess runs it too where it has a preexec_fn, as Ray's starts have


def _only(trials: list[PlannedTrial], *, gang: bool) -> list[PlannedTrial]:
    return [trial for trial in trials if (trial.config.workers > 1) == gang]


def _next_attempt(folder: Path) -> Path:
    """A new folder for Tune's files; none is used twice."""
    attempts = folder / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in attempts.iterdir() if path.name.isdigit()), default=0) + 1
    path = attempts / f"{number:04d}"
    path.mkdir()
    return path


def _tune(study: StudyConfig, trials: list[PlannedTrial], ledger: Ledger, state: StudyState, folder: Path, name: str) -> None:
    """One Tune experiment over trials of one kind."""
    from ray import tune

    from study import trial as executors
    from study.tune_callback import LedgerCallback

    gang = name == "gang"
    plans = [_to_plan(trial, state, study) for trial in trials]
    trainable = (
        tune.with_resources(executors.gang_trial, executors.DRIVER_RESOURCES)
        if gang
        else tune.with_resources(executors.InProcessTrial, executors.in_process_resources)
    )
    tuner = tune.Tuner(
        trainable,
        param_space={"plan": tune.grid_search(plans)},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=concurrency(study, trials) if gang else study.max_concurrent,
            reuse_actors=not gang,
            trial_name_creator=_name_trial,
            trial_dirname_creator=_name_trial,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(folder),
            failure_config=tune.FailureConfig(max_failures=study.max_failures),
            checkpoint_config=_checkpoints(study, gang),
            callbacks=[LedgerCallback(ledger, study.folder)],
            verbose=0,
        ),
    )
    tuner.fit()
    _raise_if_interrupted(trials, state)


def _raise_if_interrupted(trials: list[PlannedTrial], state: StudyState) -> None:
    """Tune takes the first Ctrl-C itself, to end its trials' processes, and returns as if it were done; say that it was not."""
    if any(state.known[trial.id].status not in (FINISHED, FAILED) for trial in trials):
        raise KeyboardInterrupt


def _checkpoints(study: StudyConfig, gang: bool) -> Any:
    """Gangs keep checkpoints with Ray Train, not with Tune."""
    from ray import tune

    if gang:
        return tune.CheckpointConfig()
    return tune.CheckpointConfig(
        num_to_keep=CHECKPOINTS_KEPT, checkpoint_frequency=study.checkpoint_every, checkpoint_at_end=True
    )


def concurrency(study: StudyConfig, trials: list[PlannedTrial]) -> int | None:
    """Gangs at a time: the config's wish, and never more than fit whole on the local Ray. None for no limit.

    Trials of one process need no cap: Ray places each only where its CPUs are free.
    """
    if study.address is not None:
        return study.max_concurrent
    fit = max(1, local_cpus(study) // max(cpus_of(trial.config) for trial in trials))
    return min(fit, study.max_concurrent or fit)


def _to_plan(trial: PlannedTrial, state: StudyState, study: StudyConfig) -> dict[str, Any]:
    """What an executor needs; see :class:`study.trial.InProcessTrial`."""
    gang = trial.config.workers > 1
    resume_from = [] if gang else state.known[trial.id].checkpoints_left()
    return {
        "id": trial.id,
        "config": trial.config.to_dict(),
        "resume_from": resume_from,
        "storage": str(study.folder / "train"),
        "max_failures": study.max_failures,
    }


def _name_trial(trial: Any) -> str:
    return str(trial.config["plan"]["id"])
