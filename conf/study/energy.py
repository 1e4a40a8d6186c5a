"""The figures of ``energy`` that no row says: the look-up's energy at which LNS and another format
break even, and measured joules.

The model (:mod:`trainers.telemetry.energy`) assumes the energy g of the look-up in an LNS addition,
so a ratio of modelled energies would be that assumption again. What the study can find is how many
multiply-accumulates each format needs for an error, since a coarse format may need a wider network.
Networks *qualify* whose mean validation error is at most :data:`WORSE` points above that of the
best float32 network. With N multiply-accumulates of e picojoules each, LNS and another format take
the same energy at

    g* = max over LNS networks that qualify of (E / N - e(LNS, g = 0)),
    E  = min over the other's networks that qualify of N e

Below g* the LNS takes less. It is minus infinity where no LNS network qualifies, infinity where
none of the other's does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lns_ops.formats import Logarithmic, parse
from study import Study
from study.results.objectives import last_value, mean_objective
from study.results.statistics import Entry, entries, interval, measure
from trainers.telemetry.energy import mac_picojoules

WORSE = 0.5
"""Points of validation error by which a network may be worse than the best in float32."""
RESAMPLES = 2000
MACS = "telemetry/macs_per_step"
"""Multiply-accumulates of a network, whose trials all take equally many steps."""


def against_float32(study: Study) -> dict[str, Any]:
    """Return the energy of a look-up at which LNS and float32 break even, in picojoules."""
    return _break_even(study, "float32")


def against_float16(study: Study) -> dict[str, Any]:
    """Return the energy of a look-up at which LNS and float16 break even, in picojoules."""
    return _break_even(study, "float16")


def against_int8(study: Study) -> dict[str, Any]:
    """Return the energy of a look-up at which LNS and int8 break even, in picojoules."""
    return _break_even(study, "int8")


def measured(study: Study) -> dict[str, Any]:
    """Return the measured joules of LNS trials over those of float32 trials of the same networks.

    LNS is 12 bits with Kahan summation. A seed's joules are summed over its networks.
    """
    metric, sums = study.config.primary_metric, []
    for row in ("lns12 + kahan", "float32"):
        by_seed: dict[int, float] = {}
        for trial in study.state.trials:
            if trial.row == row:
                joules = measure(trial, "joules", metric)
                by_seed[trial.seed] = by_seed.get(trial.seed, 0.0) + (joules or math.nan)
        sums.append(by_seed)
    return ratio(*sums)


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """Return the mean ratio of two figures by seed, its interval Student's t over seeds."""
    ratios = np.array([value / theirs.get(seed, math.nan) for seed, value in ours.items()])
    if len(ratios) < 2 or np.isnan(ratios).any():
        return _undecided("needs joules of both rows at two seeds: run it with trial.device=cuda")
    mean, half = float(ratios.mean()), interval(ratios.tolist()) or 0.0
    return {"figure": mean, "low": mean - half, "high": mean + half, "unit": "times float32"}


def _break_even(study: Study, rival: str) -> dict[str, Any]:
    """Return the break-even of LNS and ``rival``; its interval is the bootstrap's over seeds."""
    found = entries(study.state)
    formats = [entry.categories["format"] for entry in found]
    macs = np.array([mean_objective(entry.trials, MACS) for entry in found])
    if not {"float32", rival} <= set(formats) or np.isnan(macs).any():
        return _undecided(f"needs rows of float32 and {rival}, and trial.telemetry=true")
    errors = _errors(study, found)
    seeds, rng = errors.shape[1], np.random.default_rng(0)
    drawn = rng.integers(seeds, size=(RESAMPLES, seeds))
    values = [find(errors[:, picked].mean(axis=1), macs, formats, rival) for picked in drawn]
    figure = find(errors.mean(axis=1), macs, formats, rival)
    if np.isnan([figure, *values]).any() or seeds < 2:
        return _undecided(f"neither LNS nor {rival} comes near float32's error, or there is 1 seed")
    low, high = np.quantile(values, [0.025, 0.975], method="closest_observation")
    note = "bootstrap over seeds; networks within half a point of the best in float32"
    return {"figure": figure, "low": low, "high": high, "unit": "pJ a look-up", "note": note}


def _undecided(note: str) -> dict[str, Any]:
    return {"figure": math.nan, "verdict": "undecided", "note": note}


def find(errors: np.ndarray, macs: np.ndarray, formats: list[str], rival: str) -> float:
    """Return the break-even in picojoules, NaN where no network of either kind qualifies.

    Args:
        errors: mean validation error of each network, in per cent.
        macs: its multiply-accumulates.
        formats: name of its number format; one of them is float32.
        rival: the format that is compared with LNS.
    """
    floats = [name == "float32" for name in formats]
    qualifies = errors <= errors[floats].min() + WORSE
    networks = [(name, n) for name, n, good in zip(formats, macs, qualifies, strict=True) if good]
    energy = min((n * mac_picojoules(name) for name, n in networks if name == rival), default=None)
    logs = [(name, n) for name, n in networks if isinstance(parse(name), Logarithmic)]
    if energy is None:
        return math.inf if logs else math.nan
    return max((energy / n - mac_picojoules(name, 0.0) for name, n in logs), default=-math.inf)


def _errors(study: Study, found: list[Entry]) -> np.ndarray:
    """Return the last validation errors, in per cent ``[networks, seeds]``."""
    metric = study.config.primary_metric
    table = [
        [last_value(trial, metric) for trial in sorted(entry.trials, key=lambda each: each.seed)]
        for entry in found
    ]
    return np.array(table, dtype=float)
