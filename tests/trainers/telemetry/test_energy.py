"""The energy model of products: its equation by hand, unknown formats, and a trial that reports
it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.telemetry.costs import LOOK_UP, LOOK_UP_RANGE
from trainers.telemetry.energy import mac_picojoules, operator_picojoules
from trainers.training.trainer import Training

BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[16]),
    batch_size=64,
    telemetry=True,
)
MACS = 640 * (2 * 64 * 16 + 3 * 16 * 10)
"""Multiply-accumulates of one epoch, without the input's gradient."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", 4.6),
        ("float16", 1.5 + 0.5),
        ("int8", 0.3),
        ("lns(9,3)", 0.03 + 3 * 0.05 + LOOK_UP),  # logarithms of 8 bits
        ("lns16", 0.0475 + 3 * 0.05 + LOOK_UP),  # 15 bits: 7/8 of the way from 0.03 to 0.05
        ("lns12", 0.0375 + 3 * 0.05 + LOOK_UP),  # 11 bits: 3/8 of the way
    ],
)
def test_a_multiply_accumulate_takes_what_its_operations_take(name: str, expected: float) -> None:
    assert mac_picojoules(name) == pytest.approx(expected, rel=1e-12)


def test_the_look_up_is_added_to_logarithms_alone() -> None:
    assert mac_picojoules("lns12", 2.0) - mac_picojoules("lns12", 0.5) == pytest.approx(1.5)
    assert mac_picojoules("float32", 2.0) == mac_picojoules("float32", 0.5)
    low, high = LOOK_UP_RANGE
    assert LOOK_UP / low == pytest.approx(high / LOOK_UP)


@pytest.mark.parametrize("name", ["posit(8)", "posit(16)/channel", "takum(8)", "takum_log(12)"])
def test_no_energy_is_made_up_for_other_formats(name: str) -> None:
    assert mac_picojoules(name) == math.inf


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="float31"):
        mac_picojoules("float31")


LNS = mac_picojoules("lns12")


@pytest.mark.parametrize(
    ("precision", "keys", "expected"),
    [
        ({}, {}, {"aten.mm": 4.6}),
        ({}, {"autocast": "float16", "device": "cuda"}, {"aten.mm": 2.0}),
        ({}, {"autocast": "bfloat16"}, {"aten.mm": mac_picojoules("bfloat16")}),
        ({"format": "lns12"}, {}, {"aten.convolution": LNS, "lns_ops.linear": LNS}),
        ({"format": "lns12", "scope": "matmul"}, {}, {"aten.bmm": 4.6, "lns_ops.matmul": LNS}),
        ({"format": "lns16", "accumulation": "float32"}, {}, {"lns_ops.matmul": 0.59 * 1.5}),
        ({"format": "posit(8)"}, {}, {"aten.mm": math.inf}),
        ({"format": "float16"}, {}, {"aten.mm": 2.0}),
        ({"format": "int8", "gradient_format": "float16"}, {}, {"aten.mm": math.inf}),
        ({"format": "int8", "master_format": "float32"}, {}, {"aten.mm": 0.3}),
    ],
)
def test_each_operator_has_the_energy_of_the_format_it_computes_in(
    precision: dict[str, Any], keys: dict[str, Any], expected: dict[str, float]
) -> None:
    config = replace(BASE, precision=PrecisionConfig(**precision), **keys)
    found = {operator: operator_picojoules(config, operator) for operator in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["float32", "int8", "lns12"])
def test_a_trial_tells_the_modelled_energy_of_every_epoch(name: str) -> None:
    training = Training(replace(BASE, precision=PrecisionConfig(format=name)))
    for _ in range(2):
        found = training.train_epoch()
        assert found["telemetry/modelled_joules"] == pytest.approx(
            1e-12 * MACS * mac_picojoules(name)
        )


def test_a_trial_in_a_format_without_figures_tells_none() -> None:
    found = Training(replace(BASE, precision=PrecisionConfig(format="posit(8)"))).train_epoch()
    assert "telemetry/macs_per_step" in found
    assert "telemetry/modelled_joules" not in found
