"""The contract of every executor, each in its own kind of worker processes, with one fixture for
each."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
    LEFT,
    MEET,
    REFUSED,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Message,
)
from trainers.workers.node import Node
from trainers.workers.resources import IN_PROCESS, PACKED, RAY_TRAIN

EPOCHS = 3
ORIGIN = {"study": "contract"}
SECRET = "of the ranks"


class Hosted:
    """Processes that train trials by one executor.

    Args:
        executor: its name.
        workers: ranks of a trial.
        processes: worker processes that a trial takes.
        lanes: trials at once in one.
        address: where ranks on several machines meet; "" for one machine.
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
        address: str = "",
        **values: Any,
    ) -> None:
        self.config = replace(SMALL, epochs=EPOCHS, batch_size=128, workers=workers)
        self._driver, self._executor, self._values = driver, executor, values
        self._processes, self._lanes, self._address = processes, lanes, address
        self.keys: list[int] = []

    def train(
        self,
        config: TrialConfig,
        folder: Path,
        *,
        stop_after: int = EPOCHS,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        """Train the trial of a folder; return its first process's messages. ``meanwhile`` is called
        after the first epoch, while the trial waits."""
        self._start()
        waits = stop_after < EPOCHS or meanwhile is not None
        values = {"origin": ORIGIN, "waits": waits, **self._values}
        self._tell(TRAIN, folder.name, plan(config, folder, self._executor, **values))
        said = self._until(self.keys[0], BEGAN, ENDED)
        while said[-1].kind != ENDED:
            said += self._until(self.keys[0], REPORT, ENDED)
            if values["waits"] and said[-1].kind == REPORT and not said[-1].payload["done"]:
                if meanwhile is not None and said[-1].payload["epoch"] == 1:
                    meanwhile()
                self._tell(GO if said[-1].payload["epoch"] < stop_after else STOP, folder.name)
        for key in self.keys[1:]:
            self._until(key, ENDED)
        if said[-1].payload["retire"]:
            assert self._until(self.keys[0], DIED)
            self.keys = []
        return said

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes."""
        return [self._driver.pids[key] for key in self.keys]

    def _start(self) -> None:
        """Create the missing processes; the processes of a gang meet."""
        if self.keys:
            return
        self.keys = [next(self._fresh) for _ in range(self._processes)]
        for key in self.keys:
            # passed on as a study does: for a Ray that started after the forking process
            own = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
            self._driver.start(key, self._lanes, **own)
        if self._processes > 1:
            store: int | str = ""
            for rank, key in enumerate(self.keys):
                place = {"rank": rank, "workers": self._processes, "store": store}
                address = {"address": self._address, "backend": "gloo", "secret": SECRET}
                self._driver.send(key, JOIN, payload=place | address)
                if rank == 0:
                    store = self._until(key, MEET)[-1].payload
            for key in self.keys:
                self._until(key, JOINED)

    def _tell(self, kind: str, trial: str, payload: Any = None) -> None:
        for key in self.keys:
            self._driver.send(key, kind, trial, payload)

    def _until(self, key: int, *kinds: str) -> list[Message]:
        return self._driver.until(key, lambda message: message.kind in kinds, 240.0)


def alone(config: TrialConfig) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the epochs' metrics and the last weights of a one-worker trial in this process."""
    training = Training(config)
    metrics = [training.train_epoch() for _ in range(config.epochs)]
    metrics[-1] |= training.test()
    return metrics, {name: p.codes for name, p in training.model.named_parameters()}


def errors(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics with the same bits for any number of workers: shares of examples."""
    return {name: value for name, value in metrics.items() if name.endswith("/error")}


def epochs_of(said: list[Message]) -> list[dict[str, Any]]:
    """Return the metrics of all epochs: those before the start, and the trial's reports."""
    began, *rest = said
    assert began.kind == BEGAN, began
    found = list(began.payload.history)
    for message in rest:
        if message.kind == REPORT:
            found += [*message.payload.get(HISTORY, []), message.payload]
    return found


def assert_complete(said: list[Message], config: TrialConfig) -> None:
    """Assert that the trial is done, all its epochs are known, and its result equals that of one
    worker."""
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
def apart(driver: Driver) -> Hosted:
    """A gang that meets like one whose ranks are on several machines."""
    return Hosted(driver, IN_PROCESS, workers=2, processes=2, address="127.0.0.1")


@pytest.fixture(scope="module")
def packed(driver: Driver) -> Hosted:
    return Hosted(driver, PACKED, lanes=2)


@pytest.fixture(scope="module")
def ray_train(driver: Driver, ray_cluster: None) -> Hosted:
    address = ray.get_runtime_context().gcs_address
    return Hosted(driver, RAY_TRAIN, workers=2, ray=address)


@pytest.fixture(
    scope="module",
    params=[
        "in_process",
        "gang",
        "apart",
        "packed",
        pytest.param("ray_train", marks=pytest.mark.slow),
    ],
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


@pytest.mark.parametrize("name", ["gang", "apart"])
def test_who_connects_to_a_gang_does_not_end_its_trial(
    request: pytest.FixtureRequest, name: str, tmp_path: Path
) -> None:
    hosted: Hosted = request.getfixturevalue(name)

    def intrude() -> None:
        """Send to every port of the ranks, as another user of the machine can, that all leave."""
        stores = list(stores_of(hosted.pids))
        assert bool(stores) == (name == "apart")
        for store in stores:
            store.set("leave/trial", "1")

    assert_complete(
        hosted.train(hosted.config, tmp_path / "trial", meanwhile=intrude), hosted.config
    )


def test_who_knows_a_gangs_secret_ends_its_trial(apart: Hosted, tmp_path: Path) -> None:
    def leave() -> None:
        for store in stores_of(apart.pids):
            store.set(f"leave/{SECRET}/trial", "1")

    said = apart.train(apart.config, tmp_path / "trial", meanwhile=leave)
    assert said[-1].payload["how"] == LEFT


def stores_of(pids: list[int]) -> Iterator[TCPStore]:
    """Yield a connection to each TCPStore at a port that one of the processes listens at."""
    for pid in pids:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and is_store(connection.laddr):
                yield TCPStore(*connection.laddr, timeout=timedelta(seconds=10))


def is_store(address: tuple[str, int]) -> bool:
    """Return whether a TCPStore answers, by its own ping: torch's client waits for others
    forever."""
    validate, ping = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=BI", 13, 7)
    with socket.create_connection(address, timeout=2.0) as connection, suppress(OSError):
        connection.sendall(validate + ping)
        return connection.recv(4) == struct.pack("=I", 7)
    return False
