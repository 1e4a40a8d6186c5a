"""The working folder for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.study.conftest import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the tiny study."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path
