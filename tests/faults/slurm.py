"""Fault injection for a study on Slurm and S3: one fault every few seconds.

    hosts.sh FOLDER slurm.sh python -m tests.faults.slurm SECONDS SEED

The program runs on the only host of a test Slurm (:mod:`tests.study.ops.launch.machines.hosts`),
with its own S3 server. It launches ``faults.yaml`` in the working directory with ``lns-study launch
--to slurm``, and launches it again each time the job has ended with trials left. At random it
empties the cache first, as on a new machine. A random one of :data:`FAULTS` is injected each time
the study has run for SECONDS since its start or the last fault. The final contents of the store are
written to ``result.json``.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from study.ledger.storage import refresh
from tests.study import object_store
from tests.study.object_store import BUCKET, Line
from trainers.checkpoint.manifest import STATE, parse_state
from trainers.object_store import Store, local_folder

STORAGE = f"s3://{BUCKET}/studies"
FAULTS = ("driver", "worker", "ray's control store", "raylet", "bucket", "requeue")
MOST_JOBS = 100
AWAY_SECONDS = 15.0
"""Maximum time for which the bucket is unreachable, in seconds."""


def main(seconds: float, chance: random.Random) -> None:
    """Launch until every trial has finished, then write the result."""
    made: Counter[str] = Counter()
    began, jobs = time.monotonic(), 0
    with object_store.serve() as server, tempfile.TemporaryDirectory() as cache:
        line = Line(server)
        object_store.new_bucket(server)
        os.environ |= object_store.environment(line, Path(cache))
        while not _is_complete():
            if jobs == MOST_JOBS:
                raise SystemExit(f"not complete after {jobs} jobs; faults: {dict(made)}")
            if chance.random() < 0.5:
                shutil.rmtree(cache)
            jobs += 1
            made += _launch(seconds, chance, line)
        result = _result() | {"seconds": time.monotonic() - began, "jobs": jobs, "faults": made}
    Path("result.json").write_text(json.dumps(result))


def _launch(seconds: float, chance: random.Random, line: Line) -> Counter[str]:
    """Launch once, inject faults until the job has ended, and return the count of each fault."""
    made, logs = Counter[str](), set[Path]()
    command = [sys.executable, "-m", "study", "launch", "faults.yaml", "--to", "slurm"]
    launch = subprocess.Popen([*command, f"storage={STORAGE}", "tracking_uri=none"])
    since = math.inf
    while launch.poll() is None:
        time.sleep(0.2)
        _start_now()
        logs |= set(Path("/tmp").glob(f"ray-{_job() or 0}-*"))
        if not _find(_is_driver):
            since = math.inf
        elif time.monotonic() < (since := min(since, time.monotonic())) + seconds:
            continue
        elif _make(name := chance.choice(FAULTS), chance, line):
            print(f"FAULT {name}", flush=True)
            made[name] += 1
            since = time.monotonic()
    for folder in logs:
        shutil.rmtree(folder, ignore_errors=True)
    return made


def _make(fault: str, chance: random.Random, line: Line) -> bool:
    """Inject a fault; return False if the process to kill does not exist now."""
    if fault == "bucket":
        line.cut()
        time.sleep(chance.uniform(1, AWAY_SECONDS))
        line.mend()
        return True
    if fault == "requeue":
        return subprocess.run(["scontrol", "requeue", _job()], capture_output=True).returncode == 0
    wanted: dict[str, Callable[[list[str]], bool]] = {
        "driver": _is_driver,
        "worker": _is_trial,
        "ray's control store": lambda words: Path(words[0]).name == "gcs_server",
        "raylet": lambda words: Path(words[0]).name == "raylet",
    }
    found = _find(wanted[fault])
    if not found:
        return False
    chance.choice(found).kill()
    return True


def _is_driver(words: list[str]) -> bool:
    return words[1:5] == ["-P", "-m", "study", "run"]


def _is_trial(words: list[str]) -> bool:
    return "trainers.workers.fork_server" in " ".join(words) or words[0].startswith("ray::")


def _find(wanted: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """Return the processes in these namespaces for whose command line ``wanted`` is true."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if words and wanted(words):
                found.append(process)
    return found


def _job() -> str:
    done = subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True)
    return done.stdout.strip()


def _start_now() -> None:
    """Start a requeued job at once; Slurm would wait for two minutes."""
    states = subprocess.run(["squeue", "--noheader", "--format=%T"], capture_output=True, text=True)
    if states.stdout.strip() == "PENDING":
        subprocess.run(
            ["scontrol", "update", f"JobId={_job()}", "StartTime=now"], capture_output=True
        )


def _is_complete() -> bool:
    folder = local_folder(f"{STORAGE}/faults")
    refresh(folder)
    state = fold(read_ledger(folder))
    done = sum(trial.status == FINISHED for trial in state.trials)
    print(f"{done} of {len(state.trials)} trials have finished", flush=True)
    return 0 < len(state.trials) == done


def _result() -> dict[str, Any]:
    """Return the ledger's lines, and epoch and digest of each trial's last checkpoint."""
    store, digests = Store(f"{STORAGE}/faults"), dict[str, tuple[int, str]]()
    for name in store.names("checkpoints"):
        if name.endswith(f"/{STATE}"):
            trial, _, _ = name.split("/")
            state = parse_state(store.get(f"checkpoints/{name}"), Path(name))
            epoch = int(state["epoch"])
            digests[trial] = max(digests.get(trial, (0, "")), (epoch, state["sha256"]))
    segments = store.get_all([f"ledger/{name}" for name in store.names("ledger")])
    return {"ledger": b"".join(segments).decode(), "weights": digests}


if __name__ == "__main__":
    main(float(sys.argv[1]), random.Random(int(sys.argv[2])))
