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

**Interval.** g* rises with every LNS network that qualifies and falls with every one of the other's
that does. Each network's error minus that of the best float32 network has an interval, Student's t
over paired seeds, corrected by Bonferroni for the number of networks: with 95 % all of them are
right, and then g* lies between what it is with the LNS networks that surely qualify beside the
other's that may, and with those that may beside those that surely do. A bootstrap over five seeds
would be too sure: where one network is 0.05 points too bad to qualify, it said so in 77 of 100
simulated studies only. Limit: which float32 network is the best counts as known.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from lns_ops.formats import Logarithmic, parse
from study import Study
from study.claims.verdict import of_mean
from study.ledger.state import FINISHED
from study.results.contrasts import ALPHA
from study.results.objectives import last_value, mean_objective
from study.results.statistics import Entry, entries, measure
from study.results.ties import mean_of
from trainers.telemetry.energy import mac_picojoules

WORSE = 0.5
"""Points of validation error by which a network may be worse than the best in float32."""
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
                whole = trial.status == FINISHED  # a trial that failed took less
                joules = measure(trial, "joules", metric) if whole else None
                more = math.nan if joules is None else joules
                by_seed[trial.seed] = by_seed.get(trial.seed, 0.0) + more
        sums.append(by_seed)
    return ratio(*sums)


def ratio(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """Return the mean ratio of two figures by seed, its interval Student's t over seeds."""
    ratios = np.array([value / theirs.get(seed, math.nan) for seed, value in ours.items()])
    if len(ratios) < 2 or not np.isfinite(ratios).all():
        return _undecided("needs joules of both rows at two seeds: run it with trial.device=cuda")
    return of_mean(ratios.tolist(), "times float32")


def _break_even(study: Study, rival: str) -> dict[str, Any]:
    """Return the break-even of LNS and ``rival``; see the head of this file for its interval."""
    found = entries(study.state)
    formats = [entry.categories["format"] for entry in found]
    macs = np.array([mean_objective(entry.trials, MACS) for entry in found])
    if not {"float32", rival} <= set(formats) or np.isnan(macs).any():
        return _undecided(f"needs rows of float32 and {rival}, and trial.telemetry=true")
    return break_even(_errors(study, found), macs, formats, rival)


def break_even(
    errors: np.ndarray, macs: np.ndarray, formats: list[str], rival: str
) -> dict[str, Any]:
    """Return the break-even of LNS and ``rival`` with its interval.

    Args:
        errors: validation error of each network, in per cent, ``[networks, seeds]``.
        macs, formats, rival: as in :func:`find`.
    """
    gaps = _gaps(errors, formats)
    mean, half = gaps.mean(axis=1), _halves(gaps)
    figure = find(mean <= WORSE, mean <= WORSE, macs, formats, rival)
    if half is None or math.isnan(figure):
        return _undecided(f"neither LNS nor {rival} comes near float32's error, or there is 1 seed")
    surely, maybe = mean + half <= WORSE, mean - half <= WORSE
    low = find(surely, maybe, macs, formats, rival)
    high = find(maybe, surely, macs, formats, rival)
    return {
        "figure": figure,
        "low": -math.inf if math.isnan(low) else low,
        "high": math.inf if math.isnan(high) else high,
        "unit": "pJ a look-up",
        "note": "networks within half a point of the best in float32",
    }


def _gaps(errors: np.ndarray, formats: list[str]) -> np.ndarray:
    """Return the errors minus those of the best float32 network, seed by seed."""
    floats = [place for place, name in enumerate(formats) if name == "float32"]
    best = min(floats, key=lambda place: mean_of(errors[place]))
    gaps: np.ndarray = errors - errors[best]
    return gaps


def _halves(gaps: np.ndarray) -> np.ndarray | None:
    """Return half the widths of the simultaneous intervals of mean gaps; None with one seed."""
    networks, seeds = gaps.shape
    if seeds < 2:
        return None
    critical = stats.t.isf(ALPHA / 2 / max(1, networks - 1), seeds - 1)
    halves: np.ndarray = critical * gaps.std(axis=1, ddof=1) / math.sqrt(seeds)
    return halves


def _undecided(note: str) -> dict[str, Any]:
    return {"figure": math.nan, "verdict": "undecided", "note": note}


def find(
    logs: np.ndarray, others: np.ndarray, macs: np.ndarray, formats: list[str], rival: str
) -> float:
    """Return the break-even in picojoules, NaN where no network of either kind qualifies.

    Args:
        logs, others: which networks qualify, of LNS and of ``rival``.
        macs: multiply-accumulates of each network.
        formats: name of its number format.
        rival: the format that is compared with LNS.
    """
    networks = list(zip(formats, macs, logs, others, strict=True))
    energy = min(
        (n * mac_picojoules(name) for name, n, _, good in networks if good and name == rival),
        default=None,
    )
    near = [(name, n) for name, n, good, _ in networks if good and _is_log(name)]
    if energy is None:
        return math.inf if near else math.nan
    return max((energy / n - mac_picojoules(name, 0.0) for name, n in near), default=-math.inf)


def _is_log(name: str) -> bool:
    return isinstance(parse(name), Logarithmic)


def _errors(study: Study, found: list[Entry]) -> np.ndarray:
    """Return the last validation errors, in per cent ``[networks, seeds]``."""
    metric = study.config.primary_metric
    table = [
        [last_value(trial, metric) for trial in sorted(entry.trials, key=lambda each: each.seed)]
        for entry in found
    ]
    return np.array(table, dtype=float)
