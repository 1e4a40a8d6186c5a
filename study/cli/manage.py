"""Commands for existing studies: ``list status show export resume extend retry pause stop cancel
edit import rerun``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError, refusals
from study.program import STORAGE, lns_study
from study.text import CELL, NAME, counted, duration, one_line, when
from trainers.object_store import local_folder, place_of

if TYPE_CHECKING:
    from study.config import Metric, StudyConfig
    from study.ledger.state import StudyState, TrialState


TRIAL = "the trial's id, or its beginning; `lns-study status STUDY` lists them"
PLACE = ("address", "insecure", "cpus", "max_concurrent", "tracking_uri")
"""Keys that determine where a study runs, without any effect on its results."""
Commands = Any  # argparse's subparsers; the class is generic only in type stubs
Run = Callable[["StudyConfig", bool, str, float], int]


def add_commands(commands: Commands, run: Run) -> None:
    """Add the commands; ``run`` runs all or some trials of a config and returns the exit code."""
    listing = add_command(commands, "list", _list, "list the studies of a storage", study=False)
    listing.add_argument(
        "--plain", action="store_true", help="separate columns by tabs, without headings"
    )
    status = add_command(
        commands, "status", _status, "show a study's progress, also while it runs elsewhere"
    )
    status.add_argument(
        "--watch", action="store_true", help="print it again every two seconds, until Ctrl-C"
    )
    show = add_command(commands, "show", _show, "show everything about one trial")
    show.add_argument("trial", metavar="TRIAL", help=TRIAL)
    export = add_command(commands, "export", _export, "write trials, or their epochs, as a table")
    export.add_argument(
        "--format",
        choices=("csv", "json", "jsonl", "parquet"),
        help="format of the table (default: by the output's ending, else csv)",
    )
    export.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="file to write, - for standard output (default: STUDY.csv or similar in the working"
        " folder, if it does not exist yet)",
    )
    export.add_argument(
        "--epochs", action="store_true", help="one row per epoch instead of one per trial"
    )
    _add_runs(commands, run)
    _add_wishes(commands)
    take = add_command(
        commands,
        "import",
        _import,
        "take finished trials from another study instead of running them",
    )
    take.add_argument(
        "source",
        metavar="FROM",
        help="the other study: its name in the same storage, or its folder",
    )
    rerun = add_command(
        commands,
        "rerun",
        _rerun,
        "train a trial again and compare whether every figure is bit-equal",
    )
    rerun.add_argument("trial", metavar="TRIAL", help=TRIAL)


def _add_runs(commands: Commands, run: Run) -> None:
    def command(name: str, text: str, only: str) -> argparse.ArgumentParser:
        parser = add_command(commands, name, lambda options: _again(options, run, only), text)
        parser.add_argument(
            "--plain", action="store_true", help="one line per epoch instead of a live table"
        )
        return parser

    resume = "continue a paused or interrupted study"
    retry = "run only the failed trials of a study again"
    for parser in (command("resume", resume, "unfinished"), command("retry", retry, "failed")):
        parser.add_argument(
            "overrides",
            metavar="key=value",
            nargs="*",
            help=f"change where it runs: {', '.join(PLACE)}; for example address=null",
        )
    extend = command(
        "extend", "change a study and run the additions: seeds, rows, samples, epochs", "all"
    )
    extend.add_argument(
        "overrides",
        metavar="key=value",
        nargs="+",
        help="for example seeds=[0,1,2,3,4] or search.num_samples=100",
    )


def _add_wishes(commands: Commands) -> None:
    for name, text in {
        "pause": "start no more trials of a running study until `resume`; running trials continue",
        "stop": "start no more trials of a running study, and end it after the running trials",
        "cancel": (
            "end a running study: its trials write a checkpoint after the current epoch, if that"
            " takes no longer than 20 s, and resume from it when the study is run again"
        ),
    }.items():
        add_command(commands, name, functools.partial(_ask, name), text)
    edit = add_command(commands, "edit", _edit, "change the limits of a running study")
    edit.add_argument(
        "overrides",
        metavar="limits.KEY=VALUE",
        nargs="+",
        help="for example limits.hours=5 or limits.trials=null",
    )


def add_command(
    commands: Commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    *,
    study: bool = True,
) -> argparse.ArgumentParser:
    """Add a command with ``--storage`` and, unless ``study`` is False, the positional ``STUDY``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    if study:
        parser.add_argument("study", metavar="STUDY", help="the study's name, or its folder")
    add_storage(parser)
    parser.set_defaults(command=command)
    return parser


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--storage``."""
    text = "folder of all studies, s3://bucket/prefix or gs://bucket/prefix (default: studies)"
    parser.add_argument("--storage", default=STORAGE, help=text)


def _open(options: argparse.Namespace) -> tuple[Path, StudyState]:
    from study.manage.studies import find, read_whole

    with refusals():
        folder = find(options.study, options.storage)
        state = read_whole(folder)
    name = state.config.name
    if state.damage:
        print(f"lns-study: {one_line(name, NAME)}: {state.damage}", file=sys.stderr)
    return folder, state


def _list(options: argparse.Namespace) -> int:
    from study.manage.studies import folders, overview

    with refusals():
        lines = [overview(folder) for folder in folders(options.storage)]
    if not lines:
        print(
            f"no studies in {place_of(local_folder(options.storage))}; run one with"
            f" `{lns_study('run', 'quickstart')}`"
        )
        return 0
    lines.sort(key=lambda line: -float(line["time"]))
    cells = [
        [
            one_line(str(line["name"]), CELL if options.plain else NAME),
            *(str(line[key]) for key in ("condition", "trials", "best")),
            when(line["time"]),
        ]
        for line in lines
    ]
    print_table(
        ["study", "condition", "trials", "best", "last heard of"], cells, plain=options.plain
    )
    return 0


def _status(options: argparse.Namespace) -> int:
    from study.views.console import PrintableConsole

    console = PrintableConsole()
    while True:
        folder, state = _open(options)
        if options.watch and console.is_terminal:
            console.clear()
        _print_status(console, folder, state)
        if not options.watch:
            return 0
        time.sleep(2)


def _print_status(console: Any, folder: Path, state: StudyState) -> None:
    from study.execution.launched import launch_stages
    from study.manage.studies import condition
    from study.results.utilisation import first_epoch
    from study.views.progress import render

    now = condition(folder, state)
    limits = state.limits or dataclasses.asdict(state.config.limits)
    set_limits = ", ".join(f"{key} {value}" for key, value in limits.items() if value is not None)
    console.print(
        f"{one_line(state.config.name, NAME)}: {now}"
        + (f"; limits: {set_limits}" if set_limits else ""),
        markup=False,
        highlight=False,
    )
    console.print(render(state, now=time.time() if now == "running" else None))
    run = state.runs[-1] if state.runs else None
    for stages in filter(None, (launch_stages(run), first_epoch(run))):
        console.print(stages, markup=False, highlight=False)


def _show(options: argparse.Namespace) -> int:
    from study.manage.studies import find_trial

    folder, state = _open(options)
    with refusals():
        trial = find_trial(state, options.trial)
    _print_trial(folder, trial, state.config.primary_metric)
    return 0


def _print_trial(folder: Path, trial: TrialState, metric: Metric) -> None:
    from study.config.yaml_loader import dump
    from study.ledger.state import name_of
    from study.results.objectives import objective, test_value

    print(
        f"{trial.id}: {name_of(trial)}: {trial.status}"
        + (f" ({trial.error})" if trial.error else "")
    )
    test = test_value(trial, metric) if trial.test else None
    facts = {
        "sampled": trial.params or None,
        metric.final_words: f"{metric.figure(test)}{metric.unit}" if test is not None else None,
        "time": duration(seconds) if (seconds := objective(trial, "seconds")) is not None else None,
        "restarts": trial.restarts,
        "Ray actor": trial.actor or None,
        "code": ", ".join(trial.commits) or None,
        "checkpoints": trial.checkpoints_left() or None,
        "study": str(folder),
    }
    print(dump({key: value for key, value in facts.items() if value is not None}), end="")
    print(dump({"config": trial.config}))
    names = list(
        dict.fromkeys(name for event in trial.reports.values() for name in event["metrics"])
    )
    lines = [
        [str(epoch), *(f"{event['metrics'].get(name, float('nan')):.5g}" for name in names)]
        for epoch, event in sorted(trial.reports.items())
    ]
    print_table(["epoch", *names], lines)


def _export(options: argparse.Namespace) -> int:
    from study.manage.export import EXPORTS, export

    folder, state = _open(options)
    to_output = options.output == "-"
    named = options.output and not to_output
    form = options.format or (Path(options.output).suffix.removeprefix(".") if named else "csv")
    if form not in EXPORTS:
        raise UserError(
            f"--output {options.output}: the ending must be one of {', '.join(EXPORTS)}; or give"
            " --format"
        )
    path = None if to_output else Path(options.output or f"{folder.name}.{form}")
    if path is not None and not named and os.path.lexists(path):
        raise UserError(f"{path}: exists; give `--output {path}` to replace it, or another file")
    try:
        count = export(state, path, form, epochs=options.epochs, named=bool(named))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror}); choose another file"
        ) from None
    if path is not None:
        print(f"{counted(count, 'epoch' if options.epochs else 'trial')} in {path}")
    return 0


def _again(options: argparse.Namespace, run: Run, only: str) -> int:
    from study.execution.control import Wish, ask
    from study.ledger.lock import is_locked
    from study.ledger.state import FAILED, ONLY_FAILED
    from study.manage.extend import extended
    from study.manage.studies import continued

    folder, state = _open(options)
    if only != "all":
        _check_place(options)
    with refusals():
        locked = is_locked(folder)
    if locked:
        if only != "unfinished" or options.overrides:
            stop = lns_study("stop", options.study, storage=options.storage)
            raise UserError(
                f"{state.config.name}: is running; wait for it, or stop it with `{stop}`"
            )
        ask(folder, wish=Wish.RUN)
        print(f"{state.config.name}: is running; if it was paused, it continues")
        return 0
    if only == ONLY_FAILED and not state.damage and FAILED not in state.counts():
        return _say_nothing_failed(options, state)
    with refusals():
        study = continued(extended(state, options.overrides), folder)
    return run(study, options.plain, only, options.began)


def _check_place(options: argparse.Namespace) -> None:
    """Check that overrides only change where a study runs.

    Raises:
        UserError: an override has another key.
    """
    for override in options.overrides:
        if override.partition("=")[0] not in PLACE:
            extend = lns_study("extend", options.study, override, storage=options.storage)
            raise UserError(
                f"{override}: would change the study; resume and retry accept only"
                f" {', '.join(PLACE)}; to change it: `{extend}`"
            )


def _say_nothing_failed(options: argparse.Namespace, state: StudyState) -> int:
    from study.ledger.state import ENDED

    left = sum(trial.status not in ENDED for trial in state.trials)
    again = lns_study("resume", options.study, storage=options.storage)
    print(
        f"{state.config.name}: no trial has failed, so there is nothing to retry"
        + (f"; {left} are left, run them with: {again}" if left else "")
    )
    return 0


def _ask(name: str, options: argparse.Namespace) -> int:
    from study.execution.control import Wish, ask

    folder, state = _running(options)
    ask(folder, wish=Wish[name.upper()])
    left = {
        "pause": f"`{lns_study('resume', options.study, storage=options.storage)}` continues it",
        "stop": "it ends after the running trials",
        "cancel": "its trials end after the current epoch",
    }
    print(f"{state.config.name}: asked to {name}; {left[name]}")
    return 0


def _edit(options: argparse.Namespace) -> int:
    from study.execution.control import ask
    from study.manage.extend import extended

    extend = lns_study("extend", options.study, *options.overrides, storage=options.storage)
    folder, state = _running(options, f"; to change its limits: {extend}")
    for override in options.overrides:
        if not override.startswith("limits."):
            extend = lns_study("extend", options.study, override, storage=options.storage)
            raise UserError(
                f"edit {override}: only limits can be changed while a study runs; stop it and use"
                f" `{extend}`"
            )
    with refusals():
        now = (
            dataclasses.replace(
                state, plan=state.plan | {"study": state.plan["study"] | {"limits": state.limits}}
            )
            if state.limits
            else state
        )
        limits = dataclasses.asdict(extended(now, options.overrides).limits)
    ask(folder, limits=limits)
    given = ", ".join(f"{key} {value}" for key, value in limits.items() if value is not None)
    print(f"{state.config.name}: limits are now {given or 'none'}")
    return 0


def _running(options: argparse.Namespace, else_: str = "") -> tuple[Path, StudyState]:
    """Return folder and state of a running study; ``else_`` is added to the error's advice.

    Raises:
        UserError: the study is not running.
    """
    from study.ledger.lock import is_locked

    folder, state = _open(options)
    if not is_locked(folder):
        again = lns_study("resume", options.study, storage=options.storage)
        raise UserError(f"{state.config.name}: is not running; to continue it: {again}{else_}")
    return folder, state


def _import(options: argparse.Namespace) -> int:
    from study.manage.extend import take_over
    from study.manage.studies import find

    folder, state = _open(options)
    with refusals():
        taken, left = take_over(folder, find(options.source, options.storage))
    again = lns_study("resume", options.study, storage=options.storage)
    print(
        f"{state.config.name}: took {taken} finished trials over; {left} are left"
        + (f", run them with: {again}" if left else "")
    )
    return 0


def _rerun(options: argparse.Namespace) -> int:
    from study.api import run_study
    from study.ledger.state import name_of
    from study.manage.rerun import rerun
    from study.manage.studies import find_trial
    from study.views.console import PrintableConsole
    from study.views.progress import PlainView

    _, state = _open(options)
    console = PrintableConsole()
    with refusals():
        trial = find_trial(state, options.trial)
        done = rerun(
            state,
            trial,
            lambda study: run_study(study, PlainView(console), lambda line: None).state,
        )
    if not done.differences:
        print(
            f"{trial.id} ({name_of(trial)}): every figure of"
            f" {counted(len(done.again.reports), 'epoch')} came out bit-equal"
        )
        return 0
    print(f"{trial.id} ({name_of(trial)}): NOT bit-equal:", file=sys.stderr)
    for line in done.differences[:20]:
        print(f"  {line}", file=sys.stderr)
    return 1


def print_table(headings: list[str], lines: list[list[str]], *, plain: bool = False) -> None:
    """Print a table with aligned columns; with ``plain``, tabs and no headings."""
    headings, *lines = [[one_line(cell, CELL) for cell in line] for line in [headings, *lines]]
    if plain:
        for line in lines:
            print("\t".join(cell.replace("\t", " ") for cell in line))
        return
    widths = [
        max(len(line[column]) for line in [headings, *lines]) for column in range(len(headings))
    ]
    for line in [headings, *lines]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
