"""Time whole studies from the command line, as a user experiences them.

    python scripts/bench_studies.py [--storage FOLDER] [--json FILE] "table trial.device=cuda"
    "cover" ...
    python scripts/bench_studies.py --launch "quickstart --to ray" ...
    python scripts/bench_studies.py --beside CHECKOUT scripts/bench/own_network.yaml ...

Each argument has the words after ``lns-study run``, or after ``lns-study launch`` for a running
cluster that shares this machine's clock and temporary folder. Results from the ledger and the
clock:

- seconds from the command to the first trial's start, to the first reported epoch, to the last
  trial's end, and to the end of the command (report written, MLflow complete);
- trials per second, while more trials than slots were left;
- epochs per second from the first start to the last end;
- maximum number of trials at a time (the number of slots);
- ``utilisation``: total seconds of the trials divided by the seconds of these slots.

With ``--beside`` each study also runs with the code of another checkout, right after this one, and
each result is divided by the other checkout's.
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

from study.ledger.events import Event
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


def measure(words: str, storage: Path | None, *, launch: bool, code: Path) -> dict[str, float]:
    """Run a study and return its figures.

    Args:
        words: words after ``lns-study run`` or ``launch``.
        storage: folder for the studies; None for a temporary one.
        launch: whether it is launched.
        code: the checkout whose code runs.
    """
    if storage is not None:
        storage.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=storage))
    command = [
        *(sys.executable, "-P", "-m", "study", "launch" if launch else "run"),
        *shlex.split(words),
        *("name=bench", f"storage={place}"),
        *([] if launch else ["--plain"]),
    ]
    paths = (str(code), os.environ.get("PYTHONPATH"))
    began = time.time()
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ended = time.time()
    if done.returncode:
        print(done.stdout[-3000:])
        sys.exit(f"{words}: exit code {done.returncode}")
    return figures(read_ledger(place / "bench"), began, ended)


def show(heading: str, values: dict[str, float]) -> None:
    """Print figures under a heading."""
    print(heading)
    for name, value in values.items():
        print(f"    {name:24s} {value:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+")
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--storage", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    results = {}
    for words in options.studies:
        found = measure(words, options.storage, launch=options.launch, code=here)
        results[words] = found
        show(words, found)
        if options.beside:
            other = options.beside.resolve()
            theirs = measure(words, options.storage, launch=options.launch, code=other)
            results[f"{words} in {other}"] = theirs
            show(f"{words} in {other}", theirs)
            show("this / the other", {name: found[name] / theirs[name] for name in found})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
