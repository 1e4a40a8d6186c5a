"""Extension of studies: more epochs from checkpoints, and trials copied from another study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.config.compose import change
from study.ledger.events import Event
from study.ledger.log import Ledger
from study.ledger.provenance import different_data
from study.ledger.state import ENDED, FINISHED, StudyState, TrialState
from study.ledger.studies import whole
from study.plan.identity import beginning_key
from study.program import lns_study


def extended(state: StudyState, overrides: Sequence[str]) -> StudyConfig:
    """Return the study's config with ``key=value`` changes: more seeds, rows, samples or epochs.

    Raises:
        ValueError: the changed config is not valid, or a change sets the name or the storage, which
            would make it another study.
    """
    for override in overrides:
        if override.partition("=")[0] in ("name", "storage"):
            run = lns_study("run", "CONFIG", override)
            raise ValueError(f"{override}: that would be another study; run it with `{run}`")
    return change(state.config, overrides)


def continuations(
    ledger: Ledger, state: StudyState, trials: Iterable[TrialState] | None = None
) -> int:
    """Copy the epochs of a shorter trial to every trial that differs only by more epochs.

    The longer trial resumes from the shorter trial's last checkpoint, and ends with the same bits
    as if it had trained from the start. Changes after the end of the shorter trial
    (:mod:`trainers.config.schedule_changes`) may differ too. Left out are trials whose epochs
    depend on the number of epochs, and loops of the user's own, which may depend on it.

    Args:
        ledger: ledger of the study.
        state: its state.
        trials: trials to continue; None for the plan's.

    Returns:
        The number of such trials.
    """
    begun = [
        trial
        for trial in state.known.values()
        if trial.status == FINISHED and trial.epoch == trial.epochs
    ]
    shorter = {(trial.epochs, beginning_key(trial.config, trial.epochs)): trial for trial in begun}
    lengths = sorted({epochs for epochs, _ in shorter}, reverse=True)
    found = 0
    for trial in state.trials if trials is None else trials:
        if trial.reports or trial.status in ENDED:
            continue
        if trial.own_loop or not _independent(trial.config):
            continue
        sources = (
            shorter.get((n, beginning_key(trial.config, n))) for n in lengths if n < trial.epochs
        )
        found += any(
            _continue_from(ledger, trial, source) for source in sources if source is not None
        )
    return found


def _continue_from(ledger: Ledger, trial: TrialState, source: TrialState) -> bool:
    """Let ``trial`` resume from the last checkpoint of ``source``; return whether there is one."""
    kept = source.checkpoints_left()
    if not kept:
        return False
    _copy_reports(ledger, source, source.id, trial.id)
    for path in reversed(kept):
        ledger.append(
            {
                "event": "checkpoint",
                "trial": trial.id,
                "epoch": source.epoch,
                "path": path,
                "source": source.id,
            }
        )
    return True


def _independent(config: dict[str, Any]) -> bool:
    """Return whether an epoch does not depend on the number of epochs.

    True for a learning rate that does not decay towards the last epoch, in one process or in a
    fixed number of processes that exchange gradients at every step.
    """
    in_step = config.get("sync", {}).get("name", "synchronous") == "synchronous"
    fixed = config["workers"] == 1 or (in_step and config.get("min_workers") is None)
    return fixed and config.get("lr_schedule", {}).get("decay", "constant") == "constant"


def take_over(folder: Path, source: Path) -> tuple[int, int]:
    """Copy finished trials from the study in ``source`` into the ledger of the one in ``folder``.

    Only trials in the plans of both studies are copied.

    Returns:
        The number of copied trials, and of trials that are still missing.

    Raises:
        ValueError: either study has no plan or is damaged, they saw different data, or the study is
            running.
    """
    before, other = whole(folder), whole(source)
    _check_data(before, other)
    with Ledger(folder) as ledger:
        taken = 0
        for trial in before.trials:
            known = other.known.get(trial.id)
            if trial.status != FINISHED and known is not None and known.status == FINISHED:
                _copy(ledger, known, source)
                taken += 1
    return taken, sum(trial.status != FINISHED for trial in before.trials) - taken


def _copy(ledger: Ledger, known: TrialState, source: Path) -> None:
    """Copy a finished trial of another study, with its times and its code."""
    id_, from_, events = known.id, str(source), list[Event]()
    code, machines = known.commits, known.machines
    if relief := known.relief:
        events.append(
            {"event": "relieved", "trial": id_, "source": from_, "error": "", "relief": relief}
        )
    events.append(
        {"event": "started", "trial": id_, "source": from_, "commits": code, "machines": machines}
    )
    for event in events:
        if known.started:
            event["time"] = known.started
        ledger.append(event)
    _copy_reports(ledger, known, from_, id_)
    end: Event = {"event": "finished", "trial": id_, "source": from_, "metrics": known.test}
    if known.ended:
        end["time"] = known.ended
    ledger.append(end)


def _copy_reports(ledger: Ledger, known: TrialState, source: str, trial: str) -> None:
    """Copy the epochs of ``known`` to ``trial``, with their times, seconds and code."""
    for epoch, event in sorted(known.reports.items()):
        ledger.append(
            {
                "event": "report",
                "trial": trial,
                "epoch": epoch,
                "time": event["time"],
                "metrics": event["metrics"],
                "seconds": known.took.get(epoch),
                "commits": known.commits,
                "machines": known.machines,
                "source": source,
            }
        )


def _check_data(ours: StudyState, theirs: StudyState) -> None:
    if found := different_data(ours.plan.get("data", []), theirs.plan.get("data", [])):
        one, other = found
        raise ValueError(
            f"data {one['name']!r}: the two studies saw different files (sha256"
            f" {one['digest'][:12]} and {other['digest'][:12]}); run the trials again instead"
        )
