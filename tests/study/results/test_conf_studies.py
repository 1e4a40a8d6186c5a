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
from study.config.compose import load
from study.evidence.analyses import Ranks
from study.ledger.state import TrialState
from tests.trainers.processes import spawned
from trainers import LoopContext
from trainers.config import TrialConfig
from trainers.config.model import VARIANTS

FOLDER = Path(__file__).parents[3] / "conf" / "study"


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
    """A rate with a momentum and a width; few points cannot separate their shares."""
    found = module("search_space_odyssey").share_of_learning_rate(odyssey_of(points))
    assert found["figure"] > 0.2
    assert (found.get("verdict") == "undecided") is not decided


@pytest.mark.parametrize(("points", "beaten"), [(9, "undecided"), (10, "fails")])
@pytest.mark.parametrize("lead", [-2.0, 2.0])
def test_ranks_at_few_points_decide_nothing(
    points: int, beaten: str, lead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either direction: the best of few points belongs to a variant that they suit."""
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


def test_the_study_in_lns_differs_in_its_arithmetic_alone() -> None:
    first, second = load("search_space_odyssey"), load("search_space_odyssey_lns")
    assert (first.rows, first.space, first.claims) == (second.rows, second.space, second.claims)
    formats = {str(first.trial.precision), str(second.trial.precision)}
    assert len(formats) == 2


def test_the_estimate_of_evolution_strategies_points_uphill(evolution: ModuleType) -> None:
    """For a linear loss, the estimate from ranks has the gradient's direction."""
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(5, generator=generator)
    directions = torch.randn(4000, 5, generator=generator)
    losses = torch.stack([directions @ slope, -directions @ slope])
    estimate = evolution.gradient(losses, directions, 0.1)
    assert float(torch.cosine_similarity(estimate, slope, dim=0)) > 0.99
    shifted = evolution.gradient(torch.exp(losses), directions, 0.1)
    torch.testing.assert_close(shifted, estimate)  # only ranks count


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
    """Two epochs of evolution strategies as a rank of ``world_size``: its reports and its state."""
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
    """Each worker draws all directions and tries its share. A sum of losses is exact if all but one
    are zero. Five pairs do not divide by two, so the shares differ in size."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
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
    done = study.run(name, tiny | {"seeds": [0, 1]} | changes, tracking_uri="none", cpus=2)
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
    """For each seed, the test error in per cent at the lowest validation error."""
    found: dict[int, list[tuple[float, float]]] = {}
    for trial in trials:
        if trial.row == row and trial.epochs == epochs:
            last = trial.reports[epochs]["metrics"]["validation/error"]
            found.setdefault(trial.seed, []).append((last, 100 * trial.test["test/error"]))
    return [min(found[seed], key=lambda pair: pair[0])[1] for seed in sorted(found)]
