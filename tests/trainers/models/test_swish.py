"""Swish: its equation, and the beta that a layer learns, in float32, LNS and other formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lns_ops import LNSTensor, convert_
from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.models import make_model
from trainers.models.mlp import SwishBeta
from trainers.training.trainer import Training

LEARNED = ModelConfig(name="mlp", hidden=[16, 12], args={"activation": "swish_beta"})
DIGITS = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=LEARNED,
    optimizer=OptimizerConfig(lr=0.1, momentum=0.9),
    batch_size=32,
    epochs=4,
    device="cpu",
    threads=1,
)


@pytest.mark.parametrize("name", ["swish", "swish_beta"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_swish_is_x_times_sigmoid_of_beta_x(name: str, beta: float) -> None:
    args = {"activation": name, "beta": beta}
    model = make_model(ModelConfig(name="mlp", hidden=[8], args=args), (4,), 3, 0)
    assert isinstance(model, nn.Sequential)
    x = torch.linspace(-4, 4, 9)
    torch.testing.assert_close(model[1](x), x * torch.sigmoid(beta * x))


def betas(model: nn.Module) -> list[float]:
    found = [part.beta.detach() for part in model.modules() if isinstance(part, SwishBeta)]
    return [float(beta.to_float() if isinstance(beta, LNSTensor) else beta) for beta in found]


def test_each_layer_has_a_beta_of_one_whatever_the_seed() -> None:
    """Also for the cnn; the weights equal the ones in the network with a constant beta."""
    for config in (LEARNED, ModelConfig(name="cnn", channels=[2], hidden=[8], args=LEARNED.args)):
        model = make_model(config, (1, 8, 8) if config.name == "cnn" else (64,), 10, 5)
        assert betas(model) == [1.0, 1.0]
    plain = make_model(ModelConfig(name="mlp", hidden=[16, 12]), (64,), 10, 5)
    learned = make_model(LEARNED, (64,), 10, 5)
    for name, value in plain.named_parameters():
        assert torch.equal(value, learned.get_parameter(name))
    assert len(list(learned.parameters())) == len(list(plain.parameters())) + 2


def test_the_gradient_of_beta_is_the_equation() -> None:
    layer = SwishBeta()
    with torch.no_grad():
        layer.beta.fill_(1.5)
    layer.double()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, beta: torch.func.functional_call(layer, {"beta": beta}, (x,)),
        (x.requires_grad_(), layer.beta),
    )
    s = torch.sigmoid(1.5 * x)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.beta.grad, (x**2 * s * (1 - s)).sum().reshape(1))


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_gradient_of_beta_in_lns_is_near_that_of_float32(scale: float) -> None:
    """Within 5 %: 512 terms of the same sign, each with the errors of five lns12 operations (at
    most 0.6 % of a value each). The sum loses nothing, because its terms have the same size."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)) * 2
    found = []
    for fmt in ("float32", "lns12"):
        layer: nn.Module = nn.Sequential(SwishBeta())
        with torch.no_grad():
            layer[0].beta.fill_(1.0)
        if fmt != "float32":
            convert_(layer, fmt, scope="everywhere")
        y = layer(x)
        (y * (scale / 512)).sum().backward()
        grad = layer[0].beta.grad
        found.append(float(grad.to_float() if isinstance(grad, LNSTensor) else grad))
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[0] * scale > 0


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(),
        PrecisionConfig(format="lns12", kahan_sum=True),
        PrecisionConfig(format="lns12", scope="matmul"),
        PrecisionConfig(format="bfloat16", stochastic_rounding=True),
    ],
    ids=lambda p: f"{p.format}-{p.scope}",
)
def test_beta_is_trained_and_resumed_with_the_same_bits(
    precision: PrecisionConfig, tmp_path: Path
) -> None:
    whole, begun, resumed = (Training(replace(DIGITS, precision=precision)) for _ in range(3))
    metrics = [whole.train_epoch() for _ in range(4)]
    assert metrics[-1]["train/error"] < 0.5 * metrics[0]["train/error"]
    assert all(beta != 1.0 for beta in betas(whole.model))
    begun.train_epoch()
    begun.save(tmp_path)
    resumed.restore(tmp_path)
    for _ in range(3):
        resumed.train_epoch()
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(storage_of(one.detach()), storage_of(two.detach()))


def staged(rank: int, folder: str) -> dict[str, list[float]]:
    """The weights of one of two stages, by schedule and format."""
    found: dict[str, list[float]] = {}
    for schedule in ("1f1b", "zero_bubble"):
        for precision in (PrecisionConfig(), PrecisionConfig(format="lns12", kahan_sum=True)):
            layout = Layout(pp=2, micro_batches=2, schedule=schedule)
            config = replace(DIGITS, precision=precision, workers=2, layout=layout)
            training = Training(config, rank=rank, world_size=2)
            for _ in range(3):
                training.train_epoch()
            found[f"{schedule} {precision.format}"] = bits(training.model)
    return found


def bits(model: nn.Module) -> list[float]:
    """The bits of all parameters in one list."""
    held = [storage_of(parameter.detach()).flatten() for parameter in model.parameters()]
    return [value for each in held for value in each.tolist()]


def test_stages_train_their_betas_as_one_process_does(tmp_path: Path) -> None:
    """Also if the schedule defers the gradients of linear layers; beta's gradients are not
    deferred."""
    first, second = spawned(staged, tmp_path)
    for precision in (PrecisionConfig(), PrecisionConfig(format="lns12", kahan_sum=True)):
        alone = Training(replace(DIGITS, precision=precision, layout=Layout(micro_batches=2)))
        for _ in range(3):
            alone.train_epoch()
        assert all(beta != 1.0 for beta in betas(alone.model))
        for schedule in ("1f1b", "zero_bubble"):
            key = f"{schedule} {precision.format}"
            assert first[key] + second[key] == bits(alone.model)
