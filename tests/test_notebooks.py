"""Every cell of the notebooks in docs/notebooks runs, each notebook in a new kernel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from study.evidence.rerun import differences
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
    for cell in notebook.cells:  # a run prints one table and some lines, whatever its length
        shown_outputs = cell.get("outputs", [])
        tables = [each for each in shown_outputs if each["output_type"] == "display_data"]
        lines = "".join(each.get("text", "") for each in shown_outputs).splitlines()
        assert len(tables) <= 1
        assert len(lines) < 10
        if ".run(config" in cell["source"]:
            assert "6 finished" in tables[0]["data"]["text/plain"]


CELL = """
import study
from pathlib import Path
from study import DataConfig, ModelConfig, SearchConfig, StudyConfig, TrialConfig

Path("net.py").write_text('''
from torch import nn

def make(inputs, classes, width=16):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes)
    )
''')
data = DataConfig(name="digits", validation_size=300)
model = ModelConfig(name=str(Path("net.py").resolve()) + ":make")
trial = TrialConfig(data=data, model=model, epochs=20, batch_size=32)
space = {
    "precision.format": {"choice": ["float32", "lns12"]},
    "workers": {"choice": [1, 2]},
    "optimizer.lr": {"loguniform": [0.01, 0.3]},
}
search = SearchConfig(algorithm="tpe", num_samples=3)
config = StudyConfig(
    name=name, trial=trial, space=space, search=search, tracking_uri="none", cpus=2,
    max_concurrent=1,
)
study.run(config)
"""


def reply_to(message: str, client: Any) -> dict[str, Any]:
    """Return the kernel's reply to a message; earlier replies are left out."""
    while (reply := client.get_shell_msg(timeout=SECONDS))["parent_header"]["msg_id"] != message:
        pass
    content: dict[str, Any] = reply["content"]
    return content


@pytest.mark.slow
def test_a_study_of_ones_own_network_is_interrupted_and_its_cell_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    manager, client = start_new_kernel(cwd=str(tmp_path))
    cell = f"name = 'stopped'{CELL}"
    folder, until = tmp_path / "studies" / "stopped", time.monotonic() + SECONDS
    try:
        first = client.execute(cell)
        while sum(event["event"] == "report" for event in read_ledger(folder)) < 25:
            assert time.monotonic() < until
            time.sleep(0.05)
        manager.interrupt_kernel()
        assert reply_to(first, client)["ename"] == "KeyboardInterrupt"
        assert fold(read_ledger(folder)).outcome == "interrupted"
        for again in (cell, f"name = 'whole'{CELL}"):
            assert reply_to(client.execute(again), client)["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    stopped, whole = (fold(read_ledger(folder.with_name(name))) for name in ("stopped", "whole"))
    assert [trial.id for trial in stopped.trials] == [trial.id for trial in whole.trials]
    assert stopped.outcome == whole.outcome == "finished"
    assert len(whole.trials) == 3
    for one, other in zip(stopped.trials, whole.trials, strict=True):
        assert (one.status, sorted(one.reports)) == (FINISHED, list(range(1, 21)))
        assert differences(one, other) == []
    events = read_ledger(folder)
    assert sum(event["event"] == "report" for event in events) == 3 * 20
    tensors = [
        {path.relative_to(saved) for path in saved.rglob("tensors-*")}
        for saved in (folder / "checkpoints", folder.with_name("whole") / "checkpoints")
    ]
    assert tensors[0] == tensors[1] != set()  # their names are digests
