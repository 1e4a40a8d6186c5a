"""Repair of a damaged ledger (``lns-study doctor STUDY --repair``) from its undamaged lines,
checkpoints and MLflow.

Undamaged events stay, in order. Where lines are lost, the events that a trial must have had are
restored: its start, epochs (from the history in its newest complete checkpoint, else from MLflow),
checkpoints and end. Restored events name their source under ``recovered``. Events of a trial that
was copied from another study are restored as copied, with the code that its other lines or its
checkpoints name. Times come from MLflow, else from the previous line. Restored epochs share the
seconds that MLflow has and the undamaged epochs do not, so the sum stays right. A finished trial
with an epoch that cannot be restored becomes unfinished: the next run trains it again.

The damaged file is kept beside the new one. The new one contains no password that an earlier
version wrote. If all plans are lost, the next ``lns-study run CONFIG`` writes a new plan, and the
events of its trials in the ledger count.

Limits: data that neither a checkpoint nor MLflow has stay lost: edited limits, restarts, the number
of CPUs, and, without MLflow, the seconds of a trial whose lines are all lost.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias, cast

from study.errors import UserError
from study.ledger.events import Added, Common, Event, TrialEvent, TrialValues, stamped, trial_of
from study.ledger.lines import HEADER, Damage, seal
from study.ledger.lock import take_lock
from study.ledger.log import FILE, Contents, describe_damage, make_header, new_id, open_ledger
from study.ledger.state import FINISHED, fold, study_without_password
from study.ledger.storage import write_lock
from study.ops.repair.sources import (
    CHECKPOINT,
    ENDS,
    Known,
    Names,
    add_known_to_mlflow,
    known_to_checkpoints,
)
from study.plan.checkpoints import checkpoints_of
from trainers.files import sync_folder, write_whole
from trainers.object_store import is_url, place_of

Restored: TypeAlias = TrialEvent | Added
KINDS = (*ENDS, "started", "report", "checkpoint", "added")
"""Events that can be restored."""
BESIDE = ("planned", "capacity", "ended", "edited", "restarted", "relieved", "damaged", HEADER)
"""Events that cannot be restored."""
ELIMINATION = "elimination"


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """Result of a repair.

    Attributes:
        kept: path of the damaged file; None if no file was damaged.
        recovered: restored events.
        lost: descriptions of what could not be restored.
        planned: whether the ledger has a plan.
    """

    kept: Path | None
    recovered: list[Event]
    lost: list[str]
    planned: bool


def needs_repair(folder: Path) -> str:
    """Describe the damage of the ledger in ``folder``; "" if it is undamaged."""
    contents = open_ledger(folder)
    if contents.damage:
        return describe_damage(contents.damage)
    if not contents.events and next(checkpoints_of(folder), None) is not None:
        return "there are checkpoints, and no ledger that knows of them"
    return ""


def repair(folder: Path, uri: str | None) -> Repaired:
    """Repair the ledger in ``folder``.

    Args:
        folder: folder of the study.
        uri: tracking URI of the MLflow store with the study's runs; None to use no store.

    Raises:
        ValueError: another process writes the ledger, or the store does not answer.
        UserError: the ledger is in an object store, where it cannot be replaced.
    """
    if is_url(place := place_of(folder)):
        raise UserError(
            f"{place}: a ledger in an object store is not repaired in place; repair a copy of it in"
            " a folder, as docs/howto/repair-and-resume.md says"
        )
    with take_lock(folder) as lock:
        contents = open_ledger(folder)
        known = known_to_checkpoints(folder)
        id_ = contents.id or _common_id(known) or new_id()
        restoration = _Restoration(contents, known)
        marks: set[str] = set()
        if uri is not None:
            name, names = _name(folder, contents), _all_names(contents, known)
            marks = add_known_to_mlflow(known, name, id_, uri, names, restoration.may_be_own)
        restoration.restore()
        write_lock(lock, {})
        kept = _replace(folder, id_, restoration, marks)
        write_lock(lock, {"lines": 1 + len(restoration.events)})
    planned = any(event["event"] == "planned" for event in restoration.events)
    return Repaired(
        kept=kept, recovered=restoration.recovered, lost=restoration.lost, planned=planned
    )


def _common_id(known: dict[str, Known]) -> str:
    """Return the id of the ledger that most checkpoints name, or ""."""
    named = Counter(
        str(entry.origin["ledger"]) for entry in known.values() if entry.origin.get("ledger")
    )
    return named.most_common(1)[0][0] if named else ""


def _name(folder: Path, contents: Contents) -> str:
    plans = [event for event in contents.events if event["event"] == "planned"]
    return str(plans[-1]["study"]["name"]) if plans else folder.name


def _all_names(contents: Contents, known: dict[str, Known]) -> Names:
    """Return the names of all metrics of a study."""
    reports = [event["metrics"] for event in contents.events if event["event"] == "report"]
    reports += [values for entry in known.values() for values in entry.epochs.values()]
    ends = [event["metrics"] for event in contents.events if event["event"] == FINISHED]
    lasts = [entry.end for entry in known.values() if entry.end]
    ends += [end["metrics"] for end in lasts if end["event"] == FINISHED]
    return Names(
        reported={name for values in reports for name in values},
        final={name for values in ends for name in values},
    )


class _Restoration:
    """The events of the new ledger, from the undamaged events of the old one and the evidence.

    Attributes:
        events: events in order, once :meth:`restore` has been called.
        recovered: restored events.
        lost: descriptions of what could not be restored.
    """

    def __init__(self, contents: Contents, known: dict[str, Known]) -> None:
        self._damage = {
            damage.number: damage for damage in contents.damage if damage.number is not None
        }
        self._whole = list(zip(contents.numbers, contents.events, strict=True))
        self._numbers, self._times = contents.numbers, [event["time"] for event in contents.events]
        # the first line is the header
        self._gaps = [gap for gap in sorted(self._damage) if gap > 1] if self._whole else [1]
        self._known, self._state = known, fold(contents.events)
        self._events_of: dict[str, list[tuple[int, TrialEvent]]] = defaultdict(list)
        for number, event in self._whole:
            if "trial" in event:
                self._events_of[event["trial"]].append((number, event))
        self._plans = [number for number, event in self._whole if event["event"] == "planned"]
        self._inserted: dict[int, list[Event]] = defaultdict(list)
        self._inserted_of: dict[str, list[Restored]] = defaultdict(list)
        self._latest: dict[tuple[int, str], float] = defaultdict(lambda: -math.inf)
        self.recovered: list[Event] = []
        self.lost: list[str] = []
        self.events: list[Event] = []

    def may_be_own(self, mark: str) -> bool:
        """Return whether a mark may belong to one of the ledger's events, lost ones included."""
        if self._state.is_own(mark) or not self._whole:
            return True
        moment = float(mark)
        places = {bisect(self._numbers, gap) for gap in self._gaps}
        return bisect(self._times, moment) in places

    def restore(self) -> None:
        """Fill the gaps, reset incomplete trials, and sort all events."""
        for gap in self._gaps:
            if self._is_plan(gap):
                self._inserted[gap].append(
                    {"event": "lost", "time": self._between(gap), "what": "planned"}
                )
        for trial in sorted({*self._events_of, *self._known, *self._state.known}):
            self._restore(
                trial, self._events_of[trial], self._known.get(trial, Known(source=ELIMINATION))
            )
        if self._whole or not self._damage:
            self.lost += [
                f"{damage}{_meaning(damage)}"
                for number, damage in sorted(self._damage.items())
                if self._is_lost(number)
            ]
        else:
            self.lost.append(f"all {len(self._damage)} lines; the next run makes a new plan")
        numbered = [(number, 1, event) for number, event in self._whole]
        numbered += [
            (number, 0, event)
            for number, events in self._inserted.items()
            for event in sorted(events, key=itemgetter("time"))
        ]
        self.events = [event for *_, event in sorted(numbered, key=lambda entry: entry[:2])]
        self.recovered = [
            event for events in self._inserted.values() for event in events if "recovered" in event
        ]

    def _restore(self, trial: str, events: list[tuple[int, TrialEvent]], known: Known) -> None:
        """Restore the lost events of a trial."""
        first = events[0][0] if events else math.inf
        if trial not in self._state.known and self._plans and self._adaptive:
            self._add(trial, known, first)
        taken = self._taken_over(events, known)
        begun = min((number for number, event in events if event["event"] == "started"), default=0)
        for number in self._not_started(events, known):
            at = self._insert(
                _with({"event": "started", "trial": trial}, taken or _code(known)),
                self._before(events, number),
                number,
                ELIMINATION,
            )
            begun = begun or at or 0
            if at is not None and taken and "commits" not in taken:
                self.lost.append(
                    f"trial {trial}: the commit of the code that trained it; it was taken over from"
                    f" {taken['source']}"
                )
        epochs = {event["epoch"]: number for number, event in events if event["event"] == "report"}
        ends = [number for number, event in events if event["event"] in ENDS]
        end = min(ends, default=math.inf)
        for epoch, metrics in sorted(known.epochs.items()):
            if epoch not in epochs:
                after = max((n for e, n in epochs.items() if e < epoch), default=begun)
                before = min((n for e, n in epochs.items() if e > epoch), default=end)
                report = _with(
                    {"event": "report", "trial": trial, "epoch": epoch, "metrics": metrics}, taken
                )
                if (
                    gap := self._insert(report, after, before, known.source, known.times.get(epoch))
                ) is not None:
                    epochs[epoch] = gap
        noted = {event["epoch"] for _, event in events if event["event"] == "checkpoint"}
        for epoch, path in sorted(known.paths.items()):
            if epoch not in noted and epoch in epochs:
                self._insert(
                    {"event": "checkpoint", "trial": trial, "epoch": epoch, "path": str(path)},
                    epochs[epoch],
                    math.inf,
                    CHECKPOINT,
                )
        known.share_seconds([*(event for _, event in events), *self._inserted_of[trial]])
        self._restore_end(trial, known, epochs, ends)

    def _restore_end(
        self, trial: str, known: Known, epochs: dict[int, int], ends: list[int]
    ) -> None:
        planned = self._state.known.get(trial)
        epoch_count = planned.epochs if planned else int(known.config.get("epochs", 0))
        for event in (known.end, *(event for _, event in reversed(self._events_of[trial]))):
            if event and event["event"] == FINISHED:
                epoch_count = event.get("epochs") or epoch_count
        first = epoch_count if self._was_told(trial) else 1
        missing = [epoch for epoch in range(first, epoch_count + 1) if epoch not in epochs]
        if not ends and known.end and not (known.end["event"] == FINISHED and missing):
            self._insert(
                known.end, max(epochs.values(), default=0), math.inf, known.source, known.ended
            )
        finished = [
            number for number, event in self._events_of[trial] if event["event"] == FINISHED
        ]
        if not epoch_count and finished:  # the number of epochs that it needs is unknown
            missing = [
                gap
                for gap in self._gaps
                if gap < finished[0] and self._may_hold(gap, "report", trial)
            ]
        if finished and missing:
            self._whole = [entry for entry in self._whole if entry[0] not in finished]
            epochs_ = (
                f"epochs {', '.join(map(str, missing))}" if epoch_count else "some epochs, perhaps,"
            )
            self.lost.append(f"trial {trial}: {epochs_} are lost; it is trained again")

    def _was_told(self, trial: str) -> bool:
        """Return whether the trial was last started by ``ask``; such a trial only has its last
        epoch (:mod:`study.engines.ask_tell`)."""
        begun = [event for _, event in self._events_of[trial] if event["event"] == "started"]
        return bool(begun) and "pid" in begun[-1]

    def _insert(
        self, event: Restored, after: float, before: float, source: str, when: float | None = None
    ) -> int | None:
        """Put an event into the first gap between two numbers; return the gap, or None."""
        trial = event["planned"]["id"] if event["event"] == "added" else event["trial"]
        gaps = (gap for gap in self._gaps if after <= gap <= before)
        gap = next((gap for gap in gaps if self._may_hold(gap, event["event"], trial)), None)
        if gap is None:
            return None
        trial = trial_of(event)
        moment = self._between(
            gap, when if when is not None or self._whole else self._worked_on(trial)
        )
        moment = self._latest[gap, trial] = max(moment, self._latest[gap, trial])
        made = stamped(event, moment)
        made["recovered"] = source
        self._inserted[gap].append(made)
        self._inserted_of[trial].append(made)
        return gap

    def _may_hold(self, gap: int, kind: str, trial: str) -> bool:
        """Return whether the readable part of a lost line is compatible with an event."""
        hints = self._damage[gap].hints if self._whole else {}
        other_kind = hints.get("event") in (*KINDS, *BESIDE) and hints["event"] != kind
        other_trial = (
            hints.get("trial") in {*self._events_of, *self._known, *self._state.known}
            and hints["trial"] != trial
        )
        return not (other_kind or other_trial or self._is_plan(gap))

    def _between(self, gap: int, when: float | None = None) -> float:
        """Return ``when``, limited to the times of the lines before and after the gap.

        Without ``when``, return the time of the line before.
        """
        place = bisect(self._numbers, gap)
        before = self._times[place - 1] if place else -math.inf
        after = self._times[place] if place < len(self._times) else math.inf
        moment = before if when is None else min(max(when, before), after)
        return moment if math.isfinite(moment) else after if math.isfinite(after) else time.time()

    def _is_plan(self, gap: int) -> bool:
        """Return whether a lost line was a plan.

        True if its text says so, or if it follows the end of a run and the next line is not a plan.
        """
        place = bisect(self._numbers, gap)
        around = [event["event"] for _, event in self._whole[max(0, place - 1) : place + 1]]
        kind = self._damage[gap].hints.get("event") if self._whole else None
        return kind == "planned" or (
            place > 0 and len(around) == 2 and around[0] == "ended" and around[1] != "planned"
        )

    def _is_lost(self, number: int) -> bool:
        """Return whether nothing was restored for a lost line; a header needs no restoration."""
        recovered = any("recovered" in event for event in self._inserted[number])
        return not recovered and not (number == 1 and self._whole)

    def _worked_on(self, trial: str) -> float | None:
        """Return the time of a trial's oldest remaining checkpoint, or None."""
        paths = self._known[trial].paths.values() if trial in self._known else []
        return min((path.stat().st_mtime for path in paths), default=None)

    def _not_started(self, events: list[tuple[int, TrialEvent]], known: Known) -> Iterator[float]:
        """Yield the line numbers before which a ``started`` event of the trial is missing.

        Infinity means the end of the ledger.
        """
        if not events and (known.epochs or known.end):
            yield math.inf
        begun = False
        last = 0
        for number, event in events:
            begun = begun and not any(last < plan < number for plan in self._plans)
            last = number
            if event["event"] == "started":
                begun = True
            elif not begun and self._is_own(event) and event["event"] in ("report", *ENDS):
                begun = True
                yield number

    def _is_own(self, event: TrialEvent) -> bool:
        """Return whether the trial must have been started before this event.

        False for an epoch that another trial of the study trained and this one continues from.
        """
        return event.get("source") not in self._state.known

    def _taken_over(self, events: list[tuple[int, TrialEvent]], known: Known) -> Common:
        """Return the source and the commits of a trial that was copied from another study.

        The commits come from its lines or its checkpoints. The result is empty for a trial of this
        study.
        """
        from_elsewhere = [event for _, event in events if "source" in event and self._is_own(event)]
        if not from_elsewhere:
            return {}
        told = [commit for event in from_elsewhere for commit in event.get("commits", [])]
        code = [known.origin["code"]] if "code" in known.origin else []
        taken: Common = {"source": from_elsewhere[0]["source"]}
        if commits := list(dict.fromkeys(told)) or code:
            taken["commits"] = commits
        return taken

    def _before(self, events: list[tuple[int, TrialEvent]], number: float) -> int:
        """Return the last line number of the trial, or of the run's plan, before a line number."""
        return max(
            [0, *(n for n, _ in events if n < number), *(n for n in self._plans if n < number)]
        )

    @property
    def _adaptive(self) -> bool:
        """Whether the search proposes trials while the study runs."""
        search = self._state.config.search
        return search.adaptive or search.confirm > 0

    def _add(self, trial: str, known: Known, first: float) -> None:
        planned = known.origin.get("trial")
        if planned and known.config:
            values: TrialValues = planned | {"config": known.config}
            self._insert({"event": "added", "planned": values}, self._plans[0], first, CHECKPOINT)


def _with(event: TrialEvent, origin: Common) -> TrialEvent:
    """Return an event with its origin."""
    return cast(TrialEvent, {**event, **origin})


def _code(known: Known) -> Common:
    """Return the code that checkpoints name, as part of an event."""
    return {"code": known.origin["code"]} if "code" in known.origin else {}


def _meaning(damage: Damage) -> str:
    """Describe the effect of a lost line for the user."""
    meanings = {
        "planned": "; a run's plan: its code version is unknown, the next run makes a new plan",
        "edited": "; limits that were edited: edit them again",
        "failed": "; the trial is tried again",
        "stopped": "; the scheduler decides again",
        "finished": "; the trial continues from its checkpoint, and ends with the same figures",
        "report": "; the trial is trained again from its last checkpoint",
    }
    return meanings.get(damage.hints.get("event", ""), "")


def _replace(folder: Path, id_: str, restoration: _Restoration, marks: set[str]) -> Path | None:
    """Replace the ledger atomically, and keep the old one beside it.

    ``marks`` are the marks of the ledger's runs in MLflow, some of which may belong to lost events.
    """
    path = folder / FILE
    last = restoration.events[-1]["time"] if restoration.events else time.time()
    kept = (
        path.with_name(f"{FILE}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        if path.exists()
        else None
    )
    restoration.events.append(
        {
            "event": "repaired",
            "time": last,
            "damaged": kept.name if kept else None,
            "lost": restoration.lost,
            "marks": sorted(marks),
        }
    )
    first = restoration.events[0]["time"]
    lines = [
        seal(
            event | {"study": study_without_password(event["study"])}
            if "study" in event
            else event,
            number,
        )
        for number, event in enumerate([make_header(id_, first), *restoration.events], 1)
    ]
    if kept is not None:
        try:
            os.link(path, kept)
        except OSError:  # a file system without hard links
            write_whole(kept, path.read_bytes())
    write_whole(path, b"".join(lines), sync=True)
    sync_folder(folder)
    return kept
