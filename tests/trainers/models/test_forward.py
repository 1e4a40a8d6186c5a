"""Activation checkpoints change no bit and save memory; mixed precision learns, resumes, and leaves
out overflowing updates."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lns_ops import cuda
from lns_ops.tensor import storage_of
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.memory import MemoryConfig
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.data import Split
from trainers.models.forward import set_forward_
from trainers.optim.wrappers import ScaledOptimizer
from trainers.telemetry.metrics import repeatable
from trainers.training.step import accumulate, train_step
from trainers.training.trainer import Training

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[24, 24, 24, 24]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    batch_size=64,
    epochs=2,
)
PRECISIONS = {
    "float32": PrecisionConfig(),
    "lns": PrecisionConfig(format="lns12", kahan_sum=True),
    "matmul": PrecisionConfig(format="lns12", scope="matmul"),
    "simulated": PrecisionConfig(format="bfloat16", stochastic_rounding=True),
}


@pytest.mark.parametrize("segments", [None, 2, 9, 100])
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_activation_checkpoints_change_no_bit(name: str, segments: int | None) -> None:
    config = replace(BASE, precision=PRECISIONS[name], layout=Layout(micro_batches=2))
    whole = Training(config)
    saving = Training(
        replace(config, memory=MemoryConfig(activation_checkpoints=True, segments=segments))
    )
    assert repeatable(saving.train_epoch()) == repeatable(whole.train_epoch())
    for a, b in zip(saving.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(storage_of(a), storage_of(b))


def kept(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps for backward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert y.requires_grad
    return sum(sizes.values())


def test_segments_hold_less() -> None:
    """32 linear layers with ReLU: all inputs and the last output; in 8 segments their inputs and
    the last one's four outputs."""
    x = torch.randn(10, 32)
    model = nn.Sequential(*(layer for _ in range(32) for layer in (nn.Linear(32, 32), nn.ReLU())))
    assert kept(model, x) == 33 * x.nbytes
    set_forward_(model, MemoryConfig(activation_checkpoints=True))
    assert kept(model, x) == (8 + 4) * x.nbytes


def test_mixed_precision_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = replace(BASE, autocast="bfloat16", epochs=4, data=DataConfig(name="digits"))
    training, float32 = Training(config), Training(replace(config, autocast="none"))
    for _ in range(2):
        metrics, expected = training.train_epoch(), float32.train_epoch()
    training.save(tmp_path)
    assert all(
        p.dtype == torch.float32 and p.grad.dtype == torch.float32
        for p in training.model.parameters()
    )
    assert metrics["train/loss"] != expected["train/loss"]
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=0.05)
    again = Training(config)
    again.restore(tmp_path)
    assert repeatable(again.train_epoch()) == repeatable(training.train_epoch())


def scaled(scale: float) -> tuple[nn.Sequential, torch.optim.Optimizer, GradScaler]:
    torch.manual_seed(0)
    model, scaler = nn.Sequential(nn.Linear(4, 3)), GradScaler("cpu", init_scale=scale)
    set_forward_(model, MemoryConfig(), "bfloat16", scaler)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), scaler


def test_scaled_gradients_are_divided_again_and_overflow_leaves_the_update_out() -> None:
    batch = Split(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))
    reference, _, _ = scaled(1.0)
    accumulate(reference, batch, 1)
    model, optimizer, scaler = scaled(2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    train_step(model, ScaledOptimizer(optimizer, scaler), batch)
    for p, old, expected in zip(model.parameters(), before, reference.parameters(), strict=True):
        torch.testing.assert_close(p, old - 0.1 * expected.grad, rtol=1e-6, atol=1e-7)
    model, optimizer, scaler = scaled(1e38)
    before = [p.detach().clone() for p in model.parameters()]
    batch = Split(100 * batch.x, batch.y)
    loss = train_step(model, ScaledOptimizer(optimizer, scaler), batch).loss
    assert loss == pytest.approx(loss)  # finite: not a divergence
    assert scaler.get_scale() == pytest.approx(5e37)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"autocast": "float16"}, "autocast=float16 with device=cpu"),
        ({"autocast": "float16", "device": "auto"}, "autocast=float16 with device=auto"),
        (
            {"autocast": "bfloat16", "precision": PRECISIONS["lns"]},
            "autocast=bfloat16 with precision.format=lns12",
        ),
        (
            {"autocast": "bfloat16", "workers": 2, "layout": Layout(pp=2, micro_batches=2)},
            "autocast=bfloat16 with layout.pp=2",
        ),
        (
            {
                "autocast": "float16",
                "device": "cuda",
                "workers": 2,
                "wire": WireConfig(name="int8"),
            },
            "autocast=float16 with wire.name=int8",
        ),
        (
            {
                "autocast": "float16",
                "device": "cuda",
                "workers": 2,
                "sync": SyncConfig(name="local_sgd"),
            },
            "autocast=float16 with wire.name=native, sync.name=local_sgd",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; use"):
        replace(BASE, **values)


def test_segments_without_checkpoints_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"memory.segments=2 with memory.activation_checkpoints=false.*; use"
    ):
        MemoryConfig(segments=2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_mixed_precision_on_a_gpu_learns_and_resumes(tmp_path: Path, autocast: str) -> None:
    easy = {"model": ModelConfig(hidden=[32]), "optimizer": OptimizerConfig(lr=0.1, momentum=0.5)}
    config = replace(
        BASE, autocast=autocast, device="cuda", epochs=6, data=DataConfig(name="digits"), **easy
    )
    training = Training(config)
    metrics = [repeatable(training.train_epoch()) for _ in range(4)]
    training.save(tmp_path)
    metrics += [repeatable(training.train_epoch()) for _ in range(2)]
    again = Training(config)
    again.restore(tmp_path)
    assert [repeatable(again.train_epoch()) for _ in range(2)] == metrics[4:]
    assert training.test()["test/error"] < 0.2
    saving = Training(replace(config, memory=MemoryConfig(activation_checkpoints=True)))
    assert repeatable(saving.train_epoch())["train/error"] == pytest.approx(
        metrics[0]["train/error"], abs=0.02
    )


PEAK = """
import sys
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, TrialConfig
from trainers.config.memory import MemoryConfig
from trainers.training.trainer import Training

training = Training(TrialConfig(
    data=DataConfig(name="mnist1d", args={"examples": 6100}, validation_size=100),
    model=ModelConfig(hidden=[32] * 200),
    memory=MemoryConfig(activation_checkpoints=bool(int(sys.argv[1]))),
    batch_size=6000, epochs=1, device="cpu", threads=1, telemetry=True,
))
print(training.train_epoch()["telemetry/peak_memory_bytes"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of a process")
def test_a_process_with_activation_checkpoints_takes_less() -> None:
    """200 layers whose activations are 154 MB, in the step that telemetry counts too."""
    without, held = (
        float(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(flag)], capture_output=True, text=True, check=True
            ).stdout
        )
        for flag in (0, 1)
    )
    assert held < without - 100e6
