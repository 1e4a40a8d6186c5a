"""The code in lns_ops/README.md runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lns_ops
from lns_ops.tensor import registry


@pytest.fixture
def handlers_kept() -> Iterator[None]:
    """Operations that a test adds stay there."""
    before = dict(registry.HANDLERS)
    yield
    registry.HANDLERS.clear()
    registry.HANDLERS.update(before)


@pytest.mark.usefixtures("handlers_kept")
def test_the_readmes_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(lns_ops.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 7
    printed = capsys.readouterr().out
    assert "lns12, 2^-16.0 .. 2^16.0; ranges in octaves" in printed
    assert "Conv2d     everywhere  lns16" in re.sub(r"(?<=Conv2d) +", "     ", printed)
    assert "Counter({'aten.i0.default': 1})" in printed
    x, y = (
        lns_ops.LNSTensor.from_float(torch.tensor(v), "lns12") for v in ([1.0, -2.0], [-1.0, 1.0])
    )
    assert torch.copysign(x, y).to_float().tolist() == [-1.0, 2.0]
