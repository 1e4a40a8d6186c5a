"""A worker process: it trains the trials that it is told to and reports what comes of them.

It knows nothing of Ray or of a study. It hears :class:`Message`s from its node
(:mod:`trainers.workers.node`) and answers with others; where the connection closes it ends at once.
What trains a trial is its executor's (:mod:`trainers.workers.executors`). One trial after another
runs in the main thread; a process of several *lanes* runs as many at once, in threads. A gang's
processes are ranks of one torch.distributed group, which they join before their first trial; each
runs the same trials in the same order, and rank 0 speaks for all.

A trial does not wait for anybody after an epoch, unless its plan says so (``waits``: a scheduler
may end it then). One that is told to leave, since the study ends, writes a checkpoint after the
epoch under way. The ranks of a gang, which no step lets more than an epoch apart, agree on the
epoch through their store: the first that is told names the next one.

An epoch's seconds are those of this process's monotonic clock, from the last report's sending (of
the first epoch, from when the trial was taken up) to this one's: training, evaluation, checkpoint,
and of the last one the test; waiting for whoever reads reports is no part of them.

Checkpoints are written here, after the epoch and before its report. One may be newer than the last
report that anybody has heard of, so a trial that begins again says what its earlier epochs were.
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
    NAMESPACE,
    OUT_OF_MEMORY,
    REFUSED,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Examined,
    Message,
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
"""The newest, and the one before it for a newest that is damaged."""
INTERFACE, LOOPBACK = (
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "lo0" if sys.platform == "darwin" else "lo",
)
"""Variables of the libraries by which ranks talk, and what they are set to where all ranks are on
one machine."""
MEET_SECONDS = 120
"""How long ranks wait for each other at the start."""


def serve(connection: Connection, lanes: int) -> None:
    """Serve ``connection`` until it closes.

    Args:
        lanes: trials at once; with 1 they run in the calling thread.
    """
    Worker(connection, lanes).run()


class Worker:
    """A worker process's side of its connection; see the module."""

    def __init__(self, connection: Connection, lanes: int) -> None:
        self._connection, self._lanes = connection, lanes
        self._sending = threading.Lock()
        self._work: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: dict[str, queue.SimpleQueue[str]] = {}
        self._leaving: set[str] = set()
        self._store: Store | None = None
        self._secret = ""
        self._place = {"rank": 0, "workers": 1}
        self._host = Host() if lanes > 1 else None
        self._initial: InitialSettings | None = None

    def run(self) -> None:
        """Do what is asked for until the connection closes."""
        threading.Thread(target=self._listen, daemon=True, name="listener").start()
        self._say(HELLO, payload=os.getpid())
        while True:
            message = self._work.get()
            if message.kind == JOIN:
                self._join(**message.payload)
            elif message.kind == CHECK:
                self._say(CHECKED, payload=_examined(*message.payload))
            elif self._lanes == 1:
                self._train(message.trial, message.payload)
            else:
                threading.Thread(
                    target=self._train, args=(message.trial, message.payload), daemon=True
                ).start()

    def _listen(self) -> None:
        while True:
            try:
                message: Message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # nobody is left to train for
            if message.kind == LEAVE:
                self._leaving.add(message.trial)
            elif message.kind in (GO, STOP):
                if (answers := self._answers.get(message.trial)) is not None:  # it has not ended
                    answers.put(message.kind)
            else:
                if message.kind == TRAIN:
                    self._answers[message.trial] = queue.SimpleQueue()
                self._work.put(message)

    def _say(self, kind: str, trial: str = "", payload: Any = None) -> None:
        content = pickle.dumps(Message(kind, trial, payload))
        with self._sending:
            try:
                self._connection.send_bytes(content)
            except OSError:
                os._exit(0)

    def _join(
        self, rank: int, workers: int, address: str, store: int | str, secret: str, backend: str
    ) -> None:
        """Become a rank of a torch.distributed group.

        Args:
            rank: this process's rank.
            workers: number of ranks.
            address: address of rank 0; "" if all ranks are on one machine.
            store: where rank 0 has opened the store in which all meet; rank 0 has none yet.
            secret: part of the names in the store that only the ranks know.
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
            self._say(MEET, payload=place)
        process_group.join(backend, opened, rank, workers, limit)
        self._store, self._secret = opened, secret
        self._place = {"rank": rank, "workers": workers}
        self._say(JOINED)

    def _train(self, trial: str, plan: dict[str, Any]) -> None:
        """Train one trial, to its end or that of this process."""
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
            how = self._epochs(executor, trial, plan)
        except DETERMINISTIC as error:
            how, text = REFUSED, _describe(error)
        except Exception as error:
            how, text = (
                (OUT_OF_MEMORY if is_out_of_memory(error) else FAILED),
                last_line(str(error)) or type(error).__name__,
            )
            if how == FAILED:
                self._say(ENDED, trial, {"how": how, "text": text, "retire": text})
                os._exit(1)  # what state the process is in, nobody knows
            error.__traceback__ = None  # its frames hold tensors
        del self._answers[trial]
        self._leaving.discard(trial)
        retire = self._end(executor)
        self._say(ENDED, trial, {"how": how, "text": text, "retire": retire})
        if retire:
            os._exit(0)

    def _epochs(self, executor: Executor, trial: str, plan: dict[str, Any]) -> str:
        """Train until the trial is done, stopped or left, and return which of these."""
        place = str(plan["checkpoints"])
        check_no_links(local_folder(place))
        paths = list(dict.fromkeys([*checkpoints_at(place), *plan["resume_from"]]))
        config = TrialConfig.from_dict(plan["config"])
        if config.profile.steps:
            check_no_links(local_folder(plan["profile"]))
        began = time.monotonic()
        beginning = executor.begin(config, paths)
        self._say(BEGAN, trial, beginning)
        while True:
            metrics = executor.step()
            make_there(place)
            if config.profile.steps:
                make_there(plan["profile"])
                write_files(local_folder(plan["profile"]), executor.profile())
            leaves = self._leaves(trial, int(metrics["epoch"]))
            every = 1 if leaves else int(plan["checkpoint_every"])
            metrics |= self._keep(executor, place, metrics, every)
            seconds = time.monotonic() - began
            self._say(REPORT, trial, {**metrics, "seconds": seconds})
            if metrics["done"]:
                return DONE
            if plan["waits"] and self._answers[trial].get() == STOP:
                return STOPPED
            if leaves:
                return LEFT
            began = time.monotonic()

    def _leaves(self, trial: str, epoch: int) -> bool:
        """Tell whether a trial is left after this epoch; the ranks of a gang all say the same."""
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
        """Write a checkpoint if one is due, and drop those before :data:`CHECKPOINTS_KEPT`.

        Returns:
            What the epoch's report has of it.
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
                # first of all, so that one that is half removed is no checkpoint
                with suppress(OSError):
                    (old / STATE).unlink()
                shutil.rmtree(old, ignore_errors=True)
        return {"checkpoint_path": path}

    def _end(self, executor: Executor | None) -> str:
        """End a trial and put back what it left behind; return why the process must end, or ""."""
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

    It is a file in the memory of rank 0, which has no name that another user of the machine could
    open, where a TCPStore would listen to whoever connects.
    """
    path = path or f"/proc/{os.getpid()}/fd/{os.memfd_create('lns-study-store')}"
    store = FileStore(path, -1)  # a number of ranks would have the last one remove the file
    store.set_timeout(timedelta(seconds=MEET_SECONDS))
    return store, path


def _store_at(
    address: str, port: int, opens: bool, workers: int, limit: timedelta
) -> tuple[Store, int]:
    """Return the store in which ranks on several machines meet, and its port.

    The process that opens it listens at ``address`` alone, where torch would at all of the
    machine's addresses, and at a free port.
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
    """Describe the data sets of trials, and say of each trial why it could only fail, or None.

    A loop of the user's own has its own data, which nobody else sees. A trial whose code has
    changed this process is the last that is examined here.

    Args:
        configs: the trials.
        device: a device that this process must have.

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
            torch.set_num_threads(1)  # of two examples threads would only wait for each other
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
    """Return what :func:`examine` returns, or the text of its error, of whatever class."""
    try:
        return examine(configs, device)
    except ValueError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {in_a_line(error)}"
        return f"checking data and networks of the trials raised {what}; mend what it names"


def _why_not(config: TrialConfig, info: DatasetInfo | None) -> str | None:
    """Return why a trial could only fail; None if nothing forbids it.

    Args:
        config: the trial.
        info: its data; None for a loop of the user's own, which has its own.
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
    """Join the study's Ray as a driver of its own, unless this process has.

    What is made of Ray actors needs it: Ray Train's runs, parameter servers.
    """
    import logging

    import ray

    if not ray.is_initialized():
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )


def checkpoints_at(place: str) -> list[str]:
    """Return the checkpoints of a trial that keeps them at a path or a URL, the newest first.

    Of a URL these are the store's: its cache may be another study's.
    """
    if is_url(place):
        return remote_checkpoints(place)
    return [str(path) for path in checkpoints_in(Path(place))]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return a trial's checkpoints, the newest first."""
    return sorted((path for path in folder.glob("[0-9]*") if path.is_dir()), reverse=True)


def _older(checkpoints: Sequence[Any], epoch: int) -> list[Any]:
    """Return those of a trial's checkpoints, the newest first, that are needed no longer.

    What is of later epochs than ``epoch`` was damaged, or differed between ranks, and takes the
    place of none that is whole.
    """
    return [each for each in checkpoints if int(Path(each).name) <= epoch][CHECKPOINTS_KEPT:]


def _describe(error: BaseException) -> str:
    """Return what was refused, in a line; of a mistake in code also its kind."""
    said = last_line(str(error))
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
