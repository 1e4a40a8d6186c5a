"""Studies of ``conf/study`` whose training loops and checks are code beside them."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import lns_ops
from study.claims.analyses import Ranks
from study.config.compose import load
from study.ledger.state import TrialState
from tests.trainers.processes import spawned
from trainers import LoopContext
from trainers.config import TrialConfig
from trainers.config.model import VARIANTS

FOLDER = Path(__file__).parents[3] / "conf" / "study"
GAN = {
    "loss": "ns", "format": "float32", "kahan": False, "width": 8, "steps": 2, "critic_steps": 2,
    "lr": 0.001, "beta1": 0.5, "penalty": 1.0, "clip": 0.05, "gamma": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def gans() -> ModuleType:
    return module("are_gans_equal")


@pytest.fixture(scope="module")
def evolution() -> ModuleType:
    return module("evolution")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"conf_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_odyssey_has_every_variant_on_every_set() -> None:
    study = load("search_space_odyssey")
    assert len(study.rows) * study.search.num_samples == 5400
    nine = [variant for variant in VARIANTS if variant != "torch"]
    seen: dict[str, list[str]] = {}
    for row in study.rows:
        name, _, variant = row.label.rpartition(" ")
        assert row.overrides["model.args.variant"] == variant
        seen.setdefault(name, []).append(variant)
    assert seen == dict.fromkeys(("JSB", "MuseData", "Nottingham", "Piano-midi", "copy"), nine)


def odyssey_of(points: int) -> Any:
    """A study whose variants are all tried at the same points of the space."""
    draws, rows = np.random.default_rng(0), []
    for _ in range(points):
        rate, momentum = draws.uniform(-2, 1.7), draws.uniform(0, 0.99)
        width = draws.integers(20, 201)
        for variant in VARIANTS[:3]:
            rows.append(
                {
                    "row": f"JSB {variant}",
                    "status": "finished",
                    "seed": 0,
                    "config.model.args.variant": variant,
                    "config.optimizer.lr": 10.0**rate,
                    "config.optimizer.momentum": momentum,
                    "config.model.args.width": width,
                    "config.loss.name": "binary_cross_entropy",
                    "validation/loss": 0.1 + 0.1 * rate**2,
                    "test/loss": 0.1,
                }
            )
    config = load("search_space_odyssey")
    return SimpleNamespace(config=config, trials=pd.DataFrame(rows), state=None)


@pytest.mark.parametrize(("points", "decided"), [(4, False), (12, True)])
def test_few_points_of_the_space_decide_nothing(points: int, decided: bool) -> None:
    """A rate goes with a momentum and a width, whose shares few points cannot tell apart."""
    found = module("search_space_odyssey").share_of_learning_rate(odyssey_of(points))
    assert found["figure"] > 0.2
    assert (found.get("verdict") == "undecided") is not decided


@pytest.mark.parametrize(("points", "beaten"), [(9, "undecided"), (10, "fails")])
@pytest.mark.parametrize("lead", [-2.0, 2.0])
def test_ranks_at_few_points_decide_nothing(
    points: int, beaten: str, lead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way they point: the best of few points is that of a variant that they suit."""
    means = dict(sorted({"vanilla": 2.0 + lead, "np": 2.0, "nog": 7.0}.items(), key=itemgetter(1)))
    ranks = Ranks(
        of="model.args.variant", means=means, blocks=["JSB"], p=0.001, critical=1.0,
        by_seed=means, critical_by_seed=0.1, tasks=5, runs=30,
    )  # fmt: skip
    odyssey = module("search_space_odyssey")
    monkeypatch.setattr(odyssey, "rank", lambda *_: ranks)
    found = odyssey.no_variant_ranks_above_vanilla(odyssey_of(points))
    assert found["figure"] == pytest.approx(lead)
    assert found["verdict"] == ("holds" if lead < 0 and points == 10 else beaten)
    assert ("points of the space" in found["note"]) == (points == 9)


@pytest.mark.parametrize("name", ["search_space_odyssey", "are_gans_equal"])
def test_the_study_in_lns_differs_in_its_arithmetic_alone(name: str) -> None:
    first, second = load(name), load(f"{name}_lns")
    assert (first.rows, first.space, first.claims) == (second.rows, second.space, second.claims)
    formats = {str(first.trial.precision), str(second.trial.precision)}
    formats |= {str(first.trial.trainable.args), str(second.trial.trainable.args)}
    assert len(formats) == 3


def test_a_triangle_is_drawn_where_it_is(gans: ModuleType) -> None:
    image = gans.render(torch.tensor([[[0.1, 0.1], [0.9, 0.1], [0.1, 0.9]]])).reshape(16, 16)
    inside = [image[3, 3], image[4, 8], image[8, 4]]
    outside = [image[15, 15], image[12, 12], image[0, 8]]
    assert min(inside) > 0.85
    assert max(outside) < 0.15
    turned = gans.render(torch.tensor([[[0.1, 0.9], [0.9, 0.1], [0.1, 0.1]]]))
    torch.testing.assert_close(turned.reshape(16, 16), image)


def test_distances_to_the_set_of_triangles(gans: ModuleType) -> None:
    """A triangle is in the set; noise of 0.2 in 256 pixels is 3.2 away from its triangle."""
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
    """The gradient of |D'(u)| is differentiated in lns16 as in float32: to 0.15 of its norm, as a
    unit whose input is near zero may take the other slope; without a term of it, it is off by 1."""
    x, found = gans.triangles(16, seed=1), {}
    for fmt in ("float32", "lns16"):
        torch.manual_seed(0)
        gan = gans.Gan(GAN | {"loss": "wgan_gp", "format": fmt})
        gan._slope(x).backward()
        found[fmt] = gans.floats(gan.discriminator[0].weight.grad)
    exact = found["float32"]
    assert float((found["lns16"] - exact).norm() / exact.norm()) < 0.15


def test_the_estimate_of_evolution_strategies_points_uphill(evolution: ModuleType) -> None:
    """Of a linear loss, the shaped estimate has the gradient's direction."""
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(5, generator=generator)
    directions = torch.randn(4000, 5, generator=generator)
    losses = torch.stack([directions @ slope, -directions @ slope])
    estimate = evolution.gradient(losses, directions, 0.1)
    assert float(torch.cosine_similarity(estimate, slope, dim=0)) > 0.99
    shifted = evolution.gradient(torch.exp(losses), directions, 0.1)
    torch.testing.assert_close(shifted, estimate)  # ranks alone count


def test_weights_are_tried_in_their_format(evolution: ModuleType) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    lns_ops.convert_(net, "lns12", scope="everywhere")
    weights = torch.linspace(-1, 1, 8)
    evolution.set_weights(net, weights)
    held = torch.cat([evolution.floats(p.detach()).flatten() for p in net.parameters()])
    expected: Tensor = lns_ops.LNSTensor.from_float(weights, "lns12").to_float()
    assert torch.equal(held, expected)
    assert not torch.equal(held, weights)


def evolved(rank: int, folder: str, world_size: int, fmt: str, pairs: int) -> dict[str, Any]:
    """Two epochs of evolution strategies as a rank of ``world_size``: what it reports and keeps."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    reports: list[dict[str, float]] = []
    kept: list[list[float]] = []

    def tell(metrics: Mapping[str, Any], checkpoint: Any) -> None:
        reports.append(dict(metrics))
        kept.append(checkpoint["weights"].tolist())

    config = {
        "hidden": 4, "format": fmt, "pairs": pairs, "batch": 64, "sigma": 0.05, "lr": 0.05,
        "decay": 0.01,
    }  # fmt: skip
    context = LoopContext(
        config=config, trial=TrialConfig(epochs=2), seed=3, device="cpu", resume=None, rank=rank,
        world_size=world_size, _tell=tell,
    )  # fmt: skip
    final = module("evolution").train(config, context)
    return {"reports": reports, "weights": kept, "final": final}


@pytest.mark.parametrize("fmt", ["float32", "lns12"])
def test_directions_shared_by_two_workers_give_the_bits_of_one(fmt: str, tmp_path: Path) -> None:
    """Each worker draws all directions and tries its share; a sum of losses of which all but one
    are zero is exact. Five pairs do not divide by two, so the shares differ in size."""
    alone = evolved(0, "", 1, fmt, 5)
    workers = spawned(partial(evolved, world_size=2, fmt=fmt, pairs=5), tmp_path)
    for worker in workers:
        assert {key: worker[key] for key in alone} == alone
    assert alone["weights"][0] != alone["weights"][1]
    assert evolved(0, "", 1, fmt, 6)["weights"] != alone["weights"]


@pytest.mark.slow
def test_evolution_strategies_with_two_workers_of_ray_are_those_of_one(tmp_path: Path) -> None:
    import study

    tiny = {"trial.epochs": 2, "search.num_samples": 1, "seeds": [0, 1]}
    found = []
    for workers in (1, 2):
        changes = {"storage": str(tmp_path / str(workers)), "trial.workers": workers}
        done = study.run("evolution_es", tiny | changes, tracking_uri="none", cpus=2)
        trials = sorted(done.state.trials, key=lambda trial: (trial.row, trial.config["seed"]))
        assert [trial.status for trial in trials] == ["finished"] * 4
        found.append(
            [
                {name: value for name, value in report["metrics"].items() if "error" in name}
                for trial in trials
                for report in trial.reports.values()
            ]
        )
    assert found[0] == found[1]
    assert len({str(each) for each in found[0]}) > 4


def f1_of(gans: ModuleType, better: dict[str, float], count: int = 12) -> dict[str, list[float]]:
    """Made-up F1 of configurations by loss, sd 0.15 around 0.5 and what a loss is better by."""
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
    assert f"holds if all lie below {gans.SIMILAR} F1" in found["note"]  # the page has its rule
    assert gans.judge_losses(f1_of(gans, {}))["verdict"] == "undecided"  # 12 show too little


def test_a_loss_that_did_not_train_keeps_the_claim_open(gans: ModuleType) -> None:
    worse = dict.fromkeys(set(gans.LOSSES) - {gans.USUAL}, -0.1)
    values = f1_of(gans, worse, 100) | {"mm": [0.0] * 100}
    found = gans.judge_losses(values)
    assert found["verdict"] == "undecided"
    assert "did not train: mm" in found["note"]
    untrained = f1_of(gans, {"wgan_gp": 0.45}) | {"ns": [0.01] * 12}
    assert gans.judge_losses(untrained)["verdict"] == "undecided"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("are_gans_equal", {"trial.trainable.args.steps": 5}),
        ("evolution", {}),
        ("evolution_es", {}),
        ("evolution_pbt", {"search.perturbation_interval": 1}),
    ],
)
def test_a_tiny_form_runs_to_its_verdicts(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    import study

    tiny = {"trial.epochs": 2, "search.num_samples": 2, "storage": str(tmp_path)}
    few = {} if name == "are_gans_equal" else {"seeds": [0, 1]}
    done = study.run(name, tiny | few | changes, tracking_uri="none", cpus=2)
    rows = {trial.row for trial in done.state.trials if trial.status == "finished"}
    assert rows == {row.label for row in done.config.rows}
    for claim in done.config.claims:
        if claim.check:
            file, _, function = Path(claim.check).name.partition(".py:")
            found = getattr(module(file), function)(done)
            assert found["verdict"] == "undecided"
            assert math.isnan(found["figure"])  # there is nothing to compare with


@pytest.mark.slow
def test_the_gain_over_random_search_is_the_mean_over_the_searches_of_seeds(
    evolution: ModuleType, tmp_path: Path
) -> None:
    import study

    tiny = {"trial.epochs": 2, "search.num_samples": 3, "storage": str(tmp_path), "seeds": [0, 1]}
    alone = study.run("evolution", tiny, tracking_uri="none", cpus=2)
    bred = {"search.perturbation_interval": 1}
    here = study.run("evolution_pbt", tiny | bred, tracking_uri="none", cpus=2)
    found = evolution.gain_in_lns12(here)
    errors = [chosen(each.state.trials, "lns12", epochs=2) for each in (alone, here)]
    expected = [first - second for first, second in zip(*errors, strict=True)]
    assert found["figure"] == pytest.approx(sum(expected) / 2)
    assert found["runs"] == 4
    if expected[0] != expected[1]:
        assert found["low"] < found["figure"] < found["high"]


def chosen(trials: Iterable[TrialState], row: str, epochs: int) -> list[float]:
    """The test error, in per cent, of each seed's lowest validation error."""
    found: dict[int, list[tuple[float, float]]] = {}
    for trial in trials:
        if trial.row == row and trial.epochs == epochs:
            last = trial.reports[epochs]["metrics"]["validation/error"]
            found.setdefault(trial.seed, []).append((last, 100 * trial.test["test/error"]))
    return [min(found[seed], key=lambda pair: pair[0])[1] for seed in sorted(found)]
