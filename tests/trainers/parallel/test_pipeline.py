"""Pipelines: balanced cuts; real processes give one process's gradients, bit for bit; both
parallelisms together; re-sharding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import LNSTensor
from lns_ops.tensor import storage_of
from tests.trainers.courses import broken_off
from tests.trainers.processes import spawned
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.memory import MemoryConfig
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.data import Split
from trainers.models import build
from trainers.parallel import pipeline as pipeline_module
from trainers.parallel.pipeline_partition import balanced, measure, split
from trainers.parallel.pipeline_zero_bubble import Deferred
from trainers.training.step import accumulate
from trainers.training.trainer import Training

KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
BASE = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[24, 24, 24]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    batch_size=64,
    epochs=4,
    workers=2,
)
LAYOUTS = {
    "gpipe": Layout(pp=2, schedule="gpipe", micro_batches=4),
    "1f1b": Layout(pp=2, micro_batches=4),
    "interleaved": Layout(pp=2, schedule="interleaved", micro_batches=4, virtual_stages=2),
}
DEFERRED = {
    "zero_bubble": Layout(pp=2, schedule="zero_bubble", micro_batches=4),
    "zero_bubble interleaved": Layout(
        pp=2, schedule="zero_bubble", micro_batches=4, virtual_stages=2
    ),
    "zbv": Layout(pp=2, schedule="zbv", micro_batches=4, virtual_stages=2),
    "dualpipev": Layout(pp=2, schedule="dualpipev", micro_batches=4, virtual_stages=2),
}
PRECISIONS = {"float32": PrecisionConfig(), "lns": KAHAN}
ADAM = replace(
    BASE, optimizer=OptimizerConfig(name="adam", lr=0.01), precision=KAHAN, layout=LAYOUTS["1f1b"]
)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_cuts_are_the_best_there_are(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    found = balanced(costs, parts)
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(len(costs)))
    assert len(found) == parts
    assert all(part.stop > part.start for part in found)
    every = itertools.combinations(range(1, len(costs)), parts - 1)
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in every
    )
    assert max(sum(costs[part]) for part in found) == best


def test_cuts_follow_the_cost_of_layers() -> None:
    model = build(ModelConfig(hidden=[100, 10, 10]), 50, 10)
    example = torch.zeros(1, 50)
    assert [each.cost for each in measure(model, example)[:-1]] == [2 * 50 * 100, 3000, 300, 300]
    names, shapes = split(model, 2, example)
    assert names == [["0", "1"], ["2", "3", "4", "5", "6"]]
    assert shapes == [(50,), (100,), (10,)]
    with pytest.raises(ValueError, match=r"2 layers, 3 stages: .*; \w"):
        balanced([1, 1], 3)


def gradients(training: Training) -> dict[str, torch.Tensor]:
    return {
        name: storage_of(p.grad).clone()
        for name, p in training.model.named_parameters()
        if p.grad is not None
    }


def same_gradients(config: TrialConfig, rank: int) -> bool:
    """Return whether this rank's gradients of two batches equal those of one process over the same
    micro-batches."""
    whole = Training(
        replace(config, workers=1, layout=Layout(micro_batches=config.layout.micro_batches))
    )
    part = Training(config, rank=rank, world_size=config.workers)
    assert part.pipeline is not None
    same = True
    for start in (0, config.batch_size):
        chosen = slice(start, start + config.batch_size)
        batch = Split(whole.data.train.x[chosen], whole.data.train.y[chosen])
        for training in (whole, part):
            training.optimizer.zero_grad()
        tally = accumulate(whole.model, batch, config.layout.micro_batches)
        found = part.pipeline._forward_backward(batch)
        if part.pipeline.last:
            same = same and found == tally
        expected, own = gradients(whole), gradients(part)
        same = same and len(own) == len(list(part.model.parameters()))
        same = same and all(torch.equal(own[name], expected[name]) for name in own)
        for training in (whole, part):
            training.optimizer.step()
    return same


def without_speed(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k != "samples_per_second"}


def course(config: TrialConfig, rank: int, folder: Path) -> dict[str, Any]:
    """A trial interrupted after two epochs, and continued by new objects."""
    training, metrics, resumed = broken_off(config, rank, config.workers, folder)
    weights = {
        name: storage_of(p.detach()).tolist() for name, p in training.model.named_parameters()
    }
    return {"metrics": metrics, "resumed": resumed, "test": training.test(), "weights": weights}


def two_workers(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {"gradients": {}, "courses": {}}
    for (name, layout), (arithmetic, precision) in itertools.product(
        LAYOUTS.items(), PRECISIONS.items()
    ):
        config = replace(BASE, layout=layout, precision=precision)
        result["gradients"][f"{name} {arithmetic}"] = same_gradients(config, rank)
    for arithmetic, precision in PRECISIONS.items():
        config = replace(BASE, layout=LAYOUTS["1f1b"], precision=precision)
        result["courses"][arithmetic] = course(config, rank, Path(folder) / arithmetic)
    zbv = replace(BASE, layout=DEFERRED["zbv"], precision=KAHAN)
    result["gradients"]["zbv lns"] = same_gradients(zbv, rank)
    result["dropped"] = dropped(zbv, rank)
    result["courses"]["adam"] = course(ADAM, rank, Path(folder) / "adam")
    diverging = Training(
        replace(BASE, layout=LAYOUTS["1f1b"], optimizer=OptimizerConfig(lr=1e38)),
        rank=rank,
        world_size=2,
    )
    result["diverged"] = [str(diverging.train_epoch()["train/loss"]) for _ in range(2)]
    result["broken"] = broken(rank)
    return result


def broken(rank: int) -> bool:
    """Return the comparison's result for a pipeline whose stages double the gradients."""

    def doubled(ctx: Any, grad: LNSTensor) -> tuple[torch.Tensor, None]:
        return (grad + grad).codes.contiguous().view(torch.float16), None

    right = pipeline_module._Unpack.backward
    pipeline_module._Unpack.backward = staticmethod(doubled)  # type: ignore[method-assign]
    try:
        return same_gradients(replace(BASE, layout=LAYOUTS["1f1b"], precision=KAHAN), rank)
    finally:
        pipeline_module._Unpack.backward = right  # type: ignore[method-assign]


def dropped(config: TrialConfig, rank: int) -> bool:
    """Return the comparison's result if the weight gradients of a backward pass's last layer are
    never computed."""
    right = Deferred.take

    def forgetful(deferred: Deferred) -> Any:
        deferred._waiting.pop()
        return right(deferred)

    Deferred.take = forgetful  # type: ignore[method-assign]
    try:
        return same_gradients(config, rank)
    finally:
        Deferred.take = right  # type: ignore[method-assign]


def deferring(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {"gradients": {}}
    for (name, layout), (arithmetic, precision) in itertools.product(
        DEFERRED.items(), PRECISIONS.items()
    ):
        result["gradients"][f"{name} {arithmetic}"] = same_gradients(
            replace(BASE, layout=layout, precision=precision), rank
        )
    for name, layout in DEFERRED.items():
        result[name] = course(
            replace(BASE, layout=layout, precision=KAHAN), rank, Path(folder) / name
        )
    return result


@pytest.mark.slow
def test_schedules_that_defer_train_as_one_process_does(tmp_path: Path) -> None:
    results = spawned(deferring, tmp_path)
    config, single = one_process("lns")
    for result in results:
        assert all(result["gradients"].values())
        for name in DEFERRED:
            assert [only_learnt(m) for m in result[name]["metrics"]] == single["metrics"]
            assert result[name]["resumed"] == result[name]["metrics"][2:]
            assert result[name]["test"] == single["test"]
    for name in DEFERRED:
        assert results[0][name]["weights"] | results[1][name]["weights"] == single["weights"]
        continued = Training(config)
        continued.restore(tmp_path / name)
        assert [without_speed(continued.train_epoch()) for _ in range(2)] == single["metrics"][2:]


def only_learnt(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("bytes/")}


Workers = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Workers:
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, spawned(two_workers, folder)


@pytest.mark.parametrize("arithmetic", list(PRECISIONS))
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_gradients_are_those_of_one_process_bit_for_bit(
    workers: Workers, name: str, arithmetic: str
) -> None:
    assert all(result["gradients"][f"{name} {arithmetic}"] for result in workers[1])


def test_weight_gradients_that_waited_are_the_same_and_a_lost_one_is_caught(
    workers: Workers,
) -> None:
    for result in workers[1]:
        assert result["gradients"]["zbv lns"]
        assert not result["dropped"]


def test_a_pipeline_that_passes_on_wrong_gradients_is_caught(workers: Workers) -> None:
    """After its first wrong update the stage before the cut also spoils the one behind it."""
    assert [result["broken"] for result in workers[1]] == [False, False]


def one_process(arithmetic: str) -> tuple[TrialConfig, dict[str, Any]]:
    config = ADAM if arithmetic == "adam" else replace(BASE, precision=PRECISIONS[arithmetic])
    config = replace(config, workers=1, layout=Layout(micro_batches=4))
    training = Training(config)
    metrics = [without_speed(training.train_epoch()) for _ in range(4)]
    weights = {
        name: storage_of(p.detach()).tolist() for name, p in training.model.named_parameters()
    }
    return config, {"metrics": metrics, "test": training.test(), "weights": weights}


@pytest.mark.parametrize("arithmetic", ["float32", "lns", "adam"])
def test_a_pipeline_trains_resumes_and_reshards_bit_for_bit(
    workers: Workers, arithmetic: str
) -> None:
    config, single = one_process(arithmetic)
    weights: dict[str, Any] = {}
    for result in workers[1]:
        found = result["courses"][arithmetic]
        assert [only_learnt(m) for m in found["metrics"]] == single["metrics"]
        assert found["test"] == single["test"]
        assert found["resumed"] == found["metrics"][2:]
        assert not weights.keys() & found["weights"].keys()
        weights |= found["weights"]
    assert weights == single["weights"]
    continued = Training(config)
    continued.restore(workers[0] / arithmetic)
    assert [without_speed(continued.train_epoch()) for _ in range(2)] == single["metrics"][2:]


def test_divergence_ends_the_trial_on_every_stage(workers: Workers) -> None:
    for result in workers[1]:
        assert result["diverged"] == ["nan", "nan"]


def test_activations_and_gradients_are_counted(workers: Workers) -> None:
    """Layers 64-24 | 24-24-24-10 by cost: each rank sends 24 values per example, forward or
    backward; 4 bytes, or 2 as codes."""
    for arithmetic, size in (("float32", 4), ("lns", 2)):
        sent = workers[1][0]["courses"][arithmetic]["metrics"][0]["bytes/sent"]
        assert sent == size * 24 * 64 * (1200 // 64)


GRID = Layout(dp=2, pp=2, micro_batches=2)
FOUR = {
    "float32": replace(BASE, workers=4, layout=GRID),
    "lns": replace(BASE, workers=4, layout=GRID, precision=KAHAN),
    "int8": replace(BASE, workers=4, layout=GRID, wire=WireConfig(name="int8")),
    "local": replace(BASE, workers=4, layout=GRID, sync=SyncConfig(name="local_sgd", period=4)),
}


def four_workers(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        name: course(config, rank, Path(folder) / name) for name, config in FOUR.items()
    }
    place = Training(FOUR["float32"], rank=rank, world_size=4).place
    return result | {"place": [place.pp_rank, place.dp_rank]}


@pytest.mark.slow
def test_both_parallelisms_together(tmp_path: Path) -> None:
    """Two replicas of two stages: float32 within 1e-6 of one process's weights after 72 steps, any
    wire, exact resume."""
    results = spawned(four_workers, tmp_path, world=4)
    assert [result["place"] for result in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    for name in FOUR:
        for result in results:
            assert result[name]["resumed"] == result[name]["metrics"][2:]
            assert result[name]["metrics"] == results[0][name]["metrics"]
            assert (
                result[name]["test"]["test/error"]
                <= results[0]["float32"]["test"]["test/error"] + 0.15
            )
        for stage in (0, 2):
            assert results[stage][name]["weights"] == results[stage + 1][name]["weights"]
    _, single = one_process("float32")
    for stage in (0, 2):
        for name, values in results[stage]["float32"]["weights"].items():
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(single["weights"][name]), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"precision": PrecisionConfig(format="lns12", scope="matmul")},
            "layout.pp=2 with precision.scope=matmul",
        ),
        ({"sync": SyncConfig(name="local_sgd")}, "local_sgd with workers=2, .* one replica"),
        ({"wire": WireConfig(name="int8")}, "wire.name=int8 with workers=2, .* one replica"),
        (
            {"precision": PrecisionConfig(format="bfloat16"), "layout": DEFERRED["zbv"]},
            "layout.schedule=zbv with precision.format=bfloat16",
        ),
        (
            {
                "memory": MemoryConfig(activation_checkpoints=True),
                "layout": DEFERRED["zero_bubble"],
            },
            "layout.schedule=zero_bubble with memory.activation_checkpoints=true",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        replace(BASE, **{"layout": LAYOUTS["1f1b"]} | values)
