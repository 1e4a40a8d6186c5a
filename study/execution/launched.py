"""Times of a launch, which travel with the job: how long it was packed, and when it was submitted.

A variable of the job's environment has them, so that the ledger of a study that runs on another
machine can tell the whole way to its first epoch. The job adds when its process started, by the
kernel's own count, and when its code was loaded. Limits: ``submitted`` is of the launching
machine's clock, the others of the node's; what happens between submission and start (queue, images,
pods, the wheel's installation by Ray) is one stage, as only the cluster could tell it apart.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from study.ledger.slots import INTERRUPTED, Run

VARIABLE = "LNS_STUDY_LAUNCHED"
"""Environment variable ``SECONDS,TIME``: seconds of packing, and the time of the submission."""
START = 19
"""Place of a process's start, in ticks since boot, in /proc/PID/stat behind its name."""


def told(packing: float, submitted: float) -> str:
    """Return the value of :data:`VARIABLE`."""
    return f"{packing:.3f},{submitted:.3f}"


def launch_of_job(loaded: float) -> dict[str, float]:
    """Return the times of the launch that this process is the job of; {} if there was none.

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
    """Return the runs that a job begun again by its controller continues, the last first.

    Those are the last runs that did not end in order: they were killed, or ended by a signal. Runs
    before the launch are none of them: whoever launches a study anew wishes it to run.

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
    """Describe in a line how long a launched run took to its plan, by stage; "" of any other run.

    The submission is timed by the machine that launched, the rest by that of the job.
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
