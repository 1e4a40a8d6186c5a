"""Execution of a plan.

Trials run on one of two engines: processes on this machine without Ray
(:mod:`study.engines.local`), or Ray Tune (:mod:`study.engines.ray`);
:func:`study.plan.engine_choice.by_ray` chooses.

The loop (:class:`~study.engines.loop.Loop`) starts trials, writes their reports into the ledger,
and then acts on them. The :class:`~study.search.agenda.Agenda` chooses the next trial,
:class:`~study.engines.admission.Admission` decides when it starts, the
:class:`~study.engines.early_stopping.Scheduler` (Ray Tune's) which trials end early, and the
:class:`~study.engines.control.Control` when the study pauses or ends. Trials that are finished in
the ledger do not run again. Interrupted trials resume from their last undamaged checkpoint.

Ctrl-C cancels the study like ``lns-study stop --now``.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from study.config import StudyConfig
from study.engines.control import Control
from study.engines.engine import Engine
from study.engines.local.machine import Machine
from study.engines.local.pool import Pool
from study.engines.loop import ROUND_SECONDS, Loop
from study.engines.ray.start import RayStart, data_of, has_gangs, uses_gpus
from study.engines.ray_session import Session
from study.ledger.lock import OUTPUT
from study.ledger.log import Ledger
from study.ledger.state import StudyState
from study.plan.durations import of_storage
from study.plan.engine_choice import by_ray
from study.plan.extend import continuations
from study.plan.plan import Plan
from study.plan.resources import local_cpus, visible_gpus
from study.plan.trials import PlannedTrial
from study.search.agenda import Agenda
from trainers.workers.node import Node

if TYPE_CHECKING:  # imports torch
    from trainers.telemetry.tally import Moment

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
    *,
    ray: RayStart,
    moment: Callable[[str, Moment], None] | None = None,
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
        ray: starts the ray engine, if that runs the study and has not begun to start.
        moment: shows where a trial is within an epoch, on this machine's own engine only.

    Raises:
        UserError: ``address`` names no Ray cluster.
        KeyboardInterrupt: Ctrl-C; all trial processes have ended.
    """

    def enter(trial: PlannedTrial) -> None:
        ledger.append({"event": "added", "planned": trial.to_dict()})
        if plan.study.search.population:
            continuations(ledger, state, [state.known[trial.id]])

    agenda = Agenda(plan, state, enter, only)
    if not agenda.exhausted:
        with _interrupts(control), control.watch_storage():
            if by_ray(plan.study):
                node.close()  # trials run in processes of the cluster's nodes
                _run_on_ray(plan, agenda, ledger, state, control, say, ray)
            else:
                _run_here(plan.study, agenda, ledger, state, control, node, say, moment)
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
    moment: Callable[[str, Moment], None] | None,
) -> None:
    """Run a study in processes of this machine."""
    configs = [trial.config for trial in agenda.trials] or [study.trial]
    gpus = visible_gpus() if uses_gpus(study, configs) else []
    pool = Pool(Machine(local_cpus(study), gpus), node)
    try:
        node.log(study.folder / OUTPUT)
        node.load(data_of(configs))
        loop = Loop(study, agenda, ledger, state, control, pool, say, moment=moment)
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
    ray: RayStart,
) -> None:
    """Run a study with Ray Tune, on its cluster or on a Ray that is started here."""
    study = plan.study
    if has_gangs(plan):
        agenda.earlier = of_storage(study.storage)  # short gangs are forked

    def make_loop(trials: Engine, session: Session) -> Loop:
        address = lambda: session.address  # noqa: E731
        return Loop(study, agenda, ledger, state, control, trials, say, address)

    ray.run(plan, {info["files"] for info in state.plan.get("data", [])}, make_loop)


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
