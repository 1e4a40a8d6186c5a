"""Launch through the job server of a Ray cluster (Ray's ``JobSubmissionClient``).

The study's files travel as the job's ``working_dir``, this version's wheel as a ``py_modules``
entry that Ray installs on every node. The job's environment names no variable but, in its command,
the times of the launch: what the nodes' own environment holds (an MLflow password, say) stays
there. The token of a cluster that asks for one is Ray's own matter (``~/.ray/auth_token``,
``RAY_AUTH_TOKEN``) and travels in HTTP's headers only; its file is made its user's alone.

Ray runs a job's command in a shell with the PATH of whoever started the head, which need not lead
to the head's Python. So the command takes the interpreter that the head's Ray starts its workers
with: the raylet, the parent of the job's supervisor, has it in its command line
(``--python_worker_command``; seen with Ray 2.60).

Docs: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/sdk.html
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study.errors import OutOfSightError, UserError
from study.execution.launched import VARIABLE
from study.execution.ray_token import keep_token
from study.launch.package import Package

DASHBOARD = "http://127.0.0.1:8265"
TOLD = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
"""Variables without which a printed command may not reach the cluster."""

FIND_PYTHON = r"""
raylet=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$PPID/status)
python=$(tr '\0' '\n' </proc/$raylet/cmdline | sed -n \
 -e 's/^--python_worker_command="\([^"]*\)" .*/\1/p' \
 -e 's/^--python_worker_command=\([^" ]*\) .*/\1/p')
[ -x "$python" ] || python=python
echo "Python: $python"
"""
"""Shell commands that set and print the Python of the head's Ray, or the first one of the PATH."""


def entrypoint(words: Sequence[str], **variables: str) -> str:
    """Return the command of a job that runs the Python of the head's Ray.

    Args:
        words: arguments of Python.
        variables: variables of its own.
    """
    told = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
    return f'{FIND_PYTHON.strip()}\nexec {told} "$python" {shlex.join(words)}'


def job_request(package: Package, slug: str, launched: str = "") -> dict[str, Any]:
    """Return the arguments of ``JobSubmissionClient.submit_job``.

    Args:
        package: what travels.
        slug: the study's name, with which that of the job begins.
        launched: times of the launch (:mod:`study.execution.launched`), if it is submitted.
    """
    told = {VARIABLE: launched} if launched else {}
    return {
        "submission_id": f"{slug}-{secrets.token_hex(4)}",
        "entrypoint": entrypoint(package.command[1:], **told),
        "runtime_env": {"working_dir": str(package.folder), "py_modules": [str(package.wheel)]},
        "metadata": {"code": package.digest, "wheel": package.wheel.name},
    }


def submit(address: str, request: dict[str, Any]) -> Any:
    """Submit a job; return the client.

    Raises:
        UserError: nothing answers at ``address``, or it refuses the job.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    keep_token(Path.home() / ".ray" / "auth_token")
    try:
        client = JobSubmissionClient(address)
        client.submit_job(**request)
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--address {address}: takes no job ({_first(error)}); set RAY_AUTH_MODE=token, and"
            f" give the address of the cluster's dashboard, for example {DASHBOARD}, and its token"
            " in ~/.ray/auth_token"
        ) from error
    return client


def follow(client: Any, job: str, say: Callable[[str], None]) -> bool:
    """Print a job's log until it ends; tell whether it succeeded.

    Raises:
        OutOfSightError: the cluster, or the way to it, is away; the job may go on.
        KeyboardInterrupt: the user detached; the job goes on.
    """

    async def tail() -> None:
        async for lines in client.tail_job_logs(job):
            say(lines.rstrip("\n"))

    from aiohttp import ClientError  # Ray's own client
    from ray.exceptions import AuthenticationError

    try:
        asyncio.run(tail())
        details = client.get_job_info(job)
    except (AuthenticationError, ClientError, OSError, RuntimeError) as error:
        raise OutOfSightError(_first(error)) from error
    if (status := str(details.status)) != "SUCCEEDED":
        say(f"Job {job}: {status}: {details.message}")
    return status == "SUCCEEDED"


def _first(error: Exception) -> str:
    """Return the first line of what Ray says, whose others explain at length."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def command(address: str, job: str, *words: str) -> str:
    """Return a command of Ray's on a job: ``stop``, or ``logs --follow``; with the variables of
    this process that lead to the cluster and to its token, which is in none of them."""
    told = [f"{name}={shlex.quote(os.environ[name])}" for name in TOLD if name in os.environ]
    return " ".join([*told, shlex.join(["ray", "job", *words, "--address", address, job])])
