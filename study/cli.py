"""The command line: ``lns-study run | plan | report | ui | ...``, also ``python -m study``; see :mod:`study.cli_manage` for the rest.

Exit codes: see :data:`EXIT_CODES`, which ``--help`` prints. Heavy imports (torch, Ray, MLflow) wait until a command needs them, so
``--help`` is quick.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli_manage import add_commands
from study.cli_tracking import add_tracking_commands
from study.errors import UserError, refusals
from study.program import STORAGE, lns_study

if TYPE_CHECKING:
    from rich.console import Console

    from study.config import StudyConfig
    from study.engine import Outcome, View
    from trainers.workers.node import Node

DESCRIPTION = """\
Run a study: train the same network in several number formats, several seeds each, and compare the test errors.

  lns-study run quickstart              the four-row table with a small budget: two minutes, or seconds on digits
  lns-study run table                   the full table on MNIST (12 trials of 20 epochs)
  lns-study run table 'seeds=[0,1,2,3,4]' more seeds; what has run is not run again
  lns-study plan search                 what a study would run, and how long it would take
  lns-study status table                where a study stands, also from another terminal
  lns-study report table                print the table again, renew the report, send MLflow what it lacks
  lns-study ui                          open the runs in MLflow's web interface
"""

LEFT = 3
"""Exit code of a study that ended in order with trials left."""
EXIT_CODES = """\
exit codes:
  0    done
  1    a trial failed, MLflow lacks something, figures differ (rerun, reconcile), doctor found a fault; or a mistake of ours (traceback)
  2    the input cannot work; nothing was started
  3    ended in order with trials left: stop, cancel or a limit; the same command goes on
  130  interrupted (Ctrl-C, SIGTERM); the same command goes on
"""

RUN_DESCRIPTION = """\
Run a study, or continue one: trials that have finished are not run again, interrupted ones go on from their last checkpoint.

CONFIG is a YAML file, or the name of one in conf/study (table, quickstart). After it come changes:

  key=value     set a key              trial.epochs=3   seeds=[0,1]   trial.data.train_size=6000   name=my-study
                trial. may be left out epochs=3         precision.format=lns12
  group=file    swap a file of conf/   model=mlp_128    data=digits   precision=lns16   budget=small

Values are YAML: null, true, 0.1, [0,1], "text: with a colon". Quote brackets for shells that expand them: 'seeds=[0,1]'.

  --dry-run prints every key and every trial, and starts nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(options.command(options))
    except UserError as error:
        print(f"lns-study: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlns-study: interrupted", file=sys.stderr)
        return 130


def _interrupt(*_: object) -> None:
    """End as cleanly as with Ctrl-C, also where a script's ``&`` made this process ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="lns-study", description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_plan(commands)
    _add_report(commands)
    _add_ui(commands)
    add_commands(commands, _run_config)
    add_tracking_commands(commands)
    _add_doctor(commands)
    _add_simulate(commands)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ``run CONFIG --plain key=value`` is understood too, which argparse alone refuses."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if [word for word in rest if word.startswith("-")] or (rest and not hasattr(options, "overrides")):
        parser.error(f"unknown argument {rest[0]!r}; see lns-study --help")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="run or continue a study",
        description=RUN_DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("config", metavar="CONFIG", help="YAML file, or a name in conf/study")
    run.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    run.add_argument("--dry-run", action="store_true", help="print the resolved config and trials, start nothing")
    run.add_argument("--plain", action="store_true", help="one line an epoch instead of a live table (the default when piped)")
    run.set_defaults(command=_run)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="print the trials, resources and expected time of a study, start nothing", description=(
        "Print what `lns-study run` with the same arguments would run: the trials, those left out and why, the resources of a trial, and, "
        "from what earlier studies in the storage took, the expected time. Starts nothing."))  # fmt: skip
    plan.add_argument("config", metavar="CONFIG", help="YAML file, or a name in conf/study")
    plan.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    plan.set_defaults(command=_plan)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser("simulate", help="how long a study would take on more machines, without running it", description=(
        "Simulate a study's trials and scheduler on numbers of slots (trials at a time): makespan, utilisation, what is ended early, load "
        "on MLflow. Times and curves come from studies in the storage where they have like trials, else from --seconds and synthetic "
        "curves."))  # fmt: skip
    simulate.add_argument(
        "config", metavar="CONFIG", help="YAML file, a name in conf/study, or a study that there is: its name or folder"
    )
    simulate.add_argument("--storage", help="folder of all studies, in which CONFIG is looked for first")
    simulate.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    simulate.add_argument(
        "--slots", type=int, nargs="+", default=[1, 10, 100, 1000], help="trials at a time (default: 1 10 100 1000)"
    )
    simulate.add_argument("--seconds", type=float, default=10.0, help="an epoch where none was recorded (default: 10)")
    simulate.set_defaults(command=_simulate)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="check this machine, or a study's ledger and checkpoints, and repair these", description=(
        "Check what studies need of this machine, or, of a study, its ledger and checkpoints, and say how to mend what is not as it "
        "should be."))  # fmt: skip
    doctor.add_argument(
        "study", metavar="STUDY", nargs="?", help="look at this study (its name, or its folder), not at the machine"
    )
    doctor.add_argument("--repair", action="store_true", help="make a damaged ledger again from what checkpoints and MLflow know")
    doctor.add_argument("--storage", default="studies", help="folder of all studies (default: studies)")
    doctor.add_argument(
        "--tracking-uri", help="MLflow store to ask (default: the study's, or the storage's database); none asks none"
    )
    doctor.add_argument("--address", help="Ray cluster to ask (default: start a local Ray)")
    doctor.set_defaults(command=_doctor)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="print a study's table and renew its report", description=(
        "Print the table of a study, write its report again from its ledger, and send MLflow whatever it lacks "
        "(after a tracking server was away)."))  # fmt: skip
    report.add_argument("study", metavar="STUDY", help="the study's name, or its folder")
    report.add_argument("--storage", default="studies", help="folder of all studies (default: studies)")
    report.add_argument("--tracking-uri", help="MLflow store to send to (default: the study's own)")
    forms = "the table as Markdown or LaTeX, or the trials as csv or parquet, besides the page"
    report.add_argument("--format", choices=("html", "md", "csv", "parquet", "latex"), default="html", help=forms)
    report.set_defaults(command=_report)


def _add_ui(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ui = commands.add_parser("ui", help="open the studies in MLflow's web interface", description=(
        "Serve MLflow's web interface for a storage folder on 127.0.0.1, until Ctrl-C."))  # fmt: skip
    ui.add_argument("--storage", default="studies", help="folder of all studies (default: studies)")
    store = "another MLflow database to serve, such as sqlite:////path/mlflow.db (default: the storage's)"
    ui.add_argument("--tracking-uri", "--backend-store-uri", dest="tracking_uri", metavar="URI", help=store)
    ui.add_argument("--port", type=int, default=5000, help="port to listen on (default: 5000)")
    team = ui.add_argument_group("for a team, with logins, over PostgreSQL (docs/tracking.md)")
    team.add_argument("--team", action="store_true", help="ask for logins; the rest is for this only")
    team.add_argument("--workers", type=int, help="processes that answer requests (default: 4)")
    team.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    team.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="a name by which it may be called, beside 127.0.0.1; can be repeated",
    )
    team.add_argument(
        "--artifacts", metavar="WHERE", help="folder, or s3://... , of artifacts (default: the storage's artifacts)"
    )
    ui.set_defaults(command=_ui)


def _run(options: argparse.Namespace) -> int:
    from trainers.workers.node import Node

    if not options.dry_run:
        print("Loading the study; checking its data and trials ...", flush=True)
    with nullcontext() if options.dry_run else Node() as node:  # it loads torch for the trials while this process does
        from study.compose import load

        with refusals():
            study = load(
                options.config, options.overrides, lambda line: print(line, file=sys.stderr), download=not options.dry_run
            )
        if node is None:
            return _dry_run(study)
        return _run_config(study, options.plain, again=lns_study("run", options.config, *options.overrides), node=node)


def _run_config(study: StudyConfig, plain: bool, only: str = "all", again: str = "", node: Node | None = None) -> int:
    """Run a study's config; ``again`` is the command that continues it."""
    from rich.console import Console

    from study.engine import run_study

    console = Console()
    again = again or lns_study("resume", study.slug, storage=study.storage)
    try:
        outcome = run_study(study, _view(study, console, plain), lambda line: _say(console, line), only, node)
    except KeyboardInterrupt:
        print(f"\nInterrupted. Finished epochs are kept; the same command continues: {again}", file=sys.stderr)
        return 130
    _print_outcome(outcome, study.storage)
    if outcome.failed or outcome.tracking_error:
        return 1
    return LEFT if outcome.state.outcome == "stopped" else 0


def _plan(options: argparse.Namespace) -> int:
    from study.compose import load
    from study.estimate import describe_plan
    from study.plan import make_plan

    with refusals():
        study = load(options.config, options.overrides, lambda line: print(line, file=sys.stderr), download=False)
        plan = make_plan(study, download=False)
    for line in describe_plan(plan):
        print(line)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    import dataclasses

    from study.cli_manage import print_table
    from study.ledger import read_ledger
    from study.manage import folders
    from study.plan import make_plan
    from study.progress import duration
    from study.simulate import recorded_errors, recorded_seconds, simulate
    from study.state import fold

    with refusals():
        study = _study_or_config(options)
        if min(options.slots) < 1 or not options.seconds > 0:
            raise UserError(
                f"--slots {options.slots} --seconds {options.seconds}: must be positive; use for example --slots 8 64"
            )
        if study.search.adaptive:
            study = dataclasses.replace(study, search=dataclasses.replace(study.search, algorithm="random"))
        plan = make_plan(study, download=False)
    states = [fold(read_ledger(folder)) for folder in folders(study.storage)]
    seconds = recorded_seconds(plan, states, options.seconds)
    error = recorded_errors(states, next(iter(study.search.objectives)))
    lines = []
    for slots in options.slots:
        found = simulate(plan, slots, seconds, error)
        lines.append(
            [str(slots), duration(found.makespan), f"{100 * (1 - found.idle):.0f} %", str(found.early), f"{found.epochs}", f"{found.saved}",
             f"{found.requests:.2g}"]
        )  # fmt: skip
    print(f"{study.name}: {len(plan.trials)} trials")
    print_table(["slots", "makespan", "utilisation", "ended early", "epochs", "epochs saved", "MLflow requests/s"], lines)
    return 0


def _study_or_config(options: argparse.Namespace) -> StudyConfig:
    """The config of a file or in conf/study, else of a study that there is; the other way round where ``--storage`` says in which storage.

    Raises:
        ValueError: there is none.
    """
    import dataclasses

    from study.compose import change, find_study, load
    from study.manage import find, read

    where = [f"storage={options.storage}"] if options.storage else []
    folder = None
    try:
        folder = None if not where and find_study(options.config) else find(options.config, options.storage or STORAGE)
    except ValueError:
        with suppress(ValueError):
            folder = find(options.config, options.storage or STORAGE)
    if folder is None:
        return load(options.config, [*where, *options.overrides], lambda line: print(line, file=sys.stderr), download=False)
    return dataclasses.replace(change(read(folder).config, options.overrides), storage=str(folder.parent))


def _doctor(options: argparse.Namespace) -> int:
    from study.doctor import examine, examine_study, repair_study

    def say(line: str) -> None:
        print(line, flush=True)

    if options.repair and options.study is None:
        raise UserError("--repair: mends the ledger of one study; name it: lns-study doctor STUDY --repair")
    if options.study is not None:
        with refusals():
            look = repair_study if options.repair else examine_study
            return 0 if look(options.study, options.storage, options.tracking_uri, say) else 1
    findings = examine(options.storage, options.tracking_uri, options.address, say)
    return 0 if all(finding.good for finding in findings) else 1


def _dry_run(study: StudyConfig) -> int:
    import yaml

    from study.plan import make_plan

    with refusals():
        plan = make_plan(study, download=False)
    print(yaml.safe_dump(plan.study.to_dict(), sort_keys=False, allow_unicode=True))
    print(f"# {len(plan.trials)} trials:")
    for trial in plan.trials:
        precision = trial.config.precision
        size = f"{trial.config.epochs} epochs, {trial.config.workers} worker(s)"
        print(f"#   {trial.id}  {trial.row}, seed {trial.seed}: {precision.format}, {size}")
    if any(trial.config.data.name == "mnist" and trial.config.data.root is None for trial in plan.trials):
        _print_download()
    return 0


def _print_download() -> None:
    from trainers.data import describe_download  # loads torch

    print(f"# A run would download MNIST first: {describe_download()}")
    print("# If that failed, data.name=auto would be digits; data.name=mnist would be refused.")


def _view(study: StudyConfig, console: Console, plain: bool) -> View:
    from study.preflight import local_cpus
    from study.progress import LiveView, PlainView

    concurrent = min(study.max_concurrent or 10**6, max(1, local_cpus(study) // (study.trial.workers * study.trial.threads)))
    return PlainView(console, concurrent) if plain or not console.is_terminal else LiveView(console, concurrent)


def _report(options: argparse.Namespace) -> int:
    from study.config import StudyConfig
    from study.engine import report_study

    direct = Path(options.study)
    with refusals():
        folder = direct if (direct / "ledger.jsonl").exists() else StudyConfig(name=options.study, storage=options.storage).folder
    outcome = report_study(folder, lambda line: print(line, file=sys.stderr), options.tracking_uri)
    _print_outcome(outcome, str(folder.parent))
    if options.format != "html":
        from study.report_formats import write_format

        print(f"{options.format}: {write_format(outcome.state, outcome.report, options.format)}")
    return 1 if outcome.tracking_error else 0


def _ui(options: argparse.Namespace) -> int:
    from study.config import default_tracking_uri
    from study.preflight import check_writable
    from study.tracking_uri import reveal
    from study.ui import check_port, check_servable, serve

    with refusals():
        uri = reveal(options.tracking_uri or default_tracking_uri(options.storage))
    storage = Path(options.storage).expanduser().resolve()
    if options.team:
        return _ui_of_team(options, uri, storage)
    with refusals():
        for name in ("workers", "host", "allow_host", "artifacts"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')}: is for a team's server, which asks for logins; add --team")
        check_servable(uri)
        check_writable(storage, "storage")
        check_port(options.port)
    return serve(uri, storage / "artifacts", options.port, _say_plainly)


def _ui_of_team(options: argparse.Namespace, uri: str, storage: Path) -> int:
    from study.preflight import check_writable
    from study.team import WORKERS, Team, check, serve
    from study.ui import HOST, check_servable

    artifacts = options.artifacts or str(storage / "artifacts")
    file = uri.removeprefix("sqlite:///")
    team = Team(
        uri=uri if file == uri else f"sqlite:///{Path(file).resolve()}",
        storage=storage,
        artifacts=artifacts if "://" in artifacts else str(Path(artifacts).expanduser().resolve()),
        host=options.host or HOST,
        port=options.port,
        workers=WORKERS if options.workers is None else options.workers,
        names=tuple(options.allow_host or ()),
    )
    with refusals():
        check_servable(uri)
        check_writable(storage, "storage")
        check(team)
    return serve(team, _say_plainly)


def _say_plainly(line: str) -> None:
    print(line, flush=True)


def _print_outcome(outcome: Outcome, storage: str) -> None:
    from study.report import render_text
    from study.ui import how_to_open

    print(f"\n{render_text(outcome.state)}")
    print(f"\nReport:  {outcome.report / 'report.html'}")
    study = outcome.state.config
    if outcome.tracking == "none":
        later = lns_study("sync", study.slug, "--tracking-uri", "...", storage=storage)
        print(f"MLflow:  nothing was sent; `{later}` sends it later")
    else:
        print(f"MLflow:  {how_to_open(outcome.tracking, storage, outcome.page)}")
    if outcome.tracking_error:
        to = [] if outcome.tracking == study.tracking else ["--tracking-uri", outcome.tracking]
        again = lns_study("sync", study.slug, *to, storage=storage)
        print(f"MLflow lacks part of this study ({outcome.tracking_error}); send it with: {again}", file=sys.stderr)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
