"""GANs: the triangles, the losses in float32 and LNS, and the check of the claim."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import study
from study.config.compose import load
from tests.examples.modules import FOLDER, example

GAN = {
    "loss": "ns", "format": "float32", "kahan": False, "width": 8, "steps": 2, "critic_steps": 2,
    "lr": 0.001, "beta1": 0.5, "penalty": 1.0, "clip": 0.05, "gamma": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def gans() -> ModuleType:
    return example("gans/are_gans_equal")


def test_the_study_in_lns_differs_in_its_arithmetic_alone() -> None:
    first, second = (load(f"{FOLDER}/gans/{name}.yaml") for name in ("study", "lns"))
    assert (first.rows, first.space, first.claims) == (second.rows, second.space, second.claims)
    assert second.claims
    assert str(first.trial.trainable.args) != str(second.trial.trainable.args)


def test_a_triangle_is_drawn_where_it_is(gans: ModuleType) -> None:
    image = gans.render(torch.tensor([[[0.1, 0.1], [0.9, 0.1], [0.1, 0.9]]])).reshape(16, 16)
    inside = [image[3, 3], image[4, 8], image[8, 4]]
    outside = [image[15, 15], image[12, 12], image[0, 8]]
    assert min(inside) > 0.85
    assert max(outside) < 0.15
    turned = gans.render(torch.tensor([[[0.1, 0.9], [0.9, 0.1], [0.1, 0.1]]]))
    torch.testing.assert_close(turned.reshape(16, 16), image)


def test_distances_to_the_set_of_triangles(gans: ModuleType) -> None:
    """A triangle is in the set; with noise of 0.2 in 256 pixels it is at a distance of 3.2."""
    images = gans.triangles(8, seed=5)
    noisy = images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    candidates = gans.vertices(500, torch.Generator().manual_seed(6))
    near = gans.nearest(images, gans.render, candidates, 0.02)
    far = gans.nearest(noisy, gans.render, candidates, 0.02)
    assert near.max() < 0.2
    assert far.min() > 2.5


@pytest.mark.parametrize("fmt", ["float32", "lns16"])
@pytest.mark.parametrize("loss", ["mm", "ns", "ls", "wgan", "wgan_gp", "dragan", "began"])
def test_a_step_moves_both_networks(gans: ModuleType, loss: str, fmt: str) -> None:
    torch.manual_seed(0)
    gan = gans.Gan(GAN | {"loss": loss, "format": fmt, "kahan": fmt != "float32", "lr": 0.05})
    nets = (gan.generator, gan.discriminator)
    before = [gans.floats(net[0].weight.detach().clone()) for net in nets]
    x = gans.triangles(64, seed=0)
    gan.step([x, x])
    for net, old in zip(nets, before, strict=True):
        assert not torch.equal(gans.floats(net[0].weight.detach()), old)
    if loss == "wgan":
        weights = [gans.floats(p.detach()) for p in gan.discriminator.parameters()]
        assert max(float(w.abs().max()) for w in weights) < 0.05 * 1.01
    assert (gan.balance > 0) == (loss == "began")


def test_the_gradient_penalty_has_its_gradient_in_lns(gans: ModuleType) -> None:
    """The second derivative through |D'(u)| in lns16 is within 0.15 (in the norm) of float32's. A
    unit with an input near zero may have the other slope. Without one of the terms the result would
    be off by 1."""
    x, found = gans.triangles(16, seed=1), {}
    for fmt in ("float32", "lns16"):
        torch.manual_seed(0)
        gan = gans.Gan(GAN | {"loss": "wgan_gp", "format": fmt})
        gan._slope(x).backward()
        found[fmt] = gans.floats(gan.discriminator[0].weight.grad)
    exact = found["float32"]
    assert float((found["lns16"] - exact).norm() / exact.norm()) < 0.15


def f1_of(gans: ModuleType, better: dict[str, float], count: int = 12) -> dict[str, list[float]]:
    """Made-up F1 of configurations by loss: sd 0.15 around 0.5, plus the advantage of the loss."""
    draw = np.random.default_rng(3)
    return {
        loss: list((0.5 + better.get(loss, 0.0) + 0.15 * draw.normal(size=count)).clip(0))
        for loss in gans.LOSSES
    }


def test_a_loss_that_is_better_everywhere_fails_the_claim(gans: ModuleType) -> None:
    found = gans.judge_losses(f1_of(gans, {"wgan_gp": 0.45}))
    assert found["verdict"] == "fails"
    assert "wgan_gp" in found["note"]
    assert found["low"] <= found["figure"] <= found["high"]


def test_losses_that_differ_by_nothing_hold_where_configurations_are_many(gans: ModuleType) -> None:
    worse = dict.fromkeys(set(gans.LOSSES) - {gans.USUAL}, -0.1)
    found = gans.judge_losses(f1_of(gans, worse, 100))
    assert found["verdict"] == "holds"
    assert f"holds if all lie below {gans.SIMILAR} F1" in found["note"]  # the page shows its rule
    assert gans.judge_losses(f1_of(gans, {}))["verdict"] == "undecided"  # 12 are too few


def test_a_loss_that_did_not_train_keeps_the_claim_open(gans: ModuleType) -> None:
    worse = dict.fromkeys(set(gans.LOSSES) - {gans.USUAL}, -0.1)
    values = f1_of(gans, worse, 100) | {"mm": [0.0] * 100}
    found = gans.judge_losses(values)
    assert found["verdict"] == "undecided"
    assert "did not train: mm" in found["note"]
    untrained = f1_of(gans, {"wgan_gp": 0.45}) | {"ns": [0.01] * 12}
    assert gans.judge_losses(untrained)["verdict"] == "undecided"


@pytest.mark.slow
def test_a_tiny_form_runs_to_its_verdict(gans: ModuleType, tmp_path: Path) -> None:
    tiny = {
        "trial.epochs": 2, "search.num_samples": 2, "trial.trainable.args.steps": 5,
        "storage": str(tmp_path),
    }  # fmt: skip
    done = study.run(f"{FOLDER}/gans/study.yaml", tiny, tracking_uri="none", cpus=2)
    assert {trial.row for trial in done.state.trials} == set(gans.LOSSES)
    found = gans.no_loss_is_consistently_better(done)
    assert found["verdict"] == "undecided"
    assert math.isnan(found["figure"])  # there is nothing to compare with
