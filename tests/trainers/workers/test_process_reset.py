"""Changes that a trial leaves in the process do not reach the next trial."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lns_ops import get_matmul_accumulation, set_matmul_accumulation
from trainers._compat import choose_cudnn
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.training.trainer import Training
from trainers.workers import process_reset
from trainers.workers.process_reset import InitialSettings, LeakError

CONFIG = TrialConfig(
    data=DataConfig(name="digits", validation_size=300, train_size=128),
    model=ModelConfig(hidden=[8]),
    precision=PrecisionConfig(format="lns12"),
    batch_size=32,
    epochs=1,
)


def figures() -> dict[str, float]:
    metrics = Training(CONFIG).train_epoch()
    return {name: value for name, value in metrics.items() if name != "samples_per_second"}


def test_a_trial_has_cudnn_compute_repeatably() -> None:
    """Also if somebody has chosen TF32 for only one kind of network."""
    cudnn = torch.backends.cudnn
    choose_cudnn(deterministic=False, benchmark=True)
    clean, precision = InitialSettings(), cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = "ieee"
    Training(CONFIG)
    assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    clean.restore()
    cudnn.conv.fp32_precision = precision
    assert (cudnn.deterministic, cudnn.benchmark) == (False, True)
    choose_cudnn(deterministic=False, benchmark=False)


def test_settings_are_put_back_and_the_next_trial_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LNS_STUDY_LEFTOVER", "before")
    clean, folder, before = InitialSettings(), os.getcwd(), figures()
    os.environ["LNS_STUDY_LEFTOVER"] = "after"
    os.environ["LNS_STUDY_NEW"] = "new"
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    set_matmul_accumulation("float32")
    torch.rand(7)
    clean.restore()
    assert os.environ["LNS_STUDY_LEFTOVER"] == "before"
    assert "LNS_STUDY_NEW" not in os.environ
    assert os.getcwd() == folder
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert get_matmul_accumulation() == "contract"
    state = torch.get_rng_state()
    assert figures() == before
    torch.rand(7)
    clean.restore()
    assert torch.equal(torch.get_rng_state(), state)


def test_without_putting_back_the_figures_would_differ() -> None:
    """The check above can fail: a default dtype that stays changes the next trial's results."""
    before = figures()
    torch.set_default_dtype(torch.float64)
    try:
        assert figures() != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_putting_back_what_has_not_changed_loads_nothing() -> None:
    """torch imports its compiler, two seconds, when it is set again to allow nondeterministic
    algorithms."""
    code = (
        "import sys; from trainers.workers.process_reset import InitialSettings; "
        "InitialSettings().restore(); "
        "assert 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_and_memory_that_stay_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_reset, "THREADS", 3)
    monkeypatch.setattr(process_reset, "MEMORY", 64 << 20)
    clean = InitialSettings()
    clean.restore()
    kept = bytearray(os.urandom(1 << 20) * 100)
    with pytest.raises(LeakError, match="MB and 0 threads more"):
        clean.restore()
    del kept
    clean = InitialSettings()
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(LeakError, match="4 threads more"):
            clean.restore()
    finally:
        done.set()
        for thread in threads:
            thread.join()
