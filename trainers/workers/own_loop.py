"""Executor of trials that a user's own training loop trains; counterpart of
:mod:`trainers.user_loop`.

The loop calls ``report``, while an executor is called itself. Therefore the loop runs in its own
thread, and at any time one of the two threads waits: the loop in its report, until
:meth:`OwnLoop.step` requests the next epoch or :meth:`OwnLoop.end` unwinds the loop; the worker
process in :meth:`OwnLoop.step`, until the loop reports, returns or raises. They never run at the
same time, so no locks are needed.

The last of ``epochs`` reports is forwarded after the loop has returned, together with its return
value. A loop that returns earlier ends its trial with its last report. In a gang every rank runs
the loop; all resume from the same checkpoint, and only rank 0's reports and checkpoints count.

An error in the loop rejects the trial, because a retry would raise it again. After running out of
memory or a system error (``OSError``) the trial is retried like any other.
"""

from __future__ import annotations

import queue
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.checkpoint.loops import keep, load, note, stage
from trainers.checkpoint.manifest import STATE, digest_file
from trainers.checkpoint.remote import fetched
from trainers.comm.process_group import is_of_peers
from trainers.config import TrialConfig
from trainers.files import make_there
from trainers.object_store import local_folder
from trainers.text import describe_error
from trainers.training.build import set_threads
from trainers.training.device import check_device, resolve_device
from trainers.user_code import find_source, forget, seeded, where, without_folder
from trainers.user_loop import (
    KEY,
    Checkpoint,
    LoopContext,
    TrialEnded,
    check_report,
    load_loop,
    numbers,
    training,
)
from trainers.workers.executors import Context, Executor
from trainers.workers.messages import FINAL, Beginning
from trainers.workers.out_of_memory import is_out_of_memory
from trainers.workers.process_reset import LeakError
from trainers.workers.resume import first_of, gathered, in_a_line, of_first

UNWIND_SECONDS = 60.0
"""Seconds that a loop has for its ``finally`` clauses when its trial is stopped."""


@dataclass(frozen=True)
class _End:
    """The loop's end: its return value, or its error."""

    returned: Any = None
    error: BaseException | None = None


class OwnLoop(Executor):
    """Trains a trial, or one of its ranks, by the user's loop.

    The plan's ``metrics`` are required in every report; ``origin`` is stored in checkpoints.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._staged = local_folder(context.plan["checkpoints"]) / "staged"
        self._said: queue.SimpleQueue[dict[str, float] | _End] = queue.SimpleQueue()
        self._goes_on: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._history: list[dict[str, float]] = []
        self._final: dict[str, float] | None = None
        self._stopped = False

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        self._config, own = config, self._context
        device = resolve_device(config.device)
        check_device(device)
        forget()
        loop = load_loop(config.trainable.name, config.trainable.code)
        self._path = find_source(KEY, config.trainable.name)
        self._place = where(self._path, loop)
        resume, damaged = self._continued(checkpoints)
        context = LoopContext(
            config=deepcopy(config.trainable.args),
            trial=config,
            seed=config.seed,
            device=device,
            resume=resume,
            rank=own.rank,
            world_size=own.workers,
            _tell=self._tell,
        )
        self._thread = threading.Thread(
            target=self._train, args=(loop, context), daemon=True, name="loop"
        )
        return Beginning(damaged=damaged, history=[dict(metrics) for metrics in self._history])

    def step(self) -> dict[str, Any]:
        """Run the loop until its next report or its end, and return the epoch's metrics.

        Raises:
            ValueError: the loop raised an error; the message has its file and line.
            RuntimeError: it ran out of memory, or a system error occurred.
        """
        if self._final is None:
            said = self._next()
            if not isinstance(said, _End) and len(self._history) < self._config.epochs:
                return said | {"done": False}
            self._final = self._finish(said if isinstance(said, _End) else self._next())
        return {**self._history[-1], FINAL: self._final, "done": True}

    def save(self, folder: Path) -> bool:
        """Keep the checkpoint of the loop's last report, if it had one."""
        if self._context.rank:
            return False
        state = {
            "epoch": len(self._history),
            "history": self._history,
            "tested": self._final or {},
            "returned": self._final is not None,
            "config": self._config.to_dict(),
            "origin": self._context.plan.get("origin", {}),
        }
        if self._staged.exists():
            keep(self._staged, folder, state)
            return True
        if self._final is not None and (folder / STATE).exists():
            note(folder, state)
            return True
        return False

    def profile(self) -> dict[str, bytes]:
        """Return nothing: own loops are not profiled."""
        return {}

    def end(self) -> None:
        if self._context.rank == 0:
            shutil.rmtree(self._staged, ignore_errors=True)
        if self._thread is None or not self._thread.is_alive():
            return
        self._goes_on.put(False)
        self._thread.join(UNWIND_SECONDS)
        if self._thread.is_alive():
            raise LeakError(
                f"the loop {self._config.trainable.name} still ran {UNWIND_SECONDS:g} s after its"
                " trial was stopped"
            )

    def _continued(self, checkpoints: list[str]) -> tuple[Checkpoint | None, str]:
        """Resume from the first complete checkpoint; a collective of the ranks.

        Returns:
            The checkpoint that the loop reported, or None, and a description of the damaged
            checkpoints that were skipped.
        """
        workers, damaged = self._context.workers, list[str]()
        for path in of_first(checkpoints, workers):
            found: Checkpoint | None = None
            state: dict[str, Any] = {}
            digest = wrong = ""
            try:
                folder = fetched(path)
                found, state = load(folder)
                digest = digest_file(folder / STATE)
            # any error of a damaged file: the epochs can be repeated
            except Exception as error:
                wrong = in_a_line(error)
            seen = gathered((wrong, digest), workers)
            wrong = first_of([text for text, _ in seen])
            if not wrong and len(set(seen)) > 1:
                wrong = f"{path}: not the same checkpoint on every rank; the file system lags"
            if not wrong:
                self._history = list(state["history"])
                self._final = state["tested"] if state["returned"] else None
                return found, "; ".join(damaged)
            damaged.append(wrong)
        return None, "; ".join(damaged)

    def _train(self, loop: Callable[[LoopContext], Any], context: LoopContext) -> None:
        """Run the loop, in its thread, and pass its end on to the worker process."""
        try:
            set_threads(self._config.threads)  # OpenMP has a setting per thread
            with training(context), seeded(context.seed):
                end = _End(returned=loop(context))
        except TrialEnded:
            end = _End()
        except BaseException as error:
            traceback.print_exc()
            end = _End(error=error)
        self._said.put(end)

    def _tell(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | str | None) -> None:
        """Receive a report, in the loop's thread, and wait until the loop may continue.

        Raises:
            TrialEnded: the trial has ended or was stopped.
            ValueError: the report is invalid.
        """
        epoch = len(self._history) + 1
        if self._stopped or epoch > self._config.epochs:
            raise TrialEnded
        found = check_report(metrics, epoch, self._context.plan.get("metrics", []))
        if self._context.rank == 0:
            shutil.rmtree(self._staged, ignore_errors=True)
            if checkpoint is not None:
                make_there(self._context.plan["checkpoints"])
                stage(checkpoint, self._staged)
        self._history.append(found)
        self._said.put(found)
        self._stopped = not self._goes_on.get()
        if self._stopped:
            raise TrialEnded

    def _next(self) -> dict[str, float] | _End:
        """Start or continue the loop, and return its next report or its end."""
        assert self._thread is not None, "begin comes first"
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._goes_on.put(True)
        return self._said.get()

    def _finish(self, end: dict[str, float] | _End) -> dict[str, float]:
        """Return the final figures of a loop that has ended.

        Raises:
            ValueError: the loop raised an error; the message has its file and line.
            RuntimeError: it ran out of memory, or a system error occurred.
        """
        assert isinstance(end, _End), "no loop reports more than its epochs"
        name = self._config.trainable.name
        short = without_folder(name)
        if end.error is not None:
            text = f"{KEY}={short} raised {describe_error(end.error, self._path)}; mend it there"
            lacked = isinstance(end.error, OSError) or is_out_of_memory(end.error)
            again = lacked or is_of_peers(end.error)
            raise (RuntimeError if again else ValueError)(text) from end.error
        if not self._history:
            raise ValueError(
                f"{KEY}={short} ({self._place}) returned and reported nothing; call"
                " trainers.report(metrics) once an epoch"
            )
        if end.returned is None:
            return {}
        try:
            return numbers(end.returned, "what it returned")
        except ValueError as error:
            raise ValueError(f"{KEY}={short} ({self._place}): {error}, or return None") from None
