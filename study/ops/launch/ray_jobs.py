"""Launch through the job server of a Ray cluster (Ray's ``JobSubmissionClient``).

The study's files are the job's ``working_dir``; the wheel of this version is a ``py_modules``
entry, which Ray installs on every node. The job sets one environment variable, in its command: the
times of the launch. Variables in the nodes' own environment, such as an MLflow password, stay
there. Ray itself handles the token of a cluster that asks for one (``~/.ray/auth_token``,
``RAY_AUTH_TOKEN``) and sends it in HTTP headers only; the token's file is made readable by its
owner only.

Ray runs a job's command in a shell with the PATH of the user that started the head, where
``python`` may be another interpreter. So the command uses the interpreter with which the head's Ray
starts its workers. It is in the command line of the raylet, the parent of the job's supervisor
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

from study.engines.launch_times import VARIABLE
from study.engines.ray_token import keep_token
from study.errors import OutOfSightError, UserError
from study.ops.launch.package import Package

DASHBOARD = "http://127.0.0.1:8265"
TOLD = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
"""Environment variables that a printed command may need in order to reach the cluster."""

FIND_PYTHON = r"""
raylet=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$PPID/status)
python=$(tr '\0' '\n' </proc/$raylet/cmdline | sed -n \
 -e 's/^--python_worker_command="\([^"]*\)" .*/\1/p' \
 -e 's/^--python_worker_command=\([^" ]*\) .*/\1/p')
[ -x "$python" ] || python=python
echo "Python: $python"
"""
"""Shell commands that set ``$python`` to the interpreter of the head's Ray, or else to the first
one in PATH, and print it."""


def entrypoint(words: Sequence[str], **variables: str) -> str:
    """Return a job's command, which runs the Python interpreter of the head's Ray.

    Args:
        words: arguments of the interpreter.
        variables: environment variables to set.
    """
    told = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
    return f'{FIND_PYTHON.strip()}\nexec {told} "$python" {shlex.join(words)}'


def job_request(package: Package, slug: str, launched: str = "") -> dict[str, Any]:
    """Return the arguments of ``JobSubmissionClient.submit_job``.

    Args:
        package: the package to send.
        slug: the study's slug, the prefix of the job's id.
        launched: times of the launch (:mod:`study.engines.launch_times`); "" if it is not
            submitted.
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
        UserError: ``address`` does not answer, or rejects the job.
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
    """Print a job's log until it ends; return whether the job succeeded.

    Raises:
        OutOfSightError: the cluster cannot be reached; the job may still be running.
        KeyboardInterrupt: the user detached; the job keeps running.
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
    """Return the first line of an error message; Ray's further lines are long explanations."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def command(address: str, job: str, *words: str) -> str:
    """Return a ``ray job`` command for a job, such as ``stop`` or ``logs --follow``.

    The variables :data:`TOLD` of this process are included; the token itself is in none of them.
    """
    told = [f"{name}={shlex.quote(os.environ[name])}" for name in TOLD if name in os.environ]
    return " ".join([*told, shlex.join(["ray", "job", *words, "--address", address, job])])
