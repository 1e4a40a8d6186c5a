"""One page with the claims of several studies and their verdicts, as Markdown and as HTML.

Each claim has its source, the published figure, ours with its interval, the verdict and the number
of runs; each study has a picture, statement, machine, date, commit and command. The page is
computed from the studies' ledgers, so it can be rewritten at any time.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from study.config import StudyConfig
from study.config.compose import SMALL
from study.evidence.judge import judge
from study.evidence.record import record
from study.evidence.statement import differences_of
from study.evidence.verdict import OUTCOMES
from study.ledger.state import StudyState
from study.report.claims import HEADINGS, VERDICT, claim_cells, markdown_table, markdown_text
from study.report.figures.style import LIGHT, png
from study.report.html import shown
from study.report.pictures import caption, drawings
from study.report.tables import amended, data_name, facts, remarks
from study.results.summary import Summary, summarise
from study.text import counted, printable
from trainers.files import write_whole

PAGE = "claims"
RULE = (
    "A claim holds if the whole 95 % interval of its figure is within its bounds, fails if the"
    " whole interval is outside, and is undecided otherwise; its remark has the bounds. Claims"
    " without bounds are of three kinds. A claim about ranks uses Nemenyi's distance; Friedman's"
    " test must reject and, for blocks of one data set, the seeds by themselves must agree. A claim"
    " that no row is better holds if no better row is found. A claim with its own function (`check`"
    " in the study's file) follows that function's rule; its runs are all runs passed to the"
    " function. Each interval is for one claim, without a correction for the number of claims on"
    " the page: if the true value is exactly at a bound, one claim in twenty is still decided. Each"
    " study's list gives its statement and the time of the statement."
)
RULE_OF_SMALL_FORMS = (
    "Small forms test that the studies run. Their seeds and budgets are too few to judge claims,"
    " so this page has figures and no verdicts."
)
SHOWN_FACTS = ("Statement", "Code", "Time", "Failures")
WIDTH = 100
"""Maximum line length of the Markdown page's prose."""


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """A study on the page of claims.

    Attributes:
        name, slug, question: taken from the study.
        claims: its claims, in the form of :mod:`study.evidence.record`.
        facts: statement, data, machine, time and command, by heading.
        picture: PNG; empty without a picture.
        alt: description of the picture.
        small: whether it is the study's small form.
    """

    name: str
    slug: str
    question: str
    claims: list[dict[str, Any]]
    facts: dict[str, str]
    picture: bytes
    alt: str
    small: bool = False

    @property
    def headings(self) -> list[str]:
        """Headings of the study's table of claims; small forms have no verdicts."""
        return [name for name in HEADINGS if not (self.small and name == VERDICT)]

    @property
    def lines(self) -> list[list[str]]:
        """Cells of the study's table of claims, one line per claim."""
        return [
            [cell for name, cell in zip(HEADINGS, claim_cells(claim), strict=True)
             if name in self.headings]
            for claim in self.claims
        ]  # fmt: skip

    @property
    def encoded(self) -> str:
        """Picture as base64."""
        return base64.b64encode(self.picture).decode()


def reproduced(
    state: StudyState,
    folder: Path,
    command: str,
    file: StudyConfig | None = None,
    *,
    run_checks: bool = False,
) -> Reproduced:
    """Return a study's part of the page.

    Args:
        state: state of the study, from its ledger.
        folder: folder of the study.
        command: command that runs the study.
        file: the study's current config file, which may have amendments that the ledger lacks; None
            to use the config as it ran.
        run_checks: whether to run the functions of its claims, see
            :func:`study.evidence.judge.judge`.
    """
    summary = summarise(state)
    file = file or state.config
    picture, alt = _picture(state, summary, file.picture)
    return Reproduced(
        name=state.config.name, slug=state.config.slug, question=state.config.question,
        claims=record(state, summary, judge(state, folder, run_checks=run_checks))["claims"],
        facts=_facts(state, summary, command, file), picture=picture, alt=alt,
        small=state.config.name.endswith(SMALL),
    )  # fmt: skip


def write_page(studies: Sequence[Reproduced], folder: Path) -> Path:
    """Write ``claims.md``, ``claims.html`` and the pictures; return the Markdown page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for study in studies:
        if study.picture:
            write_whole(folder / f"{study.slug}.png", study.picture)
    write_whole(folder / f"{PAGE}.md", printable(_markdown(studies)).encode())
    environment = Environment(
        loader=PackageLoader("study.report"), autoescape=True, undefined=StrictUndefined,
        finalize=shown,
    )  # fmt: skip
    page = environment.get_template("claims.html.j2").render(
        studies=studies, answer=_answer(studies), rule=_rule(studies)
    )
    write_whole(folder / f"{PAGE}.html", page.encode())
    return folder / f"{PAGE}.md"


def _markdown(studies: Sequence[Reproduced]) -> str:
    lines = ["# Claims", "", f"**{_answer(studies)}**", "", fill(_rule(studies), WIDTH), ""]
    for study in studies:
        question = fill(markdown_text(study.question), WIDTH)
        lines += [f"## {markdown_text(study.name)}", "", question, ""]
        lines += [*markdown_table(study.headings, study.lines), ""]
        picture = _fill_words(f"![{study.alt}]({study.slug}.png)")
        lines += [picture, ""] if study.picture else []
        facts = (
            f"- {name}: {value if name == 'Command' else markdown_text(value)}"
            for name, value in study.facts.items()
        )
        lines += [*(_fill_words(fact, "  ") for fact in facts), ""]
    return "\n".join(lines)


def _fill_words(text: str, indent: str = "") -> str:
    """Wrap a text into lines without breaking words, so links and command options stay whole."""
    return fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _rule(studies: Sequence[Reproduced]) -> str:
    return RULE_OF_SMALL_FORMS if any(study.small for study in studies) else RULE


def _answer(studies: Sequence[Reproduced]) -> str:
    if any(study.small for study in studies):
        return f"{counted(len(studies), 'small form')}: figures without verdicts."
    found = Counter(claim["outcome"] for study in studies for claim in study.claims)
    verbs = {name: name.removesuffix("s") for name in OUTCOMES}  # one holds, two hold
    listed = ", ".join(
        f"{found[name]} {name if found[name] == 1 else verbs[name]}"
        for name in OUTCOMES
        if found[name]
    )
    count = sum(found.values())
    return f"{counted(count, 'claim')}: {listed or 'none'}."


def _facts(state: StudyState, summary: Summary, command: str, file: StudyConfig) -> dict[str, str]:
    known = facts(state)
    found = {name: known[name] for name in SHOWN_FACTS if name in known} | amended(file)
    if otherwise := differences_of(state.plan, file.to_dict()):
        found["Its file now"] = (
            f"differs in {', '.join(otherwise)}; this page describes the study as it ran."
        )
    found["Data"] = (
        "; ".join(
            f"{data_name(entry)}, {entry['train']:,} train, {entry['validation']:,} validation,"
            f" {entry['test']:,} test, sha256 {entry['digest'][:16]}"
            for entry in state.plan["data"]
        )
        or known["Data"]
    )
    if machines := [machine for trial in state.trials for machine in trial.machines]:
        shown = (
            f"{machine['processor']}, {machine['cores']} cores,"
            f" {', '.join(machine.get('gpus', [])) or 'no GPU'}"
            for machine in machines
        )
        found["Machine"] = "; ".join(dict.fromkeys(shown))
    counts = ", ".join(f"{count} {status}" for status, count in state.counts().items())
    others = [text for text in remarks(state, summary) if text != found.get("Statement")]
    notes = {"Remarks": " ".join(others)} if others else {}
    return {**found, "Trials": counts, **notes, "Command": command}


def _picture(state: StudyState, summary: Summary, wanted: str | None) -> tuple[bytes, str]:
    """Return a picture and its description: the one that the study names, else the one most
    relevant to its claims."""
    draw = drawings(state, summary)
    several = len(state.config.search.objectives) > 1
    about = {claim.kind for claim in state.config.claims}
    first = [wanted or "", "pareto" if several else "", "law_of_bits", "memory", "ranks"]
    last = ["importance", "test_error"] if "importance" in about else ["test_error", "importance"]
    for name in (*first, *last):
        figure = draw[name](LIGHT) if name in draw else None
        if figure is not None:
            return png(figure), caption(name, summary.metric)[1]
    return b"", ""
