"""The bytes of the tensors that a step makes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lns_ops import LNSTensor
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.memory import MemoryConfig
from trainers.telemetry.metrics import PREFIX
from trainers.telemetry.tensors import TensorBytes
from trainers.training.trainer import Training


def test_each_storage_counts_once_and_while_it_lives() -> None:
    before = torch.ones(1000)
    with TensorBytes() as counted:
        made = before + 1
        assert counted.live == 4000
        views = made.view(10, 100).t(), made[:10]
        assert counted.live == 4000
        other = made * 2
        assert counted.live == counted.peak == 8000
        del made, views
        assert counted.live == 4000
        del other
    assert (counted.live, counted.peak) == (0, 8000)


def test_codes_count_two_bytes_a_value() -> None:
    x = LNSTensor.from_float(torch.ones(500), "lns16")
    with TensorBytes() as counted:
        y = x + x
    assert counted.live == 1000
    assert y.shape == (500,)


def test_what_autograd_saves_counts_until_backward() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10)])
    x = torch.randn(1024, 8)
    with TensorBytes() as counted:
        loss = net(x).sum()
        held = counted.live  # ten results of tanh, inputs of the next layer
        loss.backward()
        left = counted.live
    layer = 1024 * 8 * 4
    assert 10 * layer < held < 10.1 * layer + 2 * layer
    gradients = sum(p.numel() for p in net.parameters()) * 4
    assert gradients <= left <= 2 * gradients  # some were transposed, and copied


def test_trials_tell_it_and_checkpoints_hold_less() -> None:
    config = TrialConfig(
        data=DataConfig(name="mnist1d", args={"examples": 2000}, validation_size=100),
        model=ModelConfig(hidden=[32] * 64),
        batch_size=1024, epochs=2, device="cpu", threads=1, telemetry=True,
    )  # fmt: skip
    name = f"{PREFIX}tensor_bytes"
    told = {}
    for fmt in ("float32", "lns16"):
        for saves in (False, True):
            training = Training(
                replace(
                    config,
                    precision=PrecisionConfig(format=fmt),
                    memory=MemoryConfig(activation_checkpoints=saves),
                )
            )
            told[fmt, saves] = training.train_epoch()[name]
            assert training.train_epoch()[name] == told[fmt, saves]
        layers = 64 * 1024 * 32 * (4 if fmt == "float32" else 2)  # bytes of ReLU's output
        assert layers < told[fmt, False] < 1.5 * layers
        assert told[fmt, True] < 0.5 * told[fmt, False]
