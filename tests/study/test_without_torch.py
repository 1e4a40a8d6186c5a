"""Processes that do not train do not import torch: commands that look at studies, and the processes
beside training. Each would take 1.8 s and 290 MB more."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from lns_ops import cuda
from study.config.compose import load
from study.lifecycle import create_study
from study.program import module_command
from tests.study.conftest import TINY

LOADED = "import sys, study.cli.entry as entry; entry.main(); print('torch' in sys.modules)"
"""Runs a command as ``lns-study`` does, and prints at the end whether it imported torch."""
WAITS = ("study.tracking.writer", "study.tracking.tensorboard_alerts")
WORKER = "trainers.workers.fork_server"
needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a study that is planned, beside its config."""
    folder = tmp_path_factory.mktemp("waiting")
    (folder / "tiny.yaml").write_text(TINY)
    overrides = [f"storage={folder}", "tracking_uri=none"]
    create_study(load(str(folder / "tiny.yaml"), overrides), print)
    return folder


@pytest.mark.parametrize("module", ["study.lifecycle", "study.api", "trainers.config", "lns_ops"])
def test_modules_that_a_driver_imports(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'numba'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "words",
    ["status tiny", "list", "run tiny.yaml --dry-run", "plan tiny.yaml --slots", "report tiny"],
)
def test_commands_that_look_at_studies(planned: Path, words: str) -> None:
    command, *rest = words.split()
    reads = command in ("status", "list", "report")
    places = ["--storage", str(planned)] if reads else []
    done = subprocess.run(
        [sys.executable, "-c", LOADED, command, *rest, *places],
        cwd=planned, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False", done.stdout


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_processes_of_a_running_study(device: str, storage: Path, tmp_path: Path) -> None:
    """The libraries that a process has mapped show its imports, whoever made them."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    overrides = [f"name=waiting-{device}", f"storage={storage}", "alerts={finished: 'true'}"]
    overrides.append(f"trial.device={device}")
    words = [*module_command("study"), "run", "--plain", "tiny.yaml", *overrides]
    has_torch: dict[str, set[bool]] = defaultdict(set)
    with (tmp_path / "said").open("w") as said:
        driver = psutil.Popen(words, cwd=tmp_path, stdout=said, stderr=said)
        while driver.poll() is None:
            for process in (driver, *driver.children(recursive=True)):
                try:
                    command = " ".join(process.cmdline())
                    paths = {Path(region.path).name for region in process.memory_maps()}
                except psutil.Error:  # it has ended
                    continue
                kind = next((name for name in (*WAITS, WORKER) if name in command), "driver")
                has_torch[kind].add("libtorch_cpu.so" in paths)
            time.sleep(0.1)
    assert driver.returncode == 0, (tmp_path / "said").read_text()
    assert [has_torch[kind] for kind in ("driver", *WAITS)] == [{False}] * 3
    assert True in has_torch[WORKER]
