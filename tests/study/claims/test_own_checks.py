"""The checks beside the study files: what they make of figures and of real trials."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import study
from study.handle import Study
from study.report.reproduction import reproduced
from trainers.checkpoint.files import load_checkpoint, save_checkpoint
from trainers.user_code import load_code

FOLDER = Path(__file__).parents[3] / "conf" / "study"
TINY: dict[str, Any] = {
    "rows": [
        {"label": "dp 1"},
        {"label": "dp 2", "overrides": {"workers": 2, "layout.micro_batches": 4}},
        {"label": "pp 2", "overrides": {"workers": 2, "layout.pp": 2}},
    ],
    "trial.data.args": {"length": 3, "examples": 40, "test": 16},
    "trial.model.args": {"layers": 2, "heads": 1, "width": 4},
    "trial.epochs": 2,
    "tracking_uri": "none",
    "max_concurrent": 1,
}


def check(name: str) -> Any:
    return load_code("claims.check", f"{FOLDER}/{name}")


def errors(octaves: float) -> dict[int, dict[int, float]]:
    """Errors that rise through 50 % at 16 * 2^(octaves (bits - 3))."""
    return {
        bits: {
            depth: 90.0 if depth > 16 * 2 ** (octaves * (bits - 3)) else 10.0
            for depth in (2**power for power in range(16))
        }
        for bits in (3, 4, 5)
    }


@pytest.mark.parametrize("octaves", [1.0, 2.0, 3.0])
def test_deep_vanilla_fits_the_octaves_of_depth_a_bit(octaves: float) -> None:
    fit = check("deep_vanilla.py:fit")
    found = fit([errors(octaves)])
    assert found["figure"] == pytest.approx(octaves)
    assert found["low"] <= octaves + 1e-9
    assert "3 bits 23, 4 bits" in found["note"]
    two = fit([errors(octaves), errors(octaves + 0.5)])
    assert two["low"] < octaves + 0.25 < two["high"]


def test_deep_vanilla_is_undecided_where_no_depth_fails() -> None:
    all_train = {bits: {10: 5.0, 100: 9.0} for bits in (3, 4, 5)}
    assert check("deep_vanilla.py:fit")([all_train])["verdict"] == "undecided"


ENERGY_FORMATS = ["float32", "float32", "int8", "lns12", "lns12"]
"""Formats of five networks, each narrower first; of N = 1, 2, 2, 1 and 2 multiply-accumulates."""


@pytest.mark.parametrize(
    ("errors", "float32", "int8"),
    [
        # all are near the best: one LNS operation for each of the other's, or for two of them
        ([2.0, 1.8, 2.0, 2.0, 2.0], 4.6 - 0.1875, 2 * 0.3 - 0.1875),
        # the narrow LNS network is not: two for each of float32
        ([2.0, 1.8, 2.0, 2.4, 2.0], 4.6 / 2 - 0.1875, 0.3 - 0.1875),
        # nor is the narrow float32 network
        ([2.6, 1.8, 2.0, 2.4, 2.0], 4.6 - 0.1875, 0.3 - 0.1875),
        ([2.0, 1.8, 9.0, 2.0, 2.0], 4.6 - 0.1875, math.inf),
        ([2.0, 1.8, 2.0, 9.0, 9.0], -math.inf, -math.inf),
        ([2.0, 1.8, 9.0, 9.0, 9.0], -math.inf, math.nan),
    ],
)
def test_energy_finds_the_look_up_at_which_formats_break_even(
    errors: list[float], float32: float, int8: float
) -> None:
    find = check("energy.py:find")
    arrays = np.array(errors), np.array([1.0, 2.0, 2.0, 1.0, 2.0])
    for rival, expected in (("float32", float32), ("int8", int8)):
        assert find(*arrays, ENERGY_FORMATS, rival) == pytest.approx(expected, nan_ok=True)


def test_energy_compares_joules_by_seed() -> None:
    ratio = check("energy.py:ratio")
    found = ratio({0: 6.0, 1: 8.0, 2: 3.0}, {0: 2.0, 1: 4.0, 2: 3.0})
    assert found["figure"] == pytest.approx(2.0)
    assert found["high"] - 2.0 == pytest.approx(2.4841377, rel=1e-6)  # 4.3026527 / sqrt(3)
    for ours in ({}, {0: 6.0}, {0: 6.0, 1: math.nan}, {0: 6.0, 5: 1.0}):
        assert ratio(ours, {0: 2.0, 1: 4.0})["verdict"] == "undecided"


@pytest.mark.slow
def test_energy_without_a_gpu_is_modelled_and_not_measured(tmp_path: Path) -> None:
    rows = [
        {"label": "float32"},
        {"label": "lns12 + kahan", "overrides": {"precision.format": "lns12"}},
        {"label": "int8", "overrides": {"precision.format": "int8"}},
    ]
    tiny: dict[str, Any] = {
        "rows": rows, "data": "digits", "trial.data.train_size": 300,
        "trial.data.validation_size": 300, "trial.epochs": 1, "seeds": [0, 1], "claims": [],
        "tracking_uri": "none",
    }  # fmt: skip
    ran = study.run("energy", tiny, small=True, storage=str(tmp_path))
    assert check("energy.py:measured")(ran)["verdict"] == "undecided"
    assert "trial.device=cuda" in check("energy.py:measured")(ran)["note"]
    found = check("energy.py:against_float32")(ran)
    assert found["low"] <= found["figure"] <= found["high"]
    assert "float16" in check("energy.py:against_float16")(ran)["note"]  # no such row
    assert "the line joins" in reproduced(ran.folder, "").alt
    networks = ran.state.trials
    assert len(networks) == 3 * 3 * 2
    by_row = {row: [trial for trial in networks if trial.row == row] for row in ("float32", "int8")}
    joules = {
        row: [sum(trial.metric("telemetry/modelled_joules").values()) for trial in trials]
        for row, trials in by_row.items()
    }
    assert np.array(joules["float32"]) / np.array(joules["int8"]) == pytest.approx(4.6 / 0.3)


@pytest.mark.slow
def test_one_hash_in_layouts_on_kernels_after_a_kill_and_not_of_other_weights(
    tmp_path: Path,
) -> None:
    ran = study.run("one_hash", TINY, small=True, storage=str(tmp_path))
    assert set(ran.claims["outcome"]) == {"holds"}
    assert set(ran.claims["figure"]) == {1.0}
    note = ran.claims["note"]["one_hash_on_every_kernel_and_after_a_kill"]
    assert "gather" in note
    assert "dp 1" in note
    last = Path(ran.state.trials[1].checkpoints_left()[0])
    tensors, state = load_checkpoint(last)
    name = next(name for name in sorted(tensors) if name.endswith("weight"))
    tensors[name].view(-1)[0] += 1
    save_checkpoint(last, tensors, {key: state[key] for key in state if key != "digest"})
    again = Study(ran.folder).claims
    assert again["outcome"]["one_hash_in_every_layout"] == "fails"
    assert again["figure"]["one_hash_in_every_layout"] == 2.0
