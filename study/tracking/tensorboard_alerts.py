"""The process that writes a study's TensorBoard files and runs its alerts: ``python -m
study.tracking.tensorboard_alerts``, started by the driver if the study has either.

Like the MLflow writer (:mod:`study.tracking.writer`) it reads the ledger's new lines, so training
never waits for it, and it continues if the driver exits or is killed. Its errors do not affect the
study; if it dies, the driver restarts it.

TensorBoard: ``tensorboard/`` in the study's folder has a run per trial, with a scalar per metric
and epoch and the trial's config as hyperparameters. The files are rewritten from the ledger at the
start of each run of the study, so they contain no duplicate points.

Alerts: each event is recorded in ``alerts.jsonl`` before its command runs. A recorded event runs no
command again, so a command runs at most once, even after restarts. Events from before the study had
alerts run no command. Commands of one kind run one after another, with their output in
``alerts.log``. After the study's end, all remaining commands together have :data:`ALERT_SECONDS`.

Standard input: a line ``finish`` asks the process to exit once it has read the whole ledger.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.config.keys import flatten
from study.ledger.events import Event, trial_of
from study.ledger.log import FILE, Follower
from study.ledger.state import StudyState, TrialState, name_of
from study.program import module_command
from study.results.configurations import best, groups_of_seeds, signed
from study.tracking.writer import LINGER_SECONDS, ROUND_SECONDS, tracking_lock
from study.tracking.writer_supervisor import MOST_STARTS
from trainers.files import (
    MOST_JSON,
    check_own_file,
    check_own_folder,
    open_own_text,
    read_own,
    write_whole,
)

LOCK = "sinks.lock"
TENSORBOARD = "tensorboard"
"""Folder of the event files in the study's folder, and the package that writes them."""
NOTES, LOG = "alerts.jsonl", "alerts.log"
FOLDER_LENGTH = 200
"""Maximum number of characters of a trial's name in the name of its folder."""
FACT_LENGTH = 5000
"""Maximum number of characters of an environment variable of a command; Linux allows 128 KiB."""
ALERT_SECONDS = 60.0
"""Seconds after which an alert's command is killed, including its child processes."""
WAIT_SECONDS = 10.0
"""Maximum number of seconds that a study waits for this process at its end."""


def check_sinks(study: StudyConfig) -> None:
    """Check that the package ``tensorboard`` is installed if the study uses it.

    Raises:
        ValueError: it is not installed.
    """
    if study.tensorboard and find_spec(TENSORBOARD) is None:
        raise ValueError(
            "tensorboard=true: the package tensorboard is not installed; use `pip install"
            " 'lns-study[tensorboard]'`, or leave tensorboard out"
        )


class Sinks:
    """The supervisor of the process; it does nothing for a study without sinks.

    Args:
        study: the study.
        warn: called with a message if the process died :data:`MOST_STARTS` times, or cannot start.
    """

    def __init__(self, study: StudyConfig, warn: Callable[[str], None] = lambda line: None) -> None:
        self._wanted = study.tensorboard or bool(study.alerts)
        self._folder, self._warn = study.folder, warn
        self._process: subprocess.Popen[str] | None = None
        self._finish = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="sinks", daemon=True)

    def start(self) -> None:
        """Start the process; the ledger must already have the plan."""
        if not self._wanted:
            return
        try:
            for name in (LOCK, NOTES, LOG):
                check_own_file(self._folder / name)
        except ValueError as error:
            self._warn(
                f"No TensorBoard files and no alerts in this run: {error}; training continues, and"
                " the study's next run starts them"
            )
            return
        self._spawn()
        self._thread.start()

    def close(self) -> None:
        """Ask the process to catch up and exit; wait at most :data:`WAIT_SECONDS`."""
        if self._process is None:
            return
        with self._lock:
            self._finish = True
            self._ask_to_finish()
        self._thread.join(WAIT_SECONDS)

    @property
    def pid(self) -> int | None:
        """Process id of the process."""
        return self._process.pid if self._process else None

    def _spawn(self) -> None:
        """Start the process in its own session, so that Ctrl-C does not reach it."""
        self._process = subprocess.Popen(
            [*module_command("study.tracking.tensorboard_alerts"), "--folder", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def _ask_to_finish(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it died; the waiting thread restarts it and asks again
            self._process.stdin.write("finish\n")
            self._process.stdin.close()

    def _run(self) -> None:
        """Wait for the process, and restart it if it dies."""
        for start in range(MOST_STARTS):
            with self._lock:
                if start:
                    self._spawn()
                    if self._finish:
                        self._ask_to_finish()
            assert self._process is not None
            if self._process.wait() == 0:
                return
        self._warn(
            f"the process that writes TensorBoard's files and runs alerts died {MOST_STARTS} times;"
            " training continues, and the study's next run starts it again"
        )


class TensorBoard:
    """A writer of event files, one run per trial, by torch's ``SummaryWriter``.

    Args:
        folder: folder of all runs; its contents are removed.
    """

    def __init__(self, folder: Path) -> None:
        check_own_folder(folder)
        self._folder = folder
        self._writers: dict[str, Any] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def hear(self, event: Event, trial: TrialState, metrics: list[str]) -> None:
        """Write the metrics of a trial's event; infinite and missing values are left out.

        ``metrics`` are the metrics by which TensorBoard's hyperparameter view compares runs.
        """
        if event["event"] not in ("report", "finished", "stopped", "failed"):
            return
        epoch = event["epoch"] if event["event"] == "report" else trial.epochs
        values = event["metrics"] if event["event"] in ("report", "finished") else {}
        for name, value in values.items():
            if name != "epoch" and value is not None and math.isfinite(value):
                self._writer(trial, metrics).add_scalar(name, value, epoch, event["time"])
        if event["event"] != "report" and (writer := self._writers.pop(trial.id, None)):
            writer.close()

    def flush(self) -> None:
        """Write buffered data to the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close all files."""
        while self._writers:
            self._writers.popitem()[1].close()

    def _writer(self, trial: TrialState, metrics: list[str]) -> Any:
        """Return the open writer of a trial; a new one first writes the hyperparameters."""
        if trial.id not in self._writers:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams

            name = re.sub(r"[^A-Za-z0-9._-]+", "-", name_of(trial))[:FOLDER_LENGTH]
            folder = self._folder / f"{name}-{trial.id}"
            new = not folder.exists()
            self._writers[trial.id] = SummaryWriter(str(folder))
            values = {
                key: value
                for key, value in flatten(trial.config).items()
                if isinstance(value, bool | int | float | str)
            }
            for summary in hparams(values, dict.fromkeys(metrics, 0.0)) if new else ():
                self._writers[trial.id].file_writer.add_summary(summary)
        return self._writers[trial.id]


class Alerts:
    """Runs a study's alert commands, at most once per event; see the module docstring.

    Attributes:
        first: whether the study has alerts for the first time.
    """

    def __init__(self, folder: Path, study: StudyConfig) -> None:
        self._folder, self._study, self._best = folder, study, math.inf
        path = folder / NOTES
        self.first = not path.exists()
        text = "" if self.first else read_own(path, MOST_JSON).decode()
        if text and not text.endswith("\n"):  # incomplete last line after a crash
            write_whole(path, (text := text[: text.rfind("\n") + 1]).encode())
        self._known = {json.loads(line)["key"] for line in text.splitlines()}
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._until = math.inf
        self._writing = threading.Lock()
        self._note("began")

    def hear(self, state: StudyState, events: list[Event], quiet: bool = False) -> None:
        """Run the commands for events, or with ``quiet`` only record the events.

        ``state`` must already include the events. If they contain several new best results, only
        the last one runs a command. Each kind of command has its own thread, so that a hanging
        command does not delay other kinds.
        """
        if any(event["event"] == "finished" for event in events):
            self._hear_best(state, quiet)
        for event in events:
            if "source" in event:  # taken over from another trial or study
                continue
            if event["event"] == "failed":
                trial = state.known[event["trial"]]
                key = f"failed {trial.id} {event['time']}"
                facts = {**_facts(trial), "ERROR": str(event["error"])}
                self._run("failed", key, facts, quiet)
            elif event["event"] == "ended":
                facts = {"OUTCOME": event["outcome"]}
                self._run("finished", f"ended {event['time']}", facts, quiet)

    def _hear_best(self, state: StudyState, quiet: bool) -> None:
        search = self._study.search
        metric, mode = next(iter(search.objectives.items()))
        found = best(groups_of_seeds(state.trials, [metric], search.constraints), search.objectives)
        if found is None or not signed(found.objectives[metric], mode) < self._best:
            return
        value = found.objectives[metric]
        self._best = signed(value, mode)
        facts = {**_facts(found.trials[0]), "METRIC": metric, "VALUE": repr(value)}
        self._run("best", f"best {found.row} {found.number} {value!r}", facts, quiet)

    def _run(self, kind: str, key: str, facts: Mapping[str, str], quiet: bool) -> None:
        if key in self._known:
            return
        self._known.add(key)
        command = self._study.alerts.get(kind)
        if quiet or not command:
            self._note(key)
            return
        facts = {"EVENT": kind, "STUDY": self._study.name, "FOLDER": str(self._folder), **facts}
        variables = {
            f"LNS_STUDY_{name}": value.replace("\0", " ")[:FACT_LENGTH]
            for name, value in facts.items()
        }
        if kind not in self._lanes:
            self._lanes[kind] = ThreadPoolExecutor(1, thread_name_prefix=kind)
        self._lanes[kind].submit(self._carry_out, key, command, os.environ | variables)

    def close(self) -> None:
        """Wait for the remaining commands, at most :data:`ALERT_SECONDS` for all together."""
        self._until = time.monotonic() + ALERT_SECONDS
        for lane in self._lanes.values():
            lane.shutdown()

    def _carry_out(self, key: str, command: str, environment: Mapping[str, str]) -> None:
        self._note(key)
        with open_own_text(self._folder / LOG) as log:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            log.write(f"{when} UTC {key}\n")
            log.flush()
            seconds = min(ALERT_SECONDS, self._until - time.monotonic())
            log.write(f"{key}: {_outcome(command, environment, log, seconds)}\n")

    def _note(self, key: str) -> None:
        with self._writing, open_own_text(self._folder / NOTES) as notes:
            notes.write(json.dumps({"key": key}) + "\n")
            notes.flush()
            os.fsync(notes.fileno())


def _facts(trial: TrialState) -> dict[str, str]:
    return {
        "TRIAL": trial.id,
        "ROW": trial.row,
        "SEED": str(trial.seed),
        "CONFIGURATION": "" if trial.number is None else str(trial.number),
    }


def _outcome(command: str, environment: Mapping[str, str], log: Any, seconds: float) -> str:
    """Run a command in a shell, with its output to ``log``; return how it ended."""
    if seconds <= 0:
        return f"not run, because the {ALERT_SECONDS:g} s after the study's end were over"
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"could not be run: {error}"
    try:
        return f"exit code {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"killed after {seconds:.2g} s"


class Feed:
    """Reads a study's ledger and passes its events to TensorBoard and the alerts, if configured."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._follower, self._state = folder, Follower(folder), StudyState()
        self._board: TensorBoard | None = None
        self._alerts: Alerts | None = None
        self._metrics: list[str] = []

    def poll(self) -> None:
        """Pass on the new events of the ledger; the first call also passes on earlier runs."""
        events = self._follower.poll()
        plans = [(n, event) for n, event in enumerate(events) if event["event"] == "planned"]
        start = plans[-1][0] if plans else 0
        if plans:
            self._open(StudyConfig.from_dict(plans[-1][1]["study"]))
        first = self._alerts is not None and self._alerts.first
        self._hear(events[:start], quiet=first)
        self._hear(events[start:])

    def close(self) -> None:
        """Pass on the remaining events, close all files, and wait for the alerts."""
        self.poll()
        if self._board is not None:
            self._to_board(self._board.close)
        if self._alerts is not None:
            self._alerts.close()

    def _open(self, study: StudyConfig) -> None:
        metric = study.primary_metric
        named = [*study.search.objectives, metric.name, metric.test_name]
        self._metrics = list(dict.fromkeys(named))
        if study.tensorboard and self._board is None:
            self._board = TensorBoard(self._folder / TENSORBOARD)
        if study.alerts and self._alerts is None:
            self._alerts = Alerts(self._folder, study)

    def _hear(self, events: list[Event], quiet: bool = False) -> None:
        for event in events:
            self._state.apply(event)
            trial = self._state.known.get(trial_of(event))
            if self._board is not None and trial is not None:
                self._to_board(partial(self._board.hear, event, trial, self._metrics))
        if self._board is not None:
            self._to_board(self._board.flush)
        if self._alerts is not None and events:
            self._alerts.hear(self._state, events, quiet)

    def _to_board(self, write: Callable[[], None]) -> None:
        """Write to TensorBoard's files; after an error, only alerts continue."""
        try:
            write()
        except Exception as error:
            self._board = None
            with suppress(OSError), open_own_text(self._folder / LOG) as log:
                log.write(f"no more TensorBoard files in this run: {error}\n")


def main() -> int:
    """Run the process; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m study.tracking.tensorboard_alerts")
    parser.add_argument("--folder", required=True, type=Path)
    folder = parser.parse_args().folder
    if not (folder / FILE).exists():  # removed, moved or unmounted; the driver reports it
        return 0
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    with tracking_lock(folder, LINGER_SECONDS, LOCK) as free:
        if not free:
            return 1
        feed = Feed(folder)
        while True:
            with suppress(queue.Empty):
                inbox.get(timeout=ROUND_SECONDS)
                break
            feed.poll()
        feed.close()
    return 0


def _read(inbox: queue.SimpleQueue[str]) -> None:
    inbox.put(sys.stdin.readline())


if __name__ == "__main__":
    sys.exit(main())
