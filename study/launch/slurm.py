"""Launch on Slurm: ``sbatch`` with the script of ``conf/cluster/slurm.sh`` or the user's own.

The script is submitted as it is; what it needs comes as its arguments. So options of the site
(partition, account, nodes) go into a copy of it (``--template``) or into Slurm's own variables
(``SBATCH_PARTITION`` and the like). The current folder must be on a file system that every node
sees, which Slurm's jobs expect anyway.

Docs: https://slurm.schedmd.com/sbatch.html, https://docs.ray.io/en/latest/cluster/vms/user-guides/
community/slurm.html
"""

from __future__ import annotations

import re
import subprocess
from enum import Enum
from pathlib import Path

from study.config import StudyConfig
from study.errors import UserError
from study.launch.package import Package

ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
"""States of a job that runs no more, of those on the page "Job State Codes"
(https://slurm.schedmd.com/job_state_codes.html)."""
LOG = "slurm-{job}.log"
"""Output of a job, in the folder of the package; a requeued job appends to it."""


def batch_command(
    package: Package, loaded: StudyConfig, template: Path, launched: str = ""
) -> tuple[str, ...]:
    """Return the words that submit the study; ``launched`` are the times of the launch
    (:mod:`study.execution.launched`).

    Raises:
        UserError: the package lies where Python cannot be told to look for it.
    """
    if ":" in str(package.stage):
        raise UserError(
            f"{package.stage}: must hold no colon, at which PYTHONPATH is cut on the nodes; rename"
            " the folder, or launch from another one"
        )
    log = f"{str(package.stage).replace('%', '%%')}/{LOG.format(job='%j')}"
    return (
        "sbatch",
        "--parsable",
        f"--job-name={loaded.slug}",
        f"--output={log}",
        str(template.resolve()),
        str(package.stage),
        *([launched] if launched else []),
    )


def submit(command: tuple[str, ...]) -> str:
    """Submit the job; return its id.

    Raises:
        UserError: there is no ``sbatch``, or it refuses.
    """
    return run_tool(command).split(";")[0]


def run_tool(command: tuple[str, ...]) -> str:
    """Run a program of the cluster; return its output.

    Raises:
        UserError: it is not installed, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]}: not found; launch from a machine that has it, or add --dry-run, which"
            " only writes what would be submitted"
        ) from None
    if done.returncode:
        raise UserError(f"{command[0]} refuses: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


class Seen(Enum):
    """What Slurm says of a job."""

    RUNNING = "waits or runs"
    AWAY = "Slurm does not answer"
    COMPLETED = "succeeded"
    FAILED = "failed"
    FORGOTTEN = "ended longer ago than Slurm remembers (MinJobAge)"


def look(job: str) -> Seen:
    """Ask Slurm about a job; a controller that is away says nothing about it."""
    queue = ("squeue", "--noheader", f"--jobs={job}")
    for command in (queue, ("scontrol", "show", "job", job)):
        done = subprocess.run(command, capture_output=True, text=True)
        known = "Invalid job id" not in done.stderr
        if done.returncode and known:
            return Seen.AWAY
        if command is queue and known and done.stdout.strip():
            return Seen.RUNNING
    if not known:
        return Seen.FORGOTTEN
    state = re.search(r"JobState=(\w+)", done.stdout)
    if state and state[1] not in ENDED:  # queued again since the first question
        return Seen.RUNNING
    return Seen.COMPLETED if state and state[1] == "COMPLETED" else Seen.FAILED
