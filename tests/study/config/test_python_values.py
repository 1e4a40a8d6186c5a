"""Values of Python programs in configs and changes: NumPy's, torch's, pandas', paths."""

from __future__ import annotations

import dataclasses
import enum
import fractions
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import study
from study import (
    DataConfig,
    LimitsConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RowConfig,
    StudyConfig,
    TrainableConfig,
    TrialConfig,
)
from study.config.compose import as_overrides, load
from study.errors import UserError
from study.plan.plan import make_plan


class Optimizer(enum.StrEnum):
    SGD = "sgd"


class Device(enum.Enum):
    CPU = "cpu"


VALUES: list[tuple[Any, Any]] = [
    (np.arange(2), [0, 1]),
    (torch.tensor(2), 2),
    (np.array([16, 8]), [16, 8]),
    (np.float64(0.25), 0.25),
    (Optimizer.SGD, "sgd"),
    ({"choice": np.logspace(-3, -1, 3)}, {"choice": [0.001, 0.01, 0.1]}),
    ({"choice": range(32, 97, 32)}, {"choice": [32, 64, 96]}),
    ({"uniform": (np.float32(0), np.float32(0.5))}, {"uniform": [0.0, 0.5]}),
    (Path("there"), "there"),
    (np.bool_(True), True),
    (np.int16(300), 300),
    ({"epochs": np.int64(3)}, {"epochs": 3}),
    (np.float32(2.5), 2.5),
    (np.str_("values"), "values"),
]
"""Values of libraries, each with its plain equivalent."""


def config(values: bool) -> StudyConfig:
    """A study with values of libraries, or with their plain equivalents."""
    (
        seeds,
        epochs,
        hidden,
        lr,
        name,
        rates,
        batches,
        momentum,
        place,
        flag,
        held,
        row,
        more,
        called,
    ) = (given if values else meant for given, meant in VALUES)
    return StudyConfig(
        name=called,
        trial=TrialConfig(
            data=DataConfig(name="digits", validation_size=held),
            model=ModelConfig(hidden=hidden),
            optimizer=OptimizerConfig(name=name, lr=lr),
            epochs=epochs,
            telemetry=flag,
        ),
        rows=[RowConfig(label="a", overrides=row, published=more)],
        seeds=seeds,
        space={"optimizer.lr": rates, "batch_size": batches, "optimizer.momentum": momentum},
        storage=place,
        limits=LimitsConfig(hours=more, trials=pd.Series([7])[0]),
        cpus=np.int32(2) if values else 2,
        tracking_uri="none",
    )


def test_values_of_libraries_are_the_plain_ones() -> None:
    """Equal up to the trials' ids, and with the same types."""
    given, meant = config(True), config(False)
    assert repr(given) == repr(meant)
    assert load(given, ["data=digits"]) == load(meant, ["data=digits"])
    plans = make_plan(given), make_plan(meant)
    assert [trial.id for trial in plans[0].trials] == [trial.id for trial in plans[1].trials]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"seeds": np.arange(2)}, {"seeds": [0, 1]}),
        ({"seeds": torch.arange(2)}, {"seeds": [0, 1]}),
        ({"seeds": pd.Series([0, 1])}, {"seeds": [0, 1]}),
        ({"seeds": range(2)}, {"seeds": [0, 1]}),
        ({"trial.epochs": np.int64(2)}, {"trial.epochs": 2}),
        ({"trial.optimizer.name": Optimizer.SGD}, {"trial.optimizer.name": "sgd"}),
        ({"storage": Path("there")}, {"storage": "there"}),
        ({"model": np.str_("mlp_128")}, {"model": "mlp_128"}),
        ({"trial": {"data": {"root": Path("x")}}}, {"trial": {"data": {"root": "x"}}}),
        (
            {"space": {"optimizer.lr": {"choice": np.array([0.5, 0.25])}}},
            {"space": {"optimizer.lr": {"choice": [0.5, 0.25]}}},
        ),
    ],
    ids=str,
)
def test_changes_take_the_same(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert as_overrides(given) == as_overrides(meant)


def test_arguments_of_own_code_are_plain_values(tmp_path: Path) -> None:
    args = {"folder": tmp_path, "n": np.int64(3), "rates": np.ones(2), "by": {np.str_("a"): (1,)}}
    found = TrainableConfig(name="loop.py:train", args=args)
    assert repr(found.args) == repr(
        {"folder": str(tmp_path), "n": 3, "rates": [1.0, 1.0], "by": {"a": [1]}}
    )


def test_a_study_is_made_told_and_extended_with_them(
    tiny: Callable[..., StudyConfig], storage: Path
) -> None:
    found = study.create(
        tiny("values"), storage=storage, seeds=np.arange(1), baseline=None, rows=[]
    )
    suggestion = found.ask()
    assert suggestion is not None
    found.tell(suggestion, {"validation/error": torch.tensor(0.5), "test/error": np.float32(0.25)})
    assert found.trials["test/error"].tolist() == [0.25]
    again = study.load("values", storage=storage)
    assert again.run(seeds=np.arange(2), limits={"trials": np.int64(1)}).config.seeds == [0, 1]


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (StudyConfig, {"seeds": {0, 1}}, r"seeds: \{0, 1\} is of type set; .*use sorted\(\.\.\.\)"),
        (StudyConfig, {"seeds": 3}, r"seeds=3: must be a list, .*example seeds=\[0\]"),
        (StudyConfig, {"seeds": np.ones(2)}, "each entry a whole number"),
        (StudyConfig, {"seeds": iter([0, 1])}, r"use list\(\.\.\.\)"),
        (StudyConfig, {"trial": {"epochs": 2}}, r"of type TrialConfig; .*=TrialConfig\(\)"),
        (StudyConfig, {"rows": RowConfig(label="a")}, r"example rows=\[RowConfig\(\.\.\.\)\]"),
        (TrialConfig, {"device": Device.CPU}, "use its .value"),
        (TrialConfig, {"epochs": "2"}, r"epochs='2': must be a whole number; .*epochs=20"),
        (TrialConfig, {"model": "mlp"}, r"example model=ModelConfig\(\)"),
        (ModelConfig, {"hidden": 16}, r"example hidden=\[512\]"),
        (OptimizerConfig, {"lr": "0.1"}, "must be a number"),
        (OptimizerConfig, {"lr": fractions.Fraction(1, 3)}, r"use float\(\.\.\.\)"),
        (
            StudyConfig,
            {"space": {"precision": {"choice": [PrecisionConfig()]}}},
            r"space.precision.choice: PrecisionConf.* use dataclasses.asdict",
        ),
        (
            TrainableConfig,
            {"name": "a.py:b", "args": {"act": torch.nn.ReLU}},
            "args.act: .*ReLU.* is of type type; a config holds numbers, texts",
        ),
    ],
)
def test_what_no_config_holds_is_refused_with_what_to_write(
    make: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**values)


def test_changes_are_refused_with_what_to_write(tiny: Callable[..., StudyConfig]) -> None:
    written = tiny("refused")
    for changes, message in (
        ({"seeds": {0, 1}}, r"seeds: .* use sorted\(\.\.\.\)"),
        ({"trial": TrialConfig()}, r"trial: TrialConfig.* use dataclasses.asdict\(\.\.\.\)"),
        ({"trial.device": Device.CPU}, "trial.device: .* use its .value"),
    ):
        with pytest.raises(UserError, match=message):
            study.run(written, changes)
    assert not written.folder.exists()
    as_said = {"seeds": sorted({0, 1}), "trial": dataclasses.asdict(TrialConfig())}
    assert load(written, as_overrides(as_said)).seeds == [0, 1]
