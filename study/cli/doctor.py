"""The command ``doctor``: what studies need of this machine, or one study's ledger and
checkpoints."""

from __future__ import annotations

import argparse

from study.cli.manage import Commands, add_storage
from study.errors import UserError, refusals


def add_doctor(commands: Commands) -> None:
    """Add the command ``doctor`` to argparse's subparsers."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or a study's ledger and checkpoints, and repair these",
        description=(
            "Check what studies need of this machine, or, of a study, its ledger and checkpoints,"
            " and say how to mend what is not as it should be."
        ),
    )
    doctor.add_argument(
        "study",
        metavar="STUDY",
        nargs="?",
        help="look at this study (its name, or its folder), not at the machine",
    )
    doctor.add_argument(
        "--repair",
        action="store_true",
        help="repair a damaged ledger from what checkpoints and MLflow know",
    )
    add_storage(doctor)
    doctor.add_argument(
        "--tracking-uri",
        help=(
            "MLflow store to ask (default: the study's, or the storage's database); none asks none"
        ),
    )
    doctor.add_argument("--address", help="Ray cluster to ask (default: start a local Ray)")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from study.cli.examine import examine, examine_study, repair_study

    def say(line: str) -> None:
        print(line, flush=True)

    if options.repair and options.study is None:
        raise UserError(
            "--repair: mends the ledger of one study; name it: lns-study doctor STUDY --repair"
        )
    if options.study is not None:
        with refusals():
            look = repair_study if options.repair else examine_study
            return 0 if look(options.study, options.storage, options.tracking_uri, say) else 1
    findings = examine(options.storage, options.tracking_uri, options.address, say)
    return 0 if all(finding.good for finding in findings) else 1
