"""Settings of all tests.

Tests compute with one thread. Hypothesis has no deadlines, because kernels compile at their first
call. ``--share`` runs a part of the tests. A test may only be skipped for a reason in
:data:`SKIPS`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# fixed, so that messages do not depend on how the tests were started
os.environ["LNS_STUDY_COMMAND"] = "lns-study"

import pytest
from hypothesis import HealthCheck, settings

try:
    import torch
except ImportError:  # test_newest_python.py runs tests in an environment without torch
    torch = None  # type: ignore[assignment]

settings.register_profile("lns", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lns")
if torch is not None:
    torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # shells ignore SIGINT in background processes, and processes that tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


SKIPS = (
    # the machine's devices and processor
    "no CUDA backend", "needs a CUDA device", "GPUs, needs two", "there is a GPU", "AVX",
    "needs fork", "simd is this kernel here", "no C\\+\\+ compiler", "torch has no OpenMP of GNU's",
    # programs and permissions that the machine need not have
    "Chromium is not installed", "playwright is not installed", "PostgreSQL is not installed",
    "pip install 'lns-study\\[team\\]'", "torchao", "gfloat is not installed",
    "torch.s operation database needs it",
    "tensorboard is not installed", "pip-audit is not installed",
    "pip-audit cannot reach its database",
    "transformers is not installed", "CIFAR-10.s binary files are not here",
    "aws is not installed", "docker-compose is not installed", "Slurm is not installed",
    "kubectl is not installed", "no newer Python is installed",
    "no file system can be mounted here", "a network namespace of our own is not permitted here",
    # combinations of parameters that do not exist
    "scope matmul does not reach into an LSTM", "scope matmul has no transposed convolutions",
    "torch has no such mode", "torch takes one of them",
    "this process has a Ray with tokens already",
    # features that a supported version of a library lacks
    "new in torch 2\\.13",
)  # fmt: skip
"""Regular expressions of the allowed reasons to skip a test; with another reason the test fails."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--share`` and ``--seeds``."""
    parser.addoption(
        "--share",
        metavar="[TURN/]PARTS",
        help="only every PARTS-th of the chosen tests, another for every TURN: the number of"
        " commits, if it is not given",
    )
    parser.addoption(
        "--seeds", metavar="FIRST-LAST", help="seeds of the campaign of faults (tests/faults)"
    )


def turn_of(folder: Path) -> int:
    """Return the number of commits of a checkout.

    Where they cannot be counted, return the number of days since 1970. That includes shallow
    clones, which have the same few commits every time.
    """

    def ask(*words: str) -> str:
        git = ["git", "-C", str(folder), *words]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if ask("rev-parse", "--is-shallow-repository") == "false":
            return int(ask("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        pass  # git is not installed, or this is not a git checkout
    return int(time.time() // 86400)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not in the share of this turn."""
    if share := config.getoption("--share"):
        given, _, count = share.rpartition("/")
        turn, parts = int(given) if given else turn_of(config.rootpath), int(count)
        kept = [item for place, item in enumerate(items) if place % parts == turn % parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Fail a test that is skipped for a reason not in :data:`SKIPS`."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Fail a test file that is skipped for a reason not in :data:`SKIPS`."""
    return _judged((yield))


def _judged(report: Any) -> Any:
    """Return the report; it becomes a failure if the skip's reason is not in :data:`SKIPS`."""
    if (
        report.skipped
        and isinstance(report.longrepr, tuple)
        and not any(re.search(known, report.longrepr[2]) for known in SKIPS)
    ):
        report.outcome, report.longrepr = (
            "failed",
            f"left out for a reason that is not in tests/conftest.py: {report.longrepr[2]}",
        )
    return report


@pytest.fixture(autouse=True)
def _no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of the unit tier, which runs no slow tests, if it starts a process."""
    markers = request.node.get_closest_marker
    if markers("unit") is None or markers("slow") is not None:
        yield
        return

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a test of the unit tier starts a process; remove pytest.mark.unit")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("subprocess.Popen.__init__", "os.fork", "multiprocessing.Process.start"):
            patch.setattr(name, refuse)
        yield


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start one local Ray cluster for the session.

    It has two CPUs, its own temporary folder and no dashboard.
    """
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    yield
    ray.shutdown()
