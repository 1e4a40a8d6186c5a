"""Cached descriptions of data sets, so that unchanged files need not be read again.

Does not import torch, unless a data set must be read.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainers.config import DataConfig
from trainers.data.download import REMOTES, cache_folder, file_in
from trainers.data.mnist import FILES
from trainers.data.places import resolve
from trainers.data.split import DatasetInfo
from trainers.files import write_whole
from trainers.user_code import names_code


def prepare(config: DataConfig) -> DatasetInfo:
    """Resolve, check and describe the data of ``config``; download them if necessary.

    Files whose path, size and modification time are unchanged since they were described are not
    read again.

    Raises:
        ValueError: see :func:`load`.
    """
    config = resolve(config)
    known, key = _known_descriptions(), json.dumps([asdict(config), *_files_of(config)])
    if key in known:
        with suppress(TypeError):  # a description by another version
            return DatasetInfo(**known[key])
    from trainers.data.datasets import describe

    info = describe(config)
    if config.root and not names_code(config.name):
        with suppress(OSError):  # then the next command reads the files again
            _write_descriptions({**known, key: asdict(info)})
    return info


def _files_of(config: DataConfig) -> list[tuple[str, int, int]]:
    """Return path, size and modification time (ns) of each file that the data may be read from."""
    place = Path(config.root) if config.root else None
    paths: list[Path | None] = []
    if config.name == "mnist" and place:
        paths = [file_in(place, name) for name in FILES]
    elif config.name in REMOTES and place:
        needs = REMOTES[config.name].needs
        names = [name for choice in needs for name in choice]
        paths = [place] if config.own_file else [file_in(place, name) for name in names]
    return [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path is not None
    ]


def _descriptions() -> Path:
    """Return the path of the file with the cached descriptions."""
    return cache_folder().parent / "datasets.json"


def _known_descriptions() -> dict[str, dict[str, Any]]:
    """Return the cached descriptions, by config and files."""
    try:
        known = json.loads(_descriptions().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_descriptions(known: dict[str, dict[str, Any]]) -> None:
    """Replace the cached descriptions atomically."""
    path = _descriptions()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(known).encode())
