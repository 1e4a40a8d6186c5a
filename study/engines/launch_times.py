"""Times of a launch: how long packing took, and when the job was submitted.

They are in an environment variable of the job, so that the study's ledger has all times up to the
first epoch. The job adds the times when its process started (from the kernel) and when its code was
loaded. Limits: ``submitted`` is by the clock of the launching machine, the others by the node's.
The time between submission and start (queue, images, pods, installation of the wheel) is one stage.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from study.ledger.slots import INTERRUPTED, Run

VARIABLE = "LNS_STUDY_LAUNCHED"
"""Environment variable ``SECONDS,TIME``: duration of packing, and time of submission."""
START = 19
"""Index of the start time (ticks since boot) in /proc/PID/stat after the process name."""


def told(packing: float, submitted: float) -> str:
    """Return the value of :data:`VARIABLE`."""
    return f"{packing:.3f},{submitted:.3f}"


def launch_of_job(loaded: float) -> dict[str, float]:
    """Return the times of the launch that started this process; {} if it was not launched.

    Args:
        loaded: time at which its code was loaded.
    """
    packing, comma, submitted = os.environ.get(VARIABLE, "").partition(",")
    try:
        known = {"packing": float(packing), "submitted": float(submitted)} if comma else {}
    except ValueError:  # set by somebody else
        known = {}
    return known and {**known, "started": _start(), "loaded": loaded}


def continued(runs: Sequence[Run], launch: dict[str, float]) -> list[Run]:
    """Return the runs that a restarted job continues, newest first.

    These are the last runs after the launch that were killed or ended by a signal. Earlier runs do
    not count, because a new launch is a new request to run.

    Args:
        runs: runs of the study, the oldest first.
        launch: times of the launch whose job this is; {} if there was none.
    """

    def broken_off(run: Run) -> bool:
        return run.outcome in ("", INTERRUPTED) and run.begin > launch.get("submitted", 0.0)

    return list(itertools.takewhile(broken_off, reversed(runs)))


def _start() -> float:
    """Return the time at which this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[START])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def launch_stages(run: Run | None) -> str:
    """Describe the stages of a launched run up to its plan in one line; "" for other runs.

    The submission is timed by the launching machine, the rest by the job's.
    """
    if run is None or not run.launch:
        return ""
    times, joint = run.launch, ", "
    if "submitted" not in times:
        began, joint = "the job was started again", "; "
    else:
        waited = times["started"] - times["submitted"]
        began = f"packed in {times['packing']:.1f} s, submitted; " + (
            f"{waited:.1f} s until the job started"
            if waited >= 0
            else "the job started (the two machines' clocks disagree)"
        )
    return (
        f"{began}{joint}{times['loaded'] - times['started']:.1f} s until its code was loaded,"
        f" {run.planned - times['loaded']:.1f} s until the study was planned"
    )
