"""TrialConfig: round trip and refusals."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from lns_ops import lns12
from trainers.config import (
    DataConfig,
    MetricConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.config.compatibility import RULES, RULES_BEFORE_TRAINING
from trainers.config.layout import Layout
from trainers.config.lr_schedule import LRSchedule
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.models import build
from trainers.training.check import check_optimizer


def test_round_trip_through_plain_values() -> None:
    config = TrialConfig(
        precision=PrecisionConfig(format="lns12", kahan_sum=True),
        model=ModelConfig(hidden=[7, 8]),
        seed=3,
    )
    assert TrialConfig.from_dict(config.to_dict()) == config
    assert config.precision.lns_format == lns12
    assert PrecisionConfig().lns_format is None


def test_plain_values_are_copies_of_all_fields() -> None:
    """As ``dataclasses.asdict`` returns them."""
    config = TrialConfig(
        model=ModelConfig(name="net.py:net", args={"sizes": [1, {"deep": (2, 3)}], "on": True}),
        metrics={"r2": MetricConfig(name="torchmetrics:R2Score", args={"adjusted": 1})},
        changes=[{"epoch": 1, "optimizer.lr": 0.5}],
    )
    values = config.to_dict()
    assert values == asdict(config)
    values["model"]["args"]["sizes"][1]["deep"] = values["changes"][0]["epoch"] = None
    assert config.model.args["sizes"][1] == {"deep": [2, 3]}
    assert config.changes[0]["epoch"] == 1


@pytest.mark.parametrize(
    ("make", "values", "said"),
    [
        (DataConfig, {"name": "cifar"}, r"data.name='cifar': must be one of auto, mnist, digits"),
        (DataConfig, {"train_size": 0}, r"data.train_size=0: must be a whole number of at least 1"),
        (DataConfig, {"validation_size": -5}, r"data.validation_size=-5"),
        (ModelConfig, {"name": "rnn"}, r"model.name='rnn'"),
        (ModelConfig, {"hidden": [3, 0]}, r"model.hidden=0"),
        (
            ModelConfig,
            {"hidden": [[3]]},
            r"hidden=\[\[3\]\]: must be a list, each entry a whole number",
        ),
        (
            PrecisionConfig,
            {"scope": "all"},
            r"precision.scope='all': must be one of matmul, everywhere",
        ),
        (
            PrecisionConfig,
            {"accumulation": "bf16"},
            r"precision.accumulation='bf16': must be one of contract, float32",
        ),
        (
            OptimizerConfig,
            {"name": "hybridmul"},
            r"optimizer.name='hybridmul': must be one of sgd, adam, adamw, adamax",
        ),
        (OptimizerConfig, {"nesterov": True}, "nothing to look ahead with"),
        (
            OptimizerConfig,
            {"name": "lion", "eps": 1e-3},
            r"optimizer.eps=0.001 with optimizer.name=lion: means nothing to it, but to adam",
        ),
        (
            OptimizerConfig,
            {"name": "adam", "alpha": 0.9},
            r"optimizer.alpha=0.9 with optimizer.name=adam: means nothing to it",
        ),
        (
            OptimizerConfig,
            {"name": "madam", "beta": 1.0},
            r"optimizer.beta=1.0: must be at least 1e-6",
        ),
        (
            OptimizerConfig,
            {"name": "lars", "trust_coefficient": 0.0},
            r"optimizer.trust_coefficient=0.0: must be positive",
        ),
        (OptimizerConfig, {"centered": True}, r"optimizer.centered=True with optimizer.name=sgd"),
        (
            OptimizerConfig,
            {"betas": [0.9]},
            r"optimizer.betas=\[0.9\]: must be two numbers of at least 1e-6",
        ),
        (OptimizerConfig, {"eps": 0.0}, r"optimizer.eps=0.0: must be positive"),
        (
            OptimizerConfig,
            {"name": "madam", "weight_decay": 0.1},
            r"optimizer.weight_decay=0.1 with optimizer.name=madam",
        ),
        (
            OptimizerConfig,
            {"name": "adam", "momentum": 0.1},
            r"optimizer.momentum=0.1 with optimizer.name=adam",
        ),
        (
            PrecisionConfig,
            {"update_arithmetic": "float64"},
            r"precision.update_arithmetic='float64': must be one of lns, float32",
        ),
        (
            PrecisionConfig,
            {"stochastic_rounding": True},
            r"stochastic_rounding=true with precision.format=float32",
        ),
        (
            PrecisionConfig,
            {"format": "lns12", "stochastic_rounding": True, "kahan_sum": True},
            r"both save the part of an update",
        ),
        (
            PrecisionConfig,
            {"format": "lns13"},
            r"precision.format='lns13': format 'lns13': not one of lns16",
        ),
        (PrecisionConfig, {"format": "lns(8,9)"}, r"fraction_bits=9: with bits=8 at most 6"),
        (OptimizerConfig, {"lr": float("nan")}, r"optimizer.lr=nan"),
        (OptimizerConfig, {"momentum": 1.0}, r"optimizer.momentum=1.0: must be below 1"),
        (TrialConfig, {"epochs": 0}, r"epochs=0: must be a whole number of at least 1"),
        (TrialConfig, {"seed": -1}, r"seed=-1"),
        (TrialConfig, {"seed": 2**32}, r"seed=4294967296: must be below 2\^32"),
        (
            TrialConfig,
            {"workers": 3, "batch_size": 128},
            r"batch_size=128, workers=3: 128 / 3 is not a whole number",
        ),
    ],
)
def test_refusals_name_value_rule_and_remedy(make: type, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        make(**values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "float7"}, r"precision.format='float7': format 'float7': unknown; formats are"),
        ({"format": "int8/row"}, r"precision.format='int8/row': .* use for example int8/channel"),
        (
            {"format": "bfloat16", "scope": "matmul"},
            r"only LNS has scopes; use precision.scope=everywhere, with precision.master_format",
        ),
        (
            {"format": "lns12", "gradient_format": "lns16"},
            r"precision.gradient_format=lns16 with precision.format=lns12",
        ),
        (
            {"format": "float32", "master_format": "lns16"},
            r"precision.master_format=lns16 with precision.format=float32",
        ),
        (
            {"format": "int8", "master_format": "int8"},
            r"copies of the weights in their own format keep nothing",
        ),
        (
            {"format": "int8", "master_format": "int99"},
            r"precision.master_format='int99': int99: scaled integers have",
        ),
        ({"format": "bfloat16", "kahan_sum": True, "stochastic_rounding": True}, "choose one"),
        (
            {"format": "lns12", "sum_format": "bfloat16"},
            r"precision.sum_format=bfloat16 with precision.format=lns12: the trial computes in",
        ),
        (
            {"format": "int8", "sum_format": "posit(8)"},
            r"precision.sum_format='posit\(8\)': .* must be a binary float with a mantissa, to"
            r" which sums are rounded; use for example precision.sum_format=float\(8,13\)",
        ),
        (
            {"format": "int8", "sum_block": 128},
            r"precision.sum_block=128 with precision.sum_format=null: sums are float32, which has",
        ),
        (
            {"format": "int8", "sum_format": "bfloat16", "sum_block": 0},
            r"precision.sum_block=0: must be a whole number of at least 1; use for example",
        ),
        (
            {"format": "int8", "sum_format": "bfloat16", "sum_order": "random"},
            r"precision.sum_order='random': must be one of sequential, tree",
        ),
        (
            {"format": "int8", "sum_format": "bfloat16", "sum_of_blocks": "float64"},
            r"precision.sum_of_blocks='float64': must be one of float32, format",
        ),
    ],
)
def test_wrong_precisions_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrecisionConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"workers": 2, "sync": SyncConfig(name="local_sgd")},
            r"sync.name=local_sgd with precision.format=float16",
        ),
        (
            {"workers": 2, "sync": SyncConfig(name="asynchronous")},
            r"sync.name=asynchronous with precision.format=float16",
        ),
        (
            {"workers": 2, "layout": Layout(pp=2, micro_batches=2)},
            r"layout.pp=2 with precision.format=float16, precision.gradient_format=null: each",
        ),
        (
            {"workers": 2, "wire": WireConfig(name="int8")},
            r"wire.name=int8 with precision.format=float16, .* only float32 carries",
        ),
    ],
)
def test_what_float16_cannot_do_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrialConfig(precision=PrecisionConfig(format="float16"), **changes)


def test_simulated_formats_are_known_as_such() -> None:
    assert PrecisionConfig(format="bfloat16").simulated
    assert PrecisionConfig(format="lns8/channel").simulated
    assert PrecisionConfig(format="lns8/channel").lns_format is None
    assert not PrecisionConfig(format="lns8").simulated
    assert PrecisionConfig(format="float8_e4m3fn", stochastic_rounding=True).number_format.bits == 8


def test_the_cnn_says_what_it_needs() -> None:
    with pytest.raises(
        ValueError, match=r"model.channels=\[8\] with model.name=mlp: only the cnn has convolutions"
    ):
        ModelConfig(channels=[8])
    with pytest.raises(ValueError, match="must be one to three widths"):
        ModelConfig(name="cnn", channels=[4] * 4)
    with pytest.raises(ValueError, match=r"needs images, \(C, H, W\), \(H, W\) or square ones"):
        build(ModelConfig(name="cnn"), 50, 10)


def test_every_rule_states_its_keys_with_their_values_why_and_what_to_use() -> None:
    rules = (*RULES, *RULES_BEFORE_TRAINING)
    said = [rule.message(TrialConfig()) for rule in rules]
    assert len(set(said)) == len(said)
    for rule, message in zip(rules, said, strict=True):
        found = re.findall(r"([\w.]+)=\S", message.partition("; use ")[0])
        assert tuple(found) == rule.keys
        assert re.search(r": \w.*; use \w", message)
        assert "{" not in message.partition(": ")[2]


def test_of_several_rules_that_apply_the_first_is_raised() -> None:
    both = {"analysis_every": 1, "wire": WireConfig(name="int8")}
    with pytest.raises(ValueError, match=r"analysis_every=1 with precision.format=float32"):
        TrialConfig(**both)
    with pytest.raises(ValueError, match=r"wire.name=int8 with workers=1, .* one replica"):
        TrialConfig(**both | {"analysis_every": 0})


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_schedule": LRSchedule(decay="cosine")},
        {"lr_schedule": LRSchedule(warmup_epochs=1.0), "epochs": 2},
        {"epochs": 2, "changes": [{"epoch": 1, "optimizer.lr": 1.0}]},
    ],
)
def test_rprop_takes_its_rate_once(changes: dict[str, Any]) -> None:
    """Refused before training, but not when records of earlier versions are read."""
    config = TrialConfig(optimizer=OptimizerConfig(name="rprop"), **changes)
    with pytest.raises(ValueError, match=r"optimizer.name=rprop with .* in its first step alone"):
        check_optimizer(config)
