"""A study's loop with a scripted engine and a scripted clock: no process, no Ray, no waiting."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from study.config import StudyConfig
from study.engines.control import Control
from study.engines.engine import Slots
from study.engines.loop import ROUND_SECONDS, Loop
from study.ledger.log import Ledger
from study.ledger.state import StudyState
from study.plan.plan import make_plan
from study.plan.trials import PlannedTrial
from study.search.agenda import Agenda
from trainers.workers.messages import DIED, DONE, ENDED, REPORT, Died, Ended, ForLoop, Report
from trainers.workers.resources import WorkerResources


@dataclass
class Placed:
    """A trial that the engine has taken."""

    slots: list[int]
    hosts: list[str] = field(default_factory=lambda: ["here"])


class ScriptedEngine:
    """An engine of ``cpus`` CPUs and ``gpus`` GPUs on one machine. Its trials do what the test says
    they do, and it records what the loop asks of it."""

    def __init__(self, cpus: float, gpus: int = 0) -> None:
        self._whole = (cpus, float(gpus))
        self._slots = Slots()
        self._held: dict[str, tuple[WorkerResources, Placed]] = {}
        self.moving: list[str] = []
        self.plans: dict[str, Any] = {}
        self.answers: list[tuple[str, bool]] = []
        self.left: list[str] = []
        self.killed: dict[str, str] = {}

    @property
    def running(self) -> list[str]:
        return list(self._held)

    @property
    def idle(self) -> bool:
        return self.idle_resources[0] >= 1.0

    @property
    def idle_resources(self) -> tuple[float, float]:
        held = [shape for shape, _ in self._held.values()]
        cpus, gpus = self._whole
        return cpus - sum(s.cpus for s in held), gpus - sum(s.gpus_in_all for s in held)

    def could_fit(self, shape: WorkerResources) -> bool:
        return shape.cpus <= self._whole[0] and shape.gpus_in_all <= self._whole[1]

    def capacity(self) -> tuple[float, int, int]:
        return self._whole[0], int(self._whole[1]), 1

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], Any]
    ) -> Placed | None:
        cpus, gpus = self.idle_resources
        if shape.cpus > cpus or shape.gpus_in_all > gpus:
            return None
        self.plans[trial] = make_plan()
        self._held[trial] = shape, Placed(self._slots.take(shape.workers))
        return self._held[trial][1]

    def answer(self, trial: str, go: bool) -> None:
        self.answers.append((trial, go))

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        self.left += trials

    def kill(self, trial: str, why: str) -> None:
        self.killed[trial] = why

    def release(self, trial: str) -> None:
        """Free what a trial held."""
        self._slots.give_back(self._held.pop(trial)[1].slots)


class Course:
    """A study whose trials do what a test says.

    Args:
        study: the config; its folder gets the ledger.
        engine: the engine.
        clock: the time in seconds, a list of one number.
    """

    def __init__(self, study: StudyConfig, engine: ScriptedEngine, clock: list[float]) -> None:
        self.folder, self.state = study.folder, StudyState()
        self.ledger = Ledger(study.folder)
        self.said: list[str] = []
        self.engine, self.clock = engine, clock
        plan = make_plan(study)
        self.ledger.listen(self.state.apply)
        self.ledger.append({**plan.to_event("x"), "data": []})
        self.agenda = Agenda(plan, self.state, self._add)
        self.control = Control(study.folder, self.state, study.limits)
        self.loop = Loop(
            study, self.agenda, self.ledger, self.state, self.control, engine, self.said.append
        )

    def _add(self, trial: PlannedTrial) -> None:
        self.ledger.append({"event": "added", "planned": trial.to_dict()})

    @property
    def rows(self) -> list[str]:
        """Row of each running trial."""
        return [self.state.known[trial].row for trial in self.engine.running]

    def wait(self, seconds: float = ROUND_SECONDS) -> bool:
        """Let time pass, then run one round of the loop; return whether the study continues."""
        for _ in range(round(seconds / ROUND_SECONDS)):
            self.clock[0] += ROUND_SECONDS
            if not self.loop.begin_round():
                return False
        return True

    def report(self, trial: str, epoch: int, error: float = 0.5, *, done: bool = False) -> None:
        """Have a trial report an epoch, and with ``done`` its test figures."""
        figures: dict[str, Any] = {"epoch": epoch, "train/loss": 1.0, "validation/error": error}
        figures |= {"test/error": error, "test/loss": 1.0} if done else {}
        figures |= {"done": done, "pid": 7, "host": "here", "seconds": 1.0}
        self.hear(Report(REPORT, trial, figures))

    def end(self, trial: str, how: str = DONE, text: str = "") -> None:
        """Have a trial end."""
        self.engine.release(trial)
        self.hear(Ended(ENDED, trial, {"how": how, "text": text, "retire": ""}))

    def die(self, trial: str, why: str = "killed") -> None:
        """Have a trial's process die."""
        self.engine.release(trial)
        self.hear(Died(DIED, trial, why))

    def finish(self, trial: str, error: float = 0.5) -> None:
        """Have a trial report its remaining epochs and end."""
        known = self.state.known[trial]
        for epoch in range(known.epoch + 1, known.epochs + 1):
            self.report(trial, epoch, error, done=epoch == known.epochs)
        self.end(trial)

    def hear(self, *messages: ForLoop) -> None:
        """Pass messages to the loop."""
        self.loop.take_in(list(messages))

    def run(self) -> None:
        """Let all trials finish in the order of their starts."""
        for _ in itertools.takewhile(lambda _: self.wait(), range(1000)):
            self.finish(self.engine.running[0])
