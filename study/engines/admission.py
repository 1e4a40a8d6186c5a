"""Admission: which trial starts next, and which trials may overtake it.

Trials start in the order of the agenda. While the next trial waits for resources, later trials may
start if they use other resources than it needs, or are expected to end before it could start. So a
gang never waits forever behind small trials (EASY backfilling, D. Lifka 1995). Both engines use
this policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from study.config import StudyConfig
from study.engines.control import Control
from study.engines.engine import EPSILON, Engine
from study.ledger.events import Failed
from study.ledger.state import StudyState
from study.plan.durations import expected_seconds
from study.plan.engine_choice import resources_of
from study.plan.identity import pace_key
from study.plan.packing import LOOK_AHEAD
from study.plan.trials import PlannedTrial
from study.search.agenda import Agenda
from study.text import counted
from trainers.workers.resources import WorkerResources, cpus_of, gpus_of

LONELY_SECONDS = 10.0
"""Print a notice if no machine has had room for the next trial for this long (seconds)."""
Start = Callable[[PlannedTrial], bool]
"""Function that starts a trial if its resources are free, and returns whether it did."""


class Admission:
    """Decides which trials start; see the module.

    Args:
        study: the config.
        agenda: source of the next trial.
        state: state of the study.
        control: limits of the study.
        engine: the engine, which knows the free resources.
        say: prints a line for the user.
    """

    def __init__(
        self,
        study: StudyConfig,
        agenda: Agenda,
        state: StudyState,
        control: Control,
        engine: Engine,
        say: Callable[[str], None],
    ) -> None:
        self._study, self._agenda, self._state, self._control = study, agenda, state, control
        self.engine, self._say = engine, say
        self._lonely_since: float | None = None
        self._told: set[str] = set()

    def hand_out(self, start: Start, fail: Callable[[Failed], None]) -> bool:
        """Start all trials whose resources are free; return whether more trials wait.

        Args:
            start: starts a trial.
            fail: called with the ``failed`` event of a trial that needs more than this machine has.
        """
        while not self._control.full and (trial := self._agenda.peek()) is not None:
            if self._has_room() and start(trial):
                continue
            if failure := self._give_up(trial):
                fail(failure)
                continue
            if self._has_room():
                self._backfill(trial, start)
            return True
        return False

    def _has_room(self) -> bool:
        """Return whether ``max_concurrent`` allows one more trial."""
        return len(self.engine.running) < (self._study.max_concurrent or math.inf)

    def _give_up(self, trial: PlannedTrial) -> Failed | None:
        """Return the ``failed`` event of a trial that needs more than this machine has.

        On a cluster, which may grow, the trial waits, and the user sees one message.
        """
        shape = self._shape(trial)
        if self.engine.running or self.engine.could_fit(shape):
            self._lonely_since = None
            return None
        cpus, gpus, nodes = self.engine.capacity()
        on_gpu = f" and {shape.gpus_in_all:g} GPUs in all" if shape.gpus_in_all else ""
        each = counted(shape.threads, "CPU")
        problem = (
            f"needs {counted(shape.workers, 'worker')} of {each} each{on_gpu}, and this study has"
            f" {cpus:g} CPUs and {gpus} GPUs on {counted(nodes, 'machine')}"
        )
        if self._study.address is None and nodes:
            self._agenda.take(trial)
            return {
                "event": "failed",
                "trial": trial.id,
                "error": f"{problem}; lower trial.workers or trial.threads, or raise cpus",
            }
        self._say_lonely(trial, problem if nodes else "")
        return None

    def _say_lonely(self, trial: PlannedTrial, problem: str) -> None:
        """Print once that no machine has room for a trial, and why."""
        self._lonely_since = self._lonely_since or time.monotonic()
        if time.monotonic() - self._lonely_since <= LONELY_SECONDS or trial.id in self._told:
            return
        self._told.add(trial.id)
        self._say(
            f"Waiting: row {trial.row!r} {problem}; add nodes, or lower trial.workers or"
            " trial.threads"
            if problem
            else "Waiting: no node can be used now; new nodes are checked first"
        )

    def _backfill(self, head: PlannedTrial, start: Start) -> None:
        """Start trials behind ``head`` that do not delay it."""
        if not self.engine.idle:
            return
        needed, seconds = self._shape(head), self._agenda.epoch_seconds()
        until = self._begins_in(needed, seconds)
        for trial in self._agenda.behind(head, LOOK_AHEAD, propose=until > 0):
            if self._control.full or not self._has_room() or not self.engine.idle:
                return
            if expected_seconds(trial, seconds) <= until or self._keeps_nothing(trial, needed):
                start(trial)

    def _keeps_nothing(self, trial: PlannedTrial, needed: WorkerResources) -> bool:
        """Return whether a CPU trial leaves the CPUs that the waiting GPU trial needs.

        Only for one machine: on several it is unknown where the waiting trial will run.
        """
        shape, left = self._shape(trial), self.engine.idle_resources[0] + EPSILON
        on_cpus = shape.gpus_in_all == 0 < needed.gpus_in_all and self.engine.capacity()[2] == 1
        return on_cpus and left - shape.cpus >= needed.cpus

    def _begins_in(self, shape: WorkerResources, seconds: dict[str, float]) -> float:
        """Estimate the seconds until these resources are free; 0 if unknown."""
        cpus, gpus = self.engine.idle_resources
        left = []
        for trial in self.engine.running:
            known = self._state.known[trial]
            epochs = known.epochs - known.epoch
            left.append((epochs * seconds.get(pace_key(known.config), 0.0), trial))
        for until, trial in sorted(left):
            held = self._state.known[trial].config
            cpus, gpus = cpus + cpus_of(held), gpus + gpus_of(held)
            if cpus + EPSILON >= shape.cpus and gpus + EPSILON >= shape.gpus_in_all:
                return until
        return 0.0

    def _shape(self, trial: PlannedTrial) -> WorkerResources:
        return resources_of(self._study, trial, self._agenda.epoch_seconds())
