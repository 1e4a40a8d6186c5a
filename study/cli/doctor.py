"""The command ``doctor``: checks this machine, or one study's ledger and checkpoints."""

from __future__ import annotations

import argparse

from study.cli.manage import Commands, add_storage
from study.errors import UserError, refusals


def add_doctor(commands: Commands) -> None:
    """Add the command ``doctor`` to argparse's subparsers."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or a study's ledger and checkpoints; repair a ledger",
        description=(
            "Check whether this machine can run studies, or check a study's ledger and checkpoints,"
            " and print how to repair each fault."
        ),
    )
    doctor.add_argument(
        "study",
        metavar="STUDY",
        nargs="?",
        help="check this study (its name, or its folder) instead of the machine",
    )
    doctor.add_argument(
        "--repair",
        action="store_true",
        help="repair a damaged ledger from the checkpoints and from MLflow",
    )
    add_storage(doctor)
    doctor.add_argument(
        "--tracking-uri",
        help=("MLflow store to use (default: the study's, or the storage's database), or none"),
    )
    doctor.add_argument("--address", help="Ray cluster to check (default: start a local Ray)")
    doctor.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from study.cli.doctor_checks import examine, examine_study, repair_study

    def say(line: str) -> None:
        print(line, flush=True)

    if options.repair and options.study is None:
        raise UserError(
            "--repair: repairs the ledger of one study; name it: lns-study doctor STUDY --repair"
        )
    if options.study is not None:
        with refusals():
            look = repair_study if options.repair else examine_study
            return 0 if look(options.study, options.storage, options.tracking_uri, say) else 1
    findings = examine(options.storage, options.tracking_uri, options.address, say)
    return 0 if all(finding.good for finding in findings) else 1
