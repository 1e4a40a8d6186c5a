"""The command ``reproduce``: runs the studies with claims and writes a page of their verdicts."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli.manage import Commands, add_storage
from study.cli.run import run_config
from study.errors import UserError, refusals
from study.ledger.storage import check_writable
from study.program import NAME, lns_study
from trainers.object_store import local_folder

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.evidence.reproduction import Reproduced
    from study.ledger.state import StudyState

DESCRIPTION = """\
Run, or continue, the studies of conf/study that have claims, one after the
other, and write one page of their claims: source, published figure, ours with
its interval, verdict, runs. The page is rewritten after every study. It also
has the storage's other studies with claims in the same form (full or small).
After an interruption, repeat the same command to continue.

NAME is a study file, or the name of one in conf/study; --all takes every study
in conf/study that has claims. key=value changes all of them:
trial.device=cuda, address=auto (one Ray for all), tracking_uri=none.
"""


def add_reproduce(commands: Commands) -> None:
    """Add the command ``reproduce`` to argparse's subparsers."""
    reproduce = commands.add_parser(
        "reproduce",
        help="run the studies that have claims and write a page of their verdicts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reproduce.add_argument("overrides", metavar="NAME", nargs="*", help="studies, and key=value")
    reproduce.add_argument(
        "--all",
        action="store_true",
        help="all studies that have claims (with --small: and a small form)",
    )
    reproduce.add_argument("--small", action="store_true", help="their small forms")
    reproduce.add_argument(
        "--page-only", action="store_true", help="run no trials; write the page from the storage"
    )
    add_storage(reproduce)
    reproduce.add_argument(
        "--output", metavar="FOLDER", help="folder of the page (default: STORAGE/claims)"
    )
    reproduce.set_defaults(command=_reproduce)


def _reproduce(options: argparse.Namespace) -> int:
    changes = [word for word in options.overrides if "=" in word]
    names = [word for word in options.overrides if "=" not in word]
    small = ["--small"] if options.small else []
    output = Path(options.output or local_folder(options.storage) / "claims")
    with refusals():
        studies = _load(_names(names, every=options.all, small=options.small), changes, options)
        check_writable(output, "output", "choose another with --output /path/to/folder")
    place = ["--output", options.output] if options.output else []
    said = [*(names or ["--all"]), *small, *changes, *place]
    again = lns_study("reproduce", *said, storage=options.storage)
    worst = 0
    for turn, (name, study) in enumerate(studies.items(), 1):
        if options.page_only:
            break
        print(f"\n{study.name} ({turn} of {len(studies)})", flush=True)
        code = _run(name, study, again)
        if code == 130:
            return code
        worst = max(worst, code)
        _write(studies, output, options)
    done = _write(studies, output, options)
    missing = [study.name for study in studies.values() if study.name not in done]
    print(f"\nClaims:  {output / 'claims.html'}")
    if missing:
        print(f"lns-study: not run yet: {', '.join(missing)}; run: {again}", file=sys.stderr)
    return worst or int(bool(missing))


def _names(names: list[str], *, every: bool, small: bool) -> list[str]:
    """Return the named studies, or all studies with claims; with ``small``, with a small form.

    Raises:
        ValueError: both or neither of names and ``every`` are given.
    """
    from study.config.compose import studies_with

    if names and every:
        raise ValueError(f"reproduce {' '.join(names)} --all: name studies or use --all, not both")
    known = studies_with("claims")
    if small:
        known = [name for name in known if name in studies_with("small")]
    if not names and not every:
        words = f"those with claims{' and a small form' if small else ''}: {', '.join(known)}"
        raise ValueError(f"reproduce: needs names of studies, or --all; {words}")
    return names or known


def _load(
    names: list[str], changes: list[str], options: argparse.Namespace
) -> dict[str, StudyConfig]:
    """Return the configs of the studies by name.

    Raises:
        ValueError: a study has no claims, or two studies share a results folder.
    """
    from study.config.compose import load

    found: dict[str, StudyConfig] = {}
    for name in names:
        study = load(
            name,
            [f"storage={options.storage}", *changes],
            lambda line: print(line, file=sys.stderr),
            download=not options.page_only,
            small=options.small,
        )
        if not study.claims:
            raise ValueError(f"reproduce {name}: the study states no claims; add `claims: [...]`")
        if same := [other for other, known in found.items() if known.slug == study.slug]:
            raise ValueError(
                f"reproduce {' '.join(same)} {name}: both keep their results as {study.slug}; run"
                " only one, or give the other file another `name:`"
            )
        found[name] = study
    return found


def _run(name: str, study: StudyConfig, again: str) -> int:
    """Run or continue a study; return its exit code. An error is printed, not raised."""
    try:
        return run_config(study, plain=True, again=again)
    except UserError as error:
        print(f"lns-study: {name}: {error}", file=sys.stderr)
        return 2


def _write(studies: dict[str, StudyConfig], output: Path, options: argparse.Namespace) -> set[str]:
    """Write the page of all studies in the storage; return the names of ``studies`` found there."""
    from study.evidence.reproduction import write_page
    from study.ledger.log import FILE
    from study.ledger.storage import refresh, share
    from study.ledger.studies import read

    with refusals():
        for study in studies.values():
            refresh(study.folder)
        there = {name: study for name, study in studies.items() if (study.folder / FILE).exists()}
        parts = [
            _part(read(study.folder), study.folder, name, study, options)
            for name, study in there.items()
        ]
        parts += _others({study.slug for study in studies.values()}, options)
    write_page(sorted(parts, key=lambda part: part.slug), output)
    if error := share(output):
        print(f"lns-study: the page is in {output} only: {error}", file=sys.stderr)
    return {study.name for study in there.values()}


def _others(named: set[str], options: argparse.Namespace) -> Iterator[Reproduced]:
    """Yield the page's parts for the storage's other studies with claims, in the same form."""
    from study.config.compose import SMALL
    from study.ledger.studies import folders, read

    for folder in folders(options.storage):
        if folder.name in named or folder.name.endswith(SMALL) != options.small:
            continue
        try:
            state = read(folder)
            if state.config.claims:
                yield _part(state, folder, state.config.name.removesuffix(SMALL), None, options)
        except (TypeError, ValueError) as error:  # no plan, or from a later version
            print(f"lns-study: {folder.name} is not on the page: {error}", file=sys.stderr)


def _part(
    state: StudyState,
    folder: Path,
    name: str,
    given: StudyConfig | None,
    options: argparse.Namespace,
) -> Reproduced:
    """Return a study's part of the page, with the command that repeats it.

    It is ``run`` with the study's file and overrides, or ``run --resume`` if these do not reproduce
    the study. Functions of claims run only if the study that this command names has the same
    functions.

    Args:
        state: state of the study, from its ledger.
        folder: folder of the study.
        name: study file, or the name of one.
        given: the study with this command's changes; None if the command does not name it.
        options: the command's options.
    """
    from study.evidence.reproduction import reproduced
    from study.evidence.statement import overrides_of

    ran, file = state.config, _file(name, small=options.small, named=given is not None)
    known = {claim.check for claim in given.claims} if given else set()
    run_checks = {claim.check for claim in ran.claims if claim.check} <= known
    changes = None if file is None else overrides_of(ran, file)
    if changes is None:
        # a file that the command does not name may be an unrelated study of the same name
        file = None if given is None else file or given
        command = lns_study("run", "--resume", ran.slug, storage=options.storage)
    else:
        small = ["--small"] if options.small else []
        command = shlex.join([NAME, "run", _told(name), *small, *changes])
    return reproduced(state, folder, command, file, run_checks=run_checks)


def _told(name: str) -> str:
    """Return a study's name, or its file's path relative to the working folder if it is in it."""
    path = Path(os.path.relpath(name))
    return path.name if os.pardir in path.parts else str(path)


def _file(name: str, *, small: bool, named: bool) -> StudyConfig | None:
    """Load a study's file; None if it is missing or invalid without overrides.

    If the command did not name the study (not ``named``), the name comes from a ledger that may be
    untrusted. Then Python files, which loading would run, and files in other folders return None.
    """
    from study.config.compose import load
    from study.config.script import is_script

    if not named and (is_script(Path(name)) or Path(name).name != name):
        return None
    with suppress(OSError, ValueError):
        return load(name, download=False, small=small)
    return None
