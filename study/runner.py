"""Running a plan with Ray Tune, every event into the ledger.

Tune places, restarts and, with a scheduler, ends trials; the ledger decides what is left to do, and the :class:`~study.search.Agenda` hands
it out one trial at a time. Each run is a new Tune experiment (``attempts/0001`` ...), because Tune cannot be trusted to resume its own: its
snapshots lag by seconds. Trials that the ledger calls finished are left out, interrupted ones begin at the last whole checkpoint that
the ledger names and that is still on disk.

Ctrl-C is ours, not Tune's: it asks the :class:`~study.control.Control` to cancel, as ``lns-study cancel`` does, and Tune ends the trials'
processes in order.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import statistics
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.control import Control
from study.errors import UserError
from study.ledger import Ledger
from study.manage import continuations
from study.plan import Plan, PlannedTrial
from study.preflight import cpus_of, local_cpus
from study.search import Agenda
from study.state import StudyState
from trainers.config import TrialConfig
from trainers.out_of_memory import relief

ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # Train polls its workers this often; the default adds 2 s to every report
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process a CPU, which Tune's actors, with an environment of their own, cannot take
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no CSV, JSON or TensorBoard files: the ledger has it all
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # Tune's own snapshots are never read, and their cost grows with the trials
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "PYTHONWARNINGS": "ignore",
}
"""Set before Ray starts, unless the user set them; Ray's processes inherit them."""

TAIL = 3
"""The last so many trials a slot run longest first: within 1 to 6 % of sorting all of them, in simulations of 2 to 128 slots."""


def run_plan(plan: Plan, ledger: Ledger, state: StudyState, control: Control, only: Collection[str] | None = None) -> None:
    """Run what is left of a plan; returns when every trial has ended, or ``control`` ends the study before.

    Args:
        plan: the trials.
        ledger: takes every event.
        state: what the ledger holds already; says what is left.
        control: asked what to do, all the time.
        only: ids of the trials to run; None for all.

    Raises:
        UserError: ``address`` names no Ray cluster.
        KeyboardInterrupt: Ctrl-C; every trial's process has ended.
    """

    def enter(trial: PlannedTrial) -> None:
        ledger.append("added", planned=trial.to_dict())
        if plan.study.search.population:
            continuations(ledger, state, [state.known[trial.id]])

    agenda = Agenda(plan, state, enter, only)
    if agenda.exhausted:
        return
    with ray_session(plan.study, dashboard=plan.study.executor == "train"):
        _tune(plan.study, agenda, ledger, state, control)
    if control.interrupted:
        raise KeyboardInterrupt


@contextmanager
def ray_session(study: StudyConfig, *, dashboard: bool = False) -> Iterator[None]:
    """Ray for the time of a study: the session there is, the cluster at ``address``, or a local one that ends with us.

    Args:
        study: the config.
        dashboard: serve the State API (part of Ray's dashboard, on 127.0.0.1): by it Ray Train notices that a killed driver's workers
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
        _start_ray(study, dashboard)
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


def _next_attempt(folder: Path) -> Path:
    """A new folder for Tune's files; none is used twice."""
    attempts = folder / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in attempts.iterdir() if path.name.isdigit()), default=0) + 1
    path = attempts / f"{number:04d}"
    path.mkdir()
    return path


def _tune(study: StudyConfig, agenda: Agenda, ledger: Ledger, state: StudyState, control: Control) -> None:
    """One Tune experiment over everything on the agenda."""
    from ray import tune

    from study.tune_callback import LedgerCallback
    from study.tune_search import AgendaSearcher, StopWhenCancelled, make_scheduler

    def relieve(trial: str, error: str) -> bool:
        known = state.known[trial]
        wanted = relief(TrialConfig.from_dict(known.config))
        if known.relief or wanted is None:
            return False
        ledger.append("relieved", trial=trial, error=error, relief=wanted)
        agenda.again(trial)
        return True

    trainable, most = _trainable(study, [trial.config for trial in agenda.trials])
    slots = _slots(study, [trial.config for trial in agenda.trials])
    agenda.tail = TAIL * slots
    os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", str(max(1, slots)))  # Tune keeps one pending for a searcher of its users'
    cutter = study.search.scheduler if study.search.ends_early else "none"
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=AgendaSearcher(agenda, control, lambda trial: _to_config(trial, state, study), _room(study)),
            scheduler=make_scheduler(study.search, state),
            num_samples=-1,
            max_concurrent_trials=most,
            reuse_actors=study.executor != "train",
            trial_name_creator=_name_trial,
            trial_dirname_creator=_name_trial,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(_next_attempt(study.folder)),
            failure_config=tune.FailureConfig(max_failures=study.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            callbacks=[LedgerCallback(ledger, cutter, study.heartbeat, control.fail_storage, relieve)],
            stop=StopWhenCancelled(control),
            verbose=0,
        ),
    )
    with _interrupts(control), control.watch_storage():  # Tune's own files are on it too
        tuner.fit()
    if study.executor == "packed":
        from trainers.host import end_hosts

        end_hosts(str(study.folder))


@contextmanager
def _interrupts(control: Control) -> Iterator[None]:
    """The first Ctrl-C asks ``control`` to cancel, the second is an ordinary one; Tune's own handler is off (:data:`ENVIRONMENT`)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def cancel(*_: object) -> None:
        control.interrupted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _trainable(study: StudyConfig, configs: list[TrialConfig]) -> tuple[Any, int | None]:
    """What runs a trial, and how many at a time; None for as many as find their CPUs free.

    A gang of ours is placed whole, or waits without holding anything. Of Ray Train's gangs no more may begin than fit whole on the local
    Ray, since each takes its CPUs one by one.
    """
    from ray import tune

    if study.executor != "train":
        from study import trial as executors

        return tune.with_resources(executors.StudyTrial, executors.trial_resources), study.max_concurrent
    most = study.max_concurrent
    if study.address is None and configs:
        fit = max(1, local_cpus(study) // max(cpus_of(config) for config in configs))
        most = min(fit, most or fit)
    from study.train_trial import DRIVER_RESOURCES, train_trial

    return tune.with_resources(train_trial, DRIVER_RESOURCES), most


def _slots(study: StudyConfig, configs: list[TrialConfig]) -> int:
    """How many of these trials run at a time, about."""
    import ray

    from trainers.bundles import gpus as gpus_of

    if not configs:
        return 0
    have = ray.cluster_resources()
    cpus = have.get("CPU", 1.0) / statistics.fmean(map(cpus_of, configs))
    shares = [gpus_of(config) for config in configs]
    gpus = have.get("GPU", 0.0) / statistics.fmean(shares) if any(shares) else math.inf
    return min(math.ceil(min(float(cpus), float(gpus))), study.max_concurrent or len(configs))


def _room(study: StudyConfig) -> Any:
    """Trials wait for their resources with us; for a cluster that may grow, one more waits with Ray."""
    import ray

    from study.tune_search import Room
    from trainers.bundles import gpus as gpus_of

    def needs(trial: PlannedTrial) -> dict[str, float]:
        gpus = gpus_of(trial.config)
        return {"CPU": float(cpus_of(trial.config))} | ({"GPU": gpus} if gpus else {})

    return Room(ray.cluster_resources, needs, ahead=0 if study.address is None else 1)


def _to_config(trial: PlannedTrial, state: StudyState, study: StudyConfig) -> dict[str, Any]:
    """What an executor needs; see :class:`study.trial.StudyTrial`."""
    resume_from = [] if study.executor == "train" else state.known[trial.id].checkpoints_left()
    plan = {
        "config": trial.config.to_dict(),
        "checkpoints": str(study.folder / "checkpoints" / trial.id),
        "profile": str(study.folder / "profiles" / trial.id),
        "checkpoint_every": study.checkpoint_every,
        "resume_from": resume_from,
        "storage": str(study.folder / "train"),
        "max_failures": study.max_failures,
        "packed_in": str(study.folder) if study.executor == "packed" else None,
    }
    from study.tune_search import UNTOUCHABLE

    return {"id": trial.id, "plan": json.dumps(plan), UNTOUCHABLE: trial.seed in study.search.confirm_seeds}


def _name_trial(trial: Any) -> str:
    return str(trial.config["id"])
