"""Every optimizer in a trial: it learns, continues with the same bits, and takes the step of the
mean for any batch size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lns_ops import LNSTensor
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.lr_schedule import LRSchedule
from trainers.config.optimizer import OPTIMIZERS, OptimizerConfig
from trainers.config.sync import SyncConfig
from trainers.optim.build import make_optimizer
from trainers.training.trainer import Training

RECIPES = {
    "sgd": OptimizerConfig(lr=0.2, momentum=0.8, nesterov=True, weight_decay=1e-3),
    "adam": OptimizerConfig(name="adam", lr=0.01, amsgrad=True),
    "adamax": OptimizerConfig(name="adamax", lr=0.02),
    "nadam": OptimizerConfig(name="nadam", lr=0.01),
    "radam": OptimizerConfig(name="radam", lr=0.01),
    "adagrad": OptimizerConfig(name="adagrad", lr=0.03),
    "adadelta": OptimizerConfig(name="adadelta", lr=1.0, eps=1e-5),
    "rmsprop": OptimizerConfig(name="rmsprop", lr=0.005, centered=True),
    "asgd": OptimizerConfig(name="asgd", lr=0.5),
    "lars": OptimizerConfig(
        name="lars", lr=10.0, momentum=0.8, weight_decay=1e-3, trust_coefficient=0.002
    ),
    "lamb": OptimizerConfig(name="lamb", lr=0.02, weight_decay=0.01),
    "lion": OptimizerConfig(name="lion", lr=0.003, betas=[0.9, 0.98]),
    "madam": OptimizerConfig(name="madam", lr=0.03),
    "mul": OptimizerConfig(name="mul", lr=2.0),
    "signmul": OptimizerConfig(name="signmul", lr=0.03),
}
PRECISIONS = {
    "float32": PrecisionConfig(),
    "kahan": PrecisionConfig(format="lns12", kahan_sum=True),
    "stochastic": PrecisionConfig(format="lns12", stochastic_rounding=True),
    "float32 updates": PrecisionConfig(format="lns12", kahan_sum=True, update_arithmetic="float32"),
}


def config(optimizer: OptimizerConfig, precision: PrecisionConfig) -> TrialConfig:
    return TrialConfig(
        data=DataConfig(name="digits"), model=ModelConfig(hidden=[32]), optimizer=optimizer,
        precision=precision, batch_size=50, epochs=3
    )  # fmt: skip


def states(training: Training) -> dict[str, torch.Tensor]:
    from trainers.checkpoint.state import model_tensors

    return model_tensors(training.model, training.optimizer)


COMMON = ("sgd", "rmsprop", "lamb", "madam")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name,
            precision,
            marks=[pytest.mark.slow]
            * (precision in ("stochastic", "float32 updates") and name not in COMMON),
        )
        for name in RECIPES
        for precision in PRECISIONS
    ],
)
def test_every_optimizer_learns_and_resumes_bit_for_bit(
    name: str, precision: str, tmp_path: Path
) -> None:
    trial = config(RECIPES[name], PRECISIONS[precision])
    undisturbed = Training(trial)
    first = undisturbed.train_epoch()
    undisturbed.save(tmp_path)
    second, last = undisturbed.train_epoch(), undisturbed.train_epoch()
    assert last["train/loss"] < first["train/loss"]
    assert last["validation/error"] < 0.5
    resumed = Training(trial)
    resumed.restore(tmp_path)
    again = resumed.train_epoch(), resumed.train_epoch()
    assert [m["validation/loss"] for m in again] == [m["validation/loss"] for m in (second, last)]
    tensors = states(undisturbed)
    for key, value in states(resumed).items():
        assert value.dtype == tensors[key].dtype
        assert torch.equal(value, tensors[key]), key


def test_every_optimizer_has_a_recipe() -> None:
    # adamw: test_training.py; rprop is for whole batches
    assert RECIPES.keys() | {"adamw", "rprop"} == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("adadelta",)])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_step_is_that_of_the_mean(name: str, batch: int) -> None:
    """The sum of 64 equal gradients moves weights like a single one; only adadelta's eps is not
    scaled with the gradient."""
    weights = []
    for size in (1, batch):
        model = nn.Linear(6, 5)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(0.1, 1 + i, p.numel()).view(p.shape))
        decays = "weight_decay" in OPTIMIZERS[name]
        recipe = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1 if decays else 0.0)
        optimizer = make_optimizer(model, recipe, PrecisionConfig(), size)
        for step in range(8):
            for p in model.parameters():
                p.grad = size * torch.linspace(-1, 1 + step, p.numel()).view(p.shape)
            optimizer.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_large_batch_optimizers_follow_the_schedule(name: str) -> None:
    """Scaling with the batch, warm-up and decay reach every group of the optimizer."""
    trial = config(RECIPES[name], PRECISIONS["float32"])
    schedule = LRSchedule(decay="polynomial", power=2.0, warmup_epochs=1.0, reference_batch=25)
    training, plain = Training(replace(trial, lr_schedule=schedule)), Training(trial)
    full = [2 * group["lr"] for group in plain.optimizer.param_groups]
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx(full)
    assert len(full) == 2
    training.train_epoch()
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx(full)
    training.train_epoch()
    last = schedule.factor(2 * 24 - 1, 24, 3)
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx(
        [last * rate for rate in full]
    )
    assert [group["adapt"] for group in training.optimizer.param_groups] == [True, False]
    assert not any(isinstance(p, LNSTensor) for p in training.model.parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "optimizer": OptimizerConfig(name="lars"),
                "precision": PrecisionConfig(),
                "workers": 2,
                "batch_size": 50,
                "sync": SyncConfig(name="asynchronous", staleness=0),
            },
            "optimizer.name=lars with sync.name=asynchronous: the server's shards are slices",
        )
    ],
)
def test_what_cannot_go_together(changes: dict[str, object], said: str) -> None:
    base = {"precision": PrecisionConfig(format="lns12", update_arithmetic="float32")}
    with pytest.raises(ValueError, match=said):
        TrialConfig(**(base | changes))  # type: ignore[arg-type]
