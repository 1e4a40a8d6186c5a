"""A study's answer as text: how each row compares with the reference row, the ``baseline``.

Every finished row is compared with the reference seed by seed, using the paired contrast of
:mod:`study.results.contrasts`, whose 95 % intervals are corrected for the number of comparisons. A
row is one of:

- *worse* or *better*: the interval excludes 0.
- *as good within X*: the interval is inside the margin. The margin is the row's requirement
  (``within``, ``worse_by``), if the study is comparable with the published one, or the bound of a
  claim that compares the row with the reference.
- *open*: the interval contains 0 and is wider than the margin. The answer then gives the number of
  seeds that would show a difference as large as the margin, and the command that adds them.
- without a margin: the answer gives the largest loss that the interval allows.

Without a reference row, or with one seed, nothing is compared, and the answer says why. A row with
a diverged trial is listed but not compared.
"""

from __future__ import annotations

import bisect
import itertools
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from study.config import ClaimConfig, Metric, StudyConfig
from study.ledger.state import ENDED, StudyState
from study.results.configurations import configurations
from study.results.contrasts import POWER, Contrast, paired
from study.results.objectives import diverged, lacking
from study.results.summary import Row, Summary, figures_by_seed
from study.results.ties import compared
from study.text import counted, duration

MOST_ROWS = 6
"""Maximum number of rows listed per outcome; the table has all rows."""
MOST_SEEDS = 100
"""Maximum number of seeds that the answer proposes."""
FEW_SEEDS = 3
"""Number of seeds that the answer proposes for a study with one."""
SIZEABLE = 0.25
"""The answer mentions the size of one test example if it is at least this share of half an
interval."""
WHOLE = 0.01
"""Tolerance for a count of wrong test examples to be a whole number; reported shares have seven
digits."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row compared with the reference row.

    Attributes:
        row: the row.
        contrast: row minus reference over their common seeds, in percentage points for errors; None
            with a single common seed, or if all seeds have the same difference.
        margin: lowest and highest difference at which the row counts as good as the reference; None
            if the config sets no margin.
    """

    row: Row
    contrast: Contrast | None
    margin: tuple[float, float] | None = None

    @property
    def outcome(self) -> str:
        """``decided``, ``inside`` the margin, ``open``, ``bounded`` without a margin, ``none``."""
        if self.contrast is None:
            return "none"
        if self.contrast.decided:
            return "decided"
        if self.margin is None:
            return "bounded"
        return "inside" if self.inside else "open"

    @property
    def inside(self) -> bool:
        """Whether the interval lies inside the margin, ends included."""
        if self.contrast is None or self.margin is None:
            return False
        low, high = map(compared, self.contrast.interval)
        return self.margin[0] <= low and high <= self.margin[1]


def answer(state: StudyState, summary: Summary) -> str:
    """Return the study's finding as a few sentences in one string."""
    return " ".join(sentences(state, summary))


def sentences(state: StudyState, summary: Summary) -> list[str]:
    """Return the study's finding, one sentence per entry."""
    ended = [row for row in summary.rows if row.mean is not None and row.finished == row.seeds]
    whole = [row for row in ended if not row.diverged]
    if not whole:
        found = [_none(state), *lacking(state)]
    elif len(summary.rows) == 1:
        found = [_best(whole, summary.metric)]
    elif not (reference := state.config.baseline):
        found = [_best(whole, summary.metric), _no_reference(whole, state)]
    elif base := next((row for row in whole if row.label == reference), None):
        found = _beside(base, [row for row in whole if row is not base], state, summary)
    else:
        found = [f"Nothing is compared: {reference}, the reference row, has no mean of every seed."]
    return [*found, *_diverged(ended)]


def _none(state: StudyState) -> str:
    """Explain a missing answer: unfinished trials, divergence, or violated constraints."""
    search, trials = state.config.search, state.trials
    constraints = search.constraints
    ended = sum(trial.status in ENDED for trial in trials)
    lost = sum(diverged(trial, state.config.primary_metric.name) for trial in trials)
    done = configurations(trials, search.objectives, constraints)
    found = [each for each in done if each.finished and not each.diverged]
    if ended == len(trials) and lost and not found:
        return f"No answer: {lost} of {counted(len(trials), 'trial')} diverged."
    if ended < len(trials) or not found or any(each.eligible for each in found):
        return f"No answer yet: {ended} of {len(trials)} trials have ended."
    bounds = ", ".join(f"{metric} {bound}" for metric, bound in constraints.items())
    return f"No answer: all {len(found)} finished configurations violate {bounds}."


def capital(text: str) -> str:
    """Return ``text`` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def compare(base: Row, others: list[Row], metric: Metric) -> list[Comparison]:
    """Return each row's contrast with ``base``, corrected for the number of contrasts."""
    reference = figures_by_seed(base.trials, metric)
    found = []
    for row in others:
        figures = figures_by_seed(row.trials, metric)
        shared = sorted(reference.keys() & figures.keys())
        differences = [figures[seed] - reference[seed] for seed in shared]
        found.append(Comparison(row=row, contrast=paired(differences, "seeds")))
    tests = sum(each.contrast is not None for each in found)
    return [
        replace(each, contrast=each.contrast and replace(each.contrast, tests=tests))
        for each in found
    ]


def compare_rows(state: StudyState, summary: Summary) -> list[Comparison]:
    """Return the comparison of every finished row with the reference row, with its margin.

    The list is empty without a reference row that has finished. Rows with a diverged trial are left
    out.
    """
    whole = [
        row
        for row in summary.rows
        if row.mean is not None and row.finished == row.seeds and not row.diverged
    ]
    base = next((row for row in whole if row.label == state.config.baseline), None)
    if base is None:
        return []
    found = compare(base, [row for row in whole if row is not base], summary.metric)
    return [
        replace(each, margin=margin_of(each.row.label, state.config, summary)) for each in found
    ]


def margin_of(label: str, study: StudyConfig, summary: Summary) -> tuple[float, float] | None:
    """Return the lowest and highest difference at which a row counts as good as the reference.

    Requirements and claims about published figures count only if the study is comparable with the
    published one. Returns None if no requirement or claim limits the loss.
    """
    row = next((row for row in study.rows if row.label == label), None)
    sizes = (row.within, row.worse_by) if row and summary.comparable else ()
    ranges = [(-size, size) for size in sizes if size is not None and size > 0]
    for claim in study.claims:
        if summary.comparable or claim.published is None:
            ranges += _range_of(claim, label, study.baseline or "", summary.metric)
    low = max((each[0] for each in ranges), default=-math.inf)
    high = min((each[1] for each in ranges), default=math.inf)
    return (low, high) if math.isfinite(high if summary.metric.sign > 0 else low) else None


def _range_of(
    claim: ClaimConfig, label: str, reference: str, metric: Metric
) -> list[tuple[float, float]]:
    """Return the range of differences, row minus reference, that a claim allows.

    The list is empty if the range excludes 0: then the claim is that the row is worse or better
    than the reference, which does not define a margin.
    """
    low, high = claim.bound
    if claim.kind == "difference" and claim.rows == [label, reference]:
        found = low, high
    elif claim.kind == "difference" and claim.rows == [reference, label]:
        found = -high, -low
    elif claim.kind == "no_row_beats" and claim.rows == [label] and "by" in claim.arguments:
        by = float(claim.arguments["by"])
        found = (-math.inf, by) if metric.sign > 0 else (-by, math.inf)
    else:
        return []
    return [found] if found[0] < 0 < found[1] else []


# -------------------------------------------------------------------------------------------------
# The sentences.


def _beside(base: Row, others: list[Row], state: StudyState, summary: Summary) -> list[str]:
    """Return the sentences about the rows that were compared with the reference row."""
    metric, found = summary.metric, compare_rows(state, summary)
    if not others:
        return [f"{capital(metric.test_words)} of {base.label}: {_mean(base, metric)}."]
    if len(base.trials) < 2:
        return [
            "Nothing is compared: one seed has no interval.",
            f"To compare the rows, add seeds: {_more_seeds(state, FEW_SEEDS - 1)}.",
        ]
    found = sorted(found, key=lambda each: _loss(each, metric), reverse=True)
    worse = [each for each in found if each.outcome == "decided" and _loss(each, metric) > 0]
    better = [each for each in found if each.outcome == "decided" and _loss(each, metric) < 0]
    parts = [
        _decided(worse, "worse", base, metric),
        _decided(better, "better", base, metric),
        _inside([each for each in found if each.outcome == "inside"], base, metric),
        _bounded([each for each in found if each.outcome == "bounded"], metric),
        *_open([each for each in found if each.outcome == "open"], state, metric),
        *_untested([each for each in found if each.outcome == "none"], base, metric),
    ]
    tested = [each for each in found if each.contrast is not None]
    return [*filter(None, parts), *_scope(tested, base, state, summary)]


def _loss(found: Comparison, metric: Metric) -> float:
    """Return by how much a row is worse than the reference."""
    return metric.sign * (found.contrast.difference if found.contrast else found.row.gap or 0.0)


def _decided(found: list[Comparison], word: str, base: Row, metric: Metric) -> str:
    """List the rows that are worse or better, each with its difference and the interval."""
    listed = []
    for number, each in enumerate(found):
        assert each.contrast is not None, "decided by its interval"
        low, high = sorted(map(abs, each.contrast.interval))
        size = metric.figure(abs(each.contrast.difference))
        is_worse = f" is {word} than {base.label}" if number == 0 else ""
        unit = metric.points if number == 0 else ""
        ends = f"{metric.figure(low)} to {metric.figure(high)}"
        kept = f", inside the margin of {_margin(each, metric)}" if each.inside else ""
        listed.append(f"{each.row.label}{is_worse} by {size}{unit} ({ends}{kept})")
    return f"{_enumerate(listed)}." if listed else ""


def _margin(found: Comparison, metric: Metric) -> str:
    """Return the largest loss inside a row's margin."""
    assert found.margin is not None, "asked for rows with a margin"
    return metric.figure(found.margin[1] if metric.sign > 0 else -found.margin[0])


def _inside(found: list[Comparison], base: Row, metric: Metric) -> str:
    """List the rows that are as good as the reference within their margins."""
    listed = [
        f"{each.row.label}{f' is as good as {base.label}' if number == 0 else ''} within"
        f" {_margin(each, metric)}{metric.points if number == 0 else ''} ({_ends(each, metric)})"
        for number, each in enumerate(found)
    ]
    return f"{_enumerate(listed)}." if listed else ""


def _bounded(found: list[Comparison], metric: Metric) -> str:
    """List the rows without a margin or a visible difference, each with its largest possible
    loss."""
    listed = []
    for number, each in enumerate(found):
        assert each.contrast is not None, "bounded by its interval"
        most = max(metric.sign * end for end in each.contrast.interval)
        unit = metric.points if number == 0 else ""
        listed.append(f"{each.row.label} (at most {metric.figure(most)}{unit})")
    return f"No loss shows for {_enumerate(listed)}." if listed else ""


def _open(found: list[Comparison], state: StudyState, metric: Metric) -> list[str]:
    """List the open rows, and the command that adds enough seeds to decide them."""
    if not found:
        return []
    listed = [
        f"{each.row.label} ({_ends(each, metric)}{metric.points}, wider than the margin of"
        f" {_margin(each, metric)})"
        for each in found
    ]
    needed = max(_seeds_for(each, metric) for each in found)
    said = f"Open: {_enumerate(listed)}."
    if needed > MOST_SEEDS:
        return [said, f"More than {MOST_SEEDS} seeds would be needed for these margins."]
    power = f"with {needed} seeds a difference as large as the margin would show in"
    chance = f"{100 * POWER:.0f} % of such studies"
    now = min(round(each.contrast.df) + 1 for each in found if each.contrast)
    return [said, f"{capital(power)} {chance}: {_more_seeds(state, needed - now)}."]


def _seeds_for(found: Comparison, metric: Metric) -> int:
    """Return the smallest number of seeds with which a loss as large as the margin would show."""
    contrast, margin = found.contrast, found.margin
    assert contrast is not None, "open by its interval"
    assert margin is not None, "open by its margin"
    most = margin[1] if metric.sign > 0 else -margin[0]
    counts = range(round(contrast.df) + 2, MOST_SEEDS + 1)
    return bisect.bisect_left(counts, -most, key=lambda n: -contrast.over_pairs(n).least) + (
        counts.start
    )


def _more_seeds(state: StudyState, missing: int) -> str:
    """Return the command that adds ``missing`` seeds to the study, and its estimated cost.

    If a search confirms its best configurations with extra seeds, those are the ones extended.
    """
    study, search = state.config, state.config.search
    key, seeds = "seeds", list(study.seeds)
    trials = round(missing / len(seeds) * len(state.trials))
    if search.confirm_seeds:
        key, seeds = "search.confirm_seeds", list(search.confirm_seeds)
        trials = missing * search.confirm * len(state.rows())
    unused = itertools.filterfalse(
        {*study.seeds, *search.confirm_seeds}.__contains__, itertools.count(max(seeds) + 1)
    )
    added = itertools.islice(unused, missing)
    words = f"{key}=[{','.join(map(str, [*seeds, *added]))}]"
    # the same quoting on every platform: `report --verify` compares pages byte for byte
    command = shlex.join(["lns-study", "run", "--extend", study.slug, words])
    seconds = trials * sum(trial.spent for trial in state.trials) / len(state.trials)
    cost = f"{counted(trials, 'more trial')}, about {duration(seconds)} of trial time"
    return f"`{command}` ({cost})"


def _untested(found: list[Comparison], base: Row, metric: Metric) -> list[str]:
    """List the rows whose difference is the same at every seed: a test needs some spread."""
    equal = [each.row.label for each in found if each.row.gap == 0]
    shifted = [
        f"{each.row.label} by {metric.difference(each.row.gap)}{metric.points}"
        for each in found
        if each.row.gap and math.isfinite(each.row.gap)
    ]
    parts = []
    if equal:
        parts.append(f"Equal to {base.label} at every seed: {_enumerate(equal)}.")
    if shifted:
        parts.append(f"Not tested, because the seeds show no spread: {_enumerate(shifted)}.")
    return parts


def _scope(
    found: Sequence[Comparison], base: Row, state: StudyState, summary: Summary
) -> list[str]:
    """Describe the basis of the differences: metric, level, seeds, test set, size of one
    example."""
    metric = summary.metric
    counts = sorted({round(each.contrast.df) + 1 for each in found if each.contrast})
    if not counts:
        return []
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    facts = [f"95 %, {seeds} seeds"]
    best = ", each row at its best configuration" if summary.searched else ""
    higher = ", higher is better" if metric.sign < 0 else ""
    size = _test_size(state)
    if size:
        facts.append(f"{size:,} test examples")
    grain = _grain(size, found, base, metric)
    one = f"; one example is {metric.figure(grain)}{metric.points}" if grain else ""
    return [f"({capital(metric.test_words)}{higher}{best}; {', '.join(facts)}{one}.)"]


def _test_size(state: StudyState) -> int:
    """Return the number of test examples; 0 if it is unknown or not the same for all rows."""
    sizes = {int(entry.get("test") or 0) for entry in state.plan.get("data", [])}
    measured = state.config.primary_metric.test_name.startswith("test/")
    return sizes.pop() if len(sizes) == 1 and measured else 0


def _grain(size: int, found: Iterable[Comparison], base: Row, metric: Metric) -> float:
    """Return how much one test example adds to the error, in points; 0 if that is negligible.

    It is negligible below :data:`SIZEABLE` times half the narrowest interval. Also returns 0 if an
    example has several answers, like a text, because then errors are not whole examples.
    """
    halves = [each.contrast.half for each in found if each.contrast]
    if not (metric.percent and size and halves):
        return 0.0
    grain = 100 / size
    wrong = [value / grain for value in figures_by_seed(base.trials, metric).values()]
    if any(abs(count - round(count)) > WHOLE for count in wrong):
        return 0.0
    return grain if grain >= SIZEABLE * min(halves) else 0.0


def _ends(found: Comparison, metric: Metric) -> str:
    """Return the ends of a difference's interval, with signs."""
    assert found.contrast is not None, "asked for rows with an interval"
    return " to ".join(map(metric.difference, found.contrast.interval))


def _best(rows: list[Row], metric: Metric) -> str:
    """Name the rows with the best and second-best mean, without a test."""
    figures = {row.label: metric.sign * compared(row.mean or 0.0) for row in rows}
    first, *rest = sorted(
        rows, key=lambda row: (math.isnan(figures[row.label]), figures[row.label])
    )
    best = f"{capital(metric.best_word)} {metric.test_words}: {first.label}, {_mean(first, metric)}"
    if not rest:
        return f"{best}."
    gap = metric.figure(abs((rest[0].mean or 0.0) - (first.mean or 0.0)))
    beside = f"{gap}{metric.points} {'higher' if metric.sign > 0 else 'lower'}"
    return f"{best}; next {rest[0].label}, {beside} (chosen by these {metric.plural})."


def _no_reference(rows: list[Row], state: StudyState) -> str:
    """Explain that rows are not compared without a reference row."""
    why = "Nothing is compared, because no row is the reference"
    return f"{why}; `baseline={rows[0].label}` makes one." if len(rows) > 1 else f"{why}."


def _diverged(ended: list[Row]) -> list[str]:
    """Name the rows with diverged trials."""
    listed = [f"{row.label} ({row.diverged} of {row.seeds})" for row in ended if row.diverged]
    return [f"Not compared, because trials diverged: {_enumerate(listed)}."] if listed else []


def _enumerate(listed: list[str]) -> str:
    """Join texts as in a sentence: ``a, b and c``; beyond :data:`MOST_ROWS`, ``and 3 more``."""
    more = len(listed) - MOST_ROWS
    *first, last = [*listed[:MOST_ROWS], f"{more} more"] if more > 0 else listed
    return f"{', '.join(first)} and {last}" if first else last


def _mean(row: Row, metric: Metric) -> str:
    assert row.mean is not None, "only whole rows are compared"
    seeds = counted(row.seeds, "seed")
    return f"{metric.mean(row.mean, row.sd)}{metric.unit}, {seeds}"
