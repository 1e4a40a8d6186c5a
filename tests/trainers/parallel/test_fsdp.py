"""Fully sharded data parallelism with real processes: the same training as whole replicas, in half
the memory."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lns_ops import cuda
from tests.trainers.courses import broken_off
from tests.trainers.processes import spawned
from trainers.checkpoint.files import load_checkpoint
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.memory import MemoryConfig
from trainers.config.optimizer import OPTIMIZERS, WHOLE_TENSORS
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.data.batches import EVALUATION_BATCH
from trainers.telemetry.metrics import PREFIX, repeatable
from trainers.training.trainer import Training

WORLD = 2
ROUNDING = 1e-5
"""Relative tolerance for float32 sums in another order, through four epochs."""
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[33]),
    optimizer=OptimizerConfig(lr=0.1, momentum=0.5),
    precision=PrecisionConfig(kahan_sum=True),
    batch_size=64,
    epochs=4,
    workers=WORLD,
    layout=Layout(fsdp=True),
)
TRIALS = {
    "odd rows": BASE,
    "one row": replace(BASE, model=ModelConfig(hidden=[1, 8])),
    "micro-batches": replace(BASE, layout=Layout(fsdp=True, micro_batches=2)),
    "autocast": replace(BASE, autocast="bfloat16"),
    "cnn": replace(BASE, model=ModelConfig(name="cnn", hidden=[16], channels=[3])),
    "segments": replace(
        BASE,
        model=ModelConfig(hidden=[16, 16, 16]),
        memory=MemoryConfig(activation_checkpoints=True, segments=2),
    ),
    "telemetry": replace(BASE, telemetry=True),
}
BIG = replace(
    BASE, model=ModelConfig(hidden=[1000, 1000]), optimizer=OptimizerConfig(name="adam", lr=0.001)
)


def unsharded(config: TrialConfig) -> TrialConfig:
    return replace(config, layout=replace(config.layout, fsdp=False))


def course(config: TrialConfig, rank: int, folder: Path) -> dict[str, Any]:
    training, metrics, resumed = broken_off(config, rank, WORLD, folder / "half")
    test = training.test()
    training.save(folder / "end")
    return {"metrics": metrics, "resumed": resumed, "test": test, "history": training.history}


def exchanged(config: TrialConfig, rank: int, folder: Path) -> list[dict[str, float]]:
    """The last two epochs from the other trial's checkpoint after the second."""
    dist.barrier()
    training = Training(config, rank=rank, world_size=WORLD)
    training.restore(folder / "half")
    return [repeatable(training.train_epoch()) for _ in range(2)]


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    # of the 297 test examples rank 0 has 149, and rank 1 one batch less unless they agree
    EVALUATION_BATCH["cpu"] = 148
    result: dict[str, Any] = {}
    for name, config in TRIALS.items():
        for kind, own in (("fsdp", config), ("whole", unsharded(config))):
            result[f"{name}/{kind}"] = course(own, rank, Path(folder) / name / kind)
    result["fsdp from whole"] = exchanged(BASE, rank, Path(folder) / "odd rows" / "whole")
    result["whole from fsdp"] = exchanged(unsharded(BASE), rank, Path(folder) / "odd rows" / "fsdp")
    result["memory"] = [memory(own, rank) for own in (BIG, unsharded(BIG))]
    diverging = Training(
        replace(BASE, optimizer=OptimizerConfig(lr=1e30)), rank=rank, world_size=WORLD
    )
    result["diverged"] = [diverging.train_epoch()["train/loss"] for _ in range(2)]
    result["optimizers"] = {
        name: steps(name, rank) for name in sorted(set(OPTIMIZERS) - set(WHOLE_TENSORS))
    }
    return result


def memory(config: TrialConfig, rank: int) -> list[int]:
    """Bytes that a trial updates and keeps between steps, and bytes of all tensors that its process
    has then, without earlier ones."""
    gc.collect()
    before = alive()
    training = Training(config, rank=rank, world_size=WORLD)
    data = sum(size(tensor) for split in training.data for tensor in split)
    training.train_epoch()
    kept = sum(
        size(value) for state in training.optimizer.state.values() for value in state.values()
    )
    kept += sum(size(p) for group in training.optimizer.param_groups for p in group["params"])
    gc.collect()
    return [kept, alive() - before - data]


def size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def alive() -> int:
    tensors = [
        value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)
    ]
    return sum({tensor.untyped_storage().data_ptr(): size(tensor) for tensor in tensors}.values())


def steps(name: str, rank: int) -> bool:
    """Return whether ten steps of an optimizer agree with whole replicas within rounding."""
    config = replace(BASE, optimizer=OptimizerConfig(name=name, lr=0.01))
    trainings = [Training(own, rank=rank, world_size=WORLD) for own in (config, unsharded(config))]
    found, expected = (training.train_epoch() for training in trainings)
    return math.isclose(found["validation/loss"], expected["validation/loss"], rel_tol=ROUNDING)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, spawned(in_worker, folder)


def assert_close(found: dict[str, float], expected: dict[str, float]) -> None:
    names = [
        name
        for name in expected
        if not name.startswith(("bytes/", PREFIX)) and name != "samples_per_second"
    ]
    assert {name: found[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=ROUNDING
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRIALS))
def test_shards_train_as_whole_replicas_do(
    workers: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    folder, results = workers
    for result in results:
        for found, expected in zip(
            result[f"{name}/fsdp"]["metrics"], result[f"{name}/whole"]["metrics"], strict=True
        ):
            assert_close(found, expected)
        assert_close(result[f"{name}/fsdp"]["test"], result[f"{name}/whole"]["test"])
    (mine, _), (theirs, _) = (
        load_checkpoint(folder / name / kind / "end") for kind in ("fsdp", "whole")
    )
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRIALS))
def test_a_sharded_trial_resumes_exactly(
    workers: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    for result in workers[1]:
        assert result[f"{name}/fsdp"]["resumed"] == result[f"{name}/fsdp"]["metrics"][2:]
        assert result[f"{name}/fsdp"]["metrics"] == workers[1][0][f"{name}/fsdp"]["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp from whole", "whole from fsdp"])
def test_checkpoints_are_read_by_the_other_kind(
    workers: tuple[Path, list[dict[str, Any]]], way: str
) -> None:
    for result in workers[1]:
        for found, expected in zip(
            result[way], result["odd rows/whole"]["metrics"][2:], strict=True
        ):
            assert_close(found, expected)


@pytest.mark.slow
def test_one_process_reads_the_checkpoint_of_shards(
    workers: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = workers
    single = Training(replace(unsharded(BASE), workers=1))
    single.restore(folder / "odd rows" / "fsdp" / "end")
    assert_close(single.test(), results[0]["odd rows/fsdp"]["test"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"), [("odd rows", 1), ("micro-batches", 2), ("cnn", 1), ("telemetry", 1)]
)
def test_the_bytes_sent_are_those_of_the_formula(
    workers: tuple[Path, list[dict[str, Any]]], name: str, times: int
) -> None:
    """Rows rounded up to an even number; and one number per step in which the ranks agree that all
    is finite."""
    tensors, _ = load_checkpoint(workers[0] / name / "fsdp" / "end")
    shapes = [tensor.shape for path, tensor in tensors.items() if path.startswith("model/")]
    padded = sum(4 * 2 * math.ceil(shape[0] / 2) * math.prod(shape[1:]) for shape in shapes)
    for metrics in workers[1][0][f"{name}/fsdp"]["metrics"]:
        assert metrics["bytes/sent"] == 10 * (3 * times * padded / 2 + 8)


@pytest.mark.slow
def test_a_replica_keeps_half(workers: tuple[Path, list[dict[str, Any]]]) -> None:
    for result in workers[1]:
        (kept, held), (whole, all_held) = result["memory"]
        assert kept == pytest.approx(whole / 2, rel=0.01)
        assert whole > 16e6  # parameters, compensations and two moments of a million values
        assert held == pytest.approx(all_held / 2, rel=0.05)


@pytest.mark.slow
def test_a_trial_that_diverges_ends_on_all_replicas(
    workers: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert all(math.isnan(loss) for result in workers[1] for loss in result["diverged"])


@pytest.mark.slow
def test_every_optimizer_that_takes_elements_one_by_one_steps_the_same(
    workers: tuple[Path, list[dict[str, Any]]],
) -> None:
    for result in workers[1]:
        assert [name for name, same in result["optimizers"].items() if not same] == []
        assert len(result["optimizers"]) == len(OPTIMIZERS) - len(WHOLE_TENSORS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"precision": PrecisionConfig(format="lns12")},
            "layout.fsdp=true with precision.format=lns12: torch shards",
        ),
        (
            {"precision": PrecisionConfig(format="bfloat16")},
            "layout.fsdp=true with precision.format=bfloat16: torch shards",
        ),
        (
            {"workers": 4, "layout": Layout(fsdp=True, pp=2, micro_batches=2)},
            "layout.fsdp=true with layout.pp=2: every",
        ),
        ({"workers": 1}, "layout.fsdp=true with workers=1, min_workers=null: parameters"),
        ({"min_workers": 2}, "layout.fsdp=true with workers=2, min_workers=2: parameters"),
        (
            {"sync": SyncConfig(name="local_sgd", period=2)},
            "layout.fsdp=true with sync.name=local_sgd, wire.name=native",
        ),
        (
            {"wire": WireConfig(name="int8")},
            "layout.fsdp=true with sync.name=synchronous, wire.name=int8",
        ),
        (
            {"wire": WireConfig(bucket_cap_mb=1.0)},
            "layout.fsdp=true .* wire.bucket_cap_mb=1: backward itself",
        ),
        (
            {"autocast": "float16", "device": "cuda"},
            "layout.fsdp=true with autocast=float16: a replica",
        ),
        *(
            (
                {"optimizer": OptimizerConfig(name=name)},
                f"layout.fsdp=true with optimizer.name={name}: its step needs norms",
            )
            for name in WHOLE_TENSORS
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; use .* layout.fsdp=false"):
        replace(BASE, **values)


def on_gpus(rank: int, folder: str) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    config = replace(BASE, device="cuda", telemetry=True)
    kinds = {"fsdp": config, "whole": unsharded(config)}
    return {kind: course(own, rank, Path(folder) / kind) for kind, own in kinds.items()}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}")
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPUs, needs two"
)
def test_two_gpus_shard_as_they_train_whole(tmp_path: Path) -> None:
    for result in spawned(on_gpus, tmp_path, backend="nccl"):
        for found, expected in zip(
            result["fsdp"]["metrics"], result["whole"]["metrics"], strict=True
        ):
            assert_close(found, expected)
        assert result["fsdp"]["resumed"] == result["fsdp"]["metrics"][2:]
        assert PREFIX + "step_seconds" in result["fsdp"]["history"][0]
        assert PREFIX + "compute_seconds" not in result["fsdp"]["history"][0]
