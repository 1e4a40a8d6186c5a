"""Wire formats: the loss of a codec, what error feedback recovers, and the bytes that real
processes send."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lns_ops import LNSFormat, LNSTensor, lns8, lns12, lns16
from tests.trainers.courses import broken_off
from tests.trainers.processes import spawned
from trainers.comm.codecs import BLOCK, Codec, CodesCodec, LNSCodec, make_codec
from trainers.comm.collectives import Collectives
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.wire import FORMATS, WireConfig
from trainers.sync.all_reduce import GradientSync
from trainers.sync.powersgd import PowerSGD
from trainers.sync.synchronous import Synchronous
from trainers.training.trainer import Training

WORLD = 2
CODECS = [name for name in FORMATS if name not in ("native", "powersgd")]
RELATIVE = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-10, "lns16": 2 ** (2**-8) - 1 + 1e-6}
"""Largest relative error of a value of ordinary size: half a step of the format."""
OF_LARGEST = {"lns8": 2 ** (1 / 16) - 1 + 1e-5, "int8": 1 / 254 + 1e-6}
"""Largest error as a share of the block's largest value."""
BYTES = {
    "native": 4.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "lns16": 2.0,
    "lns8": 1 + 4 / BLOCK, "int8": 1 + 4 / BLOCK, "topk": 0.08,
}  # fmt: skip
"""Per parameter, rank and step, with two ranks: 2 (N - 1) / N = 1 times the encoded size of a
value."""
SHAPE = (96, 256)
STEPS = 30


def codec(name: str) -> Codec:
    made = make_codec(WireConfig(name=name), None)
    assert made is not None
    return made


@given(
    st.sampled_from(CODECS),
    st.integers(1, 3),
    st.integers(1, 2500),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-3, 1.0, 40.0]),
)
def test_codecs_send_what_they_promise(
    name: str, rows: int, values: int, seed: int, scale: float
) -> None:
    x = torch.randn(rows, values, generator=torch.Generator().manual_seed(seed)) * scale
    wire = codec(name)
    payload = wire.encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (rows, wire.size(values))
    back = wire.decode(payload, values)
    if name in RELATIVE:
        ordinary = x.abs() > 1e-4
        assert ((back - x).abs() <= RELATIVE[name] * x.abs())[ordinary].all()
    elif name in OF_LARGEST:
        assert (back - x).abs().max() <= OF_LARGEST[name] * x.abs().max()
    else:
        kept = back != 0
        assert torch.equal(back[kept], x[kept])
        assert kept.sum() == rows * math.ceil(0.01 * values)
        assert (x[~kept].abs().amax() if not kept.all() else 0) <= back[kept].abs().amax()


@pytest.mark.parametrize("name", CODECS)
def test_codecs_keep_zeros_and_survive_the_largest_numbers(name: str) -> None:
    wire, largest = codec(name), torch.finfo(torch.float32).max
    assert not wire.decode(wire.encode(torch.zeros(2, 70)), 70).any()
    extreme = torch.tensor([[largest, -largest, 0.0, 1e-38]])
    assert wire.decode(wire.encode(extreme), 4).isfinite().all() or name == "bfloat16"


def test_lns_rows_are_added_as_the_contract_says() -> None:
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    in_lns, in_float = CodesCodec(lns12), CodesCodec(lns12, lns_sum=False)
    values = LNSTensor.from_float(x, lns12)
    payload = in_lns.encode(values.codes)
    added = sum(values.to_float().unbind(0)[1:], values.to_float()[0])
    assert torch.equal(in_lns.decode(in_lns.sum(payload, 50), 50)[0], values.sum(0).codes)
    assert torch.equal(
        in_float.decode(in_float.sum(payload, 50), 50)[0], LNSTensor.from_float(added, lns12).codes
    )
    for codes in (in_lns, in_float):
        assert torch.equal(LNSCodec(codes).encode(x), payload)
        assert torch.equal(LNSCodec(codes).sum(payload, 50), codes.sum(payload, 50))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "fp4"}, "wire.name='fp4': must be one of native, float32"),
        ({"sum": "bf16"}, "wire.sum='bf16': must be one of auto"),
        ({"sum": "lns", "name": "int8"}, "wire.sum=lns with wire.name=int8: only LNS codes"),
        ({"topk": 0.0}, "wire.topk=0.0: must be a share above 0"),
        ({"topk": 1.5}, "wire.topk=1.5: must be a share"),
        ({"topk": math.nan}, "wire.topk=nan"),
        ({"rank": 0}, "wire.rank=0: must be a whole number of at least 1"),
        ({"rank": 4}, "wire.rank=4 with wire.name=native: means nothing to it"),
        ({"topk": 0.1, "name": "int8"}, "wire.topk=0.1 with wire.name=int8: means nothing to it"),
        (
            {"error_feedback": False, "name": "lns16"},
            "wire.error_feedback=False with wire.name=lns16: means nothing to it",
        ),
    ],
)
def test_impossible_wires_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        WireConfig(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"wire": WireConfig(name="int8")}, "wire.name=int8 with workers=1, .* one replica"),
        (
            {"workers": 2, "wire": WireConfig(sum="lns")},
            "wire.sum=lns with wire.name=native, precision.format=float32",
        ),
    ],
)
def test_wires_that_do_not_fit_the_trial_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        TrialConfig(**values)


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank))


def residues(sync: GradientSync | PowerSGD, collectives: Collectives) -> Tensor:
    """Return the sum of everything that the ranks keep for later steps."""
    state, left = sync.state(), torch.zeros(SHAPE)
    for path, value in state.items():
        if path.endswith(("own", "residue/0")):
            left = left + collectives.all_reduce_(value.clone()).reshape(SHAPE)
        elif path.endswith("owned"):
            left = left + collectives.all_gather(value.view(torch.uint8).view(-1)).view(
                torch.float32
            ).reshape(SHAPE)
    return left


def summed(name: str, collectives: Collectives, **options: Any) -> dict[str, Any]:
    """Run STEPS sums through one wire format; return the bytes sent, and the errors of the last sum
    and of the sum of all."""
    wire = WireConfig(name=name, **options)
    sync = (PowerSGD if name == "powersgd" else GradientSync)(wire, collectives)
    total = truth = torch.zeros(SHAPE)
    for step in range(STEPS):
        parameter = nn.Parameter(torch.zeros(SHAPE))
        parameter.grad = gradient(collectives.rank, step)
        before = collectives.sent
        assert sync([parameter])
        expected = sum(gradient(rank, step) for rank in range(1, WORLD)) + gradient(0, step)
        total, truth = total + parameter.grad, truth + expected
    return {
        "bytes": (collectives.sent - before) / parameter.numel(),
        "step": float((parameter.grad - expected).abs().max()),
        "lost": float((total - truth).norm() / truth.norm()),
        "conserved": float((total + residues(sync, collectives) - truth).norm() / truth.norm()),
        "bits": parameter.grad.view(torch.int32).flatten()[:50].tolist(),
    }


def trial(name: str, precision: PrecisionConfig, **options: Any) -> TrialConfig:
    return TrialConfig(
        data=DataConfig(name="digits"),
        model=ModelConfig(hidden=[32]),
        precision=precision,
        optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
        batch_size=128,
        epochs=4,
        workers=WORLD,
        wire=WireConfig(name=name, **options),
    )


TRIALS = {
    "native": trial("native", PrecisionConfig()),
    "int8": trial("int8", PrecisionConfig()),
    "topk": trial("topk", PrecisionConfig(), topk=0.1),
    "powersgd": trial("powersgd", PrecisionConfig(), rank=4),
    "lns int8": trial("int8", PrecisionConfig(format="lns12", kahan_sum=True)),
    "lns lns16": trial("lns16", PrecisionConfig(format="lns12", kahan_sum=True), sum="lns"),
}


def trained(config: TrialConfig, rank: int, folder: Path) -> dict[str, Any]:
    """A trial, and the same trial interrupted after two epochs and continued by new objects."""
    training, metrics, resumed = broken_off(config, rank, WORLD, folder)
    forgetful = Training(config, rank=rank, world_size=WORLD)
    forgetful.restore(folder)
    assert isinstance(forgetful.sync, Synchronous)
    collectives: Any = forgetful.collectives
    forgetful.sync = Synchronous(config.wire, collectives, config.seed)
    lost = forgetful.train_epoch()["train/loss"]
    return {
        "metrics": metrics,
        "resumed": resumed,
        "lost": lost,
        "test": training.test(),
        "state": len(training.sync.state()),
    }


class SkipsOne(GradientSync):
    """A broken synchroniser: leaves the first parameter's gradient unchanged."""

    def __call__(self, parameters: Any, *, finite: bool = True) -> bool:
        return super().__call__(list(parameters)[1:], finite=finite)


def same_weights(training: Training) -> bool:
    """Return whether all ranks have the same weights; a broken synchroniser must fail this."""
    flat = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(WORLD)]
    dist.all_gather(everyone, flat)
    return all(torch.equal(everyone[0], other) for other in everyone[1:])


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    collectives = Collectives()
    result: dict[str, Any] = {}
    result["sums"] = {name: summed(name, collectives) for name in FORMATS}
    result["without feedback"] = {
        n: summed(n, collectives, error_feedback=False)
        for n in ("int8", "lns8", "topk", "powersgd")
    }
    result["trials"] = {
        name: trained(config, rank, Path(folder) / name) for name, config in TRIALS.items()
    }
    whole, broken = (Training(TRIALS["native"], rank=rank, world_size=WORLD) for _ in range(2))
    assert broken.collectives is not None
    assert isinstance(broken.sync, Synchronous)
    broken.sync._sum = SkipsOne(WireConfig(), broken.collectives)
    for training in (whole, broken):
        training.train_epoch()
    result["same weights"] = [same_weights(whole), same_weights(broken)]
    return result


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(in_worker, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", list(BYTES))
def test_bytes_are_those_of_the_formula(workers: list[dict[str, Any]], name: str) -> None:
    """The flag that tells whether every rank is finite adds 8 bytes."""
    values = SHAPE[0] * SHAPE[1]
    for result in workers:
        assert result["sums"][name]["bytes"] == pytest.approx(BYTES[name] + 8 / values, rel=1e-3)


def test_powersgd_sends_its_factors(workers: list[dict[str, Any]]) -> None:
    values = SHAPE[0] * SHAPE[1]
    for result in workers:
        assert result["sums"]["powersgd"]["bytes"] * values == 4 * 2 * sum(SHAPE) + 8


@pytest.mark.parametrize("name", FORMATS)
def test_all_ranks_have_the_same_bits(workers: list[dict[str, Any]], name: str) -> None:
    assert workers[0]["sums"][name]["bits"] == workers[1]["sums"][name]["bits"]


@pytest.mark.parametrize("name", ["native", "float32", "bfloat16", "float16", "lns16"])
def test_sums_are_as_near_as_the_format(workers: list[dict[str, Any]], name: str) -> None:
    """Values up to 5: two encodings of operands and one of the sum, each at most half a step of the
    format."""
    assert workers[0]["sums"][name]["step"] <= 20 * RELATIVE.get(name, 0.0) + 1e-6


@pytest.mark.parametrize("name", ["int8", "lns8", "topk", "powersgd"])
def test_error_feedback_gives_back_what_was_lost(workers: list[dict[str, Any]], name: str) -> None:
    """All sums plus the residues equal the sum of all gradients; without feedback the loss is
    final."""
    assert workers[0]["sums"][name]["conserved"] < 1e-5
    assert (
        workers[0]["without feedback"][name]["conserved"]
        == workers[0]["without feedback"][name]["lost"]
        > 1e-3
    )


@pytest.mark.parametrize("name", list(TRIALS))
def test_every_wire_trains_and_resumes_bit_for_bit(
    workers: list[dict[str, Any]], name: str
) -> None:
    baseline = workers[0]["trials"]["native"]["test"]["test/error"]
    for result in workers:
        trial = result["trials"][name]
        assert trial["test"]["test/error"] <= baseline + 0.04
        assert trial["resumed"] == trial["metrics"][2:]
        assert (trial["lost"] != trial["metrics"][2]["train/loss"]) == (trial["state"] > 0)


def test_what_a_trial_reports_as_sent_is_the_formula(workers: list[dict[str, Any]]) -> None:
    """MLP 64-32-10, LNS lns12 in its own codes: 2 bytes; in int8 parts of 1,024 values share a
    scale."""
    values = 64 * 32 + 32 + 32 * 10 + 10
    shard = values // 2
    for name, bytes_sent in (
        ("native", 4 * values),
        ("lns lns16", 2 * values),
        ("int8", 2 * codec("int8").size(shard)),
    ):
        reported = workers[0]["trials"][name]["metrics"][0]
        assert reported["bytes/parameter_step"] == pytest.approx(
            (bytes_sent + 8) / values, rel=2e-3
        )
        assert reported["bytes/sent"] == pytest.approx(
            reported["bytes/parameter_step"] * values * (1200 // 128)
        )


def test_a_synchroniser_that_skips_a_parameter_is_caught(workers: list[dict[str, Any]]) -> None:
    for result in workers:
        assert result["same weights"] == [True, False]


def test_native_lns_gradients_take_the_bytes_of_their_codes() -> None:
    assert CodesCodec(lns12).size(100) == CodesCodec(lns16).size(100) == 200
    assert CodesCodec(lns8).size(100) == 100


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16])
def test_every_code_travels_unchanged(fmt: LNSFormat) -> None:
    logs = torch.arange(1, fmt.field_mask + 1)
    codes = torch.cat([-(fmt.field_mask + 1) + logs, torch.zeros(1), logs]).to(torch.int16)
    codec = CodesCodec(fmt)
    payload = codec.encode(codes.view(1, -1))
    assert payload.shape == (1, codec.size(len(codes)))
    assert torch.equal(codec.decode(payload, len(codes))[0], codes)
