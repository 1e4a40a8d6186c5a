"""Checks of the claims of ``search_space_odyssey``: they take the study that has run.

A *set* is a data set; a row is a variant on one, searched at random. The best tenth of a row's
trials by the validation loss, with their test losses, stands for the variant, as in the paper. A
loss that is not finite, or above that of guessing, counts as that of guessing: how far a diverged
trial went says nothing about hyperparameters.

Source: K. Greff et al. 2015, "LSTM: A Search Space Odyssey" (arXiv:1503.04069), section IV.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd
from scipy.stats import ttest_ind

from study import Study
from study.claims.analyses import rank
from study.claims.verdict import of_mean
from study.config.space import Domain
from study.results.importance import fanova
from study.results.statistics import interval
from study.results.summary import summarise, test_figures

NOTES = 88
GUESSING = {"binary_cross_entropy": math.log(2), "cross_entropy": math.log(8)}
"""Loss of equal probabilities: of a note that sounds or not, and of eight symbols to copy."""
VARIANT, LOSS = "config.model.args.variant", "config.loss.name"
ENOUGH = 5
"""Fewest trials in the best tenth of a row for a test."""
LEVEL = 0.05
POINTS = 10
"""Fewest points of the space for shares of the variance, as for a claim's ``importance``."""


def no_variant_beats_vanilla(study: Study) -> dict[str, Any]:
    """Return how many variants are significantly better than vanilla, over all sets."""
    better = [name for name, p in _worse(study, sign=-1).items() if p < LEVEL]
    return _counted(study, better, "fails" if better else "holds", "better")


def forget_gate_and_output_activation_matter(study: Study) -> dict[str, Any]:
    """Return on how many sets NFG and NOAF are significantly worse than vanilla.

    It holds if both are on every set, and fails if one is significantly better on any.
    """
    both = ("nfg", "noaf")
    worse = [n for n, p in _worse(study, sign=1).items() if p < LEVEL and n.endswith(both)]
    better = [n for n, p in _worse(study, sign=-1).items() if p < LEVEL and n.endswith(both)]
    wanted = len(both) * len(_sets(study))
    verdict = "fails" if better else "holds" if len(worse) == wanted else "undecided"
    return _counted(study, worse, verdict, f"worse, of {wanted}")


def no_variant_ranks_above_vanilla(study: Study) -> dict[str, Any]:
    """Return the lead of the best other variant's mean rank over vanilla's.

    The claim holds if vanilla itself ranks best, and fails if another one leads by more than
    Nemenyi's critical difference where Friedman's test tells the variants apart. It is about the
    best of a search: fewer than :data:`POINTS` points of the space decide nothing.
    """
    found = rank(study.state, "model.args.variant", ["data.name", "data.args"])
    if found is None or "vanilla" not in found.means:
        return {"figure": math.nan, "verdict": "undecided", "note": "no set has every variant"}
    rival = next(name for name in found.means if name != "vanilla")
    lead = found.means["vanilla"] - found.means[rival]
    beaten = lead > found.critical and found.p < LEVEL
    verdict = "holds" if lead <= 0 else "fails" if beaten else "undecided"
    points = _points(_sets(study), study)
    few = f"; {points} points of the space on a set, of {POINTS}" if points < POINTS else ""
    return {
        "figure": lead, "low": lead - found.critical, "high": lead + found.critical,
        "unit": "ranks", "verdict": "undecided" if few else verdict, "runs": found.runs,
        "note": "mean ranks " + ", ".join(f"{n} {mean:.1f}" for n, mean in found.means.items())
        + f"; Friedman's p {found.p:.2g}{few}",
    }  # fmt: skip


def _points(sets: dict[str, pd.DataFrame], study: Study) -> int:
    """Return the least number of points of the space that were tried on a set."""
    keys = [f"config.{domain.key}" for domain in study.config.parsed_space.domains]
    return min(len(trials[keys].drop_duplicates()) for trials in sets.values())


def share_of_learning_rate(study: Study) -> dict[str, Any]:
    """Return the share of the variance that the learning rate explains, by fANOVA.

    Each variant has a forest of its own on each set, so that how much worse one of them is counts
    for none of the variance. The mean is over the variants and sets, the interval over the sets'
    means. All variants are tried at the same points of rate, momentum and width: fewer than
    :data:`POINTS` of them on a set cannot tell one from another, and decide nothing.
    """
    domains = study.config.parsed_space.domains
    sets = _sets(study)
    shares = {name: _shares(trials, domains) for name, trials in sets.items()}
    rates = [share["optimizer.lr"] for share in shares.values()]
    half = interval(rates) or math.inf
    mean, unit = statistics.fmean(rates), "of the variance"
    if (points := _points(sets, study)) < POINTS:
        note = f"{points} points of the space on a set, of {POINTS} that tell its keys apart"
        return {"figure": mean, "unit": unit, "verdict": "undecided", "note": note}
    note = "; ".join(
        f"{name}: " + ", ".join(f"{k.rpartition('.')[2]} {v:.2f}" for k, v in share.items())
        for name, share in shares.items()
    )
    return {"figure": mean, "low": mean - half, "high": mean + half, "unit": unit, "note": note}


def nats_of_the_chorales(study: Study) -> dict[str, Any]:
    """Return the test loss of the best vanilla LSTM on JSB Chorales in nats a frame, all seeds."""
    table = summarise(study.state)
    row = next(row for row in table.rows if row.label == "JSB vanilla")
    nats = [NOTES * figure for figure in test_figures(row.trials, table.metric)]
    return of_mean(nats, "nats a frame") | {"runs": len(nats)}


def _sets(study: Study) -> dict[str, pd.DataFrame]:
    """Return the finished trials of the search on each set; losses above guessing are that."""
    trials = study.trials
    trials = trials[(trials.status == "finished") & trials.seed.isin(study.config.seeds)].copy()
    most = trials[LOSS].map(GUESSING)
    for name in ("validation/loss", "test/loss"):
        trials[name] = trials[name].astype(float).clip(upper=most).fillna(most)
    return dict(iter(trials.groupby(trials.row.str.rpartition(" ")[0], sort=False)))


def _tenths(trials: pd.DataFrame) -> dict[str, list[float]]:
    """Return the test losses of the best tenth of each variant's trials on a set."""
    return {
        variant: list(group.nsmallest(round(len(group) / 10), "validation/loss")["test/loss"])
        for variant, group in trials.groupby(VARIANT)
    }


def _worse(study: Study, sign: int) -> dict[str, float]:
    """Return p of Welch's test that a variant is worse (``sign`` 1) or better (-1) than vanilla.

    The name of an entry is set and variant; p is multiplied by the number of tests (Bonferroni).
    Sets with too few trials are left out.
    """
    found = {}
    for name, trials in _sets(study).items():
        tenths = _tenths(trials)
        vanilla = tenths.pop("vanilla")
        for variant, losses in tenths.items():
            if min(len(losses), len(vanilla)) >= ENOUGH:
                signed = [sign * loss for loss in losses], [sign * loss for loss in vanilla]
                test = ttest_ind(*signed, equal_var=False, alternative="greater")
                found[f"{name} {variant}"] = float(test.pvalue)
    return {name: len(found) * p for name, p in found.items()}


def _counted(study: Study, names: list[str], verdict: str, word: str) -> dict[str, Any]:
    """Return the number of ``names``, undecided where no set has enough trials."""
    tested = len(_worse(study, sign=1))
    note = f"significantly {word}: {', '.join(names) or 'none'}; {tested} tests"
    if tested < 8 * len(_sets(study)):
        verdict = "undecided"
        note += f", as a row needs {10 * ENOUGH} trials for one"
    return {"figure": len(names), "unit": "variants", "verdict": verdict, "note": note}


def _shares(trials: pd.DataFrame, domains: Sequence[Domain]) -> dict[str, float]:
    """Return the share of the variance of the validation loss by key, the mean of the variants."""
    keys = {f"config.{domain.key}": domain.key for domain in domains}
    found = []
    for _, group in trials.groupby(VARIANT):
        params = group[list(keys)].rename(columns=keys).to_dict("records")
        of_variant = fanova(params, list(group["validation/loss"]), domains)
        found.append(of_variant or dict.fromkeys(keys.values(), 0.0))
    return {key: statistics.fmean(each[key] for each in found) for key in found[0]}
