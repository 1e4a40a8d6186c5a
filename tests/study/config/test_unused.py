"""Keys that mean nothing beside others: refused where a row sets them, seen through where rows or
points of a search differ in nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from study.config.compose import change, load
from study.config.unused import UNUSED, effective, unused
from study.plan.identity import results_key, trial_id, work_id
from study.plan.plan import make_plan
from tests.trainers.conftest import toy_dataset
from trainers.config import TrialConfig
from trainers.training.trainer import Training

FLOAT32 = {"label": "float32", "overrides": {"precision.format": "float32"}}
IDLE: dict[str, dict[str, Any]] = {
    "precision.accumulation": {"precision.accumulation": "float32"},
    "precision.update_arithmetic": {"precision.update_arithmetic": "float32"},
    "precision.scope": {"precision.scope": "matmul"},
    "layout.schedule": {"layout.schedule": "gpipe"},
    "layout.pairwise": {"layout.pairwise": True},
    "wire.sum": {"wire.sum": "float32"},
    "profile.ranks": {"profile.ranks": [0]},
    "gpus": {"gpus": 0.5},
}
"""A value of every key that means nothing to a trial of one worker in float32 on a CPU."""


def config_of(**keys: Any) -> TrialConfig:
    values = TrialConfig().to_dict()
    for key, value in keys.items():
        part, _, rest = key.partition("__")
        values[part] = values[part] | {rest: value} if rest else value
    return TrialConfig.from_dict(values)


def test_every_key_that_may_mean_nothing_is_tried_here() -> None:
    assert [each.key for each in UNUSED] == list(IDLE)


@pytest.mark.parametrize("key", IDLE)
def test_a_row_that_sets_a_key_without_a_use_is_refused(tiny: Any, key: str) -> None:
    row = {**FLOAT32, "overrides": {**FLOAT32["overrides"], **IDLE[key]}}
    with pytest.raises(ValueError, match=rf"row 'float32': {key}=.* leave {key} out of the row"):
        tiny("idle", f"rows=[{row}]".replace("True", "true"), "baseline=null")


@pytest.mark.parametrize("key", IDLE)
def test_rows_that_differ_in_a_key_without_a_use_are_twins(tiny: Any, key: str) -> None:
    """One inherits it, the other takes it back; ids, of which ledgers are full, stay apart."""
    (value,) = IDLE[key].values()
    nested = {key: getattr_default(key)}
    rows = f"rows=[{FLOAT32}, {{label: plain, overrides: {nested}}}]"
    text = "[0]" if value == [0] else str(value).lower()
    study = tiny("twins", rows.replace("None", "null").replace("False", "false"),
                 f"trial.{key}={text}", "baseline=null")  # fmt: skip
    with pytest.raises(ValueError, match="'float32' and 'plain' with seed 0: both are the same"):
        make_plan(study)


def getattr_default(key: str) -> Any:
    value: Any = TrialConfig().to_dict()
    for part in key.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("key", [key for key in IDLE if key not in ("profile.ranks", "gpus")])
def test_what_means_nothing_changes_no_bit(key: str) -> None:
    """The table says so; training says it, too."""
    plain = {"model__hidden": [8], "epochs": 1, "batch_size": 32, "optimizer__lr": 0.1}
    name, (value,) = key.replace(".", "__"), IDLE[key].values()
    configs = config_of(**plain), config_of(**plain, **{name: value})
    assert trial_id(configs[0]) != trial_id(configs[1])
    assert work_id(configs[0]) == work_id(configs[1]) == trial_id(configs[0])
    assert results_key(configs[0].to_dict()) == results_key(configs[1].to_dict())
    assert effective(configs[1]) == configs[0].to_dict()
    trained = []
    for config in configs:
        training = Training(config, toy_dataset())
        training.train_epoch()
        trained.append([p.detach().clone() for p in training.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_what_means_something_is_left_alone() -> None:
    lns = {"precision__format": "lns12"}
    assert unused(config_of(**lns, precision__scope="matmul")) == []
    assert unused(config_of(**lns, precision__update_arithmetic="float32")) == []
    assert unused(config_of(**lns, precision__accumulation="float32")) == []
    assert unused(config_of(layout__pairwise=True, layout__micro_batches=2)) == []
    assert unused(config_of(workers=2, wire__sum="float32")) == []
    assert unused(config_of(device="auto", gpus=0.5)) == []
    own = {"name": "loop.py:train", "args": {}, "code": ""}
    assert unused(config_of(trainable=own, precision__scope="matmul")) == []


def test_a_row_may_inherit_what_means_nothing_to_it(tiny: Any) -> None:
    """One setting for a study's LNS rows beside a row in float32, as in conf/study/cifar10."""
    lns = {"label": "lns", "overrides": {"precision.format": "lns12"}}
    study = tiny("shared", f"rows=[{FLOAT32}, {lns}]", "trial.precision.accumulation=float32",
                 "baseline=null")  # fmt: skip
    assert len(make_plan(study).trials) == 2


def test_a_search_draws_no_twins(tiny: Any) -> None:
    """Of two accumulations float32 has one configuration, LNS has two."""
    study = tiny(
        "grid", "rows=[]", "baseline=null", "search.algorithm=grid",
        "space={precision.format: {grid: [float32, lns12]},"
        " precision.accumulation: {grid: [contract, float32]}}",
    )  # fmt: skip
    formats = [trial.config.precision.format for trial in make_plan(study).trials]
    assert sorted(formats) == ["float32", "lns12", "lns12"]


def test_a_base_trials_key_without_a_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("trial: {gpus: 0.5, epochs: 1}\n")
    said: list[str] = []
    load(str(tmp_path / "one.yaml"), ["data.name=digits"], said.append)
    assert said == [
        "trial.gpus=0.5 with device=cpu, workers=1: only the worker of a one-worker trial on a GPU"
        " takes a share of one, so it means nothing."
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("search.grace_period=2", r"search.grace_period=2 with search.scheduler=none: .* asha"),
        ("search.quantile_fraction=0.5", "search.quantile_fraction=0.5 with .* pbt, pb2"),
        ("insecure=true", "insecure=true without address: .* address=host:port"),
        ("small={epochz: 2}", "small: override 'epochz=2': .*epochs"),
        ("small={trial.epochs: two}", "small: override 'trial.epochs=two'"),
        ("small={model: mlp_9}", "small: model=mlp_9: no such config"),
    ],
)
def test_what_means_nothing_to_a_study_is_refused(tiny: Any, override: str, said: str) -> None:
    space = "space={optimizer.lr: {loguniform: [0.01, 1.0]}}"
    with pytest.raises(ValueError, match=said):
        tiny("nothing", space, override)


def test_a_study_that_exists_keeps_what_it_says(tiny: Any) -> None:
    study = tiny("exists", f"rows=[{FLOAT32}]", "baseline=null")
    assert change(study, ["insecure=true"]).insecure
