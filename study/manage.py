"""What can be done with studies that there are: list, look at, export, extend, take finished trials from another, repeat a trial.

Everything here reads ledgers; what must write one takes its lock first and so refuses while the study runs.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from study.compose import change
from study.config import RowConfig, StudyConfig
from study.configurations import groups_of_seeds
from study.errors import UserError, refusals
from study.ledger import FILE, Ledger, describe_damage, how_to_repair, is_locked, open_ledger
from study.objectives import objective
from study.plan import make_plan, trial_id
from study.program import lns_study
from study.provenance import different_data
from study.state import ENDED, FAILED, FINISHED, StudyState, TrialState, flatten, fold
from trainers.config import TrialConfig

EXPORTS = ("csv", "json", "parquet")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""With these begins what spreadsheets compute, and may so run (OWASP, "CSV injection")."""
UNTIMED = ("samples_per_second",)
"""Metrics that depend on the machine's mood, left out where results are compared."""


def find(study: str, storage: str) -> Path:
    """The folder of a study, from its name or its folder.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    direct = Path(study)
    if (direct / FILE).exists():
        return direct.resolve()
    folder = StudyConfig(name=study, storage=storage).folder
    if (folder / FILE).exists():
        return folder
    names = ", ".join(path.name for path in folders(storage)) or "none"
    raise ValueError(
        f"study {study!r}: no such study in {Path(storage).resolve()} (there: {names}); name its storage with --storage"
    )


def folders(storage: str) -> list[Path]:
    """The folders of all studies in a storage, by name."""
    return sorted(path.parent for path in Path(storage).expanduser().resolve().glob(f"*/{FILE}"))


def read(folder: Path) -> StudyState:
    """The state of the study in ``folder``, as far as its ledger is whole; ``damage`` says what is not.

    Raises:
        ValueError: its ledger holds no plan.
    """
    contents = open_ledger(folder)
    state = fold(contents.events)
    if contents.damage:
        state.damage = f"the ledger is damaged: {describe_damage(contents.damage)}; to repair it: {how_to_repair(folder)}"
    if not state.plan:
        raise ValueError(
            f"{folder}: {state.damage}"
            if state.damage
            else f"{folder}: its ledger holds no plan; run the study first with `{lns_study('run', 'CONFIG')}`"
        )
    return state


def whole(folder: Path) -> StudyState:
    """The same, for what would spread the gaps of a damaged ledger.

    Raises:
        ValueError: its ledger holds no plan, or is damaged.
    """
    state = read(folder)
    if state.damage:
        raise ValueError(f"{folder}: {state.damage}")
    return state


def condition(folder: Path, state: StudyState) -> str:
    """``running``, ``damaged``, or how the last run ended; ``interrupted`` where it was killed."""
    if is_locked(folder):
        return "running"
    if state.damage:
        return "damaged"
    return state.outcome or "interrupted"


def find_trial(state: StudyState, key: str) -> TrialState:
    """The trial with that id, or the only one whose id begins so, or of a row's ``label #number``.

    Raises:
        ValueError: there is none, or more than one.
    """
    exact = [trial for trial in state.known.values() if trial.id == key]
    found = exact or [
        trial
        for trial in state.known.values()
        if trial.id.startswith(key) or key in (f"{trial.row} #{trial.number}", f"{trial.row}, seed {trial.seed}")
    ]
    if len(found) != 1:
        some = ", ".join(trial.id for trial in list(state.known.values())[:5])
        raise ValueError(
            f"trial {key!r}: {len(found)} trials match; give an id such as {some} (`{lns_study('status', 'STUDY')}` lists them)"
        )
    return found[0]


# ------------------------------------------------------------------------------------------------------------------ export


def export_rows(state: StudyState, *, epochs: bool = False) -> list[dict[str, Any]]:
    """Flat dicts, one a trial of the last plan (or one an epoch): identity, config under dotted keys, status, times, metrics."""
    rows = []
    for trial in state.trials:
        base = _identity(trial)
        if epochs:
            rows += [base | {"epoch": epoch, **event["metrics"]} for epoch, event in sorted(trial.reports.items())]
        else:
            last = trial.reports[trial.epoch]["metrics"] if trial.reports else {}
            derived = {name: objective(trial, name) for name in ("bits", "seconds")}
            rows.append(
                base | {"epoch": trial.epoch, **last, **trial.test, **derived, "restarts": trial.restarts, "error": trial.error}
            )
    return rows


def _identity(trial: TrialState) -> dict[str, Any]:
    config = {f"config.{key}": value for key, value in flatten(trial.config).items()}
    return {"id": trial.id, "row": trial.row, "number": trial.number, "seed": trial.seed, "status": trial.status, **config}


def export(state: StudyState, path: Path, form: str, *, epochs: bool = False) -> int:
    """Write :func:`export_rows` to ``path`` as csv, json (lines) or parquet; the number of rows."""
    rows = export_rows(state, epochs=epochs)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table, path)
        return len(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        if form == "csv":
            write_csv(file, names, rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return len(rows)


def write_csv(file: TextIO, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows under a heading, nothing in which a spreadsheet would take for a formula."""
    writer = csv.writer(file)
    writer.writerow([_cell(name) for name in names])
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)


def _cell(value: Any) -> Any:
    """A value, after an apostrophe if it begins like a formula (``=cmd|...``) and is no number."""
    if isinstance(value, str) and value.startswith(FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value


# ----------------------------------------------------------------------------------------------------------- extend, import


def extended(state: StudyState, overrides: Sequence[str]) -> StudyConfig:
    """The study's config with ``key=value`` changes, for more seeds, rows, samples or epochs.

    Raises:
        ValueError: a change that is no config, or one of the name or the storage, which would be another study.
    """
    for override in overrides:
        if override.partition("=")[0] in ("name", "storage"):
            run = lns_study("run", "CONFIG", override)
            raise ValueError(f"extend {override}: that would be another study; run it with `{run}`")
    return change(state.config, overrides)


def continuations(ledger: Ledger, state: StudyState, trials: Iterable[TrialState] | None = None) -> int:
    """Enter in the ledger, for every trial that an earlier one differs from in fewer epochs alone, what that one has done.

    The longer trial goes on from the shorter one's last checkpoint, and ends with the bits it would have had from the start. What
    changes after the shorter one's end (:mod:`trainers.config.schedule_changes`) may differ too. Only for trials whose epochs do
    not depend on how many there are.

    Args:
        trials: which; None for the plan's.

    Returns:
        The number of trials that go on.
    """
    begun = [trial for trial in state.known.values() if trial.status == FINISHED and trial.epoch == trial.epochs]
    shorter = {(trial.epochs, _beginning(trial.config, trial.epochs)): trial for trial in begun}
    lengths = sorted({epochs for epochs, _ in shorter}, reverse=True)
    found = 0
    for trial in state.trials if trials is None else trials:
        if trial.reports or trial.status in ENDED or not _independent(trial.config):
            continue
        sources = (shorter.get((n, _beginning(trial.config, n))) for n in lengths if n < trial.epochs)
        found += any(_go_on(ledger, trial, source) for source in sources if source is not None)
    return found


def _go_on(ledger: Ledger, trial: TrialState, source: TrialState) -> bool:
    """Let ``trial`` continue from the last checkpoint of ``source``; False if none is left."""
    kept = source.checkpoints_left()
    if not kept:
        return False
    _copy_reports(ledger, source, source.id, trial.id)
    for path in reversed(kept):
        ledger.append("checkpoint", trial=trial.id, epoch=source.epoch, path=path, source=source.id)
    return True


def _beginning(config: dict[str, Any], epochs: int) -> str:
    """What decides the first ``epochs`` epochs."""
    values = {key: value for key, value in config.items() if key not in ("epochs", "gpus")}
    values["data"] = {key: value for key, value in config["data"].items() if key != "root"}
    values["changes"] = [change for change in config.get("changes", []) if change["epoch"] < epochs]
    return json.dumps(values, sort_keys=True)


def _independent(config: dict[str, Any]) -> bool:
    """Whether an epoch is the same however many follow: one process, and a learning rate that does not decay to the last one."""
    return bool(config["workers"] == 1 and config.get("lr_schedule", {}).get("decay", "constant") == "constant")


def take_over(folder: Path, source: Path) -> tuple[int, int]:
    """Enter finished trials of the study in ``source`` into the ledger of the one in ``folder``, where both planned the same
    trial.

    Returns:
        How many were taken, and how many trials the study still lacks.

    Raises:
        ValueError: either has no plan or is damaged, they saw different data, or the study is running.
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
    """Enter a finished trial of another study, with its times and its code."""
    origin = {"trial": known.id, "source": str(source)}
    times = {
        "started": {"time": known.started} if known.started else {},
        "finished": {"time": known.ended} if known.ended else {},
    }
    if known.relief:
        ledger.append("relieved", **origin, **times["started"], error="", relief=known.relief)
    ledger.append("started", **origin, **times["started"], commits=known.commits)
    _copy_reports(ledger, known, str(source), known.id)
    ledger.append("finished", **origin, **times["finished"], metrics=known.test)


def _copy_reports(ledger: Ledger, known: TrialState, source: str, trial: str) -> None:
    """Enter the epochs of ``known`` as those of ``trial``, with when, how long and by which code they were trained."""
    for epoch, event in sorted(known.reports.items()):
        ledger.append(
            "report",
            trial=trial,
            epoch=epoch,
            time=event["time"],
            metrics=event["metrics"],
            seconds=known.took.get(epoch),
            commits=known.commits,
            source=source,
        )


def _check_data(ours: StudyState, theirs: StudyState) -> None:
    if found := different_data(ours.plan.get("data", []), theirs.plan.get("data", [])):
        one, other = found
        raise ValueError(
            f"data {one['name']!r}: the two studies saw different files (sha256 {one['digest'][:12]} and {other['digest'][:12]}); run the "
            "trials again instead"
        )


# -------------------------------------------------------------------------------------------------------------------- rerun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
    """What came of repeating a trial: ``differences`` are empty if every figure had the same bits."""

    trial: TrialState
    again: TrialState
    differences: list[str]


def rerun(state: StudyState, trial: TrialState, run: Callable[[StudyConfig], StudyState]) -> Repetition:
    """Train a trial again from the start, in a study of its own that is thrown away, and compare every figure.

    Args:
        run: runs a study and returns its state.

    Raises:
        ValueError: the trial has no results to compare with.
    """
    if not trial.reports:
        raise ValueError(f"trial {trial.id}: has no results to compare with; choose one that has reported")
    config = TrialConfig.from_dict(trial.config)
    with tempfile.TemporaryDirectory() as storage:
        study = dataclasses.replace(
            state.config, name="rerun", trial=dataclasses.replace(config, seed=TrialConfig.seed), rows=[RowConfig(label=trial.row)],
            seeds=[config.seed], space={}, search=type(state.config.search)(), baseline=None, digits={}, comparable={},
            limits=type(state.config.limits)(), storage=storage, tracking_uri=None,
        )  # fmt: skip
        with refusals():
            (planned,) = make_plan(study).trials
        if planned.id != trial_id(config):
            raise UserError(
                f"trial {trial.id}: this machine makes another trial of its config (device=auto?); run it where it ran"
            )
        (again,) = run(study).trials
    return Repetition(trial=trial, again=again, differences=differences(trial, again))


def differences(trial: TrialState, again: TrialState) -> list[str]:
    """Where two runs of a trial have different figures, times aside; epochs that only one reported count only if both
    finished."""
    found = []
    for epoch in sorted(set(trial.reports) & set(again.reports)):
        ours, theirs = (_comparable(t.reports[epoch]["metrics"]) for t in (trial, again))
        found += [f"epoch {epoch}: {name}: {ours.get(name)} and {theirs.get(name)}" for name in _unequal(ours, theirs)]
    if trial.status == again.status == FINISHED:
        found += [f"{name}: {trial.test.get(name)} and {again.test.get(name)}" for name in _unequal(trial.test, again.test)]
    elif trial.status == FINISHED:
        found.append(f"the repetition {again.status}: {again.error}")
    return found


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name not in UNTIMED and not name.startswith(("time/", "energy/", "telemetry/"))
    }


def _unequal(ours: dict[str, float], theirs: dict[str, float]) -> Iterable[str]:
    for name in ours.keys() | theirs.keys():
        a, b = ours.get(name, math.inf), theirs.get(name, math.inf)
        if a != b and not (math.isnan(a) and math.isnan(b)):
            yield name


# --------------------------------------------------------------------------------------------------------------------- list


def overview(folder: Path) -> dict[str, Any]:
    """One study in a list: name, condition, trials, the best first objective, when it was last heard of."""
    contents = open_ledger(folder)
    events, state = contents.events, fold(contents.events)
    state.damage = describe_damage(contents.damage)
    if not state.plan:
        return {
            "name": folder.name,
            "condition": "damaged" if state.damage else "empty",
            "trials": "0",
            "best": "-",
            "time": events[-1]["time"] if events else 0.0,
        }
    metric, mode = next(iter(state.config.search.objectives.items()))
    values = [group.objectives[metric] for group in groups_of_seeds(state.trials, [metric]) if group.finished]
    usable = [value for value in values if math.isfinite(value)]
    best = (min if mode == "min" else max)(usable) if usable else None
    ended, failed = sum(trial.status in ENDED for trial in state.trials), sum(trial.status == FAILED for trial in state.trials)
    return {
        "name": state.config.name,
        "condition": condition(folder, state),
        "trials": f"{ended}/{len(state.trials)}" + (f", {failed} failed" if failed else ""),
        "best": f"{metric} {best:.4g}" if best is not None else "-",
        "time": max(event["time"] for event in events),  # what was taken over has the times of its source
    }
