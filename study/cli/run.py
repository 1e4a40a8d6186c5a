"""Commands that plan, run, simulate and report a study."""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli.manage import Commands, add_storage, print_table
from study.errors import UserError, refusals
from study.program import STORAGE, lns_study
from study.text import counted, duration
from trainers.object_store import place_of

if TYPE_CHECKING:
    from rich.console import Console

    from study.api import Outcome, View
    from study.config import StudyConfig
    from trainers.workers.node import Node


LEFT = 3
"""Exit code of a study that was stopped on request with trials left."""
EXIT_CODES = """\
exit codes:
  0    done
  1    a trial failed, MLflow lacks data, figures differ (rerun, reconcile,
       report --verify), studies have not run (reproduce), doctor found a fault,
       the storage became unwritable while a study ran (full, removed, moved:
       repair it and repeat the same command), or a bug (traceback)
  2    invalid input; nothing was started
  3    ended in order with trials left: stop, cancel or a limit; repeat the same
       command to continue (0 with run --job)
  130  interrupted (Ctrl-C, SIGTERM, SIGUSR1); repeat the same command to
       continue
"""

RUN_DESCRIPTION = """\
Run or continue a study: finished trials are not run again, interrupted ones
resume from their last checkpoint.

CONFIG is a YAML file, the name of one in conf/study (table, quickstart), or a
Python file that defines a StudyConfig (FILE.py, or FILE.py:NAME if it defines
several). Changes follow it:

  key=value     set a key              trial.epochs=3  seeds=[0,1]  name=mine
                trial. may be left out epochs=3        precision.format=lns12
  group=file    swap a file of conf/   model=mlp_128   data=digits  budget=small

Values are YAML: null, true, 0.1, [0,1], "text: with a colon". Quote brackets
for shells that expand them: 'seeds=[0,1]'.

  --small runs the study's small form: minutes on two cores, under the name
  NAME-small.
  --dry-run prints every key and every trial, and starts nothing.
"""


def add_run(commands: Commands) -> None:
    """Add the command ``run`` to argparse's subparsers."""
    run = commands.add_parser(
        "run",
        help="run or continue a study",
        description=RUN_DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_study(run)
    run.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and trials, start nothing"
    )
    run.add_argument(
        "--plain",
        action="store_true",
        help="one line per epoch instead of a live table (the default when piped)",
    )
    run.add_argument(
        "--job",
        action="store_true",
        help="for job controllers: --plain, and exit code 0 instead of 3; if the controller"
        " restarts a run that was killed or ended by a signal, the new run keeps its requests"
        " (stop, pause) and edited limits",
    )
    run.set_defaults(command=_run)


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a study: its config, overrides, and its small form."""
    parser.add_argument(
        "config", metavar="CONFIG", help="YAML or Python file, or name in conf/study"
    )
    _add_changes(parser)
    parser.add_argument(
        "--small", action="store_true", help="the study's small form, defined by its key `small`"
    )


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """Add ``key=value``; the default keeps argparse from listing it as required in errors."""
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="changes to the config"
    )


def add_plan(commands: Commands) -> None:
    """Add the command ``plan`` to argparse's subparsers."""
    plan = commands.add_parser(
        "plan",
        help="print the trials, resources and expected time of a study, start nothing",
        description=(
            "Print what `lns-study run` with the same arguments would run: the trials, excluded"
            " trials with the reason, the resources per trial, and the expected time, estimated"
            " from earlier studies in the storage. If the data are on this machine, trials are"
            " checked on them. Starts nothing, and does not run the study's own code."
        ),
    )
    add_study(plan)
    plan.set_defaults(command=_plan)


def add_simulate(commands: Commands) -> None:
    """Add the command ``simulate`` to argparse's subparsers."""
    simulate = commands.add_parser(
        "simulate",
        help="estimate how long a study would take on more machines, without running it",
        description=(
            "Simulate a study's trials and scheduler on given numbers of slots (a trial takes one"
            " slot per worker): makespan, utilisation, trials ended early, load on MLflow. Times"
            " and curves come from similar trials of studies in the storage, else from --seconds"
            " and synthetic curves."
        ),
    )
    simulate.add_argument(
        "config",
        metavar="CONFIG",
        help="YAML or Python file, a name in conf/study, or an existing study: its name or folder",
    )
    simulate.add_argument("--storage", help="folder of all studies; CONFIG is searched there first")
    _add_changes(simulate)
    simulate.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=[1, 10, 100, 1000],
        help="numbers of slots to simulate (default: 1 10 100 1000)",
    )
    simulate.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="seconds per epoch if none was recorded (default: 10)",
    )
    simulate.set_defaults(command=_simulate)


def add_report(commands: Commands) -> None:
    """Add the command ``report`` to argparse's subparsers."""
    report = commands.add_parser(
        "report",
        help="print a study's table and rewrite its report",
        description=(
            "Print the table of a study, rewrite its report from its ledger, and send missing data"
            " to MLflow (for example after the tracking server was down)."
        ),
    )
    report.add_argument("study", metavar="STUDY", help="the study's name, or its folder")
    add_storage(report)
    report.add_argument("--tracking-uri", help="MLflow store to send to (default: the study's own)")
    forms = "also write the table as Markdown or LaTeX, or the trials as csv or parquet"
    report.add_argument(
        "--format", choices=("html", "md", "csv", "parquet", "latex"), default="html", help=forms
    )
    report.add_argument(
        "--verify",
        action="store_true",
        help="write nothing; recompute the report's figures from ledger and MLflow, and print"
        " the differences",
    )
    report.add_argument(
        "--run-checks",
        action="store_true",
        help="run the claims' own functions (check), which the study's ledger names; only use it"
        " for studies whose code you trust (default: keep the last report's verdicts)",
    )
    report.set_defaults(command=_report)


def _run(options: argparse.Namespace) -> int:
    from trainers.workers.node import Node

    if not options.dry_run:
        print("Loading the study; checking its data and trials ...", flush=True)
    # the node process imports torch for the trials; this process does not need it
    with nullcontext() if options.dry_run else Node() as node:
        from study.config.compose import load

        with refusals():
            study = load(
                options.config,
                options.overrides,
                lambda line: print(line, file=sys.stderr),
                download=not options.dry_run,
                small=options.small,
            )
        if node is None:
            return _dry_run(study)
        small = ["--small"] if options.small else []
        code = run_config(
            study,
            options.plain or options.job,
            began=options.began,
            again=lns_study("run", options.config, *small, *options.overrides),
            node=node,
            job=options.job,
        )
        return 0 if options.job and code == LEFT else code


def run_config(
    study: StudyConfig,
    plain: bool,
    only: str = "all",
    began: float | None = None,
    *,
    again: str = "",
    node: Node | None = None,
    job: bool = False,
) -> int:
    """Run a study's config and print its outcome; return the exit code.

    ``again`` is the command that continues the study, ``began`` the start time of this one, and
    ``job`` whether a job controller started it.
    """
    from study.api import run_study
    from study.views.console import PrintableConsole

    console = PrintableConsole()
    again = again or lns_study("resume", study.slug, storage=study.storage)
    try:
        view, say = make_view(console, plain), lambda line: _say(console, line)
        outcome = run_study(study, view, say, only, node, began, job)
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. Finished epochs are kept; the same command continues: {again}",
            file=sys.stderr,
        )
        return 130
    _print_outcome(outcome, study.storage)
    if outcome.failed or outcome.tracking_error:
        return 1
    return LEFT if outcome.state.outcome == "stopped" else 0


def _plan(options: argparse.Namespace) -> int:
    from study.config.compose import load
    from study.execution.preflight import check_here
    from study.plan.estimate import describe_plan
    from study.plan.plan import make_plan

    with refusals():
        study = load(
            options.config,
            options.overrides,
            lambda line: print(line, file=sys.stderr),
            download=False,
            small=options.small,
        )
        plan, unchecked = check_here(make_plan(study, download=False))
    _say_damage(study, f"; until then `{lns_study('run')}` would refuse")
    for line in describe_plan(plan):
        print(line)
    if unchecked:
        print(f"Not checked: {unchecked}. `{lns_study('run')}` does so before it starts anything.")
    return 0


SIMULATED = [
    "slots", "makespan", "utilisation", "ended early", "epochs", "epochs saved",
    "MLflow requests/s",
]  # fmt: skip
"""Column headings of the output of `lns-study simulate`."""


def _simulate(options: argparse.Namespace) -> int:
    import dataclasses

    from study.execution.simulate import recorded_errors, recorded_seconds, simulate
    from study.ledger.log import readable_ledgers
    from study.ledger.state import fold
    from study.manage.studies import folders
    from study.plan.estimate import describe_size
    from study.plan.plan import make_plan

    with refusals():
        study = _study_or_config(options)
        if min(options.slots) < 1 or not options.seconds > 0:
            raise UserError(
                f"--slots {options.slots} --seconds {options.seconds}: must be positive; use for"
                " example --slots 8 64"
            )
        if study.search.adaptive:
            search = dataclasses.replace(study.search, algorithm="random")
            study = dataclasses.replace(study, search=search)
        plan = make_plan(study, download=False)
        states = [fold(events) for events in readable_ledgers(folders(study.storage))]
    _say_damage(study)
    seconds = recorded_seconds(plan, states, options.seconds)
    error = recorded_errors(states, next(iter(study.search.objectives)))
    lines = []
    for slots in options.slots:
        found = simulate(plan, slots, seconds, error)
        if found.unfit:
            more = f"{counted(found.unfit, 'trial')} of more workers"
            lines.append([str(slots), more, *["-"] * (len(SIMULATED) - 2)])
            continue
        lines.append(
            [
                str(slots),
                duration(found.makespan),
                f"{100 * (1 - found.idle):.0f} %",
                str(found.early),
                f"{found.epochs}",
                f"{found.saved}",
                f"{found.requests:.2g}",
            ]
        )
    print(f"{study.name}: {describe_size(plan, len(plan.trials))}")
    print_table(SIMULATED, lines)
    return 0


def _say_damage(study: StudyConfig, consequence: str = "") -> None:
    """Print a warning if a study's ledger exists and is damaged."""
    from study.manage.studies import damage_of

    if damage := damage_of(study.folder):
        print(f"lns-study: {study.name}: {damage}{consequence}", file=sys.stderr)


def _study_or_config(options: argparse.Namespace) -> StudyConfig:
    """Return the config of a file, of a name in conf/study, or of an existing study.

    They are searched in this order; with ``--storage``, studies of that storage come first.

    Raises:
        ValueError: not found.
    """

    from study.config.compose import change, find_study, load
    from study.manage.studies import find, placed, read

    overrides = [f"storage={options.storage}"] if options.storage else []
    folder = None
    try:
        folder = (
            None
            if not overrides and find_study(options.config)
            else find(options.config, options.storage or STORAGE)
        )
    except ValueError:
        with suppress(ValueError):
            folder = find(options.config, options.storage or STORAGE)
    if folder is None:
        return load(
            options.config,
            [*overrides, *options.overrides],
            lambda line: print(line, file=sys.stderr),
            download=False,
        )
    return placed(change(read(folder).config, options.overrides), folder)


def _dry_run(study: StudyConfig) -> int:
    from study.config.yaml_loader import dump
    from study.plan.plan import make_plan

    with refusals():
        plan = make_plan(study, download=False)
    print(dump(plan.study.to_dict()))
    print(f"# {counted(len(plan.trials), 'trial')}:")
    for trial in plan.trials:
        precision = trial.config.precision
        epochs = counted(trial.config.epochs, "epoch")
        size = f"{precision.format}, {epochs}, {counted(trial.config.workers, 'worker')}"
        print(f"#   {trial.id}  {trial.row}, seed {trial.seed}: {size}")
    if plan.downloads:
        _print_download()
    return 0


def _print_download() -> None:
    from trainers.data import describe_download

    print(f"# A run would download MNIST first: {describe_download()}")
    print("# If that fails, data.name=auto takes digits instead, and data.name=mnist is refused.")


def make_view(console: Console, plain: bool = False) -> View:
    """Return a study's progress display for a notebook, a terminal, or a log (plain lines)."""
    from study.views.progress import LiveView, PlainView

    if console.is_jupyter:
        from study.views.notebook import NotebookView  # loads matplotlib

        return NotebookView()
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


def _report(options: argparse.Namespace) -> int:
    from study.api import report_study
    from study.manage.studies import find

    with refusals():
        folder = find(options.study, options.storage)
        if options.verify:
            return _verify(folder, options.tracking_uri, options.run_checks)
    outcome = report_study(
        folder,
        lambda line: print(line, file=sys.stderr),
        options.tracking_uri,
        run_checks=options.run_checks,
    )
    _print_outcome(outcome, place_of(folder.parent))
    if options.format != "html":
        from study.report.exports import write_format

        print(f"{options.format}: {write_format(outcome.state, outcome.report, options.format)}")
    return 1 if outcome.tracking_error else 0


def _verify(folder: Path, tracking_uri: str | None, run_checks: bool) -> int:
    from study.manage.studies import read
    from study.report.verify import verify

    differences = list(verify(folder, tracking_uri, run_checks=run_checks))
    for line in differences:
        print(line)
    count = len(differences)
    verified = "every figure is as computed again" if not count else counted(count, "difference")
    own = [claim.name for claim in read(folder).config.claims if claim.check]
    if own and not run_checks:
        verified += f"; without --run-checks not judged again: {', '.join(own)}"
    print(f"{folder.name}: {verified}")
    return int(bool(count))


def say_plainly(line: str) -> None:
    """Print one line at once."""
    print(line, flush=True)


def _print_outcome(outcome: Outcome, storage: str) -> None:
    from study.claims.record import read_record
    from study.report.claims import claims_text
    from study.report.tables import render_text
    from study.tracking.address import how_to_open, naming
    from study.tracking.sqlite import advice

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(f"\n{render_text(outcome.state, width)}")
    if claims := claims_text(read_record(outcome.report).get("claims", [])):
        print(claims)
    print(f"\nReport:  {outcome.report / 'report.html'}")
    study, name = outcome.state.config, outcome.report.parent.name
    if outcome.tracking == "none":
        later = lns_study("sync", name, "--tracking-uri", "...", storage=storage)
        print(f"MLflow:  nothing was sent; `{later}` sends it later")
    else:
        print(f"MLflow:  {how_to_open(outcome.tracking, storage, outcome.page)}")
    if outcome.tracking_error:
        to = naming(outcome.tracking, storage)
        if not to and outcome.tracking != study.tracking:
            to = ["--tracking-uri", outcome.tracking]
        again = lns_study("sync", name, *to, storage=storage)
        print(
            f"MLflow lacks part of this study ({outcome.tracking_error}); send it with: {again}"
            f"{advice(outcome.tracking, outcome.tracking_error)}",
            file=sys.stderr,
        )


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
