"""A trial by Ray Train (``executor: train``), behind the protocol of
:mod:`trainers.workers.executors`: for long trials, since Ray Train restarts a gang within the
trial.

A worker process drives ``trainers.workers.ray_train_worker.build_trainer(...).fit()`` in a thread
and does nothing else. Ray Train's controller is a process of its own, maybe on another machine; a
callback in it connects back here, passes on what rank 0 reports, and waits for the word to go on.
Told to stop, it has the controller abort the run, as Ctrl-C in a script of one's own does. (An
error raised in the callback does not end a run: Ray Train starts its controller's work again, by
default without limit.)

The Ray Train run's name is the trial's id, so a driver that is started again continues the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import ray
from ray.train import TrainingFailedError, UserCallback

from trainers.checkpoint.files import load_checkpoint
from trainers.config import TrialConfig
from trainers.workers.executors import Context
from trainers.workers.messages import Beginning, last_line
from trainers.workers.ray_train_worker import build_trainer, read_results

SNAPSHOT = "checkpoint_manager_snapshot.json"
"""In a Ray Train run's folder: which checkpoint it will continue from."""
Address = tuple[str, int]


class Told(UserCallback):  # type: ignore[misc]
    """In the controller: passes reports on, and waits until it may go on.

    Args:
        address: where the driver listens.
        key: shows each to the other.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        self._address, self._key = address, key
        self._connection: Connection | None = None

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Pass on what rank 0 reported; end the run where the answer is to stop."""
        if self._connection is None:
            self._connection = Client(self._address, authkey=self._key)
        path = {"checkpoint_path": checkpoint.path} if checkpoint is not None else {}
        self._connection.send(metrics[0] | path)
        if not self._connection.recv():
            # runs once this one has returned
            ray.get_runtime_context().current_actor.abort.remote()


class RayTrainRun:
    """See the module.

    The plan has ``storage`` for Ray Train's files, and ``max_failures``: how often a gang with a
    dead worker starts again.
    """

    def __init__(self, context: Context) -> None:
        self._trial, self._plan = context.trial, context.plan
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._asked = self._stopped = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._listener: Listener | None = None
        self._results: dict[str, Any] = {}

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """Start the run, or continue it; its own folder says where from."""
        damaged = set_damaged_aside(Path(self._plan["storage"]) / self._trial)
        key = os.urandom(32)
        here = ray.util.get_node_ip_address()
        alone = all(node["NodeManagerAddress"] == here for node in ray.nodes() if node["Alive"])
        self._listener = Listener(("127.0.0.1" if alone else here, 0), authkey=key)
        threading.Thread(target=self._listen, daemon=True).start()
        trainer = build_trainer(
            config,
            storage_path=self._plan["storage"],
            name=self._trial,
            callbacks=[Told(self._listener.address, key)],
            max_failures=self._plan["max_failures"],
            origin=self._plan.get("origin", {}),
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True)
        self._thread.start()
        return Beginning(damaged=damaged)

    def step(self) -> dict[str, Any]:
        """The next report; ``done`` with the last, which has the test's figures.

        Raises:
            ValueError: the training cannot work; Ray Train has tried again what could be tried.
        """
        if self._asked:
            self._answers.put(True)
        report = self._reports.get()
        if report is not None and not any(name.startswith("test/") for name in report):
            self._asked = True
            return report | {"done": False}
        if report is not None:
            self._answers.put(True)
        assert self._thread is not None
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return (report or {}) | self._results | {"done": True}

    def save(self, folder: Path) -> None:
        """Ray Train keeps checkpoints itself."""

    def profile(self) -> dict[str, bytes]:
        """Ray Train's workers write theirs to the run's storage."""
        return {}

    def end(self) -> None:
        """Stop the run where it has not ended."""
        self._stopped = True
        self._answers.put(False)
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()

    def _fit(self, trainer: Any) -> None:
        try:
            self._results = read_results(trainer.fit().checkpoint)
        except TrainingFailedError as error:
            self._failure = ValueError(describe_failure(error))
        except Exception as error:
            self._failure = error
        self._reports.put(None)

    def _listen(self) -> None:
        """Hear the controller, until the end; one that was started again connects anew."""
        assert self._listener is not None
        while not self._stopped:
            with contextlib.suppress(EOFError, OSError):
                connection = self._listener.accept()
                while True:
                    self._reports.put(connection.recv())
                    connection.send(False if self._stopped else self._answers.get())


def set_damaged_aside(run: Path) -> str:
    """Move a Ray Train run whose newest checkpoint is damaged out of the way, so that the gang
    starts from scratch.

    Returns:
        What is wrong with the checkpoint; "" if it is whole or there is none.
    """
    try:
        snapshot = json.loads((run / SNAPSHOT).read_text())
        load_checkpoint(run / snapshot["latest_checkpoint_result"]["checkpoint_dir_name"])
    except (FileNotFoundError, KeyError, TypeError):  # not begun, or no checkpoint yet
        return ""
    except ValueError as error:
        run.rename(run.with_name(f"{run.name}-damaged-{time.time_ns()}"))
        return str(error)
    return ""


def describe_failure(error: TrainingFailedError) -> str:
    """The last line of the first worker's error, which names what happened."""
    of_workers: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes = [*of_workers.values(), getattr(error, "controller_failure", error)]
    return last_line(str(causes[0])) or type(causes[0]).__name__
