"""Commands for studies: ``init list status show export pause stop import``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError, refusals
from study.program import STORAGE, lns_study
from study.text import CELL, NAME, counted, duration, one_line, when
from trainers.object_store import local_folder, place_of

if TYPE_CHECKING:
    from study.config import Metric
    from study.ledger.state import StudyState, TrialState


TRIAL = "the trial's id, or its beginning; `lns-study status STUDY` lists them"
INDENT = "    "
Commands = Any  # argparse's subparsers; the class is generic only in type stubs


def add_commands(commands: Commands) -> None:
    """Add the commands to argparse's subparsers."""
    new = commands.add_parser(
        "init",
        help="write a study to start from: NAME.yaml with comments, and NAME.py with its data",
        description="Write a study of your own data that runs as it stands: NAME.yaml and NAME.py.",
    )
    new.add_argument("file", metavar="NAME.yaml", type=Path, help="file to write; must not exist")
    new.set_defaults(command=_init)
    listing = add_command(
        commands,
        "list",
        _list,
        "list the studies of a storage; `list --available` lists those that `run NAME` knows, with"
        " their questions",
        study=False,
    )
    listing.add_argument(
        "--available",
        action="store_true",
        help="list the studies of ./conf/study and of this package instead; those with (--small)"
        " have a small form, which runs in minutes on two cores",
    )
    listing.add_argument(
        "--plain", action="store_true", help="separate columns by tabs, without headings"
    )
    add_json(listing)
    status = add_command(
        commands, "status", _status, "show a study's progress, also while it runs elsewhere"
    )
    status.add_argument(
        "--watch", action="store_true", help="print it again every two seconds, until Ctrl-C"
    )
    add_json(status)
    _add_requests(commands)
    _add_results(commands)
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


def _add_results(commands: Commands) -> None:
    show = add_command(commands, "show", _show, "show everything about one trial")
    show.add_argument("trial", metavar="TRIAL", help=TRIAL)
    add_json(show)
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


def _add_requests(commands: Commands) -> None:
    stop = add_command(
        commands,
        "stop",
        lambda options: _ask("cancel" if options.now else "stop", options),
        "end a running study after its running trials; `stop --now` after their current epoch",
    )
    stop.add_argument(
        "--now",
        action="store_true",
        help="end the trials too: each writes a checkpoint after the current epoch, if that takes"
        " no longer than 20 s, and resumes from it when the study is run again",
    )
    add_command(
        commands,
        "pause",
        lambda options: _ask("pause", options),
        "start no more trials of a running study until `run --resume`; running trials continue",
    )


def add_command(
    commands: Commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    *,
    study: bool = True,
    description: str = "",
) -> argparse.ArgumentParser:
    """Add a command with ``--storage`` and, unless ``study`` is False, the positional ``STUDY``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description or text[0].upper() + text[1:] + "."
    )
    if study:
        parser.add_argument("study", metavar="STUDY", help="the study's name, or its folder")
    add_storage(parser)
    parser.set_defaults(command=command)
    return parser


def add_storage(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str | None = STORAGE
) -> None:
    """Add the option ``--storage``; a ``default`` of None shows whether it was given."""
    text = "folder of all studies, s3://bucket/prefix or gs://bucket/prefix (default: studies)"
    parser.add_argument("--storage", default=default, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``."""
    text = "print one JSON document instead (null for a number that is not finite)"
    parser.add_argument("--json", action="store_true", help=text)


def print_json(document: Any) -> int:
    """Print a document of dicts, lists and scalars as JSON in ASCII; return exit code 0."""
    from study.report.documents import finite

    print(json.dumps(finite(document), indent=1))
    return 0


def open_study(study: str, storage: str) -> tuple[Path, StudyState]:
    """Return a study's folder and state, given its name or its folder; warn of a damaged ledger.

    Raises:
        UserError: there is no such study, or it cannot be read.
    """
    from study.ledger.studies import find, read_whole

    with refusals():
        folder = find(study, storage)
        state = read_whole(folder)
    name = state.config.name
    if state.damage:
        print(f"lns-study: {one_line(name, NAME)}: {state.damage}", file=sys.stderr)
    return folder, state


def _init(options: argparse.Namespace) -> int:
    from study.cli.init import write_study

    with refusals():
        study, code = write_study(options.file)
    print(f"Written: {study} and {code}; run it with: {lns_study('run', str(study))}")
    return 0


def _list(options: argparse.Namespace) -> int:
    from study.ledger.studies import folders
    from study.report.documents import entry_document, overview

    if options.available:
        return _available(options)
    with refusals():
        if options.json:
            return print_json([entry_document(folder) for folder in folders(options.storage)])
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


def _available(options: argparse.Namespace) -> int:
    from study.config.compose import questions

    with refusals():
        found = questions()
    if options.json:
        return print_json(
            [
                {"name": name, "question": question, "small": small}
                for name, (question, small) in found.items()
            ]
        )
    width = min(shutil.get_terminal_size().columns, 100)
    for name, (question, small) in found.items():
        print(f"{name}  (--small)" if small else name)
        for line in textwrap.wrap(question or "no question", width - len(INDENT)):
            print(INDENT + line)
    print("\nlns-study plan NAME shows the trials of one and, where it is known, their time.")
    return 0


def _status(options: argparse.Namespace) -> int:
    from study.report.documents import study_document
    from study.views.console import PrintableConsole

    console = PrintableConsole()
    while True:
        folder, state = open_study(options.study, options.storage)
        if options.json:
            return print_json(study_document(folder, state))
        if options.watch and console.is_terminal:
            console.clear()
        _print_status(console, folder, state)
        if not options.watch:
            return 0
        time.sleep(2)


def _print_status(console: Any, folder: Path, state: StudyState) -> None:
    from study.engines.launch_times import launch_stages
    from study.ledger.studies import condition
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
    from study.ledger.studies import find_trial
    from study.report.documents import trial_document

    folder, state = open_study(options.study, options.storage)
    with refusals():
        trial = find_trial(state, options.trial)
    if options.json:
        return print_json(trial_document(folder, trial))
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
    from study.report.export import EXPORTS, export

    folder, state = open_study(options.study, options.storage)
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


def _ask(name: str, options: argparse.Namespace) -> int:
    from study.engines.control import Wish, ask
    from study.ledger.lock import is_locked

    folder, state = open_study(options.study, options.storage)
    resume = lns_study("run", "--resume", options.study, storage=options.storage)
    if not is_locked(folder):
        raise UserError(f"{state.config.name}: is not running; to continue it: {resume}")
    ask(folder, wish=Wish[name.upper()])
    asked = {
        "pause": f"pause; `{resume}` continues it",
        "stop": "stop; it ends after the running trials",
        "cancel": "stop now; its trials end after the current epoch",
    }
    print(f"{state.config.name}: asked to {asked[name]}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from study.ledger.studies import find
    from study.plan.extend import take_over

    folder, state = open_study(options.study, options.storage)
    with refusals():
        taken, left = take_over(folder, find(options.source, options.storage))
    again = lns_study("run", "--resume", options.study, storage=options.storage)
    print(
        f"{state.config.name}: took {taken} finished trials over; {left} are left"
        + (f", run them with: {again}" if left else "")
    )
    return 0


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
