"""The command ``lns-study`` as the user can type it, for messages that suggest a command.

Our scripts change to the checkout and put the venv on PATH for the processes that they start, but
not for the calling shell. So they set ``$LNS_STUDY_COMMAND`` to a command that works in that shell.
If it is not set, the command is the bare name if that is on PATH, or else the program beside this
interpreter.
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
"""Environment variable with a shell command that takes arguments at its end.

For example ``cd /checkout && .venv/bin/lns-study``.
"""
STORAGE = "studies"
"""Default folder of studies."""


def lns_study(*words: str, storage: str = STORAGE) -> str:
    """Return the command line for ``lns-study WORDS``, without passwords.

    It can be pasted into the shell from which this process was started.

    Args:
        words: unquoted arguments.
        storage: folder of the studies; added as ``--storage`` unless it is the default.
    """
    option = () if storage in (STORAGE, os.path.abspath(STORAGE)) else ("--storage", storage)
    return " ".join(
        [_program(), *(shlex.quote(without_password(word)) for word in (*words, *option))]
    )


def process_began() -> float:
    """Return the start time of this program on the :func:`time.monotonic` clock.

    This is the time when this module was imported, about 0.1 s after Python started. The process
    may be older, because a script that installs a venv replaces itself by this program (``exec``).
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
    """Return the command that runs a module in a new process, as a list of words.

    Files in the working directory cannot shadow the module (``-P``), except in our checkout, which
    need not be installed.
    """
    checkout = Path(__file__).resolve().parents[1] == Path.cwd().resolve()
    return [sys.executable, *([] if checkout else ["-P"]), "-m", module]


def own_version() -> str:
    """Return the version of lns-study.

    It comes from the installed package, or from ``pyproject.toml`` in a checkout that is not
    installed. "" if there is neither, for example if the packages were copied.
    """
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        about = Path(__file__).parents[1] / "pyproject.toml"
        return str(tomllib.loads(about.read_text())["project"]["version"]) if about.exists() else ""


def version_of(package: str) -> str:
    """Return the version of a package, or ``not installed``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
