"""Worker processes of a machine, real ones: forked, reused, lost, replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainers.nodes import MADE_UP, SMALL, Driver, alone, plan, reports
from trainers import output
from trainers.config import ModelConfig, OptimizerConfig, PrecisionConfig
from trainers.workers.fork_server import ForkServer
from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    ENDED,
    GO,
    HELLO,
    OUT_OF_MEMORY,
    REFUSED,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Message,
)
from trainers.workers.node import Node
from trainers.workers.out_of_memory import relief
from trainers.workers.resources import PACKED
from trainers.workers.worker_process import _older, checkpoints_in


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Node() as node:
        yield Driver(node)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> int:
    """Return a new process's variable, by the test's name."""
    return abs(hash(request.node.nodeid)) % 10**9


def how(said: list[Message]) -> str:
    assert said[-1].kind == ENDED
    return str(said[-1].payload["how"])


def test_one_process_trains_trial_after_trial_each_as_alone(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    other = replace(
        SMALL, precision=PrecisionConfig(), seed=3, optimizer=OptimizerConfig(name="adam", lr=0.01)
    )
    pid = driver.start(key)
    for number, config in enumerate((SMALL, other, SMALL)):
        said = driver.train(key, f"trial {number}", config, tmp_path / str(number))
        assert [message.kind for message in said] == [BEGAN, REPORT, REPORT, ENDED]
        assert how(said) == DONE
        assert reports(said) == alone(config)
        assert psutil.pid_exists(pid)
    assert [path.name for path in checkpoints_in(tmp_path / "0" / "checkpoints")] == [
        "000002",
        "000001",
    ]


def test_a_process_shares_kernels_among_the_threads_of_torch(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    driver.start(key)
    said = driver.train(key, "trial", SMALL, tmp_path, f"{MADE_UP}Team")
    assert said[-2].payload["team"] is True, (
        "what forks processes has threads that are not Python's"
    )


def test_a_trial_goes_on_after_its_newest_checkpoint_and_says_what_came_before(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    driver.start(key)
    driver.train(key, "first", replace(SMALL, epochs=3), tmp_path)
    (tmp_path / "checkpoints" / "000003" / "state.json").write_text("{")
    said = driver.train(key, "again", replace(SMALL, epochs=3), tmp_path)
    assert said[0].kind == BEGAN
    assert "000003" in said[0].payload.damaged
    assert [metrics["epoch"] for metrics in said[0].payload.history] == [1, 2]
    assert reports(said) == alone(replace(SMALL, epochs=3))[2:]


def test_a_trial_waits_for_the_word_to_go_on_where_its_plan_says_so(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    driver.start(key)
    driver.send(key, TRAIN, "waits", plan(replace(SMALL, epochs=5), tmp_path, waits=True))
    driver.until(key, lambda message: message.kind == REPORT)
    time.sleep(0.5)
    assert not driver.node.events(0.0)
    driver.send(key, GO, "waits")
    said = driver.until(key, lambda message: message.kind == REPORT)
    assert said[-1].payload["epoch"] == 2
    driver.send(key, STOP, "waits")
    assert how(driver.until(key, lambda message: message.kind == ENDED)) == STOPPED


def test_what_cannot_work_is_refused_and_the_process_goes_on(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    pid = driver.start(key)
    said = driver.train(key, "large", replace(SMALL, batch_size=100_000), tmp_path)
    assert how(said) == REFUSED
    assert said[-1].payload["text"].startswith("batch_size=100000: ")
    said = driver.train(key, "mistake", SMALL, tmp_path / "mistake", MADE_UP + "Mistaken")
    assert (
        said[-1].payload["text"]
        == "AttributeError: 'Mistaken' object has no attribute 'nothing_of_that_name'"
    )
    assert how(driver.train(key, "fine", SMALL, tmp_path / "fine")) == DONE
    assert psutil.pid_exists(pid)


def test_any_other_error_is_said_and_ends_the_process(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    driver.start(key)
    said = driver.train(key, "unlucky", SMALL, tmp_path, MADE_UP + "Unlucky")
    assert said[-1].payload["text"] == "the network is away"
    died = driver.until(key, lambda message: message.kind == DIED)
    assert died[-1].payload == "the trial's process ended with exit code 1"


@pytest.mark.parametrize(("leaks", "said_of_it"), [("Greedy", "MB"), ("Threads", "threads")])
def test_a_process_that_keeps_too_much_ends_after_its_trial(
    driver: Driver, key: int, tmp_path: Path, leaks: str, said_of_it: str
) -> None:
    driver.start(key)
    said = driver.train(key, "first", SMALL, tmp_path / "first", MADE_UP + leaks)
    if not said[-1].payload["retire"]:  # memory is compared with its size after the first trial
        said = driver.train(key, "second", SMALL, tmp_path / "second", MADE_UP + leaks)
    assert how(said) == DONE
    assert said_of_it in said[-1].payload["retire"]
    driver.until(key, lambda message: message.kind == DIED)


def test_smaller_micro_batches_fit_where_the_batch_did_not(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    """Activations of 268 MB each, in a process that may have 700 MB more."""
    base = replace(
        SMALL,
        data=replace(SMALL.data, train_size=None),
        precision=PrecisionConfig(),
        batch_size=1024,
        epochs=1,
    )
    large = replace(base, model=ModelConfig(hidden=[65536]))
    driver.start(key)
    assert how(driver.train(key, "small", base, tmp_path / "small")) == DONE
    said = driver.train(key, "large", large, tmp_path / "large", MADE_UP + "Limited")
    assert how(said) == OUT_OF_MEMORY
    assert "memory" in said[-1].payload["text"]
    assert relief(large) == {"layout.micro_batches": 2}
    again = replace(large, layout=replace(large.layout, micro_batches=2))
    assert how(driver.train(key, "again", again, tmp_path / "again", MADE_UP + "Limited")) == DONE


def test_a_killed_process_is_told_after_all_that_it_said(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    pid = driver.start(key)
    driver.send(key, TRAIN, "long", plan(replace(SMALL, epochs=10_000), tmp_path))
    driver.until(key, lambda message: message.kind == REPORT)
    os.kill(pid, 9)
    said = driver.until(key, lambda message: message.kind == DIED)
    assert said[-1].payload == "the trial's process died (SIGKILL)"
    assert {message.kind for message in said[:-1]} <= {REPORT}
    driver.send(key, TRAIN, "nobody hears", {})
    driver.start(key + 1)


def test_a_death_may_be_told_before_the_end_of_its_connection_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many are killed at once while others start, as when gangs need slots; the forking process's
    messages are always read first."""
    with Node() as node:
        driver = Driver(node)
        driver.start(1)
        select = node._selector.select

        def server_first() -> list[Any]:
            time.sleep(0.05)
            return sorted(select(), key=lambda ready: ready[0].data is not None)

        monkeypatch.setattr(node._selector, "select", server_first)
        waves = [range(10 * wave, 10 * wave + 8) for wave in range(1, 4)]
        for old, new in pairwise([range(0), *waves, range(0)]):
            for key in old:
                node.kill(key)
            for key in new:
                node.start(key, {}, 1)
            for key in new:
                driver.until(key, lambda message: message.kind == HELLO)
            for key in old:
                assert (
                    driver.until(key, lambda message: message.kind == DIED)[-1].payload
                    == "the trial's process died (SIGKILL)"
                )
        assert list(node._processes) == [1]


def test_the_current_folder_is_imported_from_by_no_process(tmp_path: Path) -> None:
    """Others may put modules where they can write, such as in /tmp."""
    (tmp_path / "numba.py").write_text(f"open({str(tmp_path / 'trapped')!r}, 'w')")
    code = "from trainers.workers.node import Node\nwith Node() as node: print(node.load([]))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "trapped").exists()


def test_checkpoints_after_damaged_ones_are_kept() -> None:
    """A trial whose checkpoints 19 and 20 are damaged starts from the beginning, and is killed
    again."""
    damaged = [Path("000020"), Path("000019")]
    assert _older([*damaged, Path("000001")], 1) == []
    newer = [Path(f"{epoch:06d}") for epoch in (4, 3, 2)]
    assert _older(damaged + newer, 4) == [Path("000002")]
    assert _older(["s3://b/t/000003", "s3://b/t/000002", "s3://b/t/000001"], 3) == [
        "s3://b/t/000001"
    ]


def test_each_process_has_its_own_environment(driver: Driver, key: int, tmp_path: Path) -> None:
    for place, value in enumerate(("one", "other")):
        driver.start(key + place, LNS_TEST_VARIABLE=value)
        said = driver.train(key + place, value, SMALL, tmp_path / value, MADE_UP + "Environment")
        assert said[-2].payload["variable"] == value


def test_several_trials_at_once_in_one_process_come_out_as_alone(
    driver: Driver, key: int, tmp_path: Path
) -> None:
    trials = {str(seed): replace(SMALL, seed=seed) for seed in range(4)}
    driver.start(key, lanes=32)
    for trial, config in trials.items():
        driver.send(key, TRAIN, trial, plan(config, tmp_path / trial, PACKED))
    said: list[Message] = []
    while sum(message.kind == ENDED for message in said) < len(trials):
        said += driver.until(key, lambda message: message.kind == ENDED)
    for trial, config in trials.items():
        assert reports([message for message in said if message.trial == trial]) == alone(config)


def test_where_the_forking_process_dies_all_die_and_the_next_start_makes_a_new_one(
    tmp_path: Path,
) -> None:
    with Node() as node:
        driver = Driver(node)
        pids = [driver.start(key) for key in (1, 2)]
        psutil.Process(pids[0]).parent().kill()
        for key in (1, 2):
            assert (
                "forks workers"
                in driver.until(key, lambda message: message.kind == DIED)[-1].payload
            )
        driver.start(3)
        assert how(driver.train(3, "fine", SMALL, tmp_path)) == DONE
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in [*pids, driver.pids[3]] if psutil.pid_exists(pid)],
        timeout=10,
    )
    assert not alive


def test_processes_die_with_who_started_them(tmp_path: Path) -> None:
    code = (
        "import sys, time; from trainers.workers.node import Node; node = Node(); node.start(1, {},"
        " 1); node.start(2, {}, 1)\nevents = []\nwhile len(events) < 2: events +="
        " node.events(1.0)\nprint('up', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def children_of(folder: Path) -> list[psutil.Process]:
    """The processes that :class:`tests.trainers.made_up.Parent` has started."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        path = folder / "children"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) == 4:
            return [psutil.Process(int(pid)) for pid in lines]
        time.sleep(0.02)
    raise AssertionError("they did not start")


PARENT = MADE_UP + "Parent"


@pytest.mark.parametrize("end", ["killed", "by the study", "server", "guard", "closed"])
def test_what_a_trial_has_started_ends_with_its_process(end: str, tmp_path: Path) -> None:
    with Node() as node:
        driver = Driver(node)
        pid = driver.start(1)
        driver.send(1, TRAIN, "long", plan(replace(SMALL, epochs=10_000), tmp_path, PARENT))
        started = children_of(tmp_path)
        server = psutil.Process(pid).parent()
        if end == "closed":
            node.close()
        elif end == "by the study":
            node.kill(1)
        else:
            {"killed": psutil.Process(pid), "server": server, "guard": server.parent()}[end].kill()
        _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


def test_what_a_trial_has_started_ends_with_who_drives_the_study(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from dataclasses import replace;"
        " from tests.trainers.nodes import *; node = Node(); driver = Driver(node);"
        " driver.start(1); driver.send(1, TRAIN, 'long', plan(replace(SMALL, epochs=10_000),"
        f" Path({str(tmp_path)!r}), {PARENT!r})); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    started = children_of(tmp_path)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


@pytest.mark.parametrize("end", ["closed", "guard killed"])
def test_a_server_that_is_ended_while_it_starts_ends_at_once(end: str) -> None:
    """Before either of its two processes has imported anything."""
    server = ForkServer()
    guard = psutil.Process(server.pid)
    while not (found := guard.children()):
        time.sleep(0.001)
    if end == "closed":
        server.close()
    else:
        guard.kill()
    until, process = time.monotonic() + 1.0, found[0]
    while (alive := process.is_running() and process.status() != psutil.STATUS_ZOMBIE) and (
        time.monotonic() < until
    ):
        time.sleep(0.01)
    if alive:
        process.kill()
    server.close()
    assert not alive


def test_a_signal_to_the_group_of_a_process_reaches_no_other(driver: Driver, key: int) -> None:
    pids = [driver.start(key), driver.start(key + 1)]
    os.killpg(os.getpgid(pids[0]), 15)
    driver.until(key, lambda message: message.kind == DIED)
    assert psutil.pid_exists(pids[1])
    assert psutil.pid_exists(driver.start(key + 2))


def test_a_closed_node_says_so() -> None:
    with Node() as node:
        pass
    with pytest.raises(RuntimeError, match="make a new one"):
        node.start(1, {}, 1)


def test_what_processes_print_goes_to_the_log(tmp_path: Path) -> None:
    with Node() as node:
        node.log(tmp_path / "workers.log")
        printing = Driver(node)
        pid = printing.start(1)
        os.kill(pid, 11)
        printing.until(1, lambda message: message.kind == DIED)
    assert "Segmentation fault" in (tmp_path / "workers.log").read_text()


@pytest.mark.parametrize("kept", [output.HEAD, 0])
def test_of_much_that_a_process_prints_the_log_keeps_begin_and_end(
    tmp_path: Path, kept: int
) -> None:
    """Twenty MB and then its death; of a long log only the end."""
    log = tmp_path / "workers.log"
    with Node() as node:
        node.log(log)
        if not kept:
            log.write_bytes(b"." * output.FILE)
        printing = Driver(node)
        printing.start(1)
        trial = plan(SMALL, tmp_path, MADE_UP + "Talker")
        printing.send(1, TRAIN, "talks", trial)
        printing.until(1, lambda message: message.kind == DIED)
    text = log.read_bytes().lstrip(b".")
    assert kept < len(text) < kept + 3 * output.TAIL
    assert text.startswith(b"line 0\n") == bool(kept)
    left_out = re.search(rb"\n\[(\d+) bytes of what this process printed are left out\]\n", text)
    assert left_out
    assert int(left_out[1]) > 15 << 20
    assert text[left_out.end() :].startswith(b"line ")
    assert b"line 1999999\n" in text
    assert b"Segmentation fault" in text
