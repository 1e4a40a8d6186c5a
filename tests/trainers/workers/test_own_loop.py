"""Trials with a user's own loop, in real worker processes: each report is an epoch; stopped, killed
and continued, with errors for mistakes."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.nodes import Driver, plan
from tests.trainers.processes import spawned
from tests.trainers.user_loops import LOOPS
from tests.trainers.workers.test_executors import Hosted
from trainers import get_checkpoint, report
from trainers.checkpoint.loops import keep, stage
from trainers.checkpoint.manifest import file_digests, read_state
from trainers.config import SyncConfig, TrainableConfig, TrialConfig
from trainers.user_loop import load_loop
from trainers.workers.executors import Context
from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    ENDED,
    FAILED,
    FINAL,
    OUT_OF_MEMORY,
    REFUSED,
    REPORT,
    STOPPED,
    TRAIN,
    Message,
)
from trainers.workers.node import Node
from trainers.workers.out_of_memory import relief
from trainers.workers.own_loop import OwnLoop
from trainers.workers.resources import OWN_LOOP, WorkerResources


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Node() as node:
        yield Driver(node)


@pytest.fixture(scope="module")
def alone(driver: Driver) -> Hosted:
    return Hosted(driver, OWN_LOOP)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(LOOPS)
    return path


def trial(file: Path, function: str, epochs: int = 4, **more: Any) -> TrialConfig:
    args = more.pop("args", {})
    loop = TrainableConfig(name=f"{file}:{function}", args=args)
    return TrialConfig(trainable=loop, epochs=epochs, **more)


def metrics(said: list[Message], name: str) -> list[float]:
    return [message.payload[name] for message in said if message.kind == REPORT]


def test_every_report_is_an_epoch_and_what_it_returns_is_final(
    alone: Hosted, file: Path, tmp_path: Path
) -> None:
    config = trial(file, "descend")
    said = alone.train(config, tmp_path / "whole")
    assert [message.kind for message in said] == [BEGAN, *[REPORT] * 4, ENDED], said[-1]
    assert metrics(said, "validation/error") == [0.5, 0.25, 0.125, 0.0625]
    assert metrics(said, "epoch") == [1.0, 2.0, 3.0, 4.0]
    assert metrics(said, "plain") == [1.0] * 4
    assert metrics(said, "done") == [False, False, False, True]
    assert said[-2].payload[FINAL] == {"test/error": 0.0625, "accuracy": 0.25}
    state = read_state(Path(said[-2].payload["checkpoint_path"]))
    assert (state["epoch"], state["tested"]) == (4, said[-2].payload[FINAL])
    assert TrialConfig.from_dict(state["config"]) == config


def test_what_a_loop_imports_is_imported_anew_for_each_trial(alone: Hosted, tmp_path: Path) -> None:
    """The process stays. The first trial changed a module beside the loop's file, and the module's
    file was edited after it."""
    loop, neighbour = tmp_path / "counting.py", tmp_path / "counted.py"
    loop.write_text(
        "import counted\nfrom trainers import report\n\n"
        "def train(config):\n"
        "    counted.trials += 1\n"
        "    report({'validation/error': counted.trials + counted.width})\n"
    )
    for place, width in (("first", 0.0), ("second", 10.0)):
        neighbour.write_text(f"trials = 0\nwidth = {width}")
        said = alone.train(trial(loop, "train", epochs=1), tmp_path / place)
        assert metrics(said, "validation/error") == [1.0 + width]


def test_a_loop_that_returns_early_ends_its_trial(
    alone: Hosted, file: Path, tmp_path: Path
) -> None:
    said = alone.train(trial(file, "descend", epochs=9), tmp_path / "early")
    assert said[-1].payload["how"] == DONE
    assert metrics(said, "epoch") == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert (said[-2].payload["done"], said[-2].payload[FINAL]["accuracy"]) == (True, 0.25)
    again = alone.train(trial(file, "descend", epochs=9), tmp_path / "early")
    assert [message.kind for message in again] == [BEGAN, REPORT, ENDED]
    assert again[1].payload[FINAL] == said[-2].payload[FINAL]


def test_a_loop_that_wants_more_is_unwound_at_its_epochs(
    alone: Hosted, file: Path, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    config = trial(file, "endless", epochs=2, args={"note": str(note)})
    said = alone.train(config, tmp_path / "endless")
    assert metrics(said, "done") == [False, True]
    assert said[-2].payload[FINAL] == {}
    assert note.read_text() == "unwound"


def test_a_stopped_loop_is_unwound_and_its_process_trains_the_next(
    alone: Hosted, file: Path, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    config = trial(file, "endless", epochs=99, args={"note": str(note)})
    said = alone.train(config, tmp_path / "stopped", stop_after=2)
    assert (said[-1].payload["how"], said[-1].payload["retire"]) == (STOPPED, "")
    assert metrics(said, "epoch") == [1.0, 2.0]
    assert note.read_text() == "unwound"
    keys = alone.keys
    next_one = alone.train(trial(file, "descend"), tmp_path / "next")
    assert next_one[-1].payload["how"] == DONE
    assert alone.keys == keys


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_killed_loop_goes_on_after_its_last_checkpoint(
    driver: Driver, file: Path, tmp_path: Path, damaged: bool
) -> None:
    config = trial(file, "descend", args={"seconds": 0.2})
    pid = driver.start(key := 100 + damaged)
    driver.send(key, TRAIN, "killed", plan(config, tmp_path, OWN_LOOP))
    driver.until(key, lambda message: message.kind == REPORT and message.payload["epoch"] == 2)
    os.kill(pid, signal.SIGKILL)
    driver.until(key, lambda message: message.kind == DIED)
    newest = sorted((tmp_path / "checkpoints").glob("[0-9]*"))[-1]
    if damaged:
        (newest / "dict.pt").write_bytes(b"")
    driver.start(key + 10)
    began, *said = driver.train(key + 10, "killed", config, tmp_path, OWN_LOOP)
    began, *said = [m for m in (began, *said) if m.kind != "hello"]
    assert (str(newest) in began.payload.damaged) == damaged
    before = [found["epoch"] for found in began.payload.history]
    assert before == [1.0, 2.0, 3.0][: int(newest.name) - damaged]
    assert before + metrics(said, "epoch") == [1.0, 2.0, 3.0, 4.0]
    assert metrics(said, "validation/error")[-1] == 0.0625


def continued(rank: int, folder: str) -> dict[str, Any]:
    """Return where two ranks continue if the second sees another checkpoint of the same epoch as
    the newest."""
    root = Path(folder)
    places = {name: root / f"{name} {rank}" for name in ("older", "one", "another")}
    for number, (name, place) in enumerate(places.items()):
        stage({"value": torch.tensor(number)}, root / f"staged {rank}")
        state = {"epoch": 1 + (name != "older"), "history": [], "tested": {}, "returned": False}
        keep(root / f"staged {rank}", place, state)
    os.chdir(tempfile.mkdtemp(dir=root))  # so that ranks use the same path but see their own files
    Path("newest").symlink_to(places["another" if rank else "one"])
    Path("before").symlink_to(places["older"])
    context = Context(trial="a", plan={"checkpoints": folder}, rank=rank, workers=2)
    found, damaged = OwnLoop(context)._continued(["newest", "before"])
    assert isinstance(found, dict)
    return {"value": int(found["value"]), "damaged": damaged}


def test_ranks_that_see_different_checkpoints_of_an_epoch_go_on_from_one_that_all_see(
    tmp_path: Path,
) -> None:
    for found in spawned(continued, tmp_path):
        assert found["value"] == 0
        assert found["damaged"].startswith("newest: not the same checkpoint on every rank")


def test_a_context_has_the_trial_and_random_numbers_are_seeded(
    alone: Hosted, file: Path, tmp_path: Path
) -> None:
    config = trial(file, "by_context", epochs=3, batch_size=33, seed=5, threads=2)
    said = alone.train(config, tmp_path / "first")
    assert metrics(said, "seed") == [5.0] * 3
    assert metrics(said, "batch") == [33.0] * 3
    assert metrics(said, "threads") == [2.0] * 3
    drawn = ("torch", "numpy", "python")
    again = alone.train(config, tmp_path / "second")
    other = alone.train(replace(config, seed=6), tmp_path / "third")
    for name in drawn:
        assert metrics(again, name) == metrics(said, name) != metrics(other, name)


def test_a_folder_is_a_checkpoint_as_it_was_at_the_report(
    alone: Hosted, file: Path, tmp_path: Path
) -> None:
    config = trial(file, "by_context", epochs=3)
    said = alone.train(config, tmp_path / "folder", stop_after=2)
    kept = Path(said[-2].payload["checkpoint_path"])
    assert {path.name: path.read_text() for path in (kept / "files").iterdir()} == {
        "0.txt": "kept",
        "1.txt": "cpu",
    }
    assert set(file_digests(read_state(kept))) == {"files/0.txt", "files/1.txt"}
    again = alone.train(config, tmp_path / "folder")
    assert metrics(again, "resumed") == [2.0]
    assert metrics(again, "epoch") == [3.0]


def test_checkpoints_are_kept_as_often_as_the_study_says(
    alone: Hosted, driver: Driver, file: Path, tmp_path: Path
) -> None:
    hosted = Hosted(driver, OWN_LOOP, checkpoint_every=3)
    hosted.train(trial(file, "descend", epochs=9), tmp_path / "few")
    names = sorted(path.name for path in (tmp_path / "few" / "checkpoints").iterdir())
    assert names == ["000003", "000004"]


def test_ranks_of_a_gang_share_torch_distributed(
    driver: Driver, file: Path, tmp_path: Path
) -> None:
    gang = Hosted(driver, OWN_LOOP, workers=2, processes=2)
    config = trial(file, "summed", epochs=3, workers=2)
    said = gang.train(config, tmp_path / "gang", stop_after=2)
    assert said[-1].payload["how"] == STOPPED
    said = gang.train(config, tmp_path / "gang")
    assert metrics(said, "epoch") == [3.0]
    assert metrics(said, "validation/error") == pytest.approx([0.3])
    assert metrics(said, "rank") == [0.0]
    assert said[-2].payload[FINAL] == {"workers": 2.0}


@pytest.mark.parametrize(
    ("function", "args", "told"),
    [
        ("silent", {}, r"returned and reported nothing; call trainers\.report"),
        ("raises", {}, r"RuntimeError in .*loop\.py, line \d+: no such weights in this file; mend"),
        ("gives", {"metrics": "3"}, r"report 1 is of type int; give a dict"),
        ("gives", {"metrics": "{1: 2}"}, r"has the name 1; names are texts"),
        ("gives", {"metrics": "{'done': 1}"}, r"has the name 'done'; names are texts other than"),
        ("gives", {"metrics": "{'bits': 1}"}, r"has the name 'bits'; names are texts other than"),
        ("gives", {"metrics": "{'seconds': 1}"}, r"has the name 'seconds'; names are texts other"),
        ("gives", {"metrics": "{'m': 'bad'}"}, r"has m=bad of type str; give a number"),
        ("gives", {"metrics": "{'m': torch.ones(2)}"}, r"of type Tensor; give a number"),
        ("gives", {"metrics": "{'m': float('nan')}"}, r"line \d+: report 1 has m=nan, with which"),
        ("gives", {"metrics": "{'epoch': 0, 'm': 1}"}, r"has epoch=0; every report is one epoch"),
        ("gives", {"metrics": "{'m': 1}", "returned": "0.5"}, r"what it returned is of type float"),
        ("gives", {"metrics": "{'m': 1}", "checkpoint": "3"}, r"checkpoint is of type int; give"),
        ("gives", {"metrics": "{'m': 1}", "checkpoint": "'no'"}, r"checkpoint='no' is no folder"),
        (
            "gives",
            {"metrics": "{'m': 1}", "checkpoint": "{'at': pathlib.Path()}"},
            r"values of pathlib\.PosixPath, which torch\.load does not read with weights_only",
        ),
    ],
)
def test_what_a_loop_does_wrong_is_told_with_its_line(
    alone: Hosted, file: Path, tmp_path: Path, function: str, args: dict[str, str], told: str
) -> None:
    said = alone.train(trial(file, function, args=args), tmp_path / "wrong")
    assert said[-1].payload["how"] == REFUSED
    text = said[-1].payload["text"]
    assert text.startswith(f"trainable.name=loop.py:{function}")
    assert str(file) in text
    assert re.search(told, text), text


def test_a_metric_that_the_study_compares_must_be_reported(
    driver: Driver, file: Path, tmp_path: Path
) -> None:
    hosted = Hosted(driver, OWN_LOOP, metrics=["validation/error"])
    said = hosted.train(trial(file, "gives", args={"metrics": "{'loss': 1}"}), tmp_path / "lacks")
    assert "report 1 has loss and lacks validation/error, by which" in said[-1].payload["text"]


@pytest.mark.parametrize(
    ("function", "how"), [("lacks_memory", OUT_OF_MEMORY), ("lost", FAILED), ("left_alone", FAILED)]
)
def test_what_another_try_may_not_meet_is_no_mistake_of_the_loop(
    driver: Driver, file: Path, tmp_path: Path, function: str, how: str
) -> None:
    hosted = Hosted(driver, OWN_LOOP)
    said = hosted.train(trial(file, function), tmp_path / "unlucky")
    assert said[-1].payload["how"] == how
    assert "loop.py, line" in said[-1].payload["text"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("absent", "has no function or class absent.*; it has .*by_context"),
        ("two", r"missing a required argument: 'other' in two\(config, other\).*line \d+"),
        ("nothing", r"too many positional arguments in nothing\(\)"),
        ("stream", "is a generator .* calls trainers.report"),
        ("Trainable", "is a class"),
    ],
)
def test_a_loop_that_cannot_be_called_is_refused(file: Path, function: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_loop(f"{file}:{function}", "")


def test_a_report_outside_of_a_trial_is_refused() -> None:
    with pytest.raises(ValueError, match="outside of a trial"):
        report({"validation/error": 0.5})
    with pytest.raises(ValueError, match="outside of a trial"):
        get_checkpoint()


def test_what_is_only_a_value_is_not_refused_and_what_acts_is(file: Path) -> None:
    trial(file, "descend", workers=3, batch_size=128, analysis_every=2)
    with pytest.raises(ValueError, match=r"with sync\.name=ensemble"):
        trial(file, "descend", workers=2, sync=SyncConfig(name="ensemble"))
    with pytest.raises(ValueError, match=r"with min_workers=1"):
        trial(file, "descend", workers=2, min_workers=1)
    with pytest.raises(ValueError, match=r"without trainable\.name"):
        TrainableConfig(args={"lr": 1})
    with pytest.raises(ValueError, match=r"must be file\.py:name"):
        TrainableConfig(name="train")


def test_a_loop_takes_a_whole_gpu_if_nothing_is_said_and_more_if_memory_runs_out(
    file: Path,
) -> None:
    shape = WorkerResources.of(trial(file, "descend", device="cuda"))
    assert (shape.gpus, shape.lanes, shape.executor) == (1.0, 1, OWN_LOOP)
    assert relief(trial(file, "descend", device="cuda", gpus=0.5)) == {"gpus": 1.0}
    assert relief(trial(file, "descend")) is None
