"""The loop of a study: start trials, write their reports into the ledger, then act on the
reports."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from study.config import StudyConfig
from study.config.metric import DERIVED
from study.engines.admission import Admission
from study.engines.control import Control, Wish, grace_seconds, is_full
from study.engines.early_stopping import make_scheduler
from study.engines.engine import Engine
from study.engines.silence import Watch, describe_silence
from study.ledger.events import Event, Started
from study.ledger.log import Ledger
from study.ledger.slots import Waiting
from study.ledger.state import StudyState, name_of
from study.ledger.trial_events import Reports, began, metrics_of
from study.plan.checkpoints import origin_of
from study.plan.engine_choice import resources_of
from study.plan.packing import TAIL
from study.plan.trials import PlannedTrial
from study.results.idle_time import UseWatch
from study.search.agenda import Agenda
from study.text import counted
from trainers.config import TrialConfig
from trainers.object_store import place_of
from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    LEFT,
    MOMENT,
    OUT_OF_MEMORY,
    PLACED,
    REFUSED,
    REPORT,
    STOPPED,
    UNPLACED,
    ForLoop,
    Places,
    WorkerPlan,
)
from trainers.workers.out_of_memory import relief
from trainers.workers.resources import (
    IN_PROCESS,
    PACKED,
    RAY_TRAIN,
    WorkerResources,
    cpus_of,
    gpus_of,
)

if TYPE_CHECKING:  # imports torch
    from trainers.telemetry.tally import Moment

ROUND_SECONDS = 0.5
"""Longest interval between two checks of requests, limits and heartbeats (seconds)."""
AWAY_SECONDS = 2.0
"""Seconds without a check after which the driver itself was stopped (Ctrl-Z) or blocked: it could
not hear its trials meanwhile, so that time does not count as their silence."""


class Loop:
    """The loop of one study.

    Args:
        study: the config.
        agenda: source of the next trial.
        ledger, state, control: the study's ledger, state and control.
        pool: engine that runs the trials.
        say: prints a line for the user.
        address: returns the address of the study's Ray, for trials whose processes join it.
        moment: shows where a trial is within an epoch; None if nobody looks, so that trials do not
            send it. It is neither in the ledger nor a sign of life for ``heartbeat``.
    """

    def __init__(
        self,
        study: StudyConfig,
        agenda: Agenda,
        ledger: Ledger,
        state: StudyState,
        control: Control,
        pool: Engine,
        say: Callable[[str], None] = lambda line: None,
        address: Callable[[], str] = lambda: "",
        moment: Callable[[str, Moment], None] | None = None,
    ) -> None:
        self._study, self._agenda, self._ledger, self._state = study, agenda, ledger, state
        self._control, self._pool, self._say = control, pool, say
        self._address, self._moment = address, moment
        self._place = place_of(study.folder)
        self._scheduler = make_scheduler(study.search, state)
        self._watch, self._looked, self._use = Watch(), time.monotonic(), UseWatch()
        self._reports = Reports(state)
        self._failures: Counter[str] = Counter()
        """Deaths of each trial since its last new epoch. Deaths of its machine count too, because
        the trial may have caused them."""
        self._capacity: tuple[float, int, int] | None = None
        self._shapes: dict[str, WorkerResources] = {}
        self._admission = Admission(study, agenda, state, control, pool, say)
        self._moving: set[str] = set()
        self._unplaced: dict[str, Started] = {}
        """``started`` events of trials whose machines are not known yet."""
        self._waiting = False
        self._left = set[str]()
        self._leaves_until: float | None = None
        """End of the grace period of a cancelled study; None if it is not cancelled."""

    def begin_round(self) -> bool:
        """Check requests, limits and heartbeats, and start the trials whose resources are free.

        The caller then passes new messages to :meth:`take_in`, and repeats.

        Returns:
            Whether the study continues; False once no trial is left or the control ends it.
        """
        self._note_capacity()
        decision = self._control.decide()
        if self._leaves_until is not None:
            return self._still_leaves()
        if decision.wish == Wish.CANCEL:
            return not self._control.storage_error and self._leave()
        over = decision.wish >= Wish.STOP or self._control.full
        on_hold = over or decision.wish == Wish.PAUSE
        self._waiting = not on_hold and self._hand_out()
        self._leave_machines_that_end()
        self._look_after_silent()
        if not on_hold:
            self._look_at_use(self._waiting)
        idle = not self._pool.running and not self._waiting
        done = over or (decision.wish != Wish.PAUSE and self._agenda.peek() is None)
        return not (idle and done)

    @property
    def waits(self) -> bool:
        """Whether a trial waits for resources."""
        return self._waiting

    @property
    def waits_for(self) -> WorkerResources | None:
        """Resources of the trial that waits; None if no trial waits."""
        head = self._agenda.peek() if self._waiting else None
        return None if head is None else self._shape(head)

    def describe(self, trial: str) -> dict[str, Any]:
        """Return a trial's id, row, seed and sampled values."""
        known = self._state.known[trial]
        return {"trial": trial, "row": known.row, "seed": known.seed, **known.params}

    def use(self, pool: Engine) -> None:
        """Switch to another engine; no trial may be running."""
        self._pool = self._admission.engine = pool

    def _leave(self) -> bool:
        """Ask running trials to end with a checkpoint after their current epoch; return whether any
        does. Trials that cannot write a checkpoint end at once.
        """
        self._left = set(filter(self._can_leave, self._pool.running))
        seconds = grace_seconds()
        if not self._left or not seconds:
            return False
        self._control.leaving = True
        self._say(
            f"Ending: {counted(len(self._left), 'trial')} may finish the epoch under way and write"
            f" a checkpoint, for {seconds:g} s at most; interrupt once more to end at once"
        )
        self._pool.leave_after_epoch(self._left)
        self._leaves_until, self._waiting = time.monotonic() + seconds, False
        return True

    def _still_leaves(self) -> bool:
        """Return whether leaving trials still have time to finish."""
        assert self._leaves_until is not None
        return (
            bool(self._left.intersection(self._pool.running))
            and time.monotonic() < self._leaves_until
            and not self._control.hurried
        )

    def _can_leave(self, trial: str) -> bool:
        """Return whether a running trial can write a checkpoint and end after an epoch.

        The user's own loops and Ray Train write checkpoints themselves, and the ranks of a
        parameter server are at different epochs.
        """
        asynchronous = self._state.known[trial].config["sync"]["name"] == "asynchronous"
        return self._shapes[trial].executor in (IN_PROCESS, PACKED) and not asynchronous

    def _leave_machines_that_end(self) -> None:
        """Ask the trials of draining machines to leave; they continue on other machines."""
        news = set(self._pool.moving) - self._moving
        self._moving |= news
        self._pool.leave_after_epoch(filter(self._can_leave, news))

    def _hand_out(self) -> bool:
        """Start the trials whose resources are free; return whether more trials wait."""
        events: list[Event] = []
        waiting = self._admission.hand_out(lambda trial: self._start(trial, events), events.append)
        self._append(events)
        return waiting

    def _start(self, trial: PlannedTrial, events: list[Event]) -> bool:
        """Start a trial if its resources are free, and add its event; return whether it started.

        If the engine does not know the machines yet, the event is added later.
        """
        shape = self._shape(trial)
        running = self._pool.start(trial.id, shape, lambda: self._plan(trial, shape.executor))
        if running is None:
            return False
        self._agenda.take(trial)
        self._control.begun(trial.id)
        self._watch.hear(trial.id)
        self._shapes[trial.id] = shape
        self._moving.discard(trial.id)
        event: Started = {
            "event": "started",
            "trial": trial.id,
            "slots": running.slots,
            "hosts": list(running.hosts),
            "cpus": shape.cpus,
            "gpus": shape.gpus_in_all,
        }
        if running.hosts:
            events.append(event)
        else:
            self._unplaced[trial.id] = event
        return True

    def take_in(self, messages: list[ForLoop]) -> None:
        """Write the trials' messages to the ledger, then act on them."""
        events: list[Event] = []
        again: list[str] = []
        for message in messages:
            if message.kind == MOMENT:
                if self._moment is not None:
                    self._moment(message.trial, message.payload)
                continue
            if self._watch.hear(message.trial) and message.kind != DIED:
                self._say(f"{name_of(self._state.known[message.trial])}: was heard of again")
            if message.kind == PLACED:
                events += self._note_place(message.trial, message.payload)
            elif message.kind == UNPLACED:
                self._watch.forget(message.trial)
                del self._unplaced[message.trial]
                again.append(message.trial)
            elif message.kind == BEGAN:
                events += self._forgive(message.trial, began(message.trial, message.payload))
            elif message.kind == REPORT:
                news = self._reports.take(message.trial, message.payload)
                events += self._forgive(message.trial, news)
            else:
                self._watch.forget(message.trial)
                events += self._note_place(message.trial, None)
                if message.kind == DIED:
                    event = self._end(message.trial, DIED, message.payload)
                else:
                    end = message.payload
                    event = self._end(message.trial, end["how"], end["text"])
                events += [event] if event else []
                again += (
                    [message.trial] if event and event["event"] in ("restarted", "relieved") else []
                )
        if not self._append(events):
            return
        for trial in again:
            self._control.again(trial)
            self._agenda.again(trial)
        for message in messages:
            if message.kind == REPORT:
                self._schedule(message.trial, message.payload)

    def _note_place(self, trial: str, place: Places | None) -> list[Event]:
        """Return the ``started`` event of a trial if it is still missing."""
        event = self._unplaced.pop(trial, None)
        if event is not None and place is not None:
            event |= {"hosts": place["hosts"], "actor": place["actor"]}
        return [] if event is None else [event]

    def _forgive(self, trial: str, events: list[Event]) -> list[Event]:
        """Return a trial's events; a new epoch among them resets the number of its deaths."""
        if self._failures[trial] and any(map(self._is_new, events)):
            del self._failures[trial]
        return events

    def _is_new(self, event: Event) -> bool:
        """Return whether an event reports a new epoch of its trial."""
        if event["event"] != "report":
            return False
        return int(event["epoch"]) > self._state.known[event["trial"]].epoch

    def _end(self, trial: str, how: str, text: str) -> Event | None:
        """Return the event of a trial's end; None if it left early or the storage failed."""
        test = self._reports.tested(trial)
        if how == DONE and test is not None:
            return test
        if how == DONE:
            return {
                "event": "failed",
                "trial": trial,
                "error": "the trial ended without test figures",
            }
        if how == STOPPED:
            return {"event": "stopped", "trial": trial, "by": self._study.search.scheduler}
        if how == LEFT and trial in self._moving and not self._control.leaving:
            return {"event": "restarted", "trial": trial, "error": "its node is drained"}
        if how == LEFT or (how == DIED and self._control.leaving):
            return None
        if how == REFUSED:
            return {"event": "failed", "trial": trial, "error": text}
        if how == OUT_OF_MEMORY:
            known = self._state.known[trial]
            wanted = None if known.relief else relief(TrialConfig.from_dict(known.config))
            if wanted is None:
                return {"event": "failed", "trial": trial, "error": f"out of memory: {text}"}
            return {"event": "relieved", "trial": trial, "error": text, "relief": wanted}
        if is_full(text):
            self._control.fail_storage(text)
            return None
        if trial in self._moving:  # it could not leave in time, which is not its fault
            return {"event": "restarted", "trial": trial, "error": f"its node was drained: {text}"}
        self._failures[trial] += 1
        if self._failures[trial] > self._study.max_failures:
            return {"event": "failed", "trial": trial, "error": text}
        return {"event": "restarted", "trial": trial, "error": text}

    def _schedule(self, trial: str, result: dict[str, Any]) -> None:
        """Ask the scheduler whether a trial continues; confirmation runs always continue."""
        if (
            self._scheduler is None
            or self._state.known[trial].seed in self._study.search.confirm_seeds
        ):
            return
        metrics, epoch = metrics_of(result), int(result["epoch"])
        ends = not result["done"] and self._scheduler.ends(trial, epoch, metrics)
        if ends or result["done"]:
            self._scheduler.note_end(trial, epoch, metrics)
        if not result["done"]:
            self._pool.answer(trial, not ends)

    def _look_after_silent(self) -> None:
        """Kill trials that were silent for longer than the heartbeat; without one, name them."""
        limit, since = self._study.heartbeat, time.monotonic() - self._looked
        if since < ROUND_SECONDS:
            return
        self._looked = time.monotonic()
        if since > AWAY_SECONDS:
            self._watch.forgive(since)
        if limit is not None:
            for trial in self._watch.hung(limit):
                self._pool.kill(
                    trial, f"no report for {limit:g} s, so its process was killed (heartbeat)"
                )
        elif silent := self._watch.newly_silent(self._state):
            for each, quiet in silent:
                self._say(describe_silence(each, quiet, limit))

    def _look_at_use(self, waits: bool) -> None:
        """Print once that the run uses few of its resources."""
        run = self._state.runs[-1]
        if not self._use.is_due(run):
            return
        waiting = None if self._agenda.exhausted else Waiting()
        if waits and (head := self._agenda.peek()) is not None:
            shape = self._shape(head)
            waiting = Waiting(trial=head.id, cpus=shape.cpus, gpus=shape.gpus_in_all)
        if low := self._use.look(run, waiting):
            self._say(low)

    def _note_capacity(self) -> None:
        """Write the capacity to the ledger when it has changed."""
        capacity = self._pool.capacity()
        if capacity != self._capacity and capacity[0]:
            self._capacity = capacity
            self._agenda.tail = TAIL * self._slots()
            self._append(
                [
                    {
                        "event": "capacity",
                        "cpus": capacity[0],
                        "gpus": capacity[1],
                        "nodes": capacity[2],
                    }
                ]
            )

    def _slots(self) -> int:
        """Estimate how many of the waiting trials can run at the same time."""
        assert self._capacity is not None
        trials = [trial.config.to_dict() for trial in self._agenda.trials]
        if not trials:
            return 0
        cpus = self._capacity[0] / statistics.fmean(map(cpus_of, trials))
        share = statistics.fmean(map(gpus_of, trials))
        gpus = self._capacity[1] / share if share else math.inf
        return min(math.ceil(min(cpus, gpus)), self._study.max_concurrent or len(trials))

    def _shape(self, trial: PlannedTrial) -> WorkerResources:
        return resources_of(self._study, trial, self._agenda.epoch_seconds())

    def _plan(self, trial: PlannedTrial, executor: str) -> WorkerPlan:
        """Return the task of the trial's processes."""
        study, by_train = self._study, executor == RAY_TRAIN
        return {
            "config": trial.config.to_dict(),
            "origin": origin_of(trial, self._ledger.id, self._state.plan),
            "checkpoints": f"{self._place}/checkpoints/{trial.id}",
            "profile": f"{self._place}/profiles/{trial.id}",
            "checkpoint_every": study.checkpoint_every,
            "resume_from": self._state.known[trial.id].checkpoints_left(),
            "waits": self._scheduler is not None and trial.seed not in study.search.confirm_seeds,
            "executor": executor,
            "metrics": [
                name
                for name in dict.fromkeys([study.primary_metric.name, *study.search.objectives])
                if name not in DERIVED
            ],
            "data": [info["files"] for info in self._state.plan.get("data", [])],
            "moments": self._moment is not None,
            "storage": str(study.folder / "train") if by_train else "",
            "max_failures": study.max_failures,
            "ray": (
                self._address() if by_train or trial.config.sync.name == "asynchronous" else ""
            ),
        }

    def _append(self, events: Iterable[Event]) -> bool:
        """Write events to the ledger; return False if the storage rejects them."""
        began = time.monotonic()
        try:
            self._ledger.append_all(list(events))
        except OSError as error:
            self._control.fail_storage(f"ledger: {error}")
            return False
        # trials are not silent while the driver waits for the storage
        self._watch.forgive(time.monotonic() - began)
        return True
