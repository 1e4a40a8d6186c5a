"""Claims about a whole search: how important a key is, and which value of a key ranks best.

- Importance: fANOVA (Hutter, Hoos, Leyton-Brown 2014) with Optuna's evaluator
  (:mod:`study.results.importance`). The interval is Student's; its standard deviation is that
  between bootstrap samples of the configurations. The forest underestimates effects that are not
  monotone; the interval does not include this bias.
- Ranks: Friedman's test (Friedman 1937) over blocks such as data sets, and Nemenyi's critical
  difference of mean ranks (J. Demsar, "Statistical Comparisons of Classifiers over Multiple Data
  Sets", JMLR 7, 2006, section 3.2.2)::

      CD = q / sqrt(2) sqrt(k (k + 1) / (6 N)),  k values, N blocks

  q is the 95 % quantile of the studentized range of k groups with infinite degrees of freedom.
  CD decides if Friedman's test rejects at 5 % (Demsar's procedure). For two values the exact sign
  test replaces Friedman's, because a lead in four of four blocks exceeds CD although it has a
  probability of 12.5 % by chance.

  Blocks that share a data set and seeds (such as formats) are not independent. With equal values,
  correlation 0.5 and five seeds, the test above alone calls a value worse in 10 % of cases (three
  values, four blocks) to 43 % (five values, sixteen blocks). For such blocks the seeds must agree:
  rank the values within each block and seed, and average over the blocks. The lead must exceed
  Tukey's difference of k values over S seeds (J. Tukey 1949; seeds as blocks)::

      HSD = q sqrt(M / S),  M the mean square of the residuals, (k - 1) (S - 1) degrees of freedom

  q is the 95 % quantile of the studentized range with these degrees of freedom. Both tests together
  are wrong in at most 3 % of these cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from study.config import ClaimConfig
from study.config.keys import lookup
from study.evidence.verdict import FAILS, HOLDS, UNDECIDED, Verdict, decide
from study.ledger.state import FINISHED, StudyState, TrialState
from study.plan.identity import task_key
from study.results.contrasts import ALPHA
from study.results.importance import resampled_shares
from study.results.likeness import Entry
from study.results.statistics import entries, interval, preference
from study.results.summary import figures_by_seed
from study.results.ties import mean_of
from study.text import counted

SAMPLES = 20
"""Bootstrap samples of the configurations for the interval of an importance."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Mean ranks of the values of a key over blocks; rank 1 is best, ties share.

    Attributes:
        of: name of the key.
        means: mean rank by value, best first.
        blocks: names of the blocks.
        p: p-value of Friedman's test, or of the sign test for two values; NaN with one block.
        critical: Nemenyi's critical difference of two mean ranks.
        by_seed: mean over seeds of each seed's ranks, by value.
        critical_by_seed: Tukey's difference of two means in ``by_seed``; infinite with one seed.
        tasks: number of distinct pairs of data set and loss; blocks that share one are dependent.
        runs: number of trials that the ranks are computed from.
    """

    of: str
    means: dict[str, float]
    blocks: list[str]
    p: float
    critical: float
    by_seed: dict[str, float]
    critical_by_seed: float
    tasks: int
    runs: int

    @property
    def dependent(self) -> bool:
        """Whether blocks share a data set, so that the seeds must agree with a verdict."""
        return self.tasks < len(self.blocks)

    def lead(self, best: str, means: Mapping[str, float]) -> float:
        """Return the lead in mean rank of ``best`` over the next value."""
        return min(rank for name, rank in means.items() if name != best) - means[best]


def judge_importance(claim: ClaimConfig, state: StudyState) -> Verdict:
    """Judge the share of the variance that a searched key explains."""
    key = str(claim.arguments["key"]).removeprefix("trial.")
    found = resampled_shares(state, SAMPLES)
    values = [each[key] for each in found if key in each]
    runs = sum(trial.status == FINISHED for trial in state.trials)
    if len(values) < 3:
        early = state.config.search.scheduler
        why = (
            f"those that {early} ended early are missing"
            if state.config.search.ends_early
            else "needs ten configurations that all have it, and a variance"
        )
        note = f"no importance of {key}: {why}"
        return Verdict(claim=claim, outcome=UNDECIDED, runs=runs, note=note)
    share, *drawn = values
    half = float(interval(drawn) or 0.0) * math.sqrt(len(drawn))
    return Verdict(
        claim=claim, outcome=decide(claim.bound, share - half, share + half), figure=share,
        low=share - half, high=share + half, unit="of the variance", runs=runs,
        note=f"interval by {SAMPLES} bootstrap samples of the configurations",
    )  # fmt: skip


def judge_ranks(claim: ClaimConfig, state: StudyState) -> Verdict:
    """Judge whether one value of a key ranks before all others."""
    arguments, best = claim.arguments, str(claim.arguments["best"])
    of, blocks = str(arguments["of"]), [str(key) for key in arguments["blocks"]]
    if missing := _without_figure(state, of, blocks):
        block, name = missing[0]
        note = f"{name} has no configuration in the block {block} whose figures are all finite"
        return Verdict(claim=claim, outcome=UNDECIDED, note=note)
    found = rank(state, of, blocks)
    if found is None or best not in found.means:
        note = "needs two values of the key, of which best is one, and a figure of each in a block"
        return Verdict(claim=claim, outcome=UNDECIDED, note=note)
    rival = next(name for name in found.means if name != best)
    lead, by_seed = (found.lead(best, means) for means in (found.means, found.by_seed))
    low, high = lead - found.critical, lead + found.critical
    outcome = _side(lead, found.critical) if found.p < ALPHA else UNDECIDED
    if found.dependent and _side(by_seed, found.critical_by_seed) != outcome:
        outcome = UNDECIDED
    test = "Friedman's" if len(found.means) > 2 else "the sign test's"
    p = "" if math.isnan(found.p) else f"; {test} p {found.p:.2g}"
    show = f"{len(found.blocks)} blocks show {found.critical:.2f} ranks"
    if found.critical >= (most := len(found.means) / 2):  # a lead over rivals that are alike
        show += f", and no lead is above {most:.1f}"
    if found.dependent:
        show += (
            f"; of {counted(found.tasks, 'data set')}, so that the seeds must agree, by"
            f" {by_seed:.2f} ranks, of which they show {found.critical_by_seed:.2f}"
        )
    return Verdict(
        claim=claim, outcome=outcome, figure=lead, low=low, high=high, unit="ranks",
        runs=found.runs,
        note=f"lead over {rival}; {show}{p}",
    )  # fmt: skip


def _side(lead: float, critical: float) -> str:
    return HOLDS if lead > critical else FAILS if lead < -critical else UNDECIDED


def claimed_ranks(state: StudyState) -> list[Ranks]:
    """Return the ranks for each claim about ranks that has the metrics for it."""
    found = [
        rank(state, str(claim.ranks["of"]), [str(key) for key in claim.ranks["blocks"]])
        for claim in state.config.claims
        if claim.kind == "ranks"
    ]
    return [ranks for ranks in found if ranks is not None]


def rank(state: StudyState, of: str, blocks: list[str]) -> Ranks | None:
    """Return the mean ranks of a key's values over blocks, by the test metric's mean over seeds.

    Returns None if there are fewer than two values, if no block has all values, or if no seed has
    a test metric for every value in every block.

    Args:
        state: state of the study.
        of: dotted trial key, or ``row``.
        blocks: dotted trial keys; trials with equal values of all keys form a block.
    """
    from scipy.stats import rankdata

    metric = state.config.primary_metric
    cells = chosen(state, of, blocks)
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    whole = {
        block: [figures_by_seed(cell[name], metric) for name in names]
        for block, cell in cells.items()
        if len(cell) == len(names)
    }
    found = [set(cell) for row in whole.values() for cell in row]
    seeds = sorted(set.intersection(*found)) if found else []
    if len(names) < 2 or not seeds:
        return None
    figures = [[mean_of(cell.values()) for cell in row] for row in whole.values()]
    means = rankdata(metric.sign * np.array(figures), axis=1).mean(axis=0)
    each = [[[cell[seed] for cell in row] for row in whole.values()] for seed in seeds]
    of_seeds = rankdata(metric.sign * np.array(each), axis=2).mean(axis=1)
    return Ranks(
        of=of, means=dict(sorted(zip(names, map(float, means), strict=True), key=itemgetter(1))),
        blocks=list(whole), p=_p(figures),
        critical=critical_difference(len(names), len(whole)),
        by_seed=dict(zip(names, map(float, of_seeds.mean(axis=0)), strict=True)),
        critical_by_seed=difference_of_seeds(of_seeds),
        tasks=len({task_key(cells[block][names[0]][0].config) for block in whole}),
        runs=sum(len(cell) for row in whole.values() for cell in row),
    )  # fmt: skip


def critical_difference(k: int, n: int) -> float:
    """Return Nemenyi's critical difference of the mean ranks of k values over n blocks.

    The module docstring has the formula; SciPy only provides the quantile.
    """
    from scipy.stats import studentized_range

    q = float(studentized_range.isf(ALPHA, k, math.inf))
    return q / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * n))


def difference_of_seeds(ranks: np.ndarray) -> float:
    """Return Tukey's honestly significant difference of the values' mean ranks.

    The module docstring has the formula; SciPy's ``tukey_hsd`` does not support blocks.

    Args:
        ranks: mean rank of each value for each seed, [S, k].

    Returns:
        The difference, infinite with one seed.
    """
    from scipy.stats import studentized_range

    seeds, k = ranks.shape
    if seeds < 2:
        return math.inf
    freedom = (seeds - 1) * (k - 1)
    rests = ranks - ranks.mean(axis=0) - ranks.mean(axis=1, keepdims=True) + ranks.mean()
    q = float(studentized_range.isf(ALPHA, k, freedom))
    return q * math.sqrt(float((rests**2).sum()) / freedom / seeds)


def _p(figures: list[list[float]]) -> float:
    """Return the p-value of Friedman's test over blocks, or of the sign test for two values."""
    from scipy.stats import binomtest, friedmanchisquare

    if len(figures) < 2:
        return math.nan
    if len(figures[0]) > 2:
        return float(friedmanchisquare(*zip(*figures, strict=True)).pvalue)
    wins, losses = (sum(sign * (a - b) < 0 for a, b in figures) for sign in (1, -1))
    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def chosen(
    state: StudyState, of: str, blocks: list[str]
) -> dict[str, dict[str, tuple[TrialState, ...]]]:
    """Return the trials of the best configuration for each value of a key in each block.

    The best configuration is chosen on the validation split as in the report's table:
    configurations that violate a constraint are excluded, and those with the most seeds come
    first, because a configuration that was not confirmed may only have been lucky. If each seed is
    a separate search, every seed has its own best configuration; a value that lacks a seed is left
    out.

    Args:
        state: state of the study.
        of: dotted trial key, or ``row``.
        blocks: dotted trial keys; trials with equal values of all keys form a block.

    Returns:
        The trials over all seeds, by block and value.
    """
    metric = state.config.primary_metric
    alone = state.config.search.per_seed
    best: dict[str, dict[str, dict[int, Entry]]] = {}
    for entry in entries(state):
        if not entry.eligible:
            continue
        cell = best.setdefault(_block(entry.trials[0], blocks), {})
        found = cell.setdefault(_value(entry.trials[0], of), {})
        seed = entry.trials[0].seed if alone else 0
        found[seed] = min(
            [found[seed], entry] if seed in found else [entry], key=preference(metric)
        )
    wanted = state.config.seeds if alone else [0]
    return {
        block: {
            name: tuple(trial for seed in wanted for trial in found[seed].trials)
            for name, found in cell.items()
            if all(seed in found for seed in wanted)
        }
        for block, cell in best.items()
    }


def _without_figure(state: StudyState, of: str, blocks: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of block and value that cannot be ranked, because a metric is missing or
    not finite."""
    metric = state.config.primary_metric
    known = {
        (block, name)
        for block, cell in chosen(state, of, blocks).items()
        for name, trials in cell.items()
        if len(figures := figures_by_seed(trials, metric)) == len(trials)
        and all(map(math.isfinite, figures.values()))
    }
    tried = {(_block(trial, blocks), _value(trial, of)): None for trial in state.trials}
    return [place for place in tried if place not in known]


def _block(trial: TrialState, blocks: list[str]) -> str:
    return ", ".join(_value(trial, key) for key in blocks)


def _value(trial: TrialState, key: str) -> str:
    if key == "row":
        return trial.row
    found = lookup(trial.config, key.removeprefix("trial."))
    return (
        ", ".join(f"{k} {v}" for k, v in found.items())
        if isinstance(found, Mapping)
        else str(found)
    )
