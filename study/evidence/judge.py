"""Verdicts on a study's claims: ``holds``, ``fails`` or ``undecided``, each with an estimate and
its 95 % interval.

The interval decides: a claim holds if the whole interval is within the claim's bounds, fails if the
interval is entirely outside, and is undecided otherwise. Estimates use the final test metrics in
the report's table. For a searched row these are the metrics of the configuration that was chosen on
the validation split. So the test set is used once, at the end, and selects nothing.

- ``value``: mean over seeds, Student's t.
- ``difference``: mean over paired seeds, Student's t (:mod:`study.results.contrasts`).
- ``no_row_beats``: paired differences to every other row, corrected for multiple comparisons. With
  a tolerance ``by`` the intervals decide. Without one, the claim holds if the row is significantly
  better than all others, or if at least :data:`ENOUGH` seeds show no better row; the note has the
  smallest difference that could have been detected.
- ``importance`` and ``ranks``: :mod:`study.evidence.analyses`.
- ``check``: a function of the study. It only runs in commands that run the study, or if the user
  asks for it; otherwise the last report has the verdict (:mod:`study.evidence.kept_verdicts`).

A row whose difference is the same at :data:`ENOUGH` or more seeds counts without a test.

A claim is undecided until all its trials have finished (for a searched row the trials of all
configurations), and if one of its rows has no trials. A claim with a published value is also
undecided if the study differs from the published recipe.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from study.config import ClaimConfig, Metric
from study.evidence.analyses import judge_importance, judge_ranks
from study.evidence.kept_verdicts import kept
from study.evidence.statement import stated
from study.evidence.verdict import (
    ENOUGH,
    FAILS,
    HOLDS,
    OUTCOMES,
    UNDECIDED,
    Verdict,
    decide,
    judge_mean,
    show,
)
from study.ledger.state import ENDED, FAILED, FINISHED, StudyState
from study.results.answer import Comparison, compare
from study.results.summary import Row, Summary, figures_by_seed, summarise
from study.tracking_uri import without_password
from trainers.text import LENGTH, describe_error
from trainers.user_code import find_source, load_code

SEARCHING = "the search has not come to its end"
LIKE = 1e-9
"""Relative tolerance for rounding, between two computations of a number or between an estimate and
an end of its interval."""


def judge(state: StudyState, folder: Path, *, run_checks: bool = False) -> list[Verdict]:
    """Return the verdict on every claim of a study.

    Args:
        state: state of the study.
        folder: folder of the study, passed to check functions.
        run_checks: whether to run the check functions. The ledger names them, so set this only if
            the ledger is the user's own or the user asked for it. Otherwise their verdicts come
            from the last report.
    """
    summary = summarise(state)
    return [_judge(claim, state, summary, folder, run_checks) for claim in state.config.claims]


def by_row(state: StudyState, summary: Summary) -> dict[str, str]:
    """Return the verdicts on claims about rows, by the row's label, for example ``loses holds``.

    Claims that were changed after the first trial are marked.
    """
    found = [_judge_rows(claim, state, summary) for claim in state.config.claims if claim.rows]
    said = stated(state)
    late = said.claims if said else {}
    return {
        row.label: ", ".join(
            f"{verdict.claim.name} {verdict.outcome}"
            + (" (NOT AS STATED)" if verdict.claim.name in late else "")
            for verdict in found
            if row.label in verdict.claim.rows
        )
        for row in summary.rows
    }


def _judge(
    claim: ClaimConfig, state: StudyState, summary: Summary, folder: Path, run_checks: bool
) -> Verdict:
    if claim.rows:
        return _judge_rows(claim, state, summary)
    if _is_searching(state):
        return _undecided(claim, SEARCHING)
    ended = sum(trial.status in ENDED for trial in state.trials)
    if ended < len(state.trials) or not ended:
        return _undecided(claim, f"{ended} of {len(state.trials)} trials have ended")
    if without := [label for label, trials in state.rows().items() if not trials]:
        return _undecided(claim, f"{without[0]} has no trials")
    if lost := [each for each in state.trials if each.number is None and each.status == FAILED]:
        return _undecided(claim, f"{lost[0].row} has no figure of seed {lost[0].seed}: it failed")
    if claim.kind == "importance":
        verdict = judge_importance(claim, state)
    elif claim.kind == "ranks":
        verdict = judge_ranks(claim, state)
    elif run_checks:
        verdict = _check(claim, state, folder)
    else:
        verdict = kept(claim, state, summary, folder)
    return _comparable(verdict, summary)


def _is_searching(state: StudyState) -> bool:
    """Return whether the search has yet to choose trials from results."""
    search = state.config.search
    return bool(search.adaptive or search.confirm_seeds) and state.outcome not in (FINISHED, FAILED)


def _judge_rows(claim: ClaimConfig, state: StudyState, summary: Summary) -> Verdict:
    rows = {row.label: row for row in summary.rows}
    if _is_searching(state) or not rows.keys() >= set(claim.rows):
        return _undecided(claim, SEARCHING)
    named = [rows[label] for label in claim.rows]
    others = [row for row in summary.rows if row not in named]
    needed = summary.rows if claim.kind == "no_row_beats" else named
    for row in needed:
        if not row.seeds:
            found = "best configuration" if state.rows()[row.label] else "trials"
            return _undecided(claim, f"{row.label} has no {found}")
        if row.finished < row.seeds:
            done = f"{row.finished} of {row.seeds} seeds of {row.label} have finished"
            return _undecided(claim, done)
        trials = state.rows()[row.label]
        if left := sum(trial.status not in ENDED for trial in trials):
            return _undecided(claim, f"{left} of {len(trials)} trials of {row.label} are left")
    if claim.kind == "no_row_beats":
        verdict = _judge_best(claim, named[0], others, summary)
    else:
        verdict = _judge_mean(claim, named, summary)
    return _comparable(verdict, summary)


def _judge_mean(claim: ClaimConfig, rows: list[Row], summary: Summary) -> Verdict:
    """Judge a row's mean, or the mean difference of two rows over the seeds that both have."""
    metric = summary.metric
    first, *second = [figures_by_seed(row.trials, metric) for row in rows]
    if not second:
        verdict = judge_mean(claim, list(first.values()), metric.unit.strip(), "seeds")
        luck = "" if summary.searches > 1 else _luck(rows[0])
        return replace(verdict, note="; ".join(filter(None, [verdict.note, luck])))
    shared = sorted(first.keys() & second[0].keys())
    if not shared:
        return _undecided(claim, "the rows share no seed")
    differences = [first[seed] - second[0][seed] for seed in shared]
    verdict = judge_mean(claim, differences, metric.points.strip(), "seeds")
    return replace(verdict, runs=2 * len(shared))


def _luck(row: Row) -> str:
    """Return a note that a searched row's mean is biased by selection; "" for other rows.

    The same trials select the configuration (validation split) and give its test metrics. With six
    equal configurations and five seeds, the mean of the best one is 1.2 standard errors too good,
    and its interval is below the true mean in 11 % of cases instead of 2.5 %. The bias cancels in
    the difference of two rows with the same search. If each seed is a separate search, the mean is
    an unbiased estimate of what the search finds.
    """
    if row.searched < 2:
        return ""
    return f"best of {row.searched} configurations, so the mean is a little too good"


def _judge_best(claim: ClaimConfig, row: Row, others: list[Row], summary: Summary) -> Verdict:
    """Judge whether no other row is better; the estimate is another row's largest advantage."""
    metric, by = summary.metric, claim.arguments.get("by")
    if row.diverged or not math.isfinite(row.mean or 0.0):
        return _undecided(claim, f"the mean of {row.label} is {row.mean}: training diverged")
    others = [other for other in others if not other.diverged]
    runs = row.seeds + sum(other.seeds for other in others)
    unit, found = metric.points.strip(), compare(row, others, metric)
    ahead, untested = _advantages(row, found, metric)
    if not ahead:
        note = "no other row can be tested: one seed, or no spread; run at least five"
        return Verdict(claim=claim, outcome=UNDECIDED, runs=runs, note=note)
    centre, low, high = (max(each) for each in zip(*ahead.values(), strict=True))
    seeds = min(len(_shared(row, each.row, metric)) for each in found if each.row.label in ahead)
    if by is not None:
        outcome = decide((-math.inf, float(by)), low, high)
    else:
        none = high < 0 or seeds >= ENOUGH
        outcome = FAILS if low > 0 else HOLDS if none else UNDECIDED
    rival = max(ahead, key=lambda label: ahead[label][0])
    note = _shown_differences(found, rival, unit)
    if untested and outcome == HOLDS:
        outcome, note = UNDECIDED, f"{untested[0]} cannot be tested; run at least five seeds"
    return Verdict(
        claim=claim, outcome=outcome, figure=centre, low=low, high=high, unit=unit, runs=runs,
        note=note.strip(),
    )  # fmt: skip


def _shown_differences(found: list[Comparison], rival: str, unit: str) -> str:
    """Return a note with the smallest difference that the seeds can detect.

    It has the difference to the nearest rival, and the largest such difference over all rows.
    """
    least = {each.row.label: each.contrast.least for each in found if each.contrast is not None}
    over = {each.row.label: each.contrast.over for each in found if each.contrast is not None}
    note = f"nearest rival: {rival}"
    if rival in least:
        note += f"; {over[rival]} show a difference of {show(least[rival], unit)} {unit}".rstrip()
    widest = max(least, key=lambda label: least[label], default=rival)
    if widest != rival:
        note += f" from it, of {show(least[widest], unit)} {unit}".rstrip() + f" from {widest}"
    return note


def _advantages(
    row: Row, found: list[Comparison], metric: Metric
) -> tuple[dict[str, tuple[float, float, float]], list[str]]:
    """Return the advantages of other rows over ``row``, and the rows that cannot be tested.

    An advantage is a mean and the ends of its interval. The intervals are simultaneous, so the
    largest true advantage is between the largest lower end and the largest upper end. Rows that
    diverged are in neither result.
    """
    ahead, untested = {}, []
    for each in found:
        gaps = _shared(row, each.row, metric)
        if each.contrast is not None:
            mean = -metric.sign * each.contrast.difference
            ahead[each.row.label] = (mean, mean - each.contrast.half, mean + each.contrast.half)
        elif len(gaps) >= ENOUGH and all(map(math.isfinite, gaps)):
            ahead[each.row.label] = (gaps[0], gaps[0], gaps[0])
        elif all(map(math.isfinite, gaps)):
            untested.append(each.row.label)
    return ahead, untested


def _shared(row: Row, other: Row, metric: Metric) -> list[float]:
    """Return the advantage of another row over ``row`` at each seed that both have."""
    ours, theirs = (figures_by_seed(each.trials, metric) for each in (row, other))
    return [metric.sign * (ours[seed] - theirs[seed]) for seed in ours.keys() & theirs.keys()]


def _check(claim: ClaimConfig, state: StudyState, folder: Path) -> Verdict:
    """Judge with the study's check function, which gets a :class:`study.Study`."""
    key, name = f"claim {claim.name}: check", str(claim.check)
    try:
        function, path = load_code(key, name), find_source(key, name)
    except ValueError as error:
        return _undecided(claim, str(error))
    handle = importlib.import_module("study").Study(folder)  # imported late: a higher layer
    try:
        found = function(handle)
        return _verdict_of(claim, found, sum(t.status == FINISHED for t in state.trials))
    except _NonsenseError as wrong:
        return _undecided(claim, f"{name} returned {wrong}")
    except (Exception, SystemExit) as error:
        return _undecided(claim, f"{name} raised {describe_error(error, path)}")


class _NonsenseError(ValueError):
    """The return value of a check function is invalid; the message has the reason."""


def _verdict_of(claim: ClaimConfig, found: Any, finished: int) -> Verdict:
    """Convert a check function's return value to a verdict.

    Raises:
        _NonsenseError: the value is invalid.
    """
    known = {"figure", "low", "high", "unit", "verdict", "note", "runs"}
    if not isinstance(found, Mapping) or "figure" not in found or found.keys() - known:
        raise _NonsenseError(
            f"{_shown(found)}: must be a mapping with figure, low, high and unit, or with"
            " figure and verdict, and may have note and runs"
        )
    figure, low, high = (_number(key, found.get(key)) for key in ("figure", "low", "high"))
    runs, said = found.get("runs", finished), found.get("verdict")
    if isinstance(runs, bool) or not isinstance(runs, Integral) or int(runs) < 0:
        raise _NonsenseError(f"runs={_shown(runs)}: must be a whole number from 0")
    if not (isinstance(said, str) and said == UNDECIDED):
        if figure is None:
            raise _NonsenseError("figure=None: must be a number where the verdict is not undecided")
        for key, value in (("figure", figure), ("low", low), ("high", high)):
            if value is not None and math.isnan(value):
                raise _NonsenseError(
                    f"{key}=nan: must be a number where the verdict is not undecided"
                )
    outcome = _outcome(claim, said, figure, low, high)
    return Verdict(
        claim=claim, outcome=outcome, figure=figure, low=low, high=high,
        unit=str(found.get("unit", "")), runs=int(runs),
        note=without_password(str(found.get("note", ""))),
    )  # fmt: skip


def _rounding(end: float) -> float:
    return LIKE * abs(end) if math.isfinite(end) else 0.0


def _outcome(
    claim: ClaimConfig, said: Any, figure: float | None, low: float | None, high: float | None
) -> str:
    """Return the outcome: the check function's verdict, or else the one by interval and bound.

    Raises:
        _NonsenseError: there is neither, or they contradict each other.
    """
    by_interval = None
    if low is not None and high is not None:
        if low > high:
            raise _NonsenseError(
                f"an interval whose low {low:g} is above high {high:g}: exchange them"
            )
        if figure is not None and not low - _rounding(low) <= figure <= high + _rounding(high):
            raise _NonsenseError(
                f"a figure {figure:g} that is not in its interval {low:g} to {high:g}: return the"
                " interval of that figure"
            )
        if claim.arguments:
            by_interval = decide(claim.bound, low, high)
        elif claim.published is not None and said is None:
            by_interval = HOLDS if low <= claim.published <= high else FAILS
    outcome = by_interval if said is None else said
    if not isinstance(outcome, str) or outcome not in OUTCOMES:
        raise _NonsenseError(
            f"verdict={_shown(said)}: needs a verdict ({', '.join(OUTCOMES)}), or low and high"
            " beside a claim with a bound or a published figure"
        )
    if by_interval is not None and UNDECIDED != outcome != by_interval:
        raise _NonsenseError(
            f"a verdict that says {outcome}, and by the claim's bound its interval {by_interval};"
            " leave the verdict or the bound out"
        )
    return outcome


def _number(key: str, value: Any) -> float | None:
    """Convert a number that a check function returned to float; None for None.

    Raises:
        _NonsenseError: it is not a number.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, str | bytes | bool):
            return float(value)
    except Exception:  # objects of the user's classes may raise anything
        pass
    raise _NonsenseError(f"{key}={_shown(value)}: must be a number")


def _shown(value: Any) -> str:
    """Return the ``repr`` of a check function's return value, cut to :data:`LENGTH` characters."""
    try:
        text = repr(value)
    except Exception:  # objects of the user's classes may raise anything
        return f"an {type(value).__name__}"
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."


def _comparable(verdict: Verdict, summary: Summary) -> Verdict:
    """Make a verdict undecided if the claim has a published value and the recipe differs.

    The study's remarks list the differences.
    """
    if verdict.claim.published is None or summary.comparable:
        return verdict
    return replace(verdict, outcome=UNDECIDED, note="not comparable with the published figure")


def _undecided(claim: ClaimConfig, note: str) -> Verdict:
    return Verdict(claim=claim, outcome=UNDECIDED, note=without_password(note))
