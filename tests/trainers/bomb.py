"""A stranger's object in a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Bomb:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)
