"""Executor of trials whose workers Ray Train starts (:func:`study.plan.engine_choice.choose_gang`).

The worker process runs ``trainers.workers.ray_train_worker.build_trainer(...).fit()`` in a thread.
Ray Train's controller is a separate process, possibly on another machine. A callback in it connects
to the worker process, sends rank 0's reports, and waits for the reply to continue. If the reply is
to stop, the callback makes the controller abort the run, as Ctrl-C does in a script. (An error
raised in the callback would not end the run: Ray Train restarts the controller's work, by default
without limit.)

The Ray Train run's name is the trial's id, so a restarted driver continues the run.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any

import ray
from ray.train import TrainingFailedError, UserCallback

from trainers._compat import abort_ray_train, latest_ray_train_checkpoint
from trainers.checkpoint.files import load_checkpoint
from trainers.config import TrialConfig
from trainers.workers.executors import Context, Executor
from trainers.workers.messages import Beginning, last_line
from trainers.workers.out_of_memory import is_out_of_memory
from trainers.workers.process_reset import LeakError
from trainers.workers.ray_train_worker import build_trainer, read_results

Address = tuple[str, int]
KEY_SECONDS = 10
"""Maximum number of seconds for a new connection to prove that it has the key."""
ACCEPT_SECONDS = 0.1
"""Seconds to wait after a connection could not be accepted."""


class ReportCallback(UserCallback):  # type: ignore[misc]
    """Callback in Ray Train's controller: sends each report and waits for the reply.

    Args:
        address: address at which the worker process listens.
        key: shared secret of the worker process and the controller.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        self._address, self._key = address, key
        self._connection: Connection | None = None

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Send rank 0's report; abort the run if the reply is to stop."""
        if self._connection is None:
            self._connection = Client(self._address, authkey=self._key)
        path = {"checkpoint_path": checkpoint.path} if checkpoint is not None else {}
        self._connection.send(metrics[0] | path)
        if not self._connection.recv():
            abort_ray_train(ray.get_runtime_context().current_actor)


class RayTrainRun(Executor):
    """Trains a trial by Ray Train; see the module docstring.

    The plan has ``storage`` for Ray Train's files, ``max_failures``, the maximum number of restarts
    of a gang with a dead worker, and ``labels``, Ray's label selector for the workers' nodes.
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
        """Continue the run from its own newest checkpoint, or start it, from one of ``checkpoints``
        if any is complete."""
        run = Path(self._plan["storage"]) / self._trial
        damaged = set_damaged_aside(run)
        whole, wrong = ([], []) if run.exists() else sort_out(checkpoints)
        key = self._key = os.urandom(32)
        here = ray.util.get_node_ip_address()
        alone = all(node["NodeManagerAddress"] == here for node in ray.nodes() if node["Alive"])
        self._listener = Listener(("127.0.0.1" if alone else here, 0))
        threading.Thread(target=self._listen, daemon=True).start()
        trainer = build_trainer(
            config,
            storage_path=self._plan["storage"],
            name=self._trial,
            callbacks=[ReportCallback(self._listener.address, key)],
            max_failures=self._plan["max_failures"],
            origin=self._plan.get("origin", {}),
            resume_from=whole,
            data=self._plan.get("data", ()),
            labels=self._plan.get("labels") or None,
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True)
        self._thread.start()
        return Beginning(damaged="; ".join(filter(None, [damaged, *wrong])))

    def step(self) -> dict[str, Any]:
        """Return rank 0's next report.

        Raises:
            ValueError: the training failed, after Ray Train's own retries.
        """
        if self._asked:
            self._answers.put(True)
        report = self._reports.get()
        if report is not None and not report["done"]:
            self._asked = True
            return report
        if report is not None:
            self._answers.put(True)
        assert self._thread is not None
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return (report or {}) | self._results | {"done": True}

    def save(self, folder: Path) -> bool:
        """Write nothing: Ray Train keeps checkpoints in the run's storage."""
        return False

    def profile(self) -> dict[str, bytes]:
        """Return nothing: Ray Train's workers write profiles to the run's storage."""
        return {}

    def end(self) -> None:
        """Abort the run unless it has ended."""
        aborts = self._thread is not None and self._thread.is_alive()
        self._stopped = True
        self._answers.put(False)
        if self._thread is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
        if aborts:
            raise LeakError(
                "Ray Train's run was aborted, which leaves its library in an undefined state"
            )

    def _fit(self, trainer: Any) -> None:
        try:
            self._results = read_results(trainer.fit().checkpoint)
        except TrainingFailedError as error:
            self._failure = failure_of(error)
        except Exception as error:
            self._failure = error
        self._reports.put(None)

    def _listen(self) -> None:
        """Accept connections until the run ends; a restarted controller connects again."""
        assert self._listener is not None
        while not self._stopped:
            try:
                connection = self._listener.accept()
            except OSError:  # closed, or too many are open
                time.sleep(ACCEPT_SECONDS)
                continue
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: Connection) -> None:
        """Serve a connection after checking its key; runs in a thread, so that a connection without
        the key delays no other."""
        with contextlib.suppress(EOFError, OSError, AuthenticationError), connection:
            with _patient(connection, KEY_SECONDS):
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            while True:
                self._reports.put(connection.recv())
                answer = False if self._stopped else self._answers.get()
                if self._stopped:  # other waiting connections also get a reply
                    self._answers.put(False)
                connection.send(answer)


@contextlib.contextmanager
def _patient(connection: Connection, seconds: int) -> Iterator[None]:
    """Set a timeout on a connection's reads, after which they raise OSError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for limit in (seconds, 0):
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", limit, 0))
            if limit:
                yield


def set_damaged_aside(run: Path) -> str:
    """Rename a run whose newest checkpoint is damaged, so that the gang starts from scratch.

    Returns:
        A description of the damage; "" if the checkpoint is complete or missing.
    """
    try:
        load_checkpoint(latest_ray_train_checkpoint(run))
    except (FileNotFoundError, KeyError, TypeError):  # not begun, or no checkpoint yet
        return ""
    except ValueError as error:
        run.rename(run.with_name(f"{run.name}-damaged-{time.time_ns()}"))
        return str(error)
    return ""


def sort_out(checkpoints: list[str]) -> tuple[list[str], list[str]]:
    """Return the complete checkpoints, and descriptions of the damaged ones; skip missing ones."""
    whole, wrong = list[str](), list[str]()
    for path in filter(os.path.isdir, checkpoints):  # a run that was set aside has moved
        try:
            load_checkpoint(Path(path))
        except ValueError as error:
            wrong.append(str(error))
        else:
            whole.append(path)
    return whole, wrong


def failure_of(error: TrainingFailedError) -> Exception:
    """Return the first worker's error if memory ran out, so that the trial can be retried; else a
    ValueError with its last line, which describes the cause."""
    of_workers: dict[int, Exception] = getattr(error, "worker_failures", {})
    causes: list[Exception] = [*of_workers.values(), getattr(error, "controller_failure", error)]
    if is_out_of_memory(causes[0]):
        return causes[0]
    return ValueError(last_line(str(causes[0])) or type(causes[0]).__name__)
