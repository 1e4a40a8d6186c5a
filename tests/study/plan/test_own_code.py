"""A study over a user's own network: named relative to its file, searched, identified by its
code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from study import create
from study.config.compose import load
from study.engines.preflight import preflight
from study.errors import UserError
from study.evidence.rerun import rerun
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, RUNNING, StudyState, fold
from study.lifecycle import Outcome, run_study
from study.plan.plan import make_plan
from tests.study.conftest import SilentView
from tests.study.engines.conftest import results
from tests.trainers.leaking import LEAKING
from tests.trainers.user_network import NETWORK
from trainers.workers.node import Node

STUDY = """
name: own
trial:
  {model: {name: "net.py:make_net"}, data: {name: "net.py:digits"}, epochs: 1, batch_size: 20}
baseline: float32
rows:
  - {label: float32}
  - {label: lns, overrides: {precision.format: lns12, precision.kahan_sum: true}}
cpus: 2
tracking_uri: none
"""
TEXTS = """
name: texts
trial:
  data: {name: text, args: {context: 8}, validation_size: null}
  model: {name: gpt, args: {layers: 1, width: 8, heads: 1}}
  loss: {name: cross_entropy}
  epochs: 1
  batch_size: 8
metric: validation/loss
cpus: 1
tracking_uri: none
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.yaml").write_text(STUDY)
    (tmp_path / "own" / "net.py").write_text(NETWORK)
    return tmp_path / "own"


def ids(folder: Path, *overrides: str) -> list[str]:
    study = load(str(folder / "own.yaml"), [f"storage={folder}", *overrides])
    return [trial.id for trial in make_plan(study).trials]


def test_trials_are_known_by_their_code_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    before = ids(folder)
    shutil.copytree(folder, tmp_path / "moved")
    assert ids(tmp_path / "moved") == before
    (folder / "net.py").write_text(NETWORK.replace("width=4", "width=5"))
    assert not set(ids(folder)) & set(before)


def test_its_arguments_are_searched(folder: Path) -> None:
    plan = make_plan(
        load(
            str(folder / "own.yaml"),
            [
                f"storage={folder}",
                "space={model.args.width: {choice: [2, 3]}}",
                "search={algorithm: grid}",
                "trial.model.args={width: 2}",
            ],
        )
    )
    widths = [trial.config.model.args["width"] for trial in plan.trials]
    assert widths == [2, 2, 3, 3]
    assert len({trial.id for trial in plan.trials}) == 4


def test_a_network_that_does_not_fit_is_refused_before_anything_starts(folder: Path) -> None:
    flat = f"trial.model.name={folder / 'net.py'}:flat"
    study = load(str(folder / "own.yaml"), [f"storage={folder}", flat])
    with pytest.raises(ValueError, match=r"into \(2, 7\); return outputs of shape \(batch, 10\)"):
        preflight(make_plan(study))


def test_a_network_that_ends_its_process_ends_no_study(folder: Path) -> None:
    (folder / "ends.py").write_text("import os\n\ndef make(inputs, classes):\n    os._exit(3)\n")
    ends = f"trial.model.name={folder / 'ends.py'}:make"
    study = load(str(folder / "own.yaml"), [f"storage={folder}", ends])
    with Node() as node, pytest.raises(ValueError, match=r"fails \(.*exit code 3\); look whether"):
        preflight(make_plan(study), node)


def test_a_check_that_takes_long_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.engines.preflight.SLOW_SECONDS", 0.01)
    study, said = load(str(folder / "own.yaml"), [f"storage={folder}"]), list[str]()
    with Node() as node:
        preflight(make_plan(study), node, said.append)
    assert said == ["Checking trials and their data: 2 trials"]


def test_code_that_changes_its_process_is_named_and_no_other_trial_is_checked_there(
    folder: Path,
) -> None:
    (folder / "leak.py").write_text(LEAKING)
    leaks = {
        "hook": "torch.nn.modules.module._global_forward_hooks",
        "method": "torch.nn.modules.linear.Linear.forward",
        "function": "torch.randperm",
        "recursion": "sys.setrecursionlimit",
        "umask": "os.umask",
        "modules": "sys.modules['trainers.workers.in_process']",
    }
    rows = [
        f"{{label: {how}, overrides: {{model: {{name: '{folder}/leak.py:make_net', args: {{how:"
        f" {how}}}}}}}}}"
        for how in leaks
    ]
    plain = "{label: plain, overrides: {model: {name: mlp, hidden: [8]}}}"
    clean = f"{{label: clean, overrides: {{model: {{name: '{folder}/leak.py:make_net'}}}}}}"
    study = load(
        str(folder / "own.yaml"),
        [f"storage={folder}", f"rows=[{', '.join([*rows, plain, clean])}]", "baseline=null"],
    )
    said: list[str] = []
    with Node() as node:
        plan, data = preflight(make_plan(study), node, said.append)
    assert len(plan.trials) == len(leaks) + 2
    assert len(data) == 1
    assert [line for line in said if line.startswith("Note")] == [
        f"Note: code of your own (row '{how}') changes {name} for all of its process; each of its"
        " trials has a process of its own, so no other trial is affected"
        for how, name in leaks.items()
    ]


def test_it_runs_and_says_when_its_code_has_changed(folder: Path) -> None:
    """Also the modules beside it that it imports."""
    said: list[str] = []
    (folder / "parts").mkdir()
    (folder / "parts" / "size.py").write_text("width = 4")
    importing = "from parts.size import width\n" + NETWORK.replace("width=4", "width=width")
    (folder / "net.py").write_text(importing)
    outcome = run_study(
        load(str(folder / "own.yaml"), [f"storage={folder}"]), SilentView(), said.append
    )
    assert [trial.status for trial in outcome.state.trials] == [FINISHED] * 2
    (folder / "parts" / "size.py").write_text("width = 5")
    again = run_study(
        load(str(folder / "own.yaml"), [f"storage={folder}"]), SilentView(), said.append
    )
    assert any("has changed since the last run" in line for line in said)
    assert len(again.state.known) == 4


@pytest.mark.slow
def test_several_files_of_one_name_have_not_changed(tmp_path: Path) -> None:
    row = "  - {{label: {0}, overrides: {{data.root: {1}/{0}.txt}}}}\n"
    rows = {name: row.format(name, tmp_path) for name in "ab"}
    said: list[str] = []

    def run_rows(names: str) -> None:
        file = tmp_path / "texts.yaml"
        file.write_text(TEXTS + "rows:\n" + "".join(rows[name] for name in names))
        run_study(load(str(file), [f"storage={tmp_path}/store"]), SilentView(), said.append)

    for name in rows:
        (tmp_path / f"{name}.txt").write_text(f"{name} to be or not to be. " * 100)
    for names in ("ab", "a", "ab"):
        run_rows(names)
    assert any("Resuming: 2 of 2" in line for line in said)
    assert not any("has changed" in line for line in said)


def run(folder: Path, *overrides: str) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    study = load(str(folder / "own.yaml"), [f"storage={folder.parent / 'store'}", *overrides])
    return run_study(study, SilentView(), said.append), said


@pytest.mark.slow
def test_rows_of_different_data_of_one_factory_go_on(folder: Path) -> None:
    row = "{{label: {}, overrides: {{data.args: {{size: {}}}}}}}"
    changes = [f"rows=[{row.format('a', 40)}, {row.format('b', 60)}]", "baseline=a"]
    run(folder, *changes)
    outcome, said = run(folder, *changes, "seeds=[0,1]")
    assert [trial.status for trial in outcome.state.trials] == [FINISHED] * 4
    assert any("Resuming: 2 of 4" in line for line in said)


@pytest.mark.slow
def test_other_examples_of_the_same_code_are_refused_wherever_the_file_is(folder: Path) -> None:
    """Files that the factory reads are not part of its code."""
    size = 'int((__import__("pathlib").Path(__file__).parent / "size.txt").read_text())'
    (folder / "net.py").write_text(NETWORK.replace("size=200", f"size={size}"))
    (folder / "size.txt").write_text("60")
    row = "rows=[{label: float32}]"
    run(folder, row)
    moved = folder.parent / "moved"
    shutil.copytree(folder, moved)
    outcome, _ = run(moved, row)
    assert outcome.state.trials[0].status == FINISHED
    (moved / "size.txt").write_text("80")
    with pytest.raises(UserError, match=r"net.py:digits': sha256 .*restore the files"):
        run(moved, row)


@pytest.mark.slow
def test_code_that_makes_other_examples_trains_anew(folder: Path) -> None:
    row = "rows=[{label: float32}]"
    run(folder, row)
    (folder / "net.py").write_text(NETWORK.replace("/ 16", "/ 17"))
    outcome, said = run(folder, row)
    assert outcome.state.trials[0].status == FINISHED
    assert any("net.py:digits has changed since the last run" in line for line in said)


@pytest.mark.slow
def test_a_moved_file_goes_on_from_its_checkpoints(folder: Path) -> None:
    row = "rows=[{label: float32}]"
    first, _ = run(folder, row)
    shutil.move(folder, folder.parent / "moved")
    outcome, said = run(folder.parent / "moved", row, "trial.epochs=2")
    assert any("1 trials continue from the last checkpoint" in line for line in said), said
    trial = outcome.state.trials[0]
    assert trial.reports[1]["metrics"] == first.state.trials[0].reports[1]["metrics"]
    assert "source" in trial.reports[1]
    assert not any("damaged" in line for line in said)


def test_a_search_that_proposes_as_it_goes_checks_the_network_first(folder: Path) -> None:
    study = load(
        str(folder / "own.yaml"),
        [
            f"storage={folder}",
            f"trial.model.name={folder / 'net.py'}:flat",
            "space={optimizer.lr: {loguniform: [0.01, 0.1]}}",
            "search={algorithm: tpe, num_samples: 2}",
        ],
    )
    with pytest.raises(ValueError, match=r"into \(2, 7\); return outputs of shape"):
        preflight(make_plan(study))


def test_names_and_numbers_of_arguments_are_what_was_written(folder: Path) -> None:
    text = STUDY.replace(
        'net.py:make_net"}', 'net.py:make_net", args: {dropout: 1e-3, norm: "a.py:f"}}'
    )
    (folder / "own.yaml").write_text(text)
    model = load(str(folder / "own.yaml"), [f"storage={folder}"]).trial.model
    assert model.args == {"dropout": 1e-3, "norm": "a.py:f"}
    assert model.name == f"{folder / 'net.py'}:make_net"
    rows = text.replace("precision.format: lns12,", "model.name: net.py:flat,")
    (folder / "own.yaml").write_text(rows)
    row = load(str(folder / "own.yaml"), [f"storage={folder}"]).rows[1]
    assert row.overrides["model.name"] == f"{folder / 'net.py'}:flat"


def test_rerun_names_the_code_that_has_changed(folder: Path) -> None:
    outcome, _ = run(folder, "rows=[{label: float32}]")
    (folder / "net.py").write_text(NETWORK + "\n")
    with pytest.raises(UserError, match=r"net.py:make_net, .*net.py:digits changed"):
        rerun(
            outcome.state,
            outcome.state.trials[0],
            lambda study: run_study(study, SilentView(), print).state,
        )


TWO_FORMATS = (
    "trial.epochs=6",
    "trial.model.args={dropout: 0.2}",
    "trial.data.args={size: 600}",
    "rows=[{label: float32}, {label: lns16, overrides: {precision.format: lns16,"
    " precision.kahan_sum: true}}]",
)


def begin(folder: Path, storage: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "study", "run", "own.yaml", "--plain", f"storage={storage}"]
    said = (folder / "said.txt").open("ab")
    return subprocess.Popen([*words, *TWO_FORMATS], cwd=folder, stdout=said, stderr=said)


def is_in_the_middle(state: StudyState) -> bool:
    return any(trial.status == RUNNING and 2 <= trial.epoch <= 4 for trial in state.trials)


def weights(state: StudyState) -> dict[str, bytes]:
    """The tensors in every trial's last checkpoint, of weights, buffers and momenta."""
    folders = {trial.id: Path(trial.checkpoints_left()[0]) for trial in state.trials}
    files = {trial: list(folder.glob("*.safetensors")) for trial, folder in folders.items()}
    return {trial: file.read_bytes() for trial, (file,) in files.items()}


@pytest.mark.slow
def test_a_study_that_was_killed_ends_with_the_bits_of_one_that_was_not(folder: Path) -> None:
    """A network with dropout and batch norm over two formats; the command itself is killed."""
    assert begin(folder, folder / "whole").wait() == 0
    process, ledger = begin(folder, folder / "killed"), folder / "killed" / "own"
    until = time.monotonic() + 120
    while not ((ledger / "ledger.jsonl").exists() and is_in_the_middle(fold(read_ledger(ledger)))):
        assert process.poll() is None, (folder / "said.txt").read_text()
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    broken_off = fold(read_ledger(ledger))
    assert is_in_the_middle(broken_off)
    assert begin(folder, folder / "killed").wait() == 0
    whole, again = (fold(read_ledger(folder / name / "own")) for name in ("whole", "killed"))
    assert [trial.status for trial in again.trials] == [FINISHED] * 2
    assert results(again) == results(whole)
    assert weights(again) == weights(whole)


def test_asking_after_the_code_has_changed_says_what_to_do(folder: Path) -> None:
    made = create(str(folder / "own.yaml"), storage=str(folder))
    (folder / "net.py").write_text(NETWORK.replace("width=4", "width=5"))
    with pytest.raises(UserError, match=r"not in its plan: code .* call create\(\)"):
        made.ask()
    assert create(str(folder / "own.yaml"), storage=str(folder)).ask() is not None


def test_code_that_is_changed_back_is_planned_anew(folder: Path) -> None:
    """Trials of the plan before the last do not belong to the study."""
    first = create(str(folder / "own.yaml"), storage=str(folder))
    before = [trial.id for trial in first.state.trials]
    (folder / "net.py").write_text(NETWORK.replace("width=4", "width=5"))
    create(str(folder / "own.yaml"), storage=str(folder))
    (folder / "net.py").write_text(NETWORK)
    with pytest.raises(UserError, match="not in its plan"):
        first.ask()
    again = create(str(folder / "own.yaml"), storage=str(folder))
    assert [trial.id for trial in again.state.trials] == before
    suggestion = again.ask()
    assert suggestion is not None
    assert suggestion.trial in before
