"""The Ray Train path: its loop alone; and with two real processes: killed in the middle, failing
permanently, without their driver."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray.train
import torch
from ray.train import (
    Checkpoint,
    ControllerError,
    TrainingFailedError,
    UserCallback,
    WorkerGroupError,
)

from lns_ops import NonFiniteError
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.data.descriptions import prepare
from trainers.training.trainer import Training
from trainers.workers.messages import HISTORY
from trainers.workers.node import versions
from trainers.workers.ray_train_run import RayTrainRun, failure_of, sort_out
from trainers.workers.ray_train_worker import FailAtOnce, build_trainer, read_results, train_loop
from trainers.workers.resources import WorkerResources

CONFIG = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[16]),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    batch_size=128,
    epochs=6,
    workers=2,
)


class FakeContext:
    """One worker of one."""

    def get_world_rank(self) -> int:
        """The only one."""
        return 0

    def get_world_size(self) -> int:
        """One."""
        return 1


def run_loop(
    config: TrialConfig,
    folder: Path,
    start: Path | None,
    monkeypatch: pytest.MonkeyPatch,
    resume_from: Sequence[str] = (),
    data: Sequence[str] = (),
    **other: str,
) -> list[dict[str, Any]]:
    """``train_loop`` without Ray: its reports; their checkpoints go to ``folder/EPOCH``."""
    reports: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], checkpoint: Checkpoint) -> None:
        reports.append(dict(metrics))
        checkpoint.to_directory(folder / str(int(metrics["epoch"])))

    monkeypatch.setattr(ray.train, "get_context", FakeContext)
    monkeypatch.setattr(
        ray.train, "get_checkpoint", lambda: start and Checkpoint.from_directory(start)
    )
    monkeypatch.setattr(ray.train, "report", report)
    plan = {"config": config.to_dict(), "resume_from": list(resume_from), "data": list(data)}
    train_loop(plan | {"versions": versions() | other})
    return reports


def test_a_node_of_another_torch_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"has torch .* submitted with .* torch 2\.0\.1.*install"):
        run_loop(replace(CONFIG, workers=1), tmp_path, None, monkeypatch, torch="2.0.1")


def test_a_node_of_other_data_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ours = replace(CONFIG, workers=1, epochs=1), prepare(CONFIG.data).files
    assert len(run_loop(config, tmp_path, None, monkeypatch, data=["0" * 64, ours])) == 1
    with pytest.raises(ValueError, match=f"other data .* sha256 {ours[:16]}.*same files there"):
        run_loop(config, tmp_path, None, monkeypatch, data=["0" * 64])


@pytest.mark.parametrize("lr", [0.1, 1e38], ids=["learns", "diverges"])
def test_the_first_report_after_a_restart_has_every_epoch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lr: float
) -> None:
    config = replace(
        CONFIG, workers=1, epochs=4, precision=PrecisionConfig(), optimizer=OptimizerConfig(lr=lr)
    )
    calm = run_loop(config, tmp_path, None, monkeypatch)
    assert not any(HISTORY in report for report in calm)
    again = run_loop(config, tmp_path / "again", tmp_path / "2", monkeypatch)
    # as text: NaN equals NaN
    assert str([past | {"done": False} for past in again[0].pop(HISTORY)]) == str(calm[:2])
    assert [report["epoch"] for report in again] == [3.0, 4.0]
    assert not any(HISTORY in report for report in again[1:])
    results = read_results(Checkpoint.from_directory(tmp_path / "again" / "4"))
    assert str(results["test/loss"]) == str(calm[-1]["test/loss"])
    assert [past["epoch"] for past in results[HISTORY]] == [1.0, 2.0, 3.0, 4.0]
    assert run_loop(config, tmp_path, tmp_path / "4", monkeypatch) == []


def test_a_run_without_a_checkpoint_begins_at_another_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits as from scratch, also if the other checkpoint is gone or damaged."""
    config = replace(CONFIG, workers=1, epochs=3)
    shorter = run_loop(replace(config, epochs=2), tmp_path / "shorter", None, monkeypatch)
    (tmp_path / "damaged").mkdir()
    source = tmp_path / "shorter" / "2"
    calm = run_loop(config, tmp_path / "calm", None, monkeypatch)
    found, wrong = sort_out([str(tmp_path / "gone"), str(tmp_path / "damaged"), str(source)])
    assert found == [str(source)]
    assert len(wrong) == 1
    assert "damaged" in wrong[0]
    (last,) = run_loop(config, tmp_path / "longer", None, monkeypatch, found)
    assert [past["epoch"] for past in last.pop(HISTORY)] == [1.0, 2.0]
    assert last["test/loss"] == calm[-1]["test/loss"]
    assert [report["epoch"] for report in shorter] == [1.0, 2.0]
    lost = [str(tmp_path / "gone"), str(tmp_path / "damaged")]
    again = run_loop(config, tmp_path / "again", None, monkeypatch, lost)
    assert [report["train/loss"] for report in again] == [report["train/loss"] for report in calm]
    own = run_loop(config, tmp_path / "own", tmp_path / "calm" / "1", monkeypatch, found)
    assert [report["epoch"] for report in own] == [2.0, 3.0]


def test_a_run_that_lacked_memory_fails_with_what_less_may_help() -> None:
    lacked = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    with pytest.raises(torch.OutOfMemoryError):
        FailAtOnce().after_exception(None, {0: lacked})
    for error in (ControllerError(lacked), WorkerGroupError("", {1: lacked})):
        assert failure_of(error) is lacked
    refused = failure_of(WorkerGroupError("", {0: RuntimeError("Traceback\nlr=-1: too small")}))
    assert isinstance(refused, ValueError)
    assert str(refused) == "lr=-1: too small"


def test_only_deterministic_errors_end_a_run_at_once() -> None:
    FailAtOnce().after_exception(
        None, {0: RuntimeError("Connection closed by peer"), 1: OSError("killed")}
    )
    with pytest.raises(NonFiniteError, match="NaN"):
        FailAtOnce().after_exception(
            None, {0: RuntimeError("Connection closed by peer"), 1: NonFiniteError("NaN")}
        )


class Killer(UserCallback):
    """Record every report; kill one of the two workers after the second. Runs in Ray Train's
    controller process."""

    def __init__(self, log: Path, kill: bool) -> None:
        self.log, self.kill = log, kill

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([m["epoch"] for m in metrics]) + "\n")
        if self.kill and len(self.log.read_text().splitlines()) == 2:
            victim = train_workers()[-1]
            os.kill(victim, signal.SIGKILL)
            self.log.with_suffix(".killed").write_text(str(victim))


def train_workers() -> list[int]:
    """Process ids of Ray Train's workers, which are siblings of the calling controller."""
    siblings = psutil.Process().parent().children(recursive=True)
    return [p.pid for p in siblings if "TrainWorker" in " ".join(p.cmdline())]


LOCAL = replace(
    CONFIG,
    optimizer=OptimizerConfig(momentum=0.5),
    sync=SyncConfig(name="diloco", period=4, outer_momentum=0.5),
    wire=WireConfig(name="int8"),
)
"""Each rank has its own state: momentum, residues of error feedback, the outer step's velocity."""
STAGES = replace(CONFIG, layout=Layout(pp=2, micro_batches=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [CONFIG, LOCAL, STAGES], ids=["synchronous", "diloco int8", "pipeline"]
)
def test_killed_worker_restarts_and_ends_bit_equal(
    ray_cluster: None, tmp_path: Path, config: TrialConfig
) -> None:
    assert WorkerResources.of(config).bundles == [{"CPU": 1.0}] * 2
    finals = {}
    for kill in (False, True):
        log = tmp_path / f"reports-{kill}"
        result = build_trainer(
            config, storage_path=str(tmp_path), name=f"kill-{kill}", callbacks=[Killer(log, kill)]
        ).fit()
        reports = [json.loads(line) for line in log.read_text().splitlines()]
        assert log.with_suffix(".killed").exists() == kill
        assert {tuple(report) for report in reports} == {(float(e), float(e)) for e in range(1, 7)}
        training = Training(
            replace(config, workers=1, layout=Layout(), wire=WireConfig(), sync=SyncConfig())
        )
        with result.checkpoint.as_directory() as folder:
            training.restore(Path(folder))
        finals[kill] = [p.codes for p in training.model.parameters()], result.metrics["test/error"]
    assert finals[True][1] == finals[False][1]
    assert all(torch.equal(a, b) for a, b in zip(finals[True][0], finals[False][0], strict=True))


@pytest.mark.slow
def test_a_parameter_server_trains_under_ray_train(ray_cluster: None, tmp_path: Path) -> None:
    """Bulk synchronous, it ends with the bits of the synchronous trial."""
    finals = []
    for name, sync in (
        ("synchronous", SyncConfig()),
        ("bulk", SyncConfig(name="asynchronous", shards=2)),
    ):
        result = build_trainer(
            replace(CONFIG, epochs=2, sync=sync), storage_path=str(tmp_path), name=name
        ).fit()
        finals.append(read_results(result.checkpoint))
    assert finals[1][HISTORY][0]["staleness/version_lag_max"] == 0
    assert finals[1]["test/loss"] == finals[0]["test/loss"]


class Counter(UserCallback):
    """Record how often a worker group failed."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        with self.log.open("a") as file:
            file.write(f"{len(worker_exceptions)}\n")


@pytest.mark.slow
def test_what_cannot_work_is_not_tried_again(ray_cluster: None, tmp_path: Path) -> None:
    config = replace(CONFIG, data=DataConfig(name="digits", train_size=99_999))
    with pytest.raises(TrainingFailedError, match="train_size=99999"):
        build_trainer(
            config,
            storage_path=str(tmp_path),
            name="refused",
            callbacks=[Counter(tmp_path / "log")],
        ).fit()
    assert len((tmp_path / "log").read_text().splitlines()) == 1


class DriverDies(UserCallback):
    """Record every report except the second, at which the run ends: after the checkpoint is stored,
    before any process knows of it. It ends with an exception. After a SIGKILL this Ray, which has
    no State API, would not release the CPUs."""

    def __init__(self, log: Path, die: bool) -> None:
        self.log, self.die = log, die

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        if self.die and metrics[0]["epoch"] == 2:
            raise RuntimeError("the driver dies")
        with self.log.open("a") as file:
            file.write(
                json.dumps(
                    [*(past["epoch"] for past in metrics[0].get(HISTORY, [])), metrics[0]["epoch"]]
                )
                + "\n"
            )


@pytest.mark.slow
def test_a_run_whose_driver_died_tells_of_every_epoch(ray_cluster: None, tmp_path: Path) -> None:
    log = tmp_path / "reports"
    for die in (True, False):
        trainer = build_trainer(
            CONFIG, storage_path=str(tmp_path), name="dies", callbacks=[DriverDies(log, die)]
        )
        if die:
            with pytest.raises(TrainingFailedError, match="the driver dies"):
                trainer.fit()
        else:
            trainer.fit()
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        [1.0],
        [1.0, 2.0, 3.0],
        [4.0],
        [5.0],
        [6.0],
    ]


def listening() -> RayTrainRun:
    run = RayTrainRun.__new__(RayTrainRun)
    run._reports, run._answers, run._stopped = queue.SimpleQueue(), queue.SimpleQueue(), False
    run._key, run._listener = b"k" * 32, Listener(("127.0.0.1", 0))
    threading.Thread(target=run._listen, daemon=True).start()
    return run


def test_who_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.workers.ray_train_run.KEY_SECONDS", 1)
    run = listening()
    assert run._listener is not None
    with socket.create_connection(run._listener.address) as silent:
        silent.settimeout(30)
        while silent.recv(1024):  # the challenge, then the end
            pass
        with Client(run._listener.address, authkey=run._key) as controller:
            time.sleep(1.5)  # a client with the key may be silent
            controller.send({"epoch": 1})
            assert run._reports.get(timeout=10) == {"epoch": 1}
            run._answers.put(False)
            assert controller.recv() is False
    run._stopped = True
    run._listener.close()


def test_a_controller_that_was_started_again_is_told_to_end() -> None:
    """The end message goes to the first connection, which is dead."""
    run = listening()
    assert run._listener is not None
    address = run._listener.address
    with Client(address, authkey=run._key) as first:
        first.send({"epoch": 1})
        assert run._reports.get(timeout=10) == {"epoch": 1}
    with Client(address, authkey=run._key) as second:
        second.send({"epoch": 1})
        assert run._reports.get(timeout=10) == {"epoch": 1}
        run._stopped = True
        run._answers.put(False)
        assert second.poll(10)
        assert second.recv() is False
    run._listener.close()


def test_who_connects_without_the_key_holds_up_nobody() -> None:
    """A silent client, and one with another key, before the controller."""
    run = listening()
    assert run._listener is not None
    address = run._listener.address
    with socket.create_connection(address):
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client(address, authkey=b"another")
        with Client(address, authkey=run._key) as controller:
            controller.send({"epoch": 1})
            assert run._reports.get(timeout=10) == {"epoch": 1}
            run._answers.put(True)
            assert controller.recv() is True
    run._stopped = True
    run._listener.close()
