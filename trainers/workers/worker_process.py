"""A worker process: trains trials and reports their epochs.

It is independent of Ray and of studies. It receives messages from its node
(:mod:`trainers.workers.node`) and sends others back (:mod:`trainers.workers.messages`); when the
connection closes it exits at once. An executor trains each trial
(:mod:`trainers.workers.executors`). Trials run one after another in the main thread, or, in a
process with several *lanes*, concurrently in threads. The processes of a gang are ranks of one
torch.distributed group, which they join before their first trial. Each rank runs the same trials in
the same order, and rank 0 reports for all.

After an epoch a trial continues without waiting, unless its plan has ``waits``, because a scheduler
may end it then. A trial that is asked to leave, because the study ends, writes a checkpoint after
the current epoch. The ranks of a gang are never more than one epoch apart; they agree on the epoch
through their store, in which the first rank that is asked writes the next epoch.

The seconds of an epoch are measured by this process's monotonic clock, from the previous report
(for the first epoch, from the trial's start) to its own. They include training, evaluation,
checkpoint and, in the last epoch, the test, but not the wait for the scheduler's reply.

If the plan has ``moments``, a thread sends about once a second where each trial is within its
epoch. Nobody waits for these messages, and the training does not know of them.

Checkpoints are written by this process, after the epoch and before its report. A checkpoint can be
newer than the last report that was received, so a resumed trial first reports its earlier epochs.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from trainers.checkpoint.manifest import STATE, write_files  # fmt: skip
from trainers.checkpoint.remote import remote_checkpoints, remove, upload
from trainers.comm import process_group
from trainers.config import DataConfig, TrialConfig
from trainers.data import DatasetInfo, prepare
from trainers.files import check_no_links, make_there
from trainers.object_store import is_url, local_folder
from trainers.telemetry.tally import Moment
from trainers.training.device import check_device
from trainers.training.trainer import check
from trainers.user_code import forget
from trainers.user_loop import load_loop
from trainers.workers.executors import Context, Executor, make_executor
from trainers.workers.messages import (
    BEGAN,
    CHECK,
    CHECKED,
    DETERMINISTIC,
    DONE,
    ENDED,
    FAILED,
    GO,
    HELLO,
    JOIN,
    JOINED,
    LEAVE,
    LEFT,
    MEET,
    MOMENT,
    NAMESPACE,
    OUT_OF_MEMORY,
    REFUSED,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Began,
    Checked,
    Ended,
    Examined,
    FromWorker,
    Hello,
    Joined,
    Meet,
    Report,
    ToWorker,
    Within,
    WorkerPlan,
    last_line,
)
from trainers.workers.out_of_memory import is_out_of_memory
from trainers.workers.packed import Host
from trainers.workers.process_reset import (
    InitialSettings,
    LeakError,
    changed_since,
    kept_settings,
    process_state,
)
from trainers.workers.resume import in_a_line

CHECKPOINTS_KEPT = 2
"""Number of checkpoints that are kept: the newest, and the one before in case the newest is
damaged."""
INTERFACE, LOOPBACK = (
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "lo0" if sys.platform == "darwin" else "lo",
)
"""Environment variables of the communication libraries, and their value if all ranks are on one
machine."""
MOMENT_SECONDS = 1.0
"""Seconds between two messages about the place of a trial within its epoch."""
MEET_SECONDS = 120
"""Seconds that ranks wait for each other at the start."""


def serve(connection: Connection, lanes: int) -> None:
    """Serve ``connection`` until it closes.

    Args:
        connection: connection to the node.
        lanes: maximum number of concurrent trials; with 1 they run in the calling thread.
    """
    Worker(connection, lanes).run()


class Worker:
    """A worker process's side of its connection; see the module docstring."""

    def __init__(self, connection: Connection, lanes: int) -> None:
        self._connection, self._lanes = connection, lanes
        self._sending = threading.Lock()
        self._work: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._answers: dict[str, queue.SimpleQueue[str]] = {}
        self._leaving: set[str] = set()
        self._store: Store | None = None
        self._secret = ""
        self._place = {"rank": 0, "workers": 1}
        self._host = Host() if lanes > 1 else None
        self._initial: InitialSettings | None = None
        self._shown: dict[str, Executor] = {}
        """Executors of the running trials whose plan has ``moments``."""
        self._shows: threading.Thread | None = None

    def run(self) -> None:
        """Process messages until the connection closes."""
        threading.Thread(target=self._listen, daemon=True, name="listener").start()
        self._say(Hello(HELLO, payload=os.getpid()))
        while True:
            message = self._work.get()
            if message.kind == JOIN:
                self._join(**message.payload)
            elif message.kind == CHECK:
                self._say(Checked(CHECKED, payload=_examined(*message.payload)))
            elif message.kind == TRAIN and self._lanes == 1:
                self._train(message.trial, message.payload)
            elif message.kind == TRAIN:
                threading.Thread(
                    target=self._train, args=(message.trial, message.payload), daemon=True
                ).start()

    def _listen(self) -> None:
        while True:
            try:
                message: ToWorker = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the node is gone
            if message.kind == LEAVE:
                self._leaving.add(message.trial)
            elif message.kind in (GO, STOP):
                if (answers := self._answers.get(message.trial)) is not None:  # it has not ended
                    answers.put(message.kind)
            else:
                if message.kind == TRAIN:
                    self._answers[message.trial] = queue.SimpleQueue()
                self._work.put(message)

    def _say(self, message: FromWorker) -> None:
        content = pickle.dumps(message)
        with self._sending:
            try:
                self._connection.send_bytes(content)
            except OSError:
                os._exit(0)

    def _show(self, trial: str, executor: Executor) -> None:
        """Send where a trial is within its epochs, from now until :meth:`_train` ends it."""
        self._shown[trial] = executor
        if self._shows is None:
            self._shows = threading.Thread(target=self._say_moments, daemon=True, name="moments")
            self._shows.start()

    def _say_moments(self) -> None:
        last: dict[str, Moment] = {}
        while True:
            time.sleep(MOMENT_SECONDS)
            moments = {trial: each.moment() for trial, each in list(self._shown.items())}
            news = {trial: moment for trial, moment in moments.items() if moment is not None}
            for trial, moment in news.items():
                if moment != last.get(trial):
                    self._say(Within(MOMENT, trial, moment))
            last = news

    def _join(
        self, rank: int, workers: int, address: str, store: int | str, secret: str, backend: str
    ) -> None:
        """Become a rank of a torch.distributed group.

        Args:
            rank: this process's rank.
            workers: number of ranks.
            address: address of rank 0; "" if all ranks are on one machine.
            store: port or path of the store that rank 0 has opened; 0 or "" on rank 0.
            secret: part of the key names in the store that only the ranks know.
            backend: torch's name of the backend.
        """
        limit = timedelta(seconds=MEET_SECONDS)
        opened: Store
        place: int | str
        if not address:
            for name in INTERFACE:
                os.environ.setdefault(name, LOOPBACK)
            opened, place = _store_here(str(store))
        else:
            opened, place = _store_at(address, int(store or 0), rank == 0, workers, limit)
        if rank == 0:
            self._say(Meet(MEET, payload=place))
        process_group.join(backend, opened, rank, workers, limit)
        self._store, self._secret = opened, secret
        self._place = {"rank": rank, "workers": workers}
        self._say(Joined(JOINED))

    def _train(self, trial: str, plan: WorkerPlan) -> None:
        """Train one trial and report its end; exit if the process cannot be reused."""
        if self._initial is None and self._lanes == 1:
            self._initial = InitialSettings()
        executor: Executor | None = None
        how, text = DONE, ""
        try:
            if plan["ray"]:
                connect_to_ray(plan["ray"])
            executor = make_executor(
                Context(trial=trial, plan=plan, **self._place, host=self._host)
            )
            if plan.get("moments") and self._place["rank"] == 0:
                self._show(trial, executor)
            how = self._epochs(executor, trial, plan)
        except DETERMINISTIC as error:
            how, text = REFUSED, _describe(error)
        except Exception as error:
            how, text = (
                (OUT_OF_MEMORY if is_out_of_memory(error) else FAILED),
                last_line(str(error)) or type(error).__name__,
            )
            if how == FAILED:
                self._say(Ended(ENDED, trial, {"how": how, "text": text, "retire": text}))
                os._exit(1)  # the process state is undefined after an unexpected error
            error.__traceback__ = None  # its frames hold tensors
        del self._answers[trial]
        self._shown.pop(trial, None)
        self._leaving.discard(trial)
        retire = self._end(executor)
        self._say(Ended(ENDED, trial, {"how": how, "text": text, "retire": retire}))
        if retire:
            os._exit(0)

    def _epochs(self, executor: Executor, trial: str, plan: WorkerPlan) -> str:
        """Train until the trial ends; return :data:`DONE`, :data:`STOPPED` or :data:`LEFT`."""
        place = plan["checkpoints"]
        check_no_links(local_folder(place))
        paths = list(dict.fromkeys([*checkpoints_at(place), *plan["resume_from"]]))
        config = TrialConfig.from_dict(plan["config"])
        if config.profile.steps:
            check_no_links(local_folder(plan["profile"]))
        began = time.monotonic()
        beginning = executor.begin(config, paths)
        self._say(Began(BEGAN, trial, beginning))
        while True:
            metrics = executor.step()
            make_there(place)
            if config.profile.steps:
                make_there(plan["profile"])
                write_files(local_folder(plan["profile"]), executor.profile())
            leaves = self._leaves(trial, int(metrics["epoch"]))
            every = 1 if leaves else plan["checkpoint_every"]
            metrics |= self._keep(executor, place, metrics, every)
            seconds = time.monotonic() - began
            self._say(Report(REPORT, trial, {**metrics, "seconds": seconds}))
            if metrics["done"]:
                return DONE
            if plan["waits"] and self._answers[trial].get() == STOP:
                return STOPPED
            if leaves:
                return LEFT
            began = time.monotonic()

    def _leaves(self, trial: str, epoch: int) -> bool:
        """Return whether to leave the trial after this epoch; the same on all ranks of a gang."""
        asked = trial in self._leaving
        if self._store is None:
            return asked
        name = f"leave/{self._secret}/{trial}"
        if asked:
            self._store.compare_set(name, "", str(epoch + 1))
        return self._store.check([name]) and epoch >= int(self._store.get(name))

    def _keep(
        self, executor: Executor, place: str, metrics: dict[str, Any], every: int
    ) -> dict[str, str]:
        """Write a checkpoint if one is due, and remove all but the last :data:`CHECKPOINTS_KEPT`.

        Returns:
            The checkpoint's entry in the epoch's report.
        """
        epoch = int(metrics["epoch"])
        if not metrics["done"] and epoch % every:
            return {}
        path = f"{place}/{epoch:06d}"
        if not executor.save(local_folder(path)):
            return {}
        if self._place["rank"] == 0:
            if is_url(place):
                upload(local_folder(path), path)
                for url in _older(remote_checkpoints(place), epoch):
                    remove(url)
            for old in _older(checkpoints_in(local_folder(place)), epoch):
                # first, so that a partly removed folder does not count as a checkpoint
                with suppress(OSError):
                    (old / STATE).unlink()
                shutil.rmtree(old, ignore_errors=True)
        return {"checkpoint_path": path}

    def _end(self, executor: Executor | None) -> str:
        """End a trial and restore the process; return the reason why it must exit, or ""."""
        sys.stdout.flush()
        try:
            if executor is not None:
                executor.end()
            if self._initial is not None:
                self._initial.restore()
        except LeakError as error:
            return str(error)
        return ""


def _store_here(path: str) -> tuple[Store, str]:
    """Return the store in which ranks on one machine meet, and its path.

    It is an anonymous file in rank 0's memory, which other users of the machine cannot open. They
    could connect to a TCPStore.
    """
    path = path or f"/proc/{os.getpid()}/fd/{os.memfd_create('lns-study-store')}"
    store = FileStore(path, -1)  # with a number of ranks, the last one would remove the file
    store.set_timeout(timedelta(seconds=MEET_SECONDS))
    return store, path


def _store_at(
    address: str, port: int, opens: bool, workers: int, limit: timedelta
) -> tuple[Store, int]:
    """Return the store in which ranks on several machines meet, and its port.

    The process that opens it listens only at ``address``, not at all addresses of the machine as
    torch would, and at a free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family) if opens else None
    store = TCPStore(
        address,
        listener.getsockname()[1] if listener else port,
        workers,
        opens,
        limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    return store, store.port


def examine(configs: Sequence[TrialConfig], device: str) -> Examined:
    """Check trials and describe their data sets.

    The data of a user's own loop are not examined. If a trial's code has changed this process, the
    examination stops after this trial.

    Args:
        configs: the trials.
        device: a device that this process must have.

    Returns:
        The result for the examined trials, which may be fewer than ``configs``.

    Raises:
        ValueError: the device is missing, or files are missing, corrupt or too few.
    """
    check_device(device)
    data: dict[DataConfig, DatasetInfo] = {}
    reasons: list[str | None] = []
    changes: list[list[str]] = []
    clean: dict[str, Any] = {}
    tried = set[str]()
    for config in configs:
        with kept_settings():
            torch.set_num_threads(1)  # with two examples, extra threads only add overhead
            task = repr((config.user_code, config.model, config.data, config.loss, config.metrics))
            news = bool(config.user_code) and task not in tried
            clean = clean or (process_state() if news else {})
            if not config.own_loop and config.data not in data:
                data[config.data] = prepare(config.data)
            reasons.append(_why_not(config, None if config.own_loop else data[config.data]))
            changes.append(changed_since(clean) if news else [])
            tried.add(task)
        if changes[-1]:
            break
    return Examined(data, reasons, changes)


def _examined(configs: Sequence[TrialConfig], device: str) -> Examined | str:
    """Return the result of :func:`examine`, or the text of its error, for any class of error."""
    try:
        return examine(configs, device)
    except ValueError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {in_a_line(error)}"
        return f"checking data and networks of the trials raised {what}; mend what it names"


def _why_not(config: TrialConfig, info: DatasetInfo | None) -> str | None:
    """Return the reason why a trial cannot succeed, or None.

    Args:
        config: the trial.
        info: its data; None for a user's own loop.
    """
    try:
        if info is None:
            forget()
            load_loop(config.trainable.name, config.trainable.code)
        else:
            check(config, info)
    except ValueError as error:
        return str(error)
    return None


def connect_to_ray(address: str) -> None:
    """Connect this process to the study's Ray as a separate driver, unless it is connected.

    Ray Train's runs and parameter servers need it, because they consist of Ray actors.
    """
    import logging

    import ray

    if not ray.is_initialized():
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )


def checkpoints_at(place: str) -> list[str]:
    """Return a trial's checkpoints at a path or URL, newest first.

    For a URL the object store is listed, not the local cache, which may belong to another study.
    """
    if is_url(place):
        return remote_checkpoints(place)
    return [str(path) for path in checkpoints_in(Path(place))]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return a trial's checkpoints, newest first."""
    return sorted((path for path in folder.glob("[0-9]*") if path.is_dir()), reverse=True)


def _older(checkpoints: Sequence[Any], epoch: int) -> list[Any]:
    """Return the checkpoints that are no longer needed; ``checkpoints`` are sorted newest first.

    Checkpoints of epochs after ``epoch`` are damaged, or differ between ranks, and do not count
    towards :data:`CHECKPOINTS_KEPT`.
    """
    return [each for each in checkpoints if int(Path(each).name) <= epoch][CHECKPOINTS_KEPT:]


def _describe(error: BaseException) -> str:
    """Return an error's last line; with its class, unless it is a ValueError."""
    said = last_line(str(error))
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
