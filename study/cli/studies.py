"""``lns-study studies``: lists the studies in ``conf/study`` with their questions."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from study.cli.manage import Commands
from study.errors import refusals

INDENT = "    "


def add_studies(commands: Commands) -> None:
    """Add the command ``studies`` to argparse's subparsers."""
    studies = commands.add_parser(
        "studies",
        help="list the studies that `run NAME` knows, with their questions",
        description=(
            "List the studies of ./conf/study and of this package by name, each with its question."
            " Those with a small form run in minutes on two cores: `lns-study run NAME --small`."
        ),
    )
    studies.set_defaults(command=_studies)


def _studies(options: argparse.Namespace) -> int:
    from study.config.compose import questions

    with refusals():
        found = questions()
    width = min(shutil.get_terminal_size().columns, 100)
    for name, (question, small) in found.items():
        print(f"{name}  (--small)" if small else name)
        for line in textwrap.wrap(question or "no question", width - len(INDENT)):
            print(INDENT + line)
    print("\nlns-study plan NAME shows the trials of one and, where it is known, their time.")
    return 0
