"""The command ``run``, and what it prints of a study's outcome."""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from study.cli.manage import Commands
from study.cli.stored import add_modes, has_mode, is_stored, load_config, run_stored
from study.errors import refusals
from study.program import STORAGE, lns_study
from study.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from study.config import StudyConfig
    from study.lifecycle import Outcome
    from trainers.workers.node import Node


LEFT = 3
"""Exit code of a study that was stopped on request with trials left."""
EXIT_CODES = """\
exit codes:
  0    done
  1    a trial failed, MLflow lacks data, figures differ (run --verify,
       report --verify, mlflow verify), studies have not run (reproduce),
       doctor found a fault, the storage became unwritable while a study
       ran (full, removed, moved: repair it and repeat the same command), or a
       bug (traceback)
  2    invalid input; nothing was started
  3    ended in order with trials left: stop or a limit; repeat the same
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

If there is no config CONFIG, `run CONFIG` continues the stored study of this
name, as `run --resume CONFIG` always does.
"""


def add_run(commands: Commands) -> None:
    """Add the command ``run`` to argparse's subparsers."""
    run = commands.add_parser(
        "run",
        help="run or continue a study; also extend a stored one (--extend), repeat its failed"
        " trials (--retry-failed), or repeat and compare one trial (--verify)",
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
    add_modes(run, runs=True)
    run.set_defaults(command=_run)


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a study: its config, overrides, and its small form."""
    parser.add_argument(
        "config", metavar="CONFIG", help="YAML or Python file, or name in conf/study"
    )
    parser.add_argument(  # the default keeps argparse from listing it as required in errors
        "overrides", metavar="key=value", nargs="*", default=[], help="changes to the config"
    )
    parser.add_argument(
        "--small", action="store_true", help="the study's small form, defined by its key `small`"
    )


def _run(options: argparse.Namespace) -> int:
    from trainers.workers.node import Node

    if has_mode(options):
        return run_stored(options, functools.partial(_train, options))
    if not options.dry_run:
        print("Loading the study; checking its data and trials ...", flush=True)
    # the node process imports torch for the trials; this process does not need it
    with nullcontext() if options.dry_run else Node() as node:
        with refusals():
            stored = is_stored(options)
            study = None if stored else load_config(options, download=not options.dry_run)
        if study is None:
            return run_stored(options, functools.partial(_train, options, node=node))
        small = ["--small"] if options.small else []
        words = ["run", options.config, *small, *options.overrides]
        again = lns_study(*words, storage=options.storage or STORAGE)
        return _train(options, study, again=again, node=node)


def _train(
    options: argparse.Namespace,
    study: StudyConfig,
    only: str = "all",
    *,
    again: str = "",
    node: Node | None = None,
) -> int:
    """Run a config with the options of ``run``; return the exit code."""
    if options.dry_run:
        return _dry_run(study)
    plain = options.plain or options.job
    began = options.began
    code = run_config(study, plain, only, began, again=again, node=node, job=options.job)
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

    ``again`` is the command that continues the study (default: ``run --resume``), ``began`` the
    start time of this one, and ``job`` whether a job controller started it.
    """
    from study.lifecycle import run_study
    from study.views.console import PrintableConsole
    from study.views.view import make_view

    console = PrintableConsole()
    again = again or lns_study("run", "--resume", study.slug, storage=study.storage)
    try:
        view, say = make_view(console, plain), lambda line: _say(console, line)
        outcome = run_study(study, view, say, only, node, began, job)
    except KeyboardInterrupt:
        print(
            f"\nInterrupted. Finished epochs are kept; the same command continues: {again}",
            file=sys.stderr,
        )
        return 130
    print_outcome(outcome, study.storage)
    if outcome.failed or outcome.tracking_error:
        return 1
    return LEFT if outcome.state.outcome == "stopped" else 0


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


def say_plainly(line: str) -> None:
    """Print one line at once."""
    print(line, flush=True)


def print_outcome(outcome: Outcome, storage: str) -> None:
    from study.evidence.record import read_record
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
        later = lns_study("mlflow", "sync", name, "--tracking-uri", "...", storage=storage)
        print(f"MLflow:  nothing was sent; `{later}` sends it later")
    else:
        print(f"MLflow:  {how_to_open(outcome.tracking, storage, outcome.page)}")
    if outcome.tracking_error:
        to = naming(outcome.tracking, storage)
        if not to and outcome.tracking != study.tracking:
            to = ["--tracking-uri", outcome.tracking]
        again = lns_study("mlflow", "sync", name, *to, storage=storage)
        print(
            f"MLflow lacks part of this study ({outcome.tracking_error}); send it with: {again}"
            f"{advice(outcome.tracking, outcome.tracking_error)}",
            file=sys.stderr,
        )


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
