"""Trials in every kind of number format: they learn, resume bit for bit, and spread over processes;
the small CNN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lns_ops import LNSTensor
from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from tests.trainers.training.test_trainer import without_speed
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.training.trainer import Training

BASE = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[24]),
    optimizer=OptimizerConfig(lr=0.2, momentum=0.5),
    batch_size=32,
    epochs=3,
)
CNN = ModelConfig(name="cnn", channels=[4, 6], hidden=[])
LEVELS = Path(__file__).parents[2] / "lns_ops" / "formats" / "levels.npy"
PRECISIONS = [
    PrecisionConfig(format="bfloat16", kahan_sum=True),
    PrecisionConfig(format="float16"),
    PrecisionConfig(
        format="float8_e4m3fn", gradient_format="float8_e5m2", stochastic_rounding=True
    ),
    PrecisionConfig(format="fixed(16,10)", kahan_sum=True),
    PrecisionConfig(format="int8/channel", master_format="bfloat16", stochastic_rounding=True),
    PrecisionConfig(format="lns8/channel", master_format="lns16", kahan_sum=True),
    PrecisionConfig(format="float(4,3)", gradient_format="float(5,2)", stochastic_rounding=True),
    PrecisionConfig(format="posit(8)", kahan_sum=True),
    PrecisionConfig(format="takum(8)/channel", stochastic_rounding=True),
    PrecisionConfig(format="takum_log(12)"),
    PrecisionConfig(format="bfp(8,32)", kahan_sum=True),
    PrecisionConfig(format=f"table({LEVELS})/channel", master_format="bfloat16"),
    PrecisionConfig(format="mxfp8"),
    PrecisionConfig(format="binary8p4", gradient_format="binary8p3", kahan_sum=True),
    PrecisionConfig(format="mxint8", kahan_sum=True),
    PrecisionConfig(format="nvfp4", master_format="bfloat16", stochastic_rounding=True),
]


def weights(training: Training) -> list[torch.Tensor]:
    return [storage_of(p.detach()) for p in training.model.parameters()]


SUMS = [
    PrecisionConfig(
        format="float8_e4m3fn", sum_format="float(8,13)", sum_block=128, kahan_sum=True
    ),
    PrecisionConfig(
        format="bfloat16",
        sum_format="bfloat16",
        sum_block=16,
        sum_order="tree",
        sum_of_blocks="format",
    ),
]


@pytest.mark.parametrize(
    ("precision", "model"),
    [(SUMS[0], BASE.model), (SUMS[1], BASE.model), (SUMS[0], CNN)],
    ids=["mlp, promoted", "mlp", "cnn"],
)
def test_trials_learn_with_rounded_sums_and_resume_bit_for_bit(
    precision: PrecisionConfig, model: ModelConfig, tmp_path: Path
) -> None:
    trial = replace(BASE, precision=precision, model=model)
    undisturbed = Training(trial)
    undisturbed.train_epoch()
    undisturbed.save(tmp_path)
    rest = [undisturbed.train_epoch() for _ in range(2)]
    assert rest[-1]["validation/error"] < 0.45
    resumed = Training(trial)
    resumed.restore(tmp_path)
    for metrics in rest:
        assert without_speed(resumed.train_epoch()) == without_speed(metrics)
    plain = Training(replace(trial, precision=PrecisionConfig(format=precision.format)))
    plain.train_epoch()
    assert any(
        not torch.equal(a, b) for a, b in zip(weights(plain), weights(undisturbed), strict=True)
    )


def test_rounded_sums_of_other_layers_are_refused() -> None:
    said = "precision.sum_format=bfloat16 with model.name=lstm: only the sums of linear layers and"
    with pytest.raises(ValueError, match=said):
        replace(BASE, precision=SUMS[1], model=ModelConfig(name="lstm"))


@pytest.mark.parametrize("model", [BASE.model, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.format)
def test_every_format_learns_and_resumes_bit_for_bit(
    precision: PrecisionConfig, model: ModelConfig, tmp_path: Path
) -> None:
    trial = replace(BASE, precision=precision, model=model)
    undisturbed = Training(trial)
    first = undisturbed.train_epoch()
    undisturbed.save(tmp_path)
    rest = [undisturbed.train_epoch() for _ in range(2)]
    assert rest[-1]["train/loss"] < first["train/loss"]
    # float16 needs its first steps to find its loss scale
    assert rest[-1]["validation/error"] < 0.45
    fmt = precision.number_format
    assert all(torch.equal(fmt.quantize(w), w) for w in weights(undisturbed))
    resumed = Training(trial)
    resumed.restore(tmp_path)
    assert [without_speed(resumed.train_epoch()) for _ in range(2)] == [
        without_speed(m) for m in rest
    ]
    assert all(
        torch.equal(a, b) for a, b in zip(weights(resumed), weights(undisturbed), strict=True)
    )


def test_the_cnn_trains_in_float32_and_in_lns() -> None:
    errors = {}
    for name, precision in {
        "float32": PrecisionConfig(),
        "lns": PrecisionConfig(format="lns12", kahan_sum=True),
    }.items():
        training = Training(replace(BASE, model=CNN, precision=precision))
        assert training.model[1].weight.shape == (4, 1, 3, 3)
        assert isinstance(training.model[1].weight, LNSTensor) == (name == "lns")
        errors[name] = [training.train_epoch() for _ in range(3)][-1]["validation/error"]
    assert max(errors.values()) < 0.25


def test_a_checkpoint_carries_the_loss_scale(tmp_path: Path) -> None:
    trial = replace(BASE, precision=PrecisionConfig(format="float16"))
    training = Training(trial)
    training.model.get_buffer("loss_scale").fill_(4.0)
    training.save(tmp_path)
    resumed = Training(trial)
    resumed.restore(tmp_path)
    assert float(resumed.model.get_buffer("loss_scale")) == 4.0


def test_divergence_in_a_simulated_format_is_a_result() -> None:
    for name in ("bfloat16", "lns8/channel"):
        training = Training(
            replace(
                BASE, precision=PrecisionConfig(format=name), optimizer=OptimizerConfig(lr=1e38)
            )
        )
        metrics = [training.train_epoch() for _ in range(2)][-1]
        assert training.diverged
        assert metrics["validation/error"] > 0.8


SPREAD = {
    "bfloat16": replace(
        BASE, workers=2, precision=PrecisionConfig(format="bfloat16", kahan_sum=True)
    ),
    "float16": replace(BASE, workers=2, precision=PrecisionConfig(format="float16")),
    "stages": replace(
        BASE,
        workers=2,
        model=ModelConfig(hidden=[24, 24]),
        precision=PrecisionConfig(format="int8/channel"),
        layout=Layout(pp=2, micro_batches=2),
    ),
}


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    result = {}
    for name, trial in SPREAD.items():
        training = Training(trial, rank=rank, world_size=2)
        losses = [training.train_epoch()["train/loss"] for _ in range(2)]
        fmt = trial.precision.number_format
        on_grid = all(torch.equal(fmt.quantize(w), w) for w in weights(training))
        result[name] = [losses, on_grid, [float(w.double().sum()) for w in weights(training)]]
    return result


@pytest.mark.slow
def test_replicas_and_stages_train_in_simulated_formats(tmp_path: Path) -> None:
    ranks = spawned(in_worker, tmp_path)
    for name, trial in SPREAD.items():
        alone = Training(
            replace(trial, workers=1, layout=Layout(micro_batches=trial.layout.micro_batches))
        )
        expected = [alone.train_epoch()["train/loss"] for _ in range(2)]
        assert all(rank[name][1] for rank in ranks), "weights must be on the grid"
        if name == "stages":  # the same micro-batches in the same order: the same bits
            assert ranks[0][name][0] == expected
            assert [s for rank in ranks for s in rank[name][2]] == [
                float(w.double().sum()) for w in weights(alone)
            ]
        else:  # gradients are rounded after the sum, in another order
            assert ranks[0][name] == ranks[1][name]
            assert ranks[0][name][0] == pytest.approx(expected, rel=0.05)
