"""The commands ``sync``, ``reconcile``, ``compare`` and ``dashboard``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli.manage import Commands, add_command, print_table
from study.errors import UserError, refusals
from study.program import lns_study
from study.text import NAME, one_line
from study.tracking.sqlite import advice
from trainers.files import check_own_folder, write_whole

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.tracking.reconcile import Audit


URI_HELP = "MLflow store (default: the study's own)"


def add_tracking_commands(commands: Commands) -> None:
    """Add the commands to the command line."""
    sync = add_command(
        commands, "sync", _sync, "send a study's missing data to MLflow, from its ledger"
    )
    sync.add_argument("--tracking-uri", help=URI_HELP)
    reconcile = add_command(
        commands,
        "reconcile",
        _reconcile,
        "compare MLflow with a study's ledger point by point, and repair differences",
    )
    reconcile.add_argument("--tracking-uri", help=URI_HELP)
    reconcile.add_argument("--check", action="store_true", help="compare only, change nothing")
    compare = add_command(
        commands, "compare", _compare, "compare two studies: matched trials, paired test, a picture"
    )
    compare.add_argument(
        "other",
        metavar="OTHER",
        help="the other study: its name in the same storage, or its folder",
    )
    compare.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="file of the picture (default: compared-with-OTHER.png in STUDY's report)",
    )
    dashboard = add_command(
        commands,
        "dashboard",
        _dashboard,
        "serve a study's report on 127.0.0.1, updated while it runs, until Ctrl-C",
    )
    dashboard.add_argument(
        "--port", type=int, default=5001, help="port to listen on (default: 5001)"
    )
    dashboard.add_argument(
        "--every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="seconds between updates (default: 10)",
    )


def _compare(options: argparse.Namespace) -> int:
    from study.manage.studies import find, read
    from study.report.compare import compare, draw, lines, verdict

    with refusals():
        folder, other = (find(name, options.storage) for name in (options.study, options.other))
        first, second = read(folder), read(other)
        found = compare(first, second)
    for state in (first, second):
        if state.damage:
            print(
                f"lns-study: {one_line(state.config.name, NAME)}: {state.damage}", file=sys.stderr
            )
    print_table(["row", "pairs", *found.names, "difference"], lines(found))
    print(f"\n{one_line(verdict(found))}")
    path = Path(options.output or folder / "report" / f"compared-with-{other.name}.png")
    with refusals():
        if not options.output:
            check_own_folder(path.parent)
    try:
        if options.output:
            path.write_bytes(draw(found))
        else:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, draw(found))
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror}); choose another file"
        ) from None
    print(f"Picture: {path}")
    return 0


def _dashboard(options: argparse.Namespace) -> int:
    from study.manage.studies import find, read
    from study.serve.dashboard import serve
    from study.serve.ui import listen

    with refusals():
        folder = find(options.study, options.storage)
        read(folder)
        listen(options.port).close()
        if not options.every > 0:
            raise UserError(
                f"--every {options.every}: must be positive; use for example --every 10"
            )
    return serve(folder, options.port, options.every, lambda line: print(line, flush=True))


def _study(options: argparse.Namespace, *, writes: bool = True) -> tuple[Path, StudyConfig]:
    """Return folder and config of a study; check that it is not running and its store answers.

    With ``writes`` a copy of a study is rejected, because the original's newer runs would count as
    wrong.
    """
    from study.ledger.lock import is_locked
    from study.manage.studies import continued, find, placed, whole
    from study.tracking.address import OFF, store_of
    from study.tracking.supervisor import check_tracking

    with refusals():
        folder = find(options.study, options.storage)
        study = (continued if writes else placed)(whole(folder).config, folder)
        study = dataclasses.replace(study, tracking_uri=store_of(study, options.tracking_uri))
        if study.tracking == OFF:
            raise UserError(
                f"{study.name}: has tracking_uri=none; name a store with --tracking-uri"
                " sqlite:///path/mlflow.db"
            )
        if is_locked(folder):
            raise UserError(f"{study.name}: is running and sends its data itself; wait for it")
        check_tracking(study.tracking)
    return folder, study


def _sync(options: argparse.Namespace) -> int:
    from study.api import sync_study
    from study.report.write import rewrite_report
    from study.tracking.address import how_to_open, naming, page

    folder, study = _study(options)
    with refusals():
        report = rewrite_report(folder)
    error, where = sync_study(folder, study, report)
    if error:
        more = advice(study.tracking, error)
        print(f"lns-study: MLflow lacks part of {study.name}: {error}{more}", file=sys.stderr)
        return 1
    audits = _audit(folder, study, delete=False)
    if audits is None:
        return 1
    if not audits[1].equal:
        named = naming(study.tracking, study.storage)
        again = lns_study("reconcile", study.slug, *named, storage=study.storage)
        print("\n".join([*audits[1].differences(), f"`{again}` repairs this"]), file=sys.stderr)
        return 1
    address = page(where["experiment"], where["view"]) if where else ""
    opens = how_to_open(study.tracking, study.storage, address)
    print(f"{study.name}: MLflow has everything: {opens}")
    return 0


def _reconcile(options: argparse.Namespace) -> int:
    folder, study = _study(options, writes=not options.check)
    audits = _audit(folder, study, repair=not options.check)
    if audits is None:
        return 1
    before, after = audits
    for line in before.differences():
        print(line)
    if before is not after:
        print(f"before: {before}")
    print(f"{study.name}: {after}")
    return 0 if after.equal else 1


def _audit(folder: Path, study: StudyConfig, **changes: bool) -> tuple[Audit, Audit] | None:
    """Reconcile a study with its store (:func:`study.tracking.reconcile.reconcile`).

    Prints the reason and returns None if the store fails.
    """
    from study.report.write import rewrite_report
    from study.tracking.reconcile import reconcile
    from study.tracking.writer import reason

    artifacts = folder.parent / "artifacts"
    try:
        return reconcile(folder, study.tracking, artifacts, report=rewrite_report, **changes)
    except ValueError as error:
        raise UserError(str(error)) from None
    except Exception as error:  # any error of the store
        more = advice(study.tracking, why := reason(error))
        print(f"lns-study: MLflow at {study.tracking}: {why}{more}", file=sys.stderr)
        return None
