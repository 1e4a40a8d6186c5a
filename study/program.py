"""The command ``lns-study`` as the user's shell finds it, for messages that name a command to give
next.

The scripts put the venv on the PATH of what they start, but not on that of the shell that called
them, and they work in the checkout. So they say in ``$LNS_STUDY_COMMAND`` how that shell reaches
the command. If it is not set, the bare name is enough if it is on the PATH; otherwise it is the
program beside this interpreter.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

from study.tracking_uri import without_password

_BEGAN = time.monotonic()

NAME = "lns-study"
VARIABLE = "LNS_STUDY_COMMAND"
"""Environment variable with shell text to which words can be added.

An example is ``cd /checkout && .venv/bin/lns-study``.
"""
STORAGE = "studies"
"""Folder in which commands look for studies unless they are told otherwise."""


def lns_study(*words: str, storage: str = STORAGE) -> str:
    """Return the command line for ``lns-study WORDS``, without passwords.

    It can be pasted into the shell from which this process was started.

    Args:
        words: arguments, not quoted yet.
        storage: folder of the studies that the command is about; named in it unless it is the usual
            one.
    """
    option = () if storage in (STORAGE, os.path.abspath(STORAGE)) else ("--storage", storage)
    return " ".join(
        [_program(), *(shlex.quote(without_password(word)) for word in (*words, *option))]
    )


def process_began() -> float:
    """Return when this program began, on the clock of :func:`time.monotonic`.

    It is when this module was loaded, a tenth of a second after Python. The process may be older:
    a script that installs a venv before ends in this program (``exec``).
    """
    return _BEGAN


def _program() -> str:
    if command := os.environ.get(VARIABLE):
        return command
    if shutil.which(NAME):
        return NAME
    beside = Path(sys.executable).with_name(NAME)
    return (
        shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m study"
    )


def module_command(module: str) -> list[str]:
    """Return the words that run a module, ours or a library's, in a process of its own.

    No file of the current folder is imported in its place, unless that folder is our checkout,
    which need not be installed.
    """
    checkout = Path(__file__).resolve().parents[1] == Path.cwd().resolve()
    return [sys.executable, *([] if checkout else ["-P"]), "-m", module]


def own_version() -> str:
    """Return our version: the installed one, in a checkout that is not installed its own; "" where
    neither is there, as for packages that somebody copied."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        about = Path(__file__).parents[1] / "pyproject.toml"
        return str(tomllib.loads(about.read_text())["project"]["version"]) if about.exists() else ""


def version_of(package: str) -> str:
    """Return the version of a package; ``not installed`` if there is none, as in a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
