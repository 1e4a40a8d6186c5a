"""Optimizer state on the CPU: the same training, without optimizer state on the device. Without a
GPU ``device=auto`` is the CPU, but the copy is still separate from the model, so all except the
transfer is tested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lns_ops import cuda
from lns_ops.tensor import storage_of
from tests.trainers.courses import broken_off
from tests.trainers.processes import spawned
from trainers.checkpoint.files import load_checkpoint
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.lr_schedule import LRSchedule
from trainers.config.memory import MemoryConfig
from trainers.config.sync import SyncConfig
from trainers.optim.offload import Offload
from trainers.telemetry.metrics import repeatable
from trainers.training.trainer import Training

WORLD = 2
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[32]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    batch_size=64,
    epochs=4,
    device="auto",
    memory=MemoryConfig(offload_optimizer=True),
)
KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
ADAMW = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.01)
TRIALS = {
    "float32": BASE,
    "float32, Kahan, AdamW": replace(
        BASE, precision=PrecisionConfig(kahan_sum=True), optimizer=ADAMW
    ),
    "cnn": replace(BASE, model=ModelConfig(name="cnn", hidden=[16], channels=[3]), precision=KAHAN),
    "lns matmul": replace(BASE, precision=PrecisionConfig(format="lns12", scope="matmul")),
    "lns, Kahan": replace(BASE, precision=KAHAN),
    "lns, Kahan, AdamW": replace(BASE, precision=KAHAN, optimizer=ADAMW),
    "lns, at random": replace(
        BASE, precision=PrecisionConfig(format="lns12", stochastic_rounding=True)
    ),
    "lns, segments": replace(
        BASE,
        model=ModelConfig(hidden=[16, 16, 16]),
        precision=KAHAN,
        memory=MemoryConfig(activation_checkpoints=True, offload_optimizer=True),
    ),
    "bfloat16": replace(BASE, precision=PrecisionConfig(format="bfloat16", kahan_sum=True)),
    "lns8 with finer copies": replace(
        BASE, precision=PrecisionConfig(format="lns8/channel", master_format="lns16")
    ),
    "autocast": replace(BASE, autocast="bfloat16"),
    "rates": replace(
        BASE, lr_schedule=LRSchedule(decay="cosine", warmup_epochs=0.5), precision=KAHAN
    ),
    "changes": replace(BASE, changes=[{"epoch": 1, "optimizer.lr": 0.1}], precision=KAHAN),
}
PARALLEL = {
    "dp": replace(BASE, workers=WORLD, precision=KAHAN),
    "pp": replace(BASE, workers=WORLD, precision=KAHAN, layout=Layout(pp=2, micro_batches=2)),
    "zero bubble": replace(
        BASE,
        workers=WORLD,
        precision=KAHAN,
        layout=Layout(pp=2, micro_batches=2, schedule="zero_bubble"),
    ),
    "fsdp": replace(
        BASE, workers=WORLD, precision=PrecisionConfig(kahan_sum=True), layout=Layout(fsdp=True)
    ),
    "tp": replace(
        BASE, workers=WORLD, precision=PrecisionConfig(kahan_sum=True), layout=Layout(tp=2)
    ),
}
EXACT_ON_A_GPU = [name for name in TRIALS if name.startswith("lns,")]
"""All their numbers are logarithms except the softmax, which both trainings compute on the same
device."""
ROUNDING = 1e-3
"""Relative tolerance for float32 updates on a CPU and on a GPU, through four epochs."""

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)


def kept_there(config: TrialConfig) -> TrialConfig:
    """The same trial without offload."""
    return replace(config, memory=replace(config.memory, offload_optimizer=False))


def course(config: TrialConfig, rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    training = Training(config, rank=rank, world_size=world_size)
    for _ in range(2):
        training.train_epoch()
    training.save(folder / "half")
    for _ in range(2):
        training.train_epoch()
    training.save(folder / "end")
    return {"history": [repeatable(values) for values in training.history], "test": training.test()}


def assert_alike(
    folder: Path, found: dict[str, Any], expected: dict[str, Any], exact: bool
) -> None:
    (mine, _), (theirs, _) = (
        load_checkpoint(folder / kind / "end") for kind in ("offloaded", "kept")
    )
    assert mine.keys() == theirs.keys()
    assert any(name.startswith(("optimizer/", "plain/")) for name in mine)
    for name, tensor in mine.items():
        if exact:
            assert torch.equal(tensor, theirs[name]), name
        else:
            torch.testing.assert_close(tensor, theirs[name], rtol=ROUNDING, atol=ROUNDING)
    relative = 0.0 if exact else ROUNDING
    assert found["test"] == pytest.approx(expected["test"], rel=relative, abs=relative)


@pytest.mark.parametrize("name", list(TRIALS))
def test_it_trains_as_with_its_state_on_the_device(name: str, tmp_path: Path) -> None:
    found = course(TRIALS[name], 0, 1, tmp_path / "offloaded")
    expected = course(kept_there(TRIALS[name]), 0, 1, tmp_path / "kept")
    assert_alike(
        tmp_path, found, expected, exact=cuda.unavailable() is not None or name in EXACT_ON_A_GPU
    )
    assert found["history"][-1]["train/loss"] < found["history"][0]["train/loss"]


@pytest.mark.parametrize("name", ["float32, Kahan, AdamW", "lns, Kahan", "lns8 with finer copies"])
def test_each_way_continues_the_others_checkpoint(name: str, tmp_path: Path) -> None:
    config = TRIALS[name]
    whole = course(config, 0, 1, tmp_path / "offloaded")
    course(kept_there(config), 0, 1, tmp_path / "kept")
    again = [Training(own) for own in (config, config, kept_there(config))]
    for training, folder in zip(again, ("offloaded", "kept", "offloaded"), strict=True):
        training.restore(tmp_path / folder / "half")
    for _ in range(2):
        for training in again:
            training.train_epoch()
    assert [repeatable(values) for values in again[0].history] == whole["history"]
    if cuda.unavailable() is not None or name in EXACT_ON_A_GPU:
        for training in again[1:]:
            training.save(tmp_path / "again")
            (mine, _), (theirs, _) = (
                load_checkpoint(folder)
                for folder in (tmp_path / "again", tmp_path / "offloaded" / "end")
            )
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_weights_that_are_not_given_back_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of these tests can fail: without the way back the model never learns."""
    monkeypatch.setattr(Offload, "push", lambda self: None)
    history = course(TRIALS["lns, Kahan"], 0, 1, tmp_path)["history"]
    assert history[-1]["validation/error"] == history[0]["validation/error"]


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, config in PARALLEL.items():
        for kind, own in (("offloaded", config), ("kept", kept_there(config))):
            result[f"{name}/{kind}"] = course(own, rank, WORLD, Path(folder) / name / kind)
            dist.barrier()
        _, metrics, resumed = broken_off(config, rank, WORLD, Path(folder) / name / "again")
        result[f"{name}/resumed"] = [metrics[2:], resumed]
    return result


@pytest.mark.slow
def test_replicas_stages_shards_and_parts_offload_theirs(tmp_path: Path) -> None:
    for result in spawned(in_worker, tmp_path):
        for name in PARALLEL:
            assert_alike(
                tmp_path / name, result[f"{name}/offloaded"], result[f"{name}/kept"], exact=True
            )
            assert result[f"{name}/offloaded"]["history"] == result[f"{name}/kept"]["history"]
            assert result[f"{name}/resumed"][0] == result[f"{name}/resumed"][1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"device": "cpu"}, "memory.offload_optimizer=true with device=cpu: .*; use device=cuda"),
        (
            {"workers": 2, "sync": SyncConfig(name="local_sgd", period=2)},
            "memory.offload_optimizer=true with sync.name=local_sgd.*; use",
        ),
        (
            {"device": "cuda", "autocast": "float16"},
            "memory.offload_optimizer=true with autocast=float16.*; use",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(BASE, **values)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", [PrecisionConfig(), KAHAN])
def test_a_gpu_holds_nothing_of_the_optimizer(precision: PrecisionConfig) -> None:
    """Adam's two moments, and Kahan's compensation, are not on the GPU: n parameters of b bytes
    free 2 n b, with Kahan 3 n b."""
    config = replace(
        BASE,
        device="cuda",
        model=ModelConfig(hidden=[4096, 4096]),
        precision=precision,
        optimizer=replace(ADAMW, lr=0.001),
        telemetry=True,
    )
    held = []
    for own in (config, kept_there(config)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        training = Training(own)
        metrics = training.train_epoch()
        training.model.zero_grad(set_to_none=True)
        held.append(torch.cuda.memory_allocated() - before)
        on_gpu = [
            storage_of(v).is_cuda
            for state in training.optimizer.state.values()
            for v in state.values()
            if storage_of(v).numel() > 1
        ]
        assert on_gpu
        assert not any(on_gpu) if own is config else all(on_gpu)
        assert metrics["telemetry/peak_memory_bytes"] > 0
        parameters = sum(p.numel() for p in training.model.parameters())
        del training
    of_each = 4 if precision.format == "float32" else 2
    copies = 3 if precision.kahan_sum else 2
    assert held[1] - held[0] >= 0.9 * copies * of_each * parameters


def test_tied_weights_stay_tied_on_the_cpu() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    own = Offload(model).own
    assert len(list(own.parameters())) == 3
    assert own.get_parameter("0.weight") is own.get_parameter("1.weight")
