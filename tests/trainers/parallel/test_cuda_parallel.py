"""Several GPUs: codecs write the same bytes as on a CPU; replicas, stages and parts of layers over
NCCL end like one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lns_ops import cuda
from lns_ops.tensor import storage_of
from tests.trainers.courses import broken_off
from tests.trainers.processes import spawned
from trainers.comm.codecs import make_codec
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.sync import SyncConfig
from trainers.config.wire import FORMATS, WireConfig
from trainers.telemetry.metrics import PREFIX
from trainers.training.trainer import Training

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPUs, needs two"
)
WORLD = 2
KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
BASE = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[32, 32]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    batch_size=128,
    epochs=4,
    workers=WORLD,
    device="cuda",
)
TRIALS = {
    "float32": BASE,
    "lns": replace(BASE, precision=KAHAN),
    **{name: replace(BASE, wire=WireConfig(name=name)) for name in FORMATS if name != "native"},
    "lns int8": replace(BASE, precision=KAHAN, wire=WireConfig(name="int8")),
    "local": replace(BASE, sync=SyncConfig(name="local_sgd", period=4), precision=KAHAN),
    "buckets": replace(BASE, wire=WireConfig(bucket_cap_mb=0.004)),
    "lns buckets": replace(
        BASE, precision=KAHAN, wire=WireConfig(bucket_cap_mb=0.004), telemetry=True
    ),
    "zero bubble": replace(
        BASE, layout=Layout(pp=2, schedule="zero_bubble", micro_batches=2), precision=KAHAN
    ),
    "pipeline": replace(BASE, layout=Layout(pp=2, micro_batches=2), precision=KAHAN),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("native", "powersgd")])
def test_codecs_write_the_same_bytes_on_a_gpu(name: str) -> None:
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 10
    codec = make_codec(WireConfig(name=name), None)
    assert codec is not None
    on_cpu, on_gpu = codec.encode(x), codec.encode(x.cuda())
    assert torch.equal(codec.decode(on_gpu, 5000).cpu(), codec.decode(on_cpu, 5000))
    # the largest values come in any order
    assert name == "topk" or torch.equal(on_gpu.cpu(), on_cpu)


def course(config: TrialConfig, rank: int, folder: Path) -> dict[str, Any]:
    training, metrics, resumed = broken_off(config, rank, WORLD, folder)
    weights = {
        name: storage_of(p.detach()).cpu().tolist() for name, p in training.model.named_parameters()
    }
    return {"metrics": metrics, "resumed": resumed, "test": training.test(), "weights": weights}


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    return {name: course(config, rank, Path(folder) / name) for name, config in TRIALS.items()}


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@needs_two
def test_two_gpus_train_as_one_process_does(tmp_path: Path) -> None:
    """LNS is bit-equal, because 64 examples per GPU or micro-batch are the contract's blocks of 64;
    the rest resumes exactly and learns."""
    results = spawned(in_worker, tmp_path, backend="nccl")
    single = Training(replace(BASE, precision=KAHAN, workers=1))
    for _ in range(4):
        single.train_epoch()
    expected = {
        name: storage_of(p.detach()).cpu().tolist() for name, p in single.model.named_parameters()
    }
    error = single.test()["test/error"]
    assert results[0]["lns"]["weights"] == results[1]["lns"]["weights"] == expected
    for name in ("pipeline", "zero bubble"):
        assert results[0][name]["weights"] | results[1][name]["weights"] == expected
    assert results[0]["lns buckets"]["weights"] == results[1]["lns buckets"]["weights"] == expected
    assert results[0]["buckets"]["weights"] == results[0]["float32"]["weights"]
    for name in TRIALS:
        assert results[0][name]["metrics"] == results[1][name]["metrics"]
        assert results[0][name]["resumed"] == results[0][name]["metrics"][2:]
        assert results[0][name]["test"]["test/error"] < error + 0.15


def in_parts(rank: int, folder: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    config = replace(
        BASE, model=ModelConfig(hidden=[32, 17, 16]), layout=Layout(tp=2), telemetry=True
    )
    training, metrics, resumed = broken_off(config, rank, WORLD, Path(folder) / "half")
    return {"metrics": metrics, "resumed": resumed, "telemetry": training.history[0]}


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@needs_two
def test_two_gpus_with_parts_of_layers_train_as_one_process_does(tmp_path: Path) -> None:
    """Within the rounding of float32 sums in another order, through four epochs."""
    single = Training(
        replace(BASE, model=ModelConfig(hidden=[32, 17, 16]), workers=1, device="cpu")
    )
    expected = [single.train_epoch() for _ in range(4)]
    for result in spawned(in_parts, tmp_path, backend="nccl"):
        assert result["resumed"] == result["metrics"][2:]
        assert result["telemetry"][PREFIX + "communication_seconds"] > 0
        for found, values in zip(result["metrics"], expected, strict=True):
            assert found["train/loss"] == pytest.approx(values["train/loss"], rel=1e-4)
            assert found["validation/loss"] == pytest.approx(values["validation/loss"], rel=1e-4)
