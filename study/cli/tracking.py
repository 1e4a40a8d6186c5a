"""The commands ``mlflow sync | verify | ui``, and ``ui``, the short form of the last."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli.manage import Commands, add_command
from study.cli.ui import add_ui
from study.errors import UserError, refusals
from study.program import lns_study
from study.tracking.sqlite import advice

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.tracking.reconcile import Audit


URI_HELP = "MLflow store (default: the study's own)"


def add_mlflow(commands: Commands) -> None:
    """Add the commands to argparse's subparsers."""
    mlflow = commands.add_parser(
        "mlflow",
        help="send a study's missing data to MLflow (`mlflow sync`), or compare MLflow with its"
        " ledger point by point and repair differences (`mlflow verify --repair`)",
        description="Send, compare or show the data of studies in MLflow.",
    )
    parts = mlflow.add_subparsers(required=True, metavar="COMMAND")
    sync = add_command(
        parts, "sync", _sync, "send a study's missing data to MLflow, from its ledger"
    )
    sync.add_argument("--tracking-uri", help=URI_HELP)
    verify = add_command(
        parts, "verify", _verify, "compare MLflow with a study's ledger point by point"
    )
    verify.add_argument("--tracking-uri", help=URI_HELP)
    verify.add_argument("--repair", action="store_true", help="repair differences in MLflow")
    add_ui(parts)
    add_ui(commands)


def _study(options: argparse.Namespace, *, writes: bool = True) -> tuple[Path, StudyConfig]:
    """Return folder and config of a study; check that it is not running and its store answers.

    With ``writes`` a copy of a study is rejected, because the original's newer runs would count as
    wrong.
    """
    from study.ledger.lock import is_locked
    from study.ledger.studies import continued, find, placed, whole
    from study.tracking.address import OFF, store_of
    from study.tracking.writer_supervisor import check_tracking

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
    from study.lifecycle import sync_study
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
        again = lns_study("mlflow", "verify", "--repair", study.slug, *named, storage=study.storage)
        print("\n".join([*audits[1].differences(), f"`{again}` repairs this"]), file=sys.stderr)
        return 1
    address = page(where["experiment"], where["view"]) if where else ""
    opens = how_to_open(study.tracking, study.storage, address)
    print(f"{study.name}: MLflow has everything: {opens}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    folder, study = _study(options, writes=options.repair)
    audits = _audit(folder, study, repair=options.repair)
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
