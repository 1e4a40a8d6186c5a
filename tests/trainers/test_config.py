"""TrialConfig: round trip and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from lns_ops import lns12
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig


def test_round_trip_through_plain_values() -> None:
    config = TrialConfig(precision=PrecisionConfig(format="lns12", kahan_sum=True), model=ModelConfig(hidden=[7, 8]), seed=3)
    assert TrialConfig.from_dict(config.to_dict()) == config
    assert config.precision.lns_format == lns12
    assert PrecisionConfig().lns_format is None


@pytest.mark.parametrize(
    ("make", "values", "said"),
    [
        (DataConfig, {"name": "cifar"}, r"data.name='cifar': must be one of auto, mnist, digits"),
        (DataConfig, {"train_size": 0}, r"data.train_size=0: must be a whole number of at least 1"),
        (DataConfig, {"validation_size": -5}, r"data.validation_size=-5"),
        (ModelConfig, {"name": "cnn"}, r"model.name='cnn'"),
        (ModelConfig, {"hidden": [3, 0]}, r"model.hidden=0"),
        (ModelConfig, {"hidden": [[3]]}, r"model.hidden=\[3\]: must be a whole number"),
        (PrecisionConfig, {"scope": "all"}, r"precision.scope='all': must be one of matmul, everywhere"),
        (PrecisionConfig, {"accumulation": "bf16"}, r"precision.accumulation='bf16': must be one of contract, float32"),
        (OptimizerConfig, {"name": "lion"}, r"optimizer.name='lion': must be one of sgd, adam, adamw"),
        (OptimizerConfig, {"betas": [0.9]}, r"optimizer.betas=\[0.9\]: must be two numbers of at least 1e-6"),
        (OptimizerConfig, {"eps": 0.0}, r"optimizer.eps=0.0: must be positive"),
        (OptimizerConfig, {"weight_decay": 0.1}, r"optimizer.weight_decay=0.1 with optimizer.name=sgd"),
        (OptimizerConfig, {"name": "adam", "momentum": 0.1}, r"optimizer.momentum=0.1 with optimizer.name=adam"),
        (
            PrecisionConfig,
            {"update_arithmetic": "float64"},
            r"precision.update_arithmetic='float64': must be one of lns, float32",
        ),
        (PrecisionConfig, {"stochastic_rounding": True}, r"stochastic_rounding=true with precision.format=float32"),
        (PrecisionConfig, {"format": "lns12", "stochastic_rounding": True, "kahan_sum": True}, r"each keeps what the other"),
        (PrecisionConfig, {"format": "lns13"}, r"precision.format='lns13': must be float32 or an LNS format"),
        (PrecisionConfig, {"format": "lns(8,9)"}, r"fraction_bits=9: with bits=8 at most 6"),
        (OptimizerConfig, {"lr": float("nan")}, r"optimizer.lr=nan"),
        (OptimizerConfig, {"momentum": 1.0}, r"optimizer.momentum=1.0: must be below 1"),
        (TrialConfig, {"epochs": 0}, r"epochs=0: must be a whole number of at least 1"),
        (TrialConfig, {"seed": -1}, r"seed=-1"),
        (TrialConfig, {"seed": 2**32}, r"seed=4294967296: must be below 2\^32"),
        (TrialConfig, {"workers": 3, "batch_size": 128}, r"batch_size=128, workers=3: 128 / 3 is no whole number"),
    ],
)
def test_refusals_name_value_rule_and_remedy(make: type, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        make(**values)
