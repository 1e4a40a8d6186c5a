"""Every cell of the notebooks in docs/notebooks runs in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {"ask_tell": ("own-loop", 8), "first_study": ("first", 12)}
"""Study and number of finished trials that each notebook leaves."""
SECONDS = 300


def outputs(notebook: Any, source: str) -> list[Any]:
    """Return the outputs of the one cell whose source contains ``source``."""
    (cell,) = [cell for cell in notebook.cells if source in cell["source"]]
    return list(cell["outputs"])


def read(name: str) -> Any:
    import nbformat

    return nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)


def test_all_notebooks_run_here() -> None:
    assert {path.stem for path in (ROOT / "docs" / "notebooks").iterdir()} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_hold_no_outputs(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    notebook = read(name)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
    study, finished = NOTEBOOKS[name]
    state = fold(read_ledger(tmp_path / "studies" / study))
    assert state.counts() == {FINISHED: finished}
    (figure,) = outputs(notebook, ".figure(")
    assert "image/png" in figure["data"]
    shown = next(
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    )
    assert study in shown["data"]["text/html"]
    for cell in notebook.cells:  # a run is one table and some lines, whatever its length
        shown_outputs = cell.get("outputs", [])
        tables = [each for each in shown_outputs if each["output_type"] == "display_data"]
        lines = "".join(each.get("text", "") for each in shown_outputs).splitlines()
        assert len(tables) <= 1
        assert len(lines) < 10
        if ".run(config" in cell["source"]:
            assert "6 finished" in tables[0]["data"]["text/plain"]
