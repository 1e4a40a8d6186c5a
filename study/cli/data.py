"""``lns-study data``: lists the data sets and the places of their files, and downloads them."""

from __future__ import annotations

import argparse
from dataclasses import fields

from study.cli.manage import Commands, print_table
from study.errors import UserError, refusals


def add_data(commands: Commands) -> None:
    """Add the command ``data`` to argparse's subparsers."""
    data = commands.add_parser(
        "data",
        help="list data sets; `data fetch NAME` downloads one",
        description=(
            "List the values of data.name: examples (training and validation + test), shape,"
            " arguments, and where the files are. `lns-study data fetch NAME` downloads the files"
            " of a data set and checks them."
        ),
    )
    data.add_argument("action", nargs="?", choices=("list", "fetch"), default="list")
    data.add_argument("name", nargs="?", metavar="NAME", help="the data set to fetch")
    data.set_defaults(command=_data)


def _data(options: argparse.Namespace) -> int:
    if options.action == "list":
        if options.name:
            raise UserError(
                f"data list {options.name}: takes no name; use lns-study data, or lns-study data"
                f" fetch {options.name}"
            )
        return _list()
    from trainers.config.data import DATA
    from trainers.data import fetch

    there_are = [name for name, known in DATA.items() if known.files]
    if options.name not in there_are:
        raise UserError(
            f"data fetch {options.name or ''}: must name a data set that is read from files; use"
            f" one of {', '.join(there_are)}"
        )
    print(f"Downloading {options.name}; existing files are kept.", flush=True)
    with refusals():
        folder = fetch(options.name)
    print(f"{options.name} is in {folder}.")
    return 0


def _list() -> int:
    from trainers.config.data import DATA
    from trainers.data import describe_place

    rows = []
    for name, known in DATA.items():
        args = ", ".join(f"{each.name}={each.default}" for each in fields(known.arguments))
        count = f"{known.train:,} + {known.test:,}" if known.train else "by its arguments"
        if known.own_file:
            count = "by its file"
        shape = " x ".join(map(str, known.shape)) or known.varying
        with refusals():
            place = describe_place(name)
        rows.append([name, known.about, count, shape, args or "-", place])
    print_table(["data.name", "what", "examples", "shape", "data.args", "files"], rows)
    return 0
