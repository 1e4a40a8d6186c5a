"""Provenance of a study: the code, the packages and the hardware that produced it.

The git commit is the commit of the checkout that this package is imported from, which has our
``pyproject.toml`` beside the package, and where git tracks this file. An installed copy has no
commit, even in a virtual environment inside another repository.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from study.program import version_of
from trainers.config.data import DATA
from trainers.config.validation import memory
from trainers.training.device import gpu_models
from trainers.user_code import without_folder

HERE = Path(__file__).resolve()
REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
)
PACKAGES = ("lns-study", "torch", "numpy", "numba", "ray", "mlflow", "omegaconf", "optuna")


@cache
def provenance() -> dict[str, Any]:
    """Return git commit (or None), whether the checkout differs from it, versions, platform."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": _dirty(),
        "versions": _versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


@cache
def hardware() -> dict[str, Any]:
    """Describe this machine: processor, usable cores, memory in bytes, names of the GPUs."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory(),
        "gpus": gpu_models(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _dirty() -> bool | None:
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this package's checkout.

    Returns None outside a checkout or without git.
    """
    if (
        not _is_ours(HERE.parents[2] / "pyproject.toml")
        or _run_git("ls-files", "--error-unmatch", HERE.name) is None
    ):
        return None
    return _run_git(*arguments)


def _is_ours(project: Path) -> bool:
    try:
        return bool(
            tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"] == "lns-study"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _run_git(*arguments: str) -> str | None:
    """Return the output of a git command in this package's folder; None if it fails.

    The repository that a git hook's environment names is ignored.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES
    }
    command = ["git", "-C", str(HERE.parent), *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    return {name: version_of(name) for name in PACKAGES}


def different_data(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the first data set of ``ours`` whose bytes ``theirs`` lack, with the one they have.

    Returns None if all agree. Of several data sets of one name, such as collections of music, one
    with the same bytes is enough; one that ``theirs`` do not name, of other arguments or another
    file, has nothing to agree with. The files are compared, whichever examples were chosen from
    them; if a ledger is too old to know the files, the examples are compared where equally many
    were chosen.

    Args:
        ours: :class:`trainers.data.DatasetInfo` as dicts, as in the ledger's ``planned`` events.
        theirs: the other study's, in the same form.
    """
    for one in ours:
        others = [entry for entry in theirs if _which(entry) == _which(one)]
        same = [_same_bytes(one, other) for other in others]
        if True in same:
            continue
        for other, answer in zip(others, same, strict=True):
            if answer is False and _decided_alike(one, other):
                return one, other
    return None


def _same_bytes(one: dict[str, Any], other: dict[str, Any]) -> bool | None:
    """Return whether two descriptions are of the same bytes; None if they cannot be compared."""
    if "files" in one and "files" in other:
        return bool(one["files"] == other["files"])
    if any(one.get(size) != other.get(size) for size in ("train", "validation")):
        return None
    return bool(one["digest"] == other["digest"])


def _decided_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two data sets of one name agree in what decides their bytes, unless files alone
    do: arguments, the name of a file of the user's, and how many windows of a text validate where
    the others overlap. Older ledgers do not say which arguments."""
    known = DATA.get(one["name"])
    if known is None or (known.files and not known.own_file):
        return True
    if known.own_file and _file(one) != _file(other):
        return False
    if "args" not in one or "args" not in other:
        return True
    strided = one["args"].get("stride") and one["validation"] != other["validation"]
    return bool(one["args"] == other["args"] and not strided)


def _file(entry: dict[str, Any]) -> str:
    """Return the name of a data set's file or folder, wherever that is."""
    return Path(entry.get("root") or "").name


def _which(entry: dict[str, Any]) -> tuple[str, str]:
    """Return what two descriptions of the same data have in common, wherever its files are."""
    return without_folder(entry["name"]), entry.get("identity", "")
