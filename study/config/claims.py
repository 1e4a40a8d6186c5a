"""Claims of a study, which its runs decide, and the digest of the study's statement.

A claim has exactly one check. Its bounds are in the display unit of the study's metric: errors in
per cent, their differences in percentage points::

    claims:
      - name: kahan_wins_back
        claim: Kahan summation wins back at least one percentage point.
        source: the talk's table, 3.62 % without and 2.29 % with it
        difference: {rows: [lns everywhere, lns everywhere + kahan], at_least: 1.0}

The *statement* of a study contains all settings that affect its figures and verdicts: question,
claims, trials, rows, seeds, space, search, metric, limits and statistics. Its SHA-256 is written to
the ledger with the plan, so that a report can list the changes made after the first trial.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from study.config.keys import OUTSIDE, is_number, sha256_of, without
from trainers.config.validation import finite, plain_values, require
from trainers.user_code import split_name, without_folder

BOUNDS = ("at_most", "at_least", "within")
"""Kinds of bounds; a check with a bound has exactly one."""
KINDS: dict[str, tuple[str, ...]] = {
    "value": ("row",),
    "difference": ("rows",),
    "no_row_beats": ("row",),
    "importance": ("key",),
    "ranks": ("of", "blocks", "best"),
}
"""Built-in checks, each with its required keys apart from the bound."""
OPTIONAL: dict[str, tuple[str, ...]] = {"no_row_beats": ("by",)}
"""Optional keys of checks."""
EXAMPLES = {
    "value": "value: {row: lns12, at_most: 2.5}",
    "difference": "difference: {rows: [nearest, kahan], at_least: 1.0}",
    "no_row_beats": "no_row_beats: {row: kahan}",
    "importance": "importance: {key: trial.optimizer.lr, at_least: 0.5}",
    "ranks": "ranks: {of: model.activation, blocks: [data.name], best: swish}",
}
STATED = (
    "question", "trial", "rows", "seeds", "space", "search", "metric", "mode", "limits", "digits",
    "baseline", "comparable", "comparable_seeds", "claims", "amendments",
)  # fmt: skip
"""Keys of a study that belong to its statement."""
STATISTIC = (
    "final test figures, every seed; 95 % intervals by Student's t; differences paired by seed,"
    " corrected by Bonferroni where several are compared"
)
"""Text that statements of earlier versions have as the statistic of every claim, even of claims
that use another one."""
STATISTICS = {
    "value": "mean of final test figures over all seeds, 95 % interval by Student's t",
    "difference": "mean difference of final test figures, paired by seed, 95 % interval by"
    " Student's t",
    "no_row_beats": "mean differences of final test figures, paired by seed, simultaneous 95 %"
    " intervals by Student's t and Bonferroni's correction",
    "importance": "share of the variance of the validation figure by fANOVA, 95 % interval by"
    " bootstrap samples of the configurations",
    "ranks": "mean ranks of final test figures over blocks, Friedman's test and Nemenyi's critical"
    " difference at 5 %, of two values the sign test; of blocks of one data set Tukey's difference"
    " of the ranks of each seed, too",
    "check": "that of the claim's function, whose code is stated by its SHA-256",
}
"""Statistic of each check; part of the claim's statement, so a change alters its digest."""
PICTURES = (
    "law_of_bits", "memory", "ranks", "test_error", "best_of_k", "importance", "pareto",
)  # fmt: skip
"""Report pictures that the page of claims can show for a study."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class AmendmentConfig:
    """A change of a study's design or claims after results were seen, as in a pre-registration.

    Attributes:
        date: day of the change, YYYY-MM-DD.
        change: one sentence that describes the change.
        reason: one sentence that gives the reason.

    Example::

        >>> amended = AmendmentConfig(
        ...     date="2026-11-30", change="Five seeds, not three.", reason="Three decided nothing."
        ... )
    """

    date: str = ""
    change: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        require(
            f"amendments: date={self.date!r}",
            re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.date) is not None,
            "must be a day as YYYY-MM-DD",
            "use for example date: '2026-11-24'",
        )
        where, rule = f"amendment of {self.date}", "an amendment needs a change and a reason"
        _refuse_empty(where, rule, change=self.change, reason=self.reason)

    @property
    def sentence(self) -> str:
        """The amendment as text."""
        return f"{self.date}: {self.change} Reason: {self.reason}"


@plain_values
@dataclass(frozen=True, kw_only=True)
class ClaimConfig:
    """One claim of a study.

    Attributes:
        name: identifier of the claim in tables and MLflow tags.
        claim: the claim, in one sentence.
        source: paper or talk that makes the claim, with the published figure as text.
        published: published figure in our unit, or None.
        value: ``{row: LABEL, at_most: X}`` (or ``at_least: X``, ``within: [LOW, HIGH]``): bound on
            a row's mean test figure.
        difference: ``{rows: [A, B], at_least: X}``: bound on the mean of A - B, paired by seed.
        no_row_beats: ``{row: LABEL}``: no other row is significantly better; with ``by: X``, no
            other row is better by more than X.
        importance: ``{key: trial.optimizer.lr, at_least: 0.5}``: bound on the share of the metric's
            variance that a searched key explains, by fANOVA.
        ranks: ``{of: KEY, blocks: [KEY, ...], best: VALUE}``: VALUE has the best mean rank over
            blocks among the values of a trial key, by Friedman's test with Nemenyi's. The key
            ``row`` is the row's label.
        check: ``file.py:function``; the function takes the study and returns a mapping with
            ``figure``, ``low``, ``high`` and ``unit``, or with ``figure`` and ``verdict``.
        at_most: upper bound on the interval that ``check`` returns.
        at_least: lower bound on the interval that ``check`` returns.
        within: lower and upper bound, ``[LOW, HIGH]``.

    Example::

        >>> claim = ClaimConfig(
        ...     name="kahan_helps",
        ...     claim="Kahan summation lowers the error by a point.",
        ...     source="the talk, 3.62 and 2.29 %",
        ...     difference={"rows": ["lns everywhere", "lns everywhere + kahan"], "at_least": 1.0},
        ... )
    """

    name: str = ""
    claim: str = ""
    source: str = ""
    published: float | None = None
    value: dict[str, Any] = field(default_factory=dict)
    difference: dict[str, Any] = field(default_factory=dict)
    no_row_beats: dict[str, Any] = field(default_factory=dict)
    importance: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    check: str | None = None
    at_most: float | None = None
    at_least: float | None = None
    within: list[float] | None = None

    def __post_init__(self) -> None:
        require(
            f"claims: name={self.name!r}",
            self.name.isidentifier(),
            "must be an identifier",
            "use for example name: kahan_wins_back",
        )
        rule = "a claim needs a sentence and its source"
        _refuse_empty(f"claim {self.name}", rule, claim=self.claim, source=self.source)
        finite(f"claim {self.name}: published", self.published, -math.inf, "leave it out for none")
        given = [kind for kind in (*KINDS, "check") if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError(
                f"claim {self.name}: has {' and '.join(given) or 'no check'}: exactly one of"
                f" {', '.join((*KINDS, 'check'))} decides it; use for example {EXAMPLES['value']}"
            )
        if self.check:
            split_name(f"claim {self.name}: check", self.check)
        else:
            self._check_keys()
        self._check_bound()

    @property
    def kind(self) -> str:
        """Name of the claim's check."""
        return "check" if self.check else next(kind for kind in KINDS if getattr(self, kind))

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the check, including its bound."""
        if self.check:
            bounds = {key: getattr(self, key) for key in BOUNDS}
            return {key: value for key, value in bounds.items() if value is not None}
        found: dict[str, Any] = getattr(self, self.kind)
        return found

    @property
    def rows(self) -> list[str]:
        """Labels of the rows that the claim names."""
        arguments = self.arguments
        if self.kind == "difference":
            return [str(label) for label in arguments["rows"]]
        return [str(arguments["row"])] if self.kind in ("value", "no_row_beats") else []

    @property
    def bound(self) -> tuple[float, float]:
        """Lowest and highest figure at which the claim holds; infinite if unbounded."""
        arguments = self.arguments
        low, high = arguments.get("within") or (
            arguments.get("at_least", -math.inf),
            arguments.get("at_most", math.inf),
        )
        return float(low), float(high)

    def _check_keys(self) -> None:
        kind, arguments = self.kind, self.arguments
        bounds = BOUNDS if kind in ("value", "difference", "importance") else ()
        known = (*KINDS[kind], *OPTIONAL.get(kind, ()), *bounds)
        missing = [key for key in KINDS[kind] if key not in arguments]
        unknown = [key for key in arguments if key not in known]
        if missing or unknown:
            wrong = f"lacks {missing[0]}" if missing else f"has an unknown key {unknown[0]}"
            raise ValueError(
                f"claim {self.name}: {kind}={arguments}: {wrong}; its keys are {', '.join(known)},"
                f" for example {EXAMPLES[kind]}"
            )
        rows, blocks = arguments.get("rows", ["", ""]), arguments.get("blocks", [""])
        if not isinstance(rows, list) or len(rows) != 2 or not isinstance(blocks, list):
            raise ValueError(
                f"claim {self.name}: {kind}={arguments}: takes two rows, or a list of keys; use"
                f" for example {EXAMPLES[kind]}"
            )
        if any(getattr(self, key) is not None for key in BOUNDS):
            raise ValueError(
                f"claim {self.name}: a bound stands beside {kind}, in which it belongs; use for"
                f" example {EXAMPLES[kind]}"
            )

    def _check_bound(self) -> None:
        arguments, kind = self.arguments, self.kind
        given = [key for key in BOUNDS if arguments.get(key) is not None]
        needs = kind in ("value", "difference", "importance")
        if len(given) > 1 or (needs and not given):
            raise ValueError(
                f"claim {self.name}: {kind}: has {' and '.join(given) or 'no bound'}: takes"
                f" {'exactly' if needs else 'at most'} one of {', '.join(BOUNDS)}; use for example"
                f" {EXAMPLES.get(kind, 'at_most: 1.0')}"
            )
        values = [arguments[key] for key in given] + [arguments.get("by", 0.0)]
        flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
        pair = arguments.get("within")
        ordered = pair is None or (isinstance(pair, list) and len(pair) == 2)
        if not ordered or not all(is_number(x) for x in flat) or (pair and pair[0] > pair[1]):
            raise ValueError(
                f"claim {self.name}: {kind}={arguments}: bounds are numbers, within is [LOW, HIGH];"
                " use for example at_least: 1.0, or within: [2.0, 2.3]"
            )


def check_claims(claims: Collection[ClaimConfig], labels: Collection[str]) -> None:
    """Check that claims have different names and that their rows exist.

    Args:
        claims: claims of a study.
        labels: labels of its rows.

    Raises:
        ValueError: two claims have the same name, or a claim's row does not exist.
    """
    names = [claim.name for claim in claims]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"claims: two have the name {twice[0]}; give every claim a name of its own"
        )
    for claim in claims:
        for label in claim.rows:
            if label not in labels:
                raise ValueError(
                    f"claim {claim.name}: {claim.kind} names the row {label!r}, which the study"
                    f" does not have; its rows are {', '.join(labels)}; use claims=[] where other"
                    " rows are asked for"
                )


def statement(
    study: Mapping[str, Any], code: Mapping[str, str], statistics: bool = True
) -> dict[str, Any]:
    """Return a study's statement: the settings that affect figures and verdicts, and statistics.

    Keys without a value are left out, so that keys added by later versions do not change digests.

    Args:
        study: ``StudyConfig.to_dict()``.
        code: SHA-256 of the file of each claim's ``check``, by the claim's name.
        statistics: whether each claim has its own statistic; ledgers of earlier versions have
            :data:`STATISTIC` for all claims.
    """
    stated = {key: _sparse(study.get(key)) for key in STATED}
    if stated.get("trial"):
        stated["trial"] = without(stated["trial"], *OUTSIDE)
    for claim in stated.get("claims") or []:
        if statistics:
            claim["statistic"] = STATISTICS[next(kind for kind in STATISTICS if kind in claim)]
        if "check" in claim:
            claim["check"] = f"{without_folder(claim['check'])} {code.get(claim['name'], '')}"
    found = {key: value for key, value in stated.items() if not _empty(value)}
    return found if statistics else found | {"statistic": STATISTIC}


def digest(stated: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a statement as canonical JSON, 64 hex digits."""
    return sha256_of(stated)


def _sparse(value: Any) -> Any:
    """Copy nested values without keys whose value is empty."""
    if isinstance(value, Mapping):
        found = {key: _sparse(entry) for key, entry in value.items()}
        return {key: entry for key, entry in found.items() if not _empty(entry)}
    return [_sparse(entry) for entry in value] if isinstance(value, list | tuple) else value


def _refuse_empty(where: str, rule: str, **sentences: str) -> None:
    """Refuse a sentence that says nothing.

    Raises:
        ValueError: with its key and the rule.
    """
    for key, sentence in sentences.items():
        require(f"{where}: {key} is empty", bool(sentence.strip()), rule, f"add `{key}: ...`")


def _empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, list | dict) and not value)
