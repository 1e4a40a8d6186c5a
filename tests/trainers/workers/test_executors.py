"""What every executor keeps to, each in the worker processes that it is made for: one contract, and
a fixture each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.trainers.nodes import SMALL, Driver, plan
from trainers.checkpoint.files import load_checkpoint
from trainers.config import ProfileConfig, TrialConfig
from trainers.training.trainer import Training
from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    ENDED,
    GO,
    HISTORY,
    JOIN,
    JOINED,
    MEET,
    REFUSED,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Message,
)
from trainers.workers.node import Node
from trainers.workers.resources import IN_PROCESS, PACKED, RAY_TRAIN, choose_executor

EPOCHS = 3
ORIGIN = {"study": "contract"}


class Hosted:
    """Processes that train trials by one executor.

    Args:
        executor: its name.
        workers: ranks of a trial.
        processes: worker processes that a trial takes.
        lanes: trials at once in one.
        values: more of a trial's plan.
    """

    _fresh = itertools.count(1000)

    def __init__(
        self,
        driver: Driver,
        executor: str,
        *,
        workers: int = 1,
        processes: int = 1,
        lanes: int = 1,
        **values: Any,
    ) -> None:
        self.config = replace(SMALL, epochs=EPOCHS, batch_size=128, workers=workers)
        self._driver, self._executor, self._values = driver, executor, values
        self._processes, self._lanes = processes, lanes
        self.keys: list[int] = []

    def train(
        self, config: TrialConfig, folder: Path, *, stop_after: int = EPOCHS
    ) -> list[Message]:
        """Train the trial of a folder; what its first process said of it."""
        self._start()
        values = {"origin": ORIGIN, "waits": stop_after < EPOCHS, **self._values}
        self._tell(TRAIN, folder.name, plan(config, folder, self._executor, **values))
        said = self._until(self.keys[0], BEGAN, ENDED)
        while said[-1].kind != ENDED:
            said += self._until(self.keys[0], REPORT, ENDED)
            if values["waits"] and said[-1].kind == REPORT:
                self._tell(GO if said[-1].payload["epoch"] < stop_after else STOP, folder.name)
        for key in self.keys[1:]:
            self._until(key, ENDED)
        if said[-1].payload["retire"]:
            assert self._until(self.keys[0], DIED)
            self.keys = []
        return said

    def _start(self) -> None:
        """Make the processes that there are not; those of a gang meet."""
        if self.keys:
            return
        self.keys = [next(self._fresh) for _ in range(self._processes)]
        for key in self.keys:
            # as a study passes them on: of a Ray that began after the forking process
            own = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
            self._driver.start(key, self._lanes, **own)
        if self._processes > 1:
            port = 0
            for rank, key in enumerate(self.keys):
                place = {"rank": rank, "workers": self._processes, "port": port}
                address = {"address": "127.0.0.1", "backend": "gloo"}
                self._driver.send(key, JOIN, payload=place | address)
                if rank == 0:
                    port = self._until(key, MEET)[-1].payload
            for key in self.keys:
                self._until(key, JOINED)

    def _tell(self, kind: str, trial: str, payload: Any = None) -> None:
        for key in self.keys:
            self._driver.send(key, kind, trial, payload)

    def _until(self, key: int, *kinds: str) -> list[Message]:
        return self._driver.until(key, lambda message: message.kind in kinds, 240.0)


def alone(config: TrialConfig) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The epochs' metrics and the last weights of a trial of one worker in this process."""
    training = Training(config)
    metrics = [training.train_epoch() for _ in range(config.epochs)]
    metrics[-1] |= training.test()
    return metrics, {name: p.codes for name, p in training.model.named_parameters()}


def errors(metrics: dict[str, Any]) -> dict[str, float]:
    """What has the same bits however many workers add it up: shares of examples."""
    return {name: value for name, value in metrics.items() if name.endswith("/error")}


def epochs_of(said: list[Message]) -> list[dict[str, Any]]:
    """The metrics of all epochs: those that the trial began with, and its reports."""
    began, *rest = said
    assert began.kind == BEGAN, began
    found = list(began.payload.history)
    for message in rest:
        if message.kind == REPORT:
            found += [*message.payload.get(HISTORY, []), message.payload]
    return found


def assert_complete(said: list[Message], config: TrialConfig) -> None:
    """The trial is done, all its epochs are known, and it ended as alone."""
    expected, weights = alone(replace(config, workers=1))
    ended, reports = said[-1].payload, [message for message in said if message.kind == REPORT]
    assert ended["how"] == DONE, ended
    by_epoch = {metrics["epoch"]: metrics for metrics in epochs_of(said)}
    assert [errors(by_epoch[epoch]) for epoch in sorted(by_epoch)] == [
        errors(metrics) for metrics in expected
    ]
    assert [message.payload["done"] for message in reports] == [*[False] * (len(reports) - 1), True]
    tensors, state = load_checkpoint(Path(reports[-1].payload["checkpoint_path"]))
    assert (state["epoch"], state["origin"]) == (EPOCHS, ORIGIN)
    for name, codes in weights.items():
        assert torch.equal(tensors[f"model/{name}"], codes), name


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Node() as node:
        yield Driver(node)


@pytest.fixture(scope="module")
def in_process(driver: Driver) -> Hosted:
    return Hosted(driver, IN_PROCESS)


@pytest.fixture(scope="module")
def gang(driver: Driver) -> Hosted:
    return Hosted(driver, IN_PROCESS, workers=2, processes=2)


@pytest.fixture(scope="module")
def packed(driver: Driver) -> Hosted:
    return Hosted(driver, PACKED, lanes=2)


@pytest.fixture(scope="module")
def ray_train(driver: Driver, ray_cluster: None) -> Hosted:
    address = ray.get_runtime_context().gcs_address
    return Hosted(driver, RAY_TRAIN, workers=2, ray=address)


@pytest.fixture(
    scope="module",
    params=["in_process", "gang", "packed", pytest.param("ray_train", marks=pytest.mark.slow)],
)
def hosted(request: pytest.FixtureRequest) -> Hosted:
    """Every executor in turn."""
    found: Hosted = request.getfixturevalue(request.param)
    return found


def test_a_trial_ends_as_alone_and_so_does_the_next(hosted: Hosted, tmp_path: Path) -> None:
    for config in (hosted.config, replace(hosted.config, seed=1)):
        said = hosted.train(config, tmp_path / f"seed-{config.seed}")
        assert_complete(said, config)
        assert [message.kind for message in said] == [BEGAN, *[REPORT] * EPOCHS, ENDED]


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_stopped_trial_goes_on_and_ends_as_if_never_stopped(
    hosted: Hosted, tmp_path: Path, damaged: bool
) -> None:
    folder = tmp_path / "stops"
    said = hosted.train(hosted.config, folder, stop_after=2)
    assert said[-1].payload["how"] == STOPPED
    newest = Path(said[-2].payload["checkpoint_path"])
    assert load_checkpoint(newest)[1]["epoch"] == 2
    if damaged:
        (newest / "state.json").write_text("{")
    again = hosted.train(hosted.config, folder)
    assert (str(newest) in again[0].payload.damaged) == damaged
    assert_complete(again, hosted.config)


def test_what_cannot_be_built_is_refused_and_the_next_trial_trains(
    hosted: Hosted, tmp_path: Path
) -> None:
    large = replace(hosted.config, batch_size=100_000)
    said = hosted.train(large, tmp_path / "large")
    assert said[-1].payload["how"] == REFUSED
    assert "batch_size=100000" in said[-1].payload["text"]
    assert REPORT not in [message.kind for message in said]
    keys = hosted.keys
    assert_complete(hosted.train(hosted.config, tmp_path / "fine"), hosted.config)
    assert hosted.keys == keys


def test_every_ranks_profile_is_kept_once(hosted: Hosted, tmp_path: Path) -> None:
    config = replace(hosted.config, epochs=1, profile=ProfileConfig(steps=[0, 1]))
    said = hosted.train(config, tmp_path / "profiled")
    assert said[-1].payload["how"] == DONE
    names = [path.name for path in tmp_path.rglob("*.trace.json.gz")]
    assert sorted(names) == [f"rank-{rank}.trace.json.gz" for rank in range(config.workers)]


@pytest.mark.parametrize(
    ("wanted", "lanes", "expected"),
    [
        ("auto", 1, IN_PROCESS),
        ("auto", 6, PACKED),
        ("packed", 32, PACKED),
        ("packed", 1, IN_PROCESS),
        ("train", 1, RAY_TRAIN),
    ],
)
def test_the_studys_key_and_the_lanes_choose_the_executor(
    wanted: str, lanes: int, expected: str
) -> None:
    assert choose_executor(wanted, lanes) == expected
