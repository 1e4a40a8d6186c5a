"""A study, its checkpoints and a tensor that commit 8514989 wrote: read, continued and repeated
with the same bits.

``tests/golden`` holds ``golden.yaml``, what ``lns-study run golden.yaml tracking_uri=none`` left of
it there, and a state dict of LNS tensors (``torch.save``).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from lns_ops import LNSTensor, convert_
from study.cli import main
from study.evidence.rerun import differences
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, StudyState, TrialState, fold

GOLDEN = Path(__file__).parents[1] / "golden"
PLAIN = ("tracking_uri=none", "--plain")


def state(folder: Path) -> StudyState:
    return fold(read_ledger(folder / "studies" / "golden"))


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate folder with the golden study's config."""
    shutil.copy(GOLDEN / "golden.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(folder: Path) -> set[str]:
    """The files of a study's weights and its optimizers' states, whose names are digests."""
    return {path.name for path in (folder / "studies" / "golden").rglob("tensors-*")}


def check_repeated(trial: TrialState, repeated: TrialState) -> None:
    """Losses are float32; their last bits depend on the processor."""
    assert [line for line in differences(trial, repeated) if "/loss: " not in line] == []
    for epoch, report in trial.reports.items():
        for name in ("train/loss", "validation/loss"):
            loss = repeated.reports[epoch]["metrics"][name]
            assert loss == pytest.approx(report["metrics"][name], rel=1e-6)


def test_a_repetition_has_the_same_trials_and_the_same_bits(copied: Path) -> None:
    assert main(["run", "golden.yaml", *PLAIN]) == 0
    golden, again = state(GOLDEN), state(copied)
    assert list(golden.known) == list(again.known)
    assert len(golden.known) == 2
    for trial, repeated in zip(golden.trials, again.trials, strict=True):
        assert repeated.status == FINISHED
        check_repeated(trial, repeated)
    assert weights(copied) == weights(GOLDEN)


def test_its_ledger_and_checkpoints_are_gone_on_from(copied: Path) -> None:
    """Three epochs from the second's checkpoint equal three epochs in a row."""
    shutil.copytree(GOLDEN / "studies", copied / "studies")
    assert main(["run", "golden.yaml", *PLAIN]) == 0
    assert (
        sum(event["event"] == "started" for event in read_ledger(copied / "studies" / "golden"))
        == 2
    )
    assert main(["run", "--extend", "golden", "trial.epochs=3", "--plain"]) == 0
    extended = [trial for trial in state(copied).trials if trial.epochs == 3]
    assert [min(trial.reports) for trial in extended] == [1, 1]
    assert main(["run", "golden.yaml", "name=whole", "trial.epochs=3", *PLAIN]) == 0
    whole = fold(read_ledger(copied / "studies" / "whole")).trials
    for trial, repeated in zip(extended, whole, strict=True):
        check_repeated(trial, repeated)
        for name in ("train/loss", "validation/loss"):  # of the epoch that both trained here
            assert trial.reports[3]["metrics"][name] == repeated.reports[3]["metrics"][name]


def test_its_tensors_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = convert_(nn.Linear(3, 2), "lns12", scope="everywhere")
    saved = torch.load(GOLDEN / "lns_tensor.pt", weights_only=True)
    assert all(isinstance(value, LNSTensor) for value in saved.values())
    for name, value in layer.state_dict().items():
        assert torch.equal(saved[name].codes, value.codes)
