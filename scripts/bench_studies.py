"""Time whole studies from the command line, as a user waits for them.

    python scripts/bench_studies.py [--storage FOLDER] [--json FILE] "table trial.device=cuda"
    "cover" ...
    python scripts/bench_studies.py --launch "quickstart --to ray" ...

Each argument is what comes after ``lns-study run``, or ``lns-study launch`` to a cluster that runs
and shares this machine's clock and temporary folder. From the ledger and the clock: seconds from
the command to the first trial's start, to the first reported epoch, to the last trial's end and to
the end of the command (report written, MLflow complete); trials that ended a second while more
trials than slots were left; epochs a second from the first start to the last end; most trials at a
time; and their seconds over those of the slots (``utilisation``; slots: the most at a time).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from study.ledger.lines import Event
from study.ledger.log import read_ledger
from study.ledger.state import ENDED, fold

ENDS = ("finished", "stopped", "failed", "restarted", "relieved")


def figures(events: list[Event], began: float, ended: float) -> dict[str, float]:
    """Return what a run's ledger says."""
    times = {
        name: [event["time"] for event in events if event["event"] == name]
        for name in ("started", "report")
    }
    ends = sorted(event["time"] for event in events if event["event"] in ENDS)
    changes = sorted([(at, 1) for at in times["started"]] + [(at, -1) for at in ends])
    running, most, held, last = 0, 0, 0.0, changes[0][0]
    for at, change in changes:
        held, last = held + running * (at - last), at
        running += change
        most = max(most, running)
    state = fold(events)
    first, full = changes[0][0], ends[: max(1, len(ends) - most)]
    return {
        "to the first start": first - began,
        "to the first epoch": min(times["report"]) - began,
        "to the last end": ends[-1] - began,
        "to the end": ended - began,
        "trials": float(sum(trial.status in ENDED for trial in state.trials)),
        "trials/s while full": len(full) / (full[-1] - first),
        "epochs/s": len(times["report"]) / (ends[-1] - first),
        "at a time": float(most),
        "utilisation": held / (most * (ends[-1] - first)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+")
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--storage", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.storage:
        options.storage.mkdir(parents=True, exist_ok=True)
    results = {}
    for number, words in enumerate(options.studies):
        storage = Path(tempfile.mkdtemp(dir=options.storage))
        command = [
            sys.executable,
            "-m",
            "study",
            "launch" if options.launch else "run",
            *shlex.split(words),
            f"name=bench{number}",
            f"storage={storage}",
            *([] if options.launch else ["--plain"]),
        ]
        began = time.time()
        done = subprocess.run(
            command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ended = time.time()
        if done.returncode:
            print(done.stdout[-3000:])
            sys.exit(f"{words}: exit code {done.returncode}")
        results[words] = figures(read_ledger(storage / f"bench{number}"), began, ended)
        print(words)
        for name, value in results[words].items():
            print(f"    {name:24s} {value:10.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
