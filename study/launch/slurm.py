"""Launch on Slurm: ``sbatch`` with the script of ``conf/cluster/slurm.sh`` or the user's own.

The script is submitted as it is; what it needs comes as its arguments. So options of the site
(partition, account, nodes) go into a copy of it (``--template``) or into Slurm's own variables
(``SBATCH_PARTITION`` and the like). The current folder must be on a file system that every node
sees, which Slurm's jobs expect anyway.

Docs: https://slurm.schedmd.com/sbatch.html, https://docs.ray.io/en/latest/cluster/vms/user-guides/
community/slurm.html
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from study.config import StudyConfig
from study.errors import UserError
from study.launch.package import Package

LOG = "slurm.log"
"""Output of the job, in the folder of the package; a requeued job appends to it."""


def batch_command(package: Package, loaded: StudyConfig, template: Path) -> tuple[str, ...]:
    """Return the words that submit the study."""
    return (
        "sbatch",
        "--parsable",
        f"--job-name={loaded.slug}",
        f"--output={str(package.stage / LOG).replace('%', '%%')}",  # %j would be the job's id
        str(template.resolve()),
        str(package.stage),
        loaded.slug,
        loaded.storage,
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


def is_running(job: str) -> bool:
    """Tell whether a job waits or runs."""
    done = subprocess.run(("squeue", "--noheader", f"--jobs={job}"), capture_output=True, text=True)
    return bool(done.stdout.strip())


def succeeded(job: str) -> bool:
    """Tell whether a job that has ended recently was ``COMPLETED``."""
    return "JobState=COMPLETED" in run_tool(("scontrol", "show", "job", job))
