"""Tensor parallelism with real processes: the same training as one process, each worker with its
parts of the layers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainers.courses import broken_off
from tests.trainers.processes import spawned
from trainers.checkpoint.files import load_checkpoint
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.memory import MemoryConfig
from trainers.config.optimizer import OPTIMIZERS, WHOLE_TENSORS, OptimizerConfig
from trainers.config.wire import FORMATS, WireConfig
from trainers.models import build
from trainers.parallel import tensor_parallel
from trainers.parallel.tensor_parallel import pairs_of
from trainers.telemetry.metrics import PREFIX, repeatable
from trainers.training.trainer import Training

ROUNDING = 1e-5
"""Relative tolerance for float32 sums in another order, through four epochs."""
MIXED = 2e-2
"""The same for bfloat16, through two epochs: terms are rounded to 8 bits before they are summed."""
LOSSY = {"bfloat16": 1e-3, "float16": 1e-3, "lns16": 1e-3, "float32": ROUNDING, "native": ROUNDING}
"""By wire format. A gradient that differs by its rounding may become the next value of a 16-bit
format."""
BLOCKS = 0.1
"""Wire formats with blocks, largest values or factors round a part by its own values, not like the
whole."""
STEPS = 10
"""Steps of an epoch."""
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[32]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    precision=PrecisionConfig(kahan_sum=True),
    batch_size=64,
    epochs=4,
    workers=2,
    layout=Layout(tp=2),
)
DEEP = ModelConfig(hidden=[32, 17, 16])
TRIALS = {
    "a pair": BASE,
    "a layer left": replace(BASE, model=ModelConfig(hidden=[32, 17])),
    "two pairs": replace(BASE, model=DEEP),
    "micro-batches": replace(BASE, model=DEEP, layout=Layout(tp=2, micro_batches=2)),
    "segments": replace(
        BASE, model=DEEP, memory=MemoryConfig(activation_checkpoints=True, segments=3)
    ),
    "adam": replace(BASE, model=DEEP, optimizer=OptimizerConfig(name="adam", lr=0.003)),
    "autocast": replace(BASE, model=DEEP, autocast="bfloat16"),
    "telemetry": replace(BASE, model=DEEP, telemetry=True),
}
REPLICAS = {
    name: replace(BASE, model=DEEP, workers=4, wire=WireConfig(name=name)) for name in FORMATS
}
BIG = replace(
    BASE,
    model=ModelConfig(hidden=[1000, 10, 1000]),
    optimizer=OptimizerConfig(name="adam", lr=0.001),
)


def uncut(config: TrialConfig) -> TrialConfig:
    """The same trial with replicas only."""
    return replace(config, workers=config.workers // 2, layout=replace(config.layout, tp=1))


def sharded(config: TrialConfig) -> TrialConfig:
    return replace(config, layout=replace(config.layout, tp=1, fsdp=True))


def course(config: TrialConfig, rank: int, folder: Path) -> dict[str, Any]:
    training, metrics, resumed = broken_off(config, rank, config.workers, folder / "half")
    test = training.test()
    training.save(folder / "end")
    own = {
        name: p.tolist()
        for name, p in training._components.kept.named_parameters()
        if p.numel() < 2_000
    }
    return {
        "metrics": metrics,
        "resumed": resumed,
        "test": test,
        "history": training.history,
        "own": own,
    }


def continued(config: TrialConfig, rank: int, folder: Path) -> list[dict[str, float]]:
    """The last two epochs from another trial's checkpoint after the second."""
    dist.barrier()
    training = Training(config, rank=rank, world_size=config.workers)
    training.restore(folder / "half")
    return [repeatable(training.train_epoch()) for _ in range(2)]


def in_two(rank: int, folder: str) -> dict[str, Any]:
    at, result = Path(folder), dict[str, Any]()
    for name, config in TRIALS.items():
        result[name] = course(config, rank, at / name)
    for name, config in REPLICAS.items():
        result[f"dp 2/{name}"] = course(uncut(config), rank, at / "dp 2" / name)
    result["sharded"] = course(sharded(BASE), rank, at / "sharded")
    result["from shards"] = continued(BASE, rank, at / "sharded")
    result["to shards"] = continued(sharded(BASE), rank, at / "a pair")
    result["from dp 2"] = continued(TRIALS["two pairs"], rank, at / "dp 2" / "native")
    result["from one"] = continued(TRIALS["two pairs"], rank, at.parent / "one" / "two pairs")
    fresh = Training(replace(TRIALS["two pairs"], seed=7), rank=rank, world_size=2)
    fresh.save(at / "fresh")
    result["collectives"] = collectives_of_a_step(fresh)
    result["disagreed"] = fresh.sync.gradients(fresh.model.parameters(), finite=rank == 0)
    diverging = Training(replace(BASE, optimizer=OptimizerConfig(lr=1e30)), rank=rank, world_size=2)
    result["diverged"] = [diverging.train_epoch()["train/loss"] for _ in range(2)]
    result["kept"] = kept(Training(BIG, rank=rank, world_size=2))
    result["optimizers"] = {
        name: steps(name, rank) for name in sorted(set(OPTIMIZERS) - set(WHOLE_TENSORS))
    }
    result |= {f"without {what}": without(what, rank) for what in ("_SumOutputs", "_SumGradients")}
    return result


def in_four(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        name: course(config, rank, Path(folder) / name) for name, config in REPLICAS.items()
    }
    result["from dp 2"] = continued(
        REPLICAS["native"], rank, Path(folder).parent / "two" / "dp 2" / "native"
    )
    vars(tensor_parallel)["JOINT"] = ()  # this process ends with it
    result["int8, all together"] = course(REPLICAS["int8"], rank, Path(folder) / "together")
    return result


class Collective(TorchDispatchMode):
    """Count every operation that communicates with other processes. (torch's CommDebugMode does so
    too, but keeps the step's graph alive.)"""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # torch then calls again with the operations it uses instead
        if "c10d" in func.namespace or "dtensor" in func.namespace:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(training: Training) -> dict[str, int]:
    """Return the communication calls of one training step, by operation."""
    _, batch = next(training._step.batches(training.data.train, 0, training.sync))
    with Collective() as mode:
        training._step.train_step(batch, training.sync)
    return dict(mode.calls)


def kept(training: Training) -> int:
    """Bytes that a trial updates and keeps between steps."""
    training.train_epoch()
    tensors = [value for state in training.optimizer.state.values() for value in state.values()]
    tensors += [p for group in training.optimizer.param_groups for p in group["params"]]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def steps(name: str, rank: int) -> dict[str, float]:
    """Return the metrics after ten steps of an optimizer."""
    return Training(optimized(name), rank=rank, world_size=2).train_epoch()


def optimized(name: str) -> TrialConfig:
    return replace(TRIALS["two pairs"], optimizer=OptimizerConfig(name=name, lr=0.01))


def without(what: str, rank: int) -> dict[str, float]:
    """Return the last of three epochs in which one sum is left out."""
    original = getattr(tensor_parallel, what)

    class Broken(original):  # type: ignore[misc, valid-type]
        if what == "_SumOutputs":
            forward = staticmethod(lambda ctx, term, collectives: term.clone())
        else:
            backward = staticmethod(lambda ctx, grad: (grad, None))

    setattr(tensor_parallel, what, Broken)
    try:
        training = Training(TRIALS["two pairs"], rank=rank, world_size=2)
        return [training.train_epoch() for _ in range(3)][-1]
    finally:
        setattr(tensor_parallel, what, original)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """The trials in this process."""
    result: dict[str, Any] = {}
    for name, config in TRIALS.items():
        training = Training(uncut(config))
        metrics = [training.train_epoch() for _ in range(2)]
        training.save(folder / "one" / name / "half")
        metrics += [training.train_epoch() for _ in range(2)]
        result[name] = {"metrics": metrics, "test": training.test()}
        training.save(folder / "one" / name / "end")
    Training(replace(uncut(TRIALS["two pairs"]), seed=7)).save(folder / "one" / "fresh")
    return result


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    """The trials in two processes, after those in one."""
    (folder / "two").mkdir()
    return spawned(in_two, folder / "two")


@pytest.fixture(scope="module")
def four(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two replicas in four processes, after those in two."""
    (folder / "four").mkdir()
    return spawned(in_four, folder / "four", world=4)


def assert_close(
    found: dict[str, float], expected: dict[str, float], tolerance: float = ROUNDING
) -> None:
    names = [
        name
        for name in expected
        if name.endswith("/loss") or (name.endswith("/error") and tolerance == ROUNDING)
    ]
    assert names
    assert {name: found[name] for name in names} == pytest.approx(
        {name: expected[name] for name in names}, rel=tolerance
    )


def linear_shapes(config: TrialConfig) -> tuple[list[nn.Linear], list[tuple[nn.Linear, nn.Linear]]]:
    model = build(config.model, 64, 10)
    assert isinstance(model, nn.Sequential)
    pairs = [
        (model.get_submodule(columns), model.get_submodule(rows))
        for columns, rows in pairs_of(model)
    ]
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return layers, pairs  # type: ignore[return-value]


def activations(config: TrialConfig, examples: int, size: int = 4) -> float:
    """Bytes that one of two workers sends in a step within its replica, by the formula."""
    _, pairs = linear_shapes(config)
    values = sum(rows.out_features for _, rows in pairs) + sum(
        columns.in_features for columns, _ in pairs[1:]
    )
    return size * examples * values + 8


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRIALS))
def test_parts_train_as_one_process_does(
    folder: Path, one: dict[str, Any], two: list[dict[str, Any]], name: str
) -> None:
    (mine, _), (theirs, _) = (
        load_checkpoint(folder / kind / name / "end") for kind in ("two", "one")
    )
    assert {key: value.shape for key, value in mine.items()} == {
        key: value.shape for key, value in theirs.items()
    }
    if name == "autocast":
        for found, expected in zip(
            two[0][name]["metrics"][:2], one[name]["metrics"][:2], strict=True
        ):
            assert_close(found, expected, MIXED)
        return
    for result in two:
        for found, expected in zip(result[name]["metrics"], one[name]["metrics"], strict=True):
            assert_close(found, expected)
        assert_close(result[name]["test"], one[name]["test"])
    for key, value in theirs.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRIALS))
def test_a_trial_in_parts_resumes_exactly(two: list[dict[str, Any]], name: str) -> None:
    for result in two:
        assert result[name]["resumed"] == result[name]["metrics"][2:]
        assert result[name]["metrics"] == two[0][name]["metrics"]


@pytest.mark.slow
def test_parts_begin_with_the_bits_of_the_whole(folder: Path, two: list[dict[str, Any]]) -> None:
    (mine, _), (theirs, _) = (load_checkpoint(folder / kind / "fresh") for kind in ("two", "one"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], value) for key, value in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRIALS))
def test_the_bytes_sent_are_those_of_the_formula(two: list[dict[str, Any]], name: str) -> None:
    """Also over steps, which are counted by the examples that a replica has seen: once, not once
    per worker."""
    parameters = sum(
        p.numel() for layer in linear_shapes(TRIALS[name])[0] for p in layer.parameters()
    )
    size = 2 if name == "autocast" else 4
    # the first pair's sum, computed again for backward
    again = 64 * 4 * 17 if name == "segments" else 0
    for metrics in two[0][name]["metrics"]:
        assert metrics["bytes/sent"] == STEPS * (activations(TRIALS[name], 64, size) + again)
        assert metrics["bytes/parameter_step"] == metrics["bytes/sent"] / (parameters * STEPS)


@pytest.mark.slow
def test_torch_sends_nothing_that_is_not_counted(two: list[dict[str, Any]]) -> None:
    """Two pairs: two sums forward, one backward, and the workers' agreement."""
    for result in two:
        assert result["collectives"] == {"c10d.allreduce_.default": 4}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["_SumOutputs", "_SumGradients"])
def test_a_sum_left_out_is_noticed(
    one: dict[str, Any], two: list[dict[str, Any]], what: str
) -> None:
    for result in two:
        found, expected = (
            metrics["train/loss"]
            for metrics in (result[f"without {what}"], one["two pairs"]["metrics"][2])
        )
        assert abs(found - expected) > 100 * ROUNDING * expected


@pytest.mark.slow
def test_every_optimizer_that_takes_elements_one_by_one_steps_the_same(
    two: list[dict[str, Any]],
) -> None:
    assert len(two[0]["optimizers"]) == len(OPTIMIZERS) - len(WHOLE_TENSORS)
    for name, found in two[0]["optimizers"].items():
        expected = Training(uncut(optimized(name))).train_epoch()
        assert (name, found["validation/loss"]) == (
            name,
            pytest.approx(expected["validation/loss"], rel=ROUNDING),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "like"),
    [
        ("from shards", "a pair"),
        ("to shards", "a pair"),
        ("from dp 2", "two pairs"),
        ("from one", "two pairs"),
    ],
)
def test_checkpoints_of_other_layouts_are_read(
    one: dict[str, Any], two: list[dict[str, Any]], way: str, like: str
) -> None:
    for result in two:
        for found, expected in zip(result[way], one[like]["metrics"][2:], strict=True):
            assert_close(found, expected)


@pytest.mark.slow
def test_one_process_goes_on_from_parts(
    folder: Path, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    single = Training(uncut(TRIALS["two pairs"]))
    single.restore(folder / "two" / "two pairs" / "half")
    for expected in one["two pairs"]["metrics"][2:]:
        assert_close(single.train_epoch(), expected)


@pytest.mark.slow
def test_a_worker_keeps_half(two: list[dict[str, Any]]) -> None:
    whole = kept(Training(uncut(BIG)))
    assert whole > 15e5
    assert all(result["kept"] == pytest.approx(whole / 2, rel=0.01) for result in two)


@pytest.mark.slow
def test_a_trial_that_diverges_ends_on_all_workers(two: list[dict[str, Any]]) -> None:
    assert all(math.isnan(loss) for result in two for loss in result["diverged"])
    assert [result["disagreed"] for result in two] == [False, False]


@pytest.mark.slow
def test_telemetry_counts_what_each_worker_computes(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    """No computation is repeated: the last layer is cut too, so all workers together compute what
    one process does."""
    (found, *_), (expected, *_) = two[0]["telemetry"]["history"], one["telemetry"]["metrics"]
    assert found[PREFIX + "macs_per_step"] == expected[PREFIX + "macs_per_step"]
    assert found[PREFIX + "communication_seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_replicas_in_parts_train_as_whole_ones(
    two: list[dict[str, Any]], four: list[dict[str, Any]], name: str
) -> None:
    for result in four:
        for found, expected in zip(
            result[name]["metrics"], two[0][f"dp 2/{name}"]["metrics"], strict=True
        ):
            assert_close(found, expected, LOSSY.get(name, BLOCKS))
        assert result[name]["resumed"] == result[name]["metrics"][2:]
        assert result[name]["metrics"] == four[0][name]["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_what_every_worker_has_remains_the_same(four: list[dict[str, Any]], name: str) -> None:
    """Ranks 0 and 1 are one replica, 0 and 2 have the same parts."""
    owns = [result[name]["own"] for result in four]
    assert owns[0] == owns[2]
    assert owns[1] == owns[3]
    assert [owns[0][bias] for bias in ("2.bias", "6.bias")] == [
        owns[1][bias] for bias in ("2.bias", "6.bias")
    ]
    assert owns[0]["0.bias"] != owns[1]["0.bias"]


@pytest.mark.slow
def test_biases_rounded_beside_parts_would_drift(four: list[dict[str, Any]]) -> None:
    owns = [result["int8, all together"]["own"] for result in four]
    assert owns[0]["2.bias"] != owns[1]["2.bias"]


@pytest.mark.slow
def test_replicas_in_parts_send_their_parts_and_activations(four: list[dict[str, Any]]) -> None:
    """One float32 all-reduce of a worker's parameters over two replicas, and one number in which
    they agree."""
    layers, pairs = linear_shapes(REPLICAS["native"])
    cut = sum(
        columns.weight.numel() + columns.bias.numel() + rows.weight.numel()
        for columns, rows in pairs
    )
    own = sum(p.numel() for layer in layers for p in layer.parameters()) - cut // 2
    for metrics in four[0]["native"]["metrics"]:
        assert metrics["bytes/sent"] == STEPS * (activations(REPLICAS["native"], 32) + 4 * own + 8)


@pytest.mark.slow
def test_replicas_in_parts_read_the_checkpoint_of_whole_ones(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    for result in four:
        for found, expected in zip(
            result["from dp 2"], two[0]["dp 2/native"]["metrics"][2:], strict=True
        ):
            assert_close(found, expected)


@pytest.mark.slow
def test_one_process_reads_the_checkpoint_of_replicas_in_parts(
    folder: Path, four: list[dict[str, Any]]
) -> None:
    single = Training(replace(REPLICAS["native"], workers=1, layout=Layout()))
    single.restore(folder / "four" / "native" / "end")
    assert_close(single.test(), four[0]["native"]["test"])
