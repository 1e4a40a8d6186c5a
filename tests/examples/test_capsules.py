"""Capsules: the squash, the routing, and that they train in every format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lns_ops
from tests.examples.modules import FOLDER, example
from trainers.config import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.config.layout import Layout
from trainers.models.loss import Loss
from trainers.training.trainer import Training

NET = example("capsules/net")
SMALLEST, ClassCapsules, squash = NET.SMALLEST, NET.ClassCapsules, NET.squash
SMALL = {"channels": 4, "types": 2, "kernel": 3}
DIGITS = TrialConfig(
    data=DataConfig(name="digits", train_size=960),
    model=ModelConfig(name=f"{FOLDER}/capsules/net.py:make_net", args=SMALL),
    loss=LossConfig(name="margin"),
    optimizer=OptimizerConfig(name="adam", lr=0.01),
    batch_size=32,
    epochs=4,
    device="cpu",
    threads=1,
)


def test_squash_keeps_the_direction_and_is_shorter_than_one() -> None:
    s = torch.randn(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    length = s.norm(dim=1, keepdim=True)
    wanted = length**2 / (1 + length**2) * s / length
    torch.testing.assert_close(squash(s), wanted, rtol=SMALLEST * 4, atol=0)
    assert (squash(s * 1e3).norm(dim=1) < 1).all()
    zero = torch.zeros(2, 8, requires_grad=True)
    squash(zero).sum().backward()
    assert zero.grad is not None
    assert torch.isfinite(zero.grad).all()
    assert torch.autograd.gradcheck(squash, s[:3].requires_grad_())


def routed(votes: Tensor, iterations: int) -> Tensor:
    """Return the equations of the paper's procedure 1, capsule by capsule."""
    batch, lower, upper, _ = votes.shape
    out = torch.empty(batch, upper, votes.shape[-1])
    for x in range(batch):
        b = torch.zeros(lower, upper)
        for _ in range(iterations):
            c = torch.exp(b) / torch.exp(b).sum(1, keepdim=True)
            assert torch.allclose(c.sum(1), torch.ones(lower))
            for j in range(upper):
                s = sum((c[i, j] * votes[x, i, j] for i in range(lower)), torch.zeros(()))
                out[x, j] = squash(s)
            b = b + torch.einsum("ijd,jd->ij", votes[x], out[x])
    return out


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_routing_is_the_procedure(iterations: int) -> None:
    votes = torch.randn(2, 6, 3, 16, generator=torch.Generator().manual_seed(1))
    layer = ClassCapsules(6, 3, iterations)
    torch.testing.assert_close(layer.route(votes), routed(votes, iterations))


def test_more_iterations_agree_more() -> None:
    """Six capsules of eight vote alike for one class; its length grows with the iterations."""
    votes = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(2))
    votes[:, :6, 0] = votes[:, :1, 0]
    lengths = [float(ClassCapsules(8, 2, r).route(votes)[0, 0].norm()) for r in (1, 2, 3)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


def test_the_margin_loss_is_the_equation() -> None:
    lengths = torch.tensor([[0.95, 0.3, 0.05], [0.5, 0.05, 0.2]])
    classes = torch.tensor([0, 1])
    wanted = 0.5 * 0.2**2 + (0.85**2 + 0.5 * (0.4**2 + 0.1**2))
    assert float(Loss(LossConfig(name="margin"))(lengths, classes)) == pytest.approx(wanted)
    other = LossConfig(name="margin", args={"positive": 1.0, "negative": 0.0, "weight": 1.0})
    whole = (lengths - torch.nn.functional.one_hot(classes, 3)).square().sum()
    assert float(Loss(other)(lengths, classes)) == pytest.approx(float(whole))
    assert int(Loss(other).wrong(lengths, classes)) == 1


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(),
        PrecisionConfig(format="lns16", kahan_sum=True),
        PrecisionConfig(format="lns12", kahan_sum=True),
        PrecisionConfig(format="lns12", scope="matmul"),
        PrecisionConfig(format="bfloat16"),
    ],
    ids=lambda p: f"{p.format}-{p.scope}",
)
def test_they_train(precision: PrecisionConfig) -> None:
    training = Training(replace(DIGITS, precision=precision))
    metrics = [training.train_epoch() for _ in range(4)]
    assert metrics[-1]["train/error"] < 0.5 < metrics[0]["train/error"]
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]


def test_checkpointed_segments_and_micro_batches_train_the_same() -> None:
    """The chain has no statistics of a batch, so it may be cut."""
    whole, cut = Training(DIGITS), Training(replace(DIGITS, layout=Layout(micro_batches=2)))
    assert cut.train_epoch()["train/loss"] == pytest.approx(whole.train_epoch()["train/loss"])


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel=9 with images of 8 x 8: two .* smaller kernel"):
        NET.make_net(64, 10)
    with pytest.raises(ValueError, match="among its arguments"):
        LossConfig(name="margin", args={"margin": 1.0})


def test_a_large_one_has_the_papers_size() -> None:
    model = NET.make_net((28, 28), 10)
    assert model[:5](torch.rand(2, 784)).shape == (2, 1152, 8)
    assert sum(p.numel() for p in model.parameters()) == 6_804_224
    x = lns_ops.LNSTensor.from_float(torch.rand(1, 1, 16), "lns12")
    assert squash(x).to_float().norm() < 1
