"""Execution of a plan.

Trials run on one of two engines: processes on this machine without Ray
(:mod:`study.execution.local`), or Ray Tune (:mod:`study.execution.tune`);
:func:`study.plan.engines.by_ray` chooses.

The loop (:class:`~study.execution.loop.Loop`) starts trials, writes their reports into the ledger,
and then acts on them. The :class:`~study.search.agenda.Agenda` chooses the next trial,
:class:`~study.execution.admission.Admission` decides when it starts, the
:class:`~study.execution.schedulers.Scheduler` (Ray Tune's) which trials end early, and the
:class:`~study.execution.control.Control` when the study pauses or ends. Trials that are finished in
the ledger do not run again. Interrupted trials resume from their last undamaged checkpoint.

Ctrl-C cancels the study like ``lns-study cancel``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from study.config import StudyConfig
from study.execution.control import Control
from study.execution.local.machine import Machine
from study.execution.local.pool import Pool
from study.execution.loop import ROUND_SECONDS, Loop
from study.execution.ray_session import ray_session
from study.execution.tune.options import TuneOptions
from study.execution.user_files import user_modules
from study.ledger.lock import OUTPUT
from study.ledger.log import Ledger
from study.ledger.state import StudyState
from study.manage.extend import continuations
from study.plan.durations import of_storage
from study.plan.engines import by_ray
from study.plan.plan import Plan
from study.plan.resources import local_cpus, visible_gpus
from study.plan.trials import PlannedTrial
from study.search.agenda import Agenda
from trainers.config import TrialConfig
from trainers.workers.node import Node, is_compared

DATA_SETS = 4
"""Largest number of data sets kept in memory."""
DOUBLED_SECONDS = 1.0
"""Seconds within which a second signal is the first one's."""


def run_plan(
    plan: Plan,
    ledger: Ledger,
    state: StudyState,
    control: Control,
    node: Node,
    only: Collection[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
    options: TuneOptions | None = None,
) -> None:
    """Run the unfinished trials of a plan, until all have ended or ``control`` ends the study.

    Args:
        plan: the trials.
        ledger: the study's ledger.
        state: the study's state, which has the unfinished trials.
        control: pauses and ends the study.
        node: process manager of this machine; closed here.
        only: ids of the trials to run; None for all.
        say: prints a line for the user.
        options: what the caller adds to the Tuner of the ray engine.

    Raises:
        UserError: ``address`` names no Ray cluster.
        KeyboardInterrupt: Ctrl-C; all trial processes have ended.
    """

    def enter(trial: PlannedTrial) -> None:
        ledger.append("added", planned=trial.to_dict())
        if plan.study.search.population:
            continuations(ledger, state, [state.known[trial.id]])

    agenda = Agenda(plan, state, enter, only)
    if not agenda.exhausted:
        with _interrupts(control), control.watch_storage():
            if by_ray(plan.study):
                node.close()  # trials run in processes of the cluster's nodes
                _run_on_ray(plan, agenda, ledger, state, control, say, options or TuneOptions())
            else:
                _run_here(plan.study, agenda, ledger, state, control, node, say)
    if control.interrupted:
        raise KeyboardInterrupt


def _run_here(
    study: StudyConfig,
    agenda: Agenda,
    ledger: Ledger,
    state: StudyState,
    control: Control,
    node: Node,
    say: Callable[[str], None],
) -> None:
    """Run a study in processes of this machine."""
    pool = Pool(Machine(local_cpus(study), _local_gpus(agenda, study)), node)
    try:
        node.log(study.folder / OUTPUT)
        node.load(_data_of(agenda, study))
        loop = Loop(study, agenda, ledger, state, control, pool, say)
        while loop.begin_round():
            loop.take_in(pool.wait(ROUND_SECONDS))
    finally:
        pool.close()


def _run_on_ray(
    plan: Plan,
    agenda: Agenda,
    ledger: Ledger,
    state: StudyState,
    control: Control,
    say: Callable[[str], None],
    options: TuneOptions,
) -> None:
    """Run a study with Ray Tune, on its cluster or on a Ray that is started here."""
    study = plan.study
    gangs = "workers" in study.space or any(
        trial.config.workers > 1 for trial in plan.trials or plan.first
    )
    if gangs:
        agenda.earlier = of_storage(study.storage)  # short gangs are forked
    gpus = len(_local_gpus(agenda, study)) if study.address is None else 0
    say(
        f"Joining the Ray cluster at {study.address} ..."
        if study.address
        else "Starting Ray on this machine ..."
    )
    with ray_session(study, gpus=gpus, dashboard=gangs and study.gang != "forked") as session:
        # loads Ray, which reads then whether it asks for a token
        from study.execution.tune.run import Needs, run_on_ray

        needs = Needs(
            make=(study.folder / OUTPUT, _data_of(agenda, study)),
            modules=user_modules(study),
            data=_data_of_nodes(plan, state),
        )
        run_on_ray(
            session,
            needs,
            lambda trials: Loop(
                study, agenda, ledger, state, control, trials, say, lambda: session.address
            ),
            say,
            options,
        )


def _data_of(agenda: Agenda, study: StudyConfig) -> list[dict[str, Any]]:
    """Return the data sets of the first trials, which every machine loads once."""
    configs = [trial.config for trial in agenda.trials] or [study.trial]
    used = [config.data for config in configs if not config.own_loop]
    return [dataclasses.asdict(config) for config in list(dict.fromkeys(used))[:DATA_SETS]]


def _data_of_nodes(plan: Plan, state: StudyState) -> tuple[list[TrialConfig], set[str]]:
    """Return one trial per data set that every node must have, and the SHA-256 digests of the
    data sets."""
    configs = [trial.config for trial in plan.trials or plan.first]
    ours = {config.data: config for config in filter(is_compared, configs)}
    return list(ours.values()), {info["files"] for info in state.plan.get("data", [])}


def _local_gpus(agenda: Agenda, study: StudyConfig) -> list[str]:
    """Return the names of this machine's GPUs if a trial may use them, else none."""
    if '"cuda"' not in json.dumps(study.to_dict()) and not any(
        trial.config.device == "cuda" for trial in agenda.trials
    ):
        return []
    return visible_gpus()


@contextmanager
def _interrupts(control: Control) -> Iterator[None]:
    """Turn the first Ctrl-C into a request to cancel.

    The second one ends leaving trials at once; a later one interrupts as usual. Signals within
    :data:`DOUBLED_SECONDS` of the first are ignored: they are the same one, sent to the group too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, first = signal.getsignal(signal.SIGINT), -math.inf

    def cancel(*_: object) -> None:
        nonlocal first
        if time.monotonic() - first < DOUBLED_SECONDS:
            return
        if control.leaving and not control.hurried:
            control.hurried = True
        elif control.interrupted:
            raise KeyboardInterrupt
        first = time.monotonic()
        control.interrupted = True

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
