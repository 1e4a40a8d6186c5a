"""Trials in real processes through the pool: gangs, shared processes, slots that are taken and
released."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.engines.engine import EPSILON
from study.engines.local.machine import Machine
from study.engines.local.pool import Pool
from tests.trainers.leaking import LEAKING
from tests.trainers.nodes import SMALL, plan, reports
from tests.trainers.telemetry.test_profiler import events
from trainers.config import (
    DataConfig,
    LossConfig,
    MetricConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ProfileConfig,
    TrainableConfig,
    TrialConfig,
)
from trainers.workers.messages import BEGAN, DIED, DONE, ENDED, REFUSED, REPORT, Message
from trainers.workers.node import Node
from trainers.workers.resources import PACKED, WorkerResources
from trainers.workers.resume import resume

GANG = replace(SMALL, workers=2, batch_size=128)
LONG = replace(GANG, epochs=10_000)


class Driver:
    """A pool over this machine, driven as by a study."""

    def __init__(self, cpus: float) -> None:
        self.node = Node()
        self.pool = Pool(Machine(cpus), self.node)

    def start(
        self,
        trial: str,
        config: TrialConfig,
        folder: Path,
        *values: Any,
        packed: bool = False,
        **more: Any,
    ) -> Any:
        executor = (PACKED,) if packed else values
        return self.pool.start(
            trial,
            WorkerResources.of(config, "packed" if packed else "auto"),
            lambda: plan(config, folder / trial, *executor, **more),
        )

    def until(self, wanted: Callable[[Message], bool], seconds: float = 60.0) -> list[Message]:
        found: list[Message] = []
        deadline = time.monotonic() + seconds
        while not any(map(wanted, found)):
            assert time.monotonic() < deadline, found
            found += self.pool.wait(0.5)
        return found

    def end(self, trial: str) -> list[Message]:
        """Return the messages of a trial up to its end. Others may send messages between and
        after."""
        said = self.until(lambda message: message.trial == trial and message.kind in (ENDED, DIED))
        return [message for message in said if message.trial == trial]

    def processes(self) -> set[int]:
        """Return the ids of the living worker processes."""
        assert self.node._server is not None
        (server,) = psutil.Process(self.node._server.pid).children()
        return {child.pid for child in server.children()}


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """Three CPUs."""
    driver = Driver(3)
    yield driver
    driver.pool.close()


def test_a_gang_in_lns_ends_with_the_bits_of_one_process_and_is_kept(
    driver: Driver, tmp_path: Path
) -> None:
    running = driver.start("gang", GANG, tmp_path)
    assert len(running.slots) == 2
    said = driver.end("gang")
    assert [message.kind for message in said] == [BEGAN, REPORT, REPORT, ENDED]
    assert said[-1].payload["how"] == DONE
    before = driver.processes()
    alone, _ = resume(replace(GANG, workers=1), [])
    alone.train_epoch()
    of_gang, beginning = resume(
        replace(GANG, workers=1), [str(tmp_path / "gang" / "checkpoints" / "000001")]
    )
    assert beginning.damaged == ""
    for (name, ours), theirs in zip(
        alone.model.named_parameters(), of_gang.model.parameters(), strict=True
    ):
        assert (ours.codes == theirs.codes).all(), name
    other = replace(
        GANG, precision=PrecisionConfig(), seed=3, optimizer=OptimizerConfig(name="adam", lr=0.01)
    )
    driver.start("between", other, tmp_path)
    assert reports(driver.end("between")) != reports(said)
    driver.start("again", GANG, tmp_path)
    assert reports(driver.end("again")) == reports(said)
    assert driver.processes() == before


def test_a_gang_of_one_machine_listens_to_that_machine_alone(
    driver: Driver, tmp_path: Path
) -> None:
    driver.start("local", LONG, tmp_path)
    driver.until(lambda message: message.kind == REPORT)
    open_ = [
        connection.laddr.ip
        for pid in driver.processes()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    driver.pool.kill("local", "seen enough")
    driver.end("local")
    assert open_, "ranks meet somewhere"
    assert set(open_) <= {"127.0.0.1", "::1"}


def test_every_rank_records_its_profile(driver: Driver, tmp_path: Path) -> None:
    config = replace(GANG, telemetry=True, epochs=1, profile=ProfileConfig(steps=[0, 2]))
    driver.start("profiled", config, tmp_path)
    (report,) = [message for message in driver.end("profiled") if message.kind == REPORT]
    assert report.payload["telemetry/communication_seconds"] > 0
    for rank in range(2):
        names = Counter(
            event["name"]
            for event in events(
                (tmp_path / "profiled" / "profile" / f"rank-{rank}.trace.json.gz").read_bytes()
            )
        )
        assert names["update"] == names["all_gather"] == 2


@pytest.fixture(scope="module")
def one_cpu() -> Iterator[Driver]:
    """A pool whose trials take turns."""
    driver = Driver(1)
    yield driver
    driver.pool.close()


@pytest.mark.parametrize(
    ("part", "how"),
    [
        *((part, "hook") for part in ("model", "loss", "data", "metrics", "trainable")),
        *(("model", how) for how in ("method", "function", "recursion", "umask", "modules")),
    ],
)
def test_what_code_of_the_user_s_changes_in_its_process_reaches_no_other_trial(
    one_cpu: Driver, part: str, how: str, tmp_path: Path
) -> None:
    (tmp_path / "leak.py").write_text(LEAKING)
    file, args = tmp_path / "leak.py", {"how": how}
    parts: dict[str, Any] = {
        "model": ModelConfig(name=f"{file}:make_net", args=args),
        "loss": LossConfig(name=f"{file}:make_loss", args=args),
        "data": DataConfig(name=f"{file}:digits", args=args),
        "metrics": {"own": MetricConfig(name=f"{file}:make_metric", args=args)},
        "trainable": TrainableConfig(name=f"{file}:train", args=args),
    }
    plain = replace(SMALL, precision=PrecisionConfig(), epochs=1)
    leaking = replace(plain, batch_size=32, **{part: parts[part]})
    found: dict[str, list[dict[str, Any]]] = {}
    for trial, config in (("before", plain), ("leaking", leaking), ("after", plain)):
        one_cpu.start(trial, config, tmp_path, WorkerResources.of(config).executor)
        said = one_cpu.end(trial)
        found[trial] = [metrics | {"pid": 0} for metrics in reports(said)]
        assert trial == "leaking" or said[-1].payload["how"] == DONE, said[-1].payload
    assert found["after"] == found["before"]


@pytest.mark.parametrize("executor", ["auto", "packed"])
@pytest.mark.parametrize("part", ["model", "loss", "data", "metrics"])
def test_code_of_the_user_s_shares_no_process(part: str, executor: str) -> None:
    parts: dict[str, Any] = {
        "model": ModelConfig(name="own.py:make"),
        "loss": LossConfig(name="own.py:make"),
        "data": DataConfig(name="own.py:make"),
        "metrics": {"own": MetricConfig(name="own.py:make")},
    }
    small = TrialConfig(device="cuda", gpus=1 / 12)
    assert WorkerResources.of(small, executor).lanes > 1
    assert WorkerResources.of(replace(small, **{part: parts[part]}), executor).lanes == 1


def test_a_dead_rank_ends_the_gang_at_once(driver: Driver, tmp_path: Path) -> None:
    driver.start("long", LONG, tmp_path)
    spoken = driver.until(lambda message: message.kind == REPORT)[-1].payload["pid"]
    (other,) = [pid for pid in driver.processes() if pid != spoken]
    start = time.monotonic()
    psutil.Process(other).kill()
    end = driver.end("long")[-1]
    assert time.monotonic() - start < 60  # not the two minutes that a collective would wait
    assert end.kind == DIED or end.payload["how"] == "failed"
    driver.start("after", GANG, tmp_path)
    assert driver.end("after")[-1].payload["how"] == DONE
    assert len(driver.processes()) == 2


def test_what_a_gang_refuses_is_said_once(driver: Driver, tmp_path: Path) -> None:
    driver.start("large", replace(GANG, batch_size=100_000), tmp_path)
    (end,) = driver.end("large")
    assert end.payload["how"] == REFUSED
    assert end.payload["text"].startswith("batch_size=100000")
    driver.start("fine", GANG, tmp_path)
    assert driver.end("fine")[-1].payload["how"] == DONE


def test_there_is_room_until_there_is_none(driver: Driver, tmp_path: Path) -> None:
    one = replace(SMALL, epochs=10_000)
    first = driver.start("first", one, tmp_path)
    gang = driver.start("second", LONG, tmp_path)
    assert [first.slots, gang.slots] == [[0], [1, 2]]
    assert driver.start("third", one, tmp_path) is None
    driver.until(lambda message: message.trial == "second" and message.kind == REPORT)
    driver.pool.kill("second", "enough")
    assert driver.end("second")[-1].payload == "enough"
    assert driver.start("a gang of three", replace(one, workers=3, batch_size=96), tmp_path) is None
    third = driver.start("third", one, tmp_path)
    fourth = driver.start("fourth", one, tmp_path)
    assert [third.slots, fourth.slots] == [[1], [2]]
    for trial in ("first", "third", "fourth"):
        driver.pool.kill(trial, "enough")
        driver.end(trial)
    assert driver.pool.running == []


def test_small_trials_share_a_process_whose_death_is_told_of_each(
    driver: Driver, tmp_path: Path
) -> None:
    one = replace(SMALL, epochs=10_000)
    for trial in "abc":
        assert driver.start(trial, replace(one, seed=ord(trial)), tmp_path, packed=True)
    assert driver.start("d", one, tmp_path, packed=True) is None
    told: dict[str, int] = {}
    while set(told) != set("abc"):
        said = driver.until(lambda message: message.kind == REPORT)
        told |= {
            message.trial: message.payload["pid"] for message in said if message.kind == REPORT
        }
    (pid,) = set(told.values())
    psutil.Process(pid).kill()
    died: set[str] = set()
    while died != set("abc"):
        died |= {
            message.trial
            for message in driver.until(lambda message: message.kind == DIED)
            if message.kind == DIED
        }
    driver.start("fine", SMALL, tmp_path, packed=True)
    assert driver.end("fine")[-1].payload["how"] == DONE


class Silent:
    """Replaces the node; its processes report nothing."""

    def start(self, key: int, environment: dict[str, str], lanes: int) -> None:
        """Do nothing."""

    def send(self, key: int, message: bytes) -> None:
        """Do nothing."""

    def kill(self, key: int) -> None:
        """Do nothing."""


SHAPES = st.builds(
    WorkerResources,
    workers=st.integers(1, 6),
    threads=st.integers(1, 4),
    device=st.sampled_from(["cpu", "cuda"]),
    gpus=st.sampled_from([0.08, 0.25, 0.5, 1.0, None]),
    packed=st.just(""),
    lanes=st.just(1),
)


def fill(machine: Machine, steps: list[tuple[WorkerResources, int]]) -> None:
    """Start and end trials in a random order, and check the free resources after each step."""
    pool = Pool(machine, Silent())  # type: ignore[arg-type]
    running: dict[str, Any] = {}
    for number, (shape, ends) in enumerate(steps):
        room = machine.free >= shape.cpus and shape.device == "cpu"
        started = pool.start(str(number), shape, dict)
        assert started is not None or not room
        if started is not None:
            running[str(number)] = started
            assert len(started.places) == len(started.hosts) == shape.workers
        slots = [slot for each in running.values() for slot in each.slots]
        assert len(slots) == len(set(slots))
        assert -EPSILON < machine.free <= machine.cpus
        assert all(-EPSILON < free <= 1 + EPSILON for free in machine.gpus)
        if running and ends % 3 == 0:
            trial = sorted(running)[ends % len(running)]
            lost = pool._lose(pool._trials[trial], "gone")
            assert {message.trial for message in lost} == {trial}
            del running[trial]
    for trial in list(running):
        pool._lose(pool._trials[trial], "gone")


@given(
    st.integers(1, 16),
    st.integers(0, 4),
    st.lists(st.tuples(SHAPES, st.integers(0, 40)), max_size=40),
)
def test_no_place_is_taken_twice_and_all_come_back(
    cpus: int, gpus: int, steps: list[tuple[WorkerResources, int]]
) -> None:
    """Trials start and die in any order: no resource becomes negative or is lost, slots are
    distinct, and free ones are found."""
    machine = Machine(cpus, [str(gpu) for gpu in range(gpus)])
    fill(machine, steps)
    assert machine.free == pytest.approx(machine.cpus)
    assert machine.gpus == pytest.approx([1.0] * gpus)


def test_a_process_sees_its_gpu_alone_and_trials_are_spread_over_all() -> None:
    machine = Machine(8, ["4", "GPU-7"])
    half = WorkerResources(workers=1, threads=1, device="cuda", gpus=0.5)
    places = []
    for _ in range(4):
        places += (found := machine.find(half)) or []
        machine.take(half, found or [])
    assert places == [0, 1, 0, 1]
    assert machine.find(half) is None
    assert not machine.fits(half, [0])
    machine.give_back(half, [1])
    assert machine.find(half) == [1]
    assert [machine.environment(place) for place in (None, 1)] == [
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "GPU-7"},
    ]
    assert Machine(8).environment(None) == {}
    assert machine.host == os.uname().nodename
