"""Launch on Slurm: ``sbatch`` with the script of ``conf/cluster/slurm.sh`` or the user's own.

The script is submitted unchanged and gets its values as arguments. So site options (partition,
account, nodes) go into a copy of the script (``--template``) or into Slurm's own variables
(``SBATCH_PARTITION`` and others). As usual with Slurm, the working directory must be on a file
system that every node mounts.

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
from study.ops.launch.package import Package

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
"""Final job states, from https://slurm.schedmd.com/job_state_codes.html."""
LOG = "slurm-{job}.log"
"""Name of a job's log file in the package's folder; a requeued job appends to it."""


def batch_command(
    package: Package, loaded: StudyConfig, template: Path, launched: str = ""
) -> tuple[str, ...]:
    """Return the ``sbatch`` command that submits the study, as a list of words.

    Args:
        package: the package to run.
        loaded: the study's config.
        template: the batch script.
        launched: times of the launch (:mod:`study.engines.launch_times`); "" if it is not
            submitted.

    Raises:
        UserError: the package's path contains a colon, so it cannot be in PYTHONPATH.
    """
    if ":" in str(package.stage):
        raise UserError(
            f"{package.stage}: must contain no colon, which separates the entries of PYTHONPATH on"
            " the nodes; rename the folder, or launch from another one"
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
        UserError: ``sbatch`` is not installed, or rejects the job.
    """
    return run_tool(command).split(";")[0]


def run_tool(command: tuple[str, ...]) -> str:
    """Run a cluster tool, such as ``sbatch`` or ``kubectl``; return its output.

    Raises:
        UserError: it is not installed, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            f"{command[0]}: not found; launch from a machine that has it, or add --dry-run, which"
            " writes the files without submitting them"
        ) from None
    if done.returncode:
        raise UserError(f"{command[0]} refuses: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


class Seen(Enum):
    """State of a job according to Slurm."""

    RUNNING = "waits or runs"
    AWAY = "Slurm does not answer"
    COMPLETED = "succeeded"
    FAILED = "failed"
    FORGOTTEN = "ended longer ago than Slurm remembers (MinJobAge)"


def look(job: str) -> Seen:
    """Query the state of a job; AWAY if Slurm's controller does not answer."""
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
    if state and state[1] not in ENDED:  # requeued since the first query
        return Seen.RUNNING
    return Seen.COMPLETED if state and state[1] == "COMPLETED" else Seen.FAILED
