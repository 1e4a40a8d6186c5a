"""Comparison of two studies: their common configurations, paired by seed, and a test of the
difference.

Both studies must have the same metric. Trials are matched by all settings that affect results. If
this matches no trials, they are matched by row, number and seed, and the differing keys are listed.
Matched trials with different data raise an error, because their figures cannot be subtracted. A
configuration counts with the seeds that finished in both studies.

Each row, and all rows together, are tested by Student's t over seeds
(:mod:`study.results.contrasts`). The difference at a seed is the mean over configurations, so that
configurations do not count as additional seeds. With one seed the test is over configurations, and
the output says so. All tests of the comparison are corrected together.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from study.config import Metric
from study.config.keys import flatten
from study.ledger.provenance import different_data
from study.ledger.state import FINISHED, StudyState, TrialState
from study.plan.identity import results_key
from study.program import lns_study
from study.report.figures.style import (
    COLOURS,
    LIGHT,
    MOST_CURVES,
    Theme,
    canvas,
    plain,
    png,
    set_title,
    value_axis,
)
from study.results.contrasts import POWER, Contrast, paired
from study.results.objectives import diverged, last_value, test_value
from study.results.statistics import seed_means
from study.text import counted
from trainers.config.validation import show
from trainers.user_code import without_folder

OF_TRAINING = ("augment", "stride")
"""Arguments of the built-in data sets that affect only the training examples."""
MOST_KEYS = 8
"""Maximum number of differing keys listed in the verdict."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One matched trial of each study; errors in per cent.

    ``name`` is the row's label, ``of`` identifies the configuration within the row.
    """

    name: str
    of: Hashable
    seed: int
    first: float
    second: float


@dataclass(frozen=True, kw_only=True)
class StudyComparison:
    """Result of comparing two studies.

    Attributes:
        names: names of the two studies.
        pairs: matched trials.
        matched_by: ``config`` or ``row``.
        metric: metric of both studies.
        measured: name of the compared figure, such as ``test error`` or ``validation error``.
        difference: mean of second minus first over all pairs, in percentage points for errors.
        contrast: contrast of that difference over seeds, or over configurations if there is one
            seed; None without a test.
        rows: contrast of each row, or None.
        diverged: row of each matched pair that is left out because a trial diverged or has no
            finite figure.
        differing: trial keys in which matched trials differ. The value shows both settings, or is
            "" if they are not the same in all pairs.
    """

    names: tuple[str, str]
    pairs: list[Pair]
    matched_by: str
    metric: Metric
    measured: str
    difference: float
    contrast: Contrast | None
    rows: dict[str, Contrast | None]
    diverged: list[str]
    differing: dict[str, str]


def compare(first: StudyState, second: StudyState) -> StudyComparison:
    """Match the finished trials of two studies.

    Raises:
        ValueError: no trials match, or the studies have different metrics or data.
    """
    metric = _shared_metric(first, second)
    ours, theirs, matched_by = _matched(first, second)
    shared = [name for name in ours if name in theirs]
    _refuse_other_data(first, second, [(ours[name], theirs[name]) for name in shared])
    tested = all(
        test_value(trial, metric) is not None
        for name in shared
        for trial in (ours[name], theirs[name])
    )
    pairs = [
        Pair(name=ours[name].row, of=_group(ours[name]), seed=ours[name].seed, first=a, second=b)
        for name in shared
        if (a := _figure(ours[name], metric, tested)) is not None
        and (b := _figure(theirs[name], metric, tested)) is not None
    ]
    kept = {(pair.name, pair.of, pair.seed) for pair in pairs}
    places = [(ours[name].row, _group(ours[name]), ours[name].seed) for name in shared]
    if not pairs:
        raise ValueError(
            f"{first.config.name} and {second.config.name}: the matched trials have no finite"
            f" {metric.plural}; compare studies whose trials did not diverge"
        )
    rows = {
        row: _contrast([pair for pair in pairs if pair.name == row])
        for row in dict.fromkeys(pair.name for pair in pairs)
    }
    contrast = _contrast(pairs)
    tests = (
        sum(each is not None for each in rows.values()) + (contrast is not None)
        if len(rows) > 1
        else 1
    )
    return StudyComparison(
        names=_names(first, second),
        pairs=pairs,
        matched_by=matched_by,
        metric=metric,
        measured=metric.test_words if tested else metric.words,
        difference=statistics.fmean(pair.second - pair.first for pair in pairs),
        contrast=contrast and dataclasses.replace(contrast, tests=tests),
        rows={row: each and dataclasses.replace(each, tests=tests) for row, each in rows.items()},
        diverged=[place[0] for place in places if place not in kept],
        differing=_differing([(ours[name], theirs[name]) for name in shared]),
    )


def _group(trial: TrialState) -> Hashable:
    """Return a key of a trial's configuration within its row; the number alone can be ambiguous."""
    return trial.number, json.dumps(trial.params, sort_keys=True)


def _shared_metric(first: StudyState, second: StudyState) -> Metric:
    """Return the metric of both studies.

    Raises:
        ValueError: the studies have different metrics.
    """
    ours, theirs = first.config.primary_metric, second.config.primary_metric
    if ours != theirs:
        wanted = f"metric={ours.name}", f"mode={ours.mode}"
        extend = lns_study("run", "--extend", second.config.slug, *wanted)
        raise ValueError(
            f"{first.config.name} and {second.config.name}: one is about {ours.name} ({ours.mode}),"
            f" the other about {theirs.name} ({theirs.mode}), which cannot be subtracted; give one"
            f" the other's metric, for example with `{extend}`"
        )
    return ours


def _refuse_other_data(
    first: StudyState, second: StudyState, matched: list[tuple[TrialState, TrialState]]
) -> None:
    """Check that matched trials were tested on the same examples.

    Raises:
        ValueError: they were not; the message has both data sets.
    """
    names = f"{first.config.name} and {second.config.name}"
    remedy = "; compare studies of the same data"
    for pair in matched:
        one, other = (_data_of(trial) for trial in pair)
        if one != other and not any(trial.own_loop for trial in pair):
            raise ValueError(
                f"{names}: matched trials have other data, {one} and {other}, and figures of other"
                f" data cannot be subtracted{remedy}"
            )
    if found := different_data(first.plan.get("data", []), second.plan.get("data", [])):
        raise ValueError(
            f"{names}: their files of data {found[0]['name']!r} are not the same (sha256"
            f" {found[0]['digest'][:12]} and {found[1]['digest'][:12]}), and figures of other data"
            f" cannot be subtracted{remedy}"
        )


def _data_of(trial: TrialState) -> str:
    """Describe a trial's data set: its name, and the arguments that affect the test examples."""
    data = trial.config["data"]
    args = {key: value for key, value in data.get("args", {}).items() if key not in OF_TRAINING}
    return f"{without_folder(data['name'])}{f' {show(args)}' if args else ''}"


def _differing(matched: list[tuple[TrialState, TrialState]]) -> dict[str, str]:
    """Return :attr:`StudyComparison.differing`."""
    found: dict[str, set[str]] = {}
    for pair in matched:
        one, other = (flatten(json.loads(results_key(trial.config))) for trial in pair)
        for key in dict.fromkeys([*one, *other]):
            values = one.get(key), other.get(key)
            if values[0] != values[1]:
                found.setdefault(key, set()).add(" and ".join(map(show, values)))
    return {key: min(values) if len(values) == 1 else "" for key, values in found.items()}


def _contrast(pairs: Iterable[Pair]) -> Contrast | None:
    """Return the contrast of pairs over seeds (:func:`study.results.statistics.seed_means`), or
    over configurations if there is one seed."""
    gaps: dict[tuple[str, Hashable], dict[int, float]] = {}
    for pair in pairs:
        gaps.setdefault((pair.name, pair.of), {})[pair.seed] = pair.second - pair.first
    if of_seeds := seed_means(list(gaps.values())):
        return paired(of_seeds, "seeds")
    return paired(
        [statistics.fmean(of_seed.values()) for of_seed in gaps.values()], "configurations"
    )


def _matched(
    first: StudyState, second: StudyState
) -> tuple[dict[str, TrialState], dict[str, TrialState], str]:
    """Return the finished trials of both studies by a common key, and the kind of key.

    Raises:
        ValueError: no trials match.
    """
    for matched_by, key in (("config", lambda trial: results_key(trial.config)), ("row", _row_key)):
        ours, theirs = (
            {key(trial): trial for trial in state.trials if trial.status == FINISHED}
            for state in (first, second)
        )
        if ours.keys() & theirs.keys():
            return ours, theirs, matched_by
    raise ValueError(
        f"{first.config.name} and {second.config.name}: no finished trial of one matches one of the"
        " other, neither by config nor by row and seed; give rows that mean the same the same"
        " label"
    )


def _names(first: StudyState, second: StudyState) -> tuple[str, str]:
    a, b = first.config.name, second.config.name
    return (a, b) if a != b else (f"{a} (first)", f"{b} (second)")


def _row_key(trial: TrialState) -> str:
    return json.dumps([trial.row, trial.number, trial.seed])


def _figure(trial: TrialState, metric: Metric, tested: bool) -> float | None:
    value = test_value(trial, metric) if tested else last_value(trial, metric)
    lost = value is None or not math.isfinite(value) or diverged(trial, metric.name)
    return None if lost else value


def lines(found: StudyComparison) -> list[list[str]]:
    """Return the table's lines, one per row: label, number of pairs, both means, mean difference
    (in percentage points for errors)."""
    metric, groups = found.metric, dict[str, list[Pair]]()
    for pair in found.pairs:
        groups.setdefault(pair.name, []).append(pair)
    table = []
    for name, pairs in groups.items():
        contrast = found.rows[name]
        difference = (
            contrast.difference
            if contrast
            else statistics.fmean(pair.second - pair.first for pair in pairs)
        )
        spread = f" ± {metric.spread(contrast.half)}" if contrast else ""
        means = (
            metric.figure(statistics.fmean(values))
            for values in ([p.first for p in pairs], [p.second for p in pairs])
        )
        table.append([name, str(len(pairs)), *means, f"{metric.difference(difference)}{spread}"])
    return table


def verdict(found: StudyComparison) -> str:
    """Describe the overall difference in one sentence."""
    test = "; too few seeds to test"
    contrast, metric = found.contrast, found.metric
    difference, half = (
        (contrast.difference, f" ± {metric.spread(contrast.half, decimals=3)} (95 %)")
        if contrast
        else (found.difference, "")
    )
    if contrast is not None:
        rows = f", corrected for {contrast.tests} tests" if contrast.tests > 1 else ""
        test = f"; Student's t over {contrast.over}: p = {contrast.p:.2g}{rows}"
        test += (
            ""
            if contrast.decided
            else (
                f", undecided: a difference of {contrast.least:.2g} would have shown in"
                f" {100 * POWER:.0f} %"
            )
        )
    equal = sum(pair.first == pair.second for pair in found.pairs)
    same = f"; {equal} pairs are equal to the last bit" if equal else ""
    lost = len(found.diverged)
    if lost:
        named = ", ".join(dict.fromkeys(found.diverged))
        same += (
            f"; {counted(lost, 'pair')} {'is' if lost == 1 else 'are'} left out, in which a trial"
            f" diverged ({named})"
        )
    if found.differing:
        named_keys = [
            f"{key} ({values})" if values else key for key, values in found.differing.items()
        ]
        more = len(named_keys) - MOST_KEYS
        rest = f" and {counted(more, 'more key')}" if more > 0 else ""
        same += f"; matched trials differ in {', '.join(named_keys[:MOST_KEYS])}{rest}"
    gap = f"{metric.difference(difference, decimals=3)}{half}{metric.points}"
    return (
        f"{found.names[1]} minus {found.names[0]}: {gap} of {found.measured} over"
        f" {len(found.pairs)} pairs matched by {found.matched_by}{test}{same}"
    )


def document(found: StudyComparison) -> dict[str, Any]:
    """Return a comparison as a JSON document; errors are in per cent."""
    return {
        "studies": list(found.names),
        "metric": found.metric.name,
        "measured": found.measured,
        "matched_by": found.matched_by,
        "difference": found.difference,
        "test": _test(found.contrast),
        "rows": [{"row": row, "test": _test(contrast)} for row, contrast in found.rows.items()],
        "pairs": [
            {"row": pair.name, "seed": pair.seed, "first": pair.first, "second": pair.second}
            for pair in found.pairs
        ],
        "diverged": found.diverged,
        "differing": found.differing,
    }


def _test(contrast: Contrast | None) -> dict[str, Any] | None:
    if contrast is None:
        return None
    names = ("difference", "interval", "p", "over", "tests", "decided")
    return {name: getattr(contrast, name) for name in names}


def draw(found: StudyComparison, theme: Theme = LIGHT) -> bytes:
    """Draw a PNG with a dot per pair, one study on each axis; the line marks equal figures."""
    figure, axes = canvas(theme, height=6.4)
    rows = list(dict.fromkeys(pair.name for pair in found.pairs))
    for number, row in enumerate(rows):
        mine = [pair for pair in found.pairs if pair.name == row]
        colour = COLOURS[number % len(COLOURS)] if len(rows) <= MOST_CURVES else COLOURS[0]
        axes.scatter(
            [p.first for p in mine],
            [p.second for p in mine],
            s=26,
            color=colour,
            alpha=0.8,
            linewidths=0,
            label=plain(row),
        )
    values = np.array([[pair.first, pair.second] for pair in found.pairs])
    metric = found.metric
    ends = [values.min() * 0.9, values.max() * 1.1]
    if metric.logarithmic(values.ravel()):
        value_axis(axes, metric, values.ravel())
        axes.set_xscale("log")
    else:
        margin = 0.05 * float(np.ptp(values)) or 0.1 * abs(float(values.max())) or 1.0
        ends = [values.min() - margin, values.max() + margin]
    axes.plot(ends, ends, color=theme.text, linewidth=1, zorder=1)
    if metric.percent:
        axes.xaxis.set_major_locator(
            axes.yaxis.get_major_locator().__class__(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        )
        axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.set_xlabel(plain(f"{found.names[0]}: {metric.heading(found.measured)}"))
    axes.set_ylabel(plain(f"{found.names[1]}: {metric.heading(found.measured)}"))
    set_title(axes, f"{len(found.pairs)} matched trials; on the line both are equal", theme)
    if len(rows) <= MOST_CURVES:
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=9)
    return png(figure)
