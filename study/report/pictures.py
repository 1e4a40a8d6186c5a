"""Pictures and further tables of a report's page, in page order.

Each picture is drawn twice, for light and dark pages, and has a description (alt text). The links
point to the study's runs in MLflow; they are available if the writer has left ``mlflow.json`` in
the study's folder.
"""

from __future__ import annotations

import base64
import statistics
import urllib.parse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from study.config import Metric
from study.evidence.analyses import claimed_ranks
from study.ledger.state import StudyState
from study.report.figures.analysis import (
    draw_best_of_k,
    draw_budget,
    draw_dependence,
    draw_front,
    draw_groups,
    draw_heat_map,
    draw_importance,
    draw_parallel,
)
from study.report.figures.claims import draw_bits, draw_memory, draw_ranks
from study.report.figures.differences import draw_differences
from study.report.figures.population import draw_population
from study.report.figures.results import draw_bars, draw_epochs, draw_slices
from study.report.figures.slots import draw_slots
from study.report.figures.style import DARK, LIGHT, Theme, png
from study.report.interactive import Interactive, interactive
from study.results.answer import capital
from study.results.budgets import best_of_k
from study.results.contrasts import POWER, Contrast
from study.results.importance import Importance, importance
from study.results.likeness import Entry
from study.results.statistics import (
    METRIC,
    Groups,
    best_of_budget,
    costs,
    entries,
    failures,
    groups,
    heat_map,
    rank_formats,
    spread_measures,
)
from study.results.summary import Summary
from study.text import duration
from study.tracking.address import HOST, PORT, WHERE, is_server, page
from study.tracking_uri import without_login
from trainers.files import read_own_json

if TYPE_CHECKING:  # study.report.figures must import matplotlib first
    from matplotlib.figure import Figure

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: ``file`` is the name of its PNG, ``title`` its heading, ``alt`` its description.

    ``note`` is a text below it.
    """

    file: str
    title: str
    alt: str
    light: bytes
    dark: bytes
    note: str = ""

    @property
    def sources(self) -> tuple[str, str]:
        """Light and dark picture as data URLs."""
        light, dark = (
            f"data:image/png;base64,{base64.b64encode(data).decode()}"
            for data in (self.light, self.dark)
        )
        return light, dark


TITLES = {
    "differences": (
        "",
        (
            "Dots and lines: difference of each row's {test} from the reference row's, with 95 %"
            " intervals; the answer above has the numbers"
        ),
    ),
    "law_of_bits": (
        "Bits",
        "Lines: {test} of each rule against the bits of its format's fraction, 95 % intervals",
    ),
    "memory": (
        "Memory",
        "Lines: bytes that the tensors of a step hold at once against the depth, one line a row",
    ),
    "ranks": (
        "Ranks",
        "Dots: mean ranks by {test} over blocks; bars join ranks closer than the critical"
        " difference",
    ),
    "test_error": (
        "",
        (
            "Bars: final {test} of each row beside the published figures; the numbers are in"
            " the table above"
        ),
    ),
    "error_per_epoch": (
        "Learning",
        (
            "Lines: {words} per epoch, mean over seeds, the band from lowest to highest,"
            " one line a row"
        ),
    ),
    "pareto": (
        "{Short} against cost",
        ("Dots: {words} against each other measure; the line joins the Pareto front"),
    ),
    "heat_map": (
        "Formats by layout or row",
        "Table in colours: {best} {words} by number format and layout, or row of the study",
    ),
    "categories": (
        "By category",
        "Box plots: {words} of the trials by category; the tests are in the tables below",
    ),
    "slices": (
        "Search",
        (
            "Dots: the first objective of every configuration over each sampled key; see"
            " configurations.csv"
        ),
    ),
    "population": (
        "Population",
        "Steps: the hyperparameters of every member by epoch; the best of each row is thick",
    ),
    "importance": (
        "Importance",
        "Bars: share of the variance of the {words} that each sampled key explains (fANOVA), and in"
        " green its share in what tells the best tenth of the configurations from all (PED-ANOVA,"
        " keys with a when included)",
    ),
    "dependence": ("Partial dependence", "Lines: {words} that a forest predicts as one key moves"),
    "parallel": (
        "Parallel coordinates",
        "Lines: a configuration each, over its sampled keys and its {short}",
    ),
    "budget": ("Best of budget", "Steps: {best} {words} so far over the seconds of trials"),
    "best_of_k": (
        "Best of k configurations",
        (
            "Lines: {best} {words} of k of a row's random configurations, mean of the bootstrap,"
            " with bands of 90 %"
        ),
    ),
    "slots": (
        "Slots",
        (
            "Bars: trials in the slots that they held during the last run, pale while they started;"
            " gaps are idle time"
        ),
    ),
}
"""Title and description of each picture by file name, as format strings for the metric's words."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Further parts of a page; ``failed`` describes the parts that could not be made, and why."""

    pictures: list[Picture]
    tables: list[Table]
    explore: Interactive | None
    failed: list[str]


def parts(state: StudyState, summary: Summary, use: list[str]) -> Parts:
    """Make every part of the page; an error in one adds a note and does not affect the others.

    Args:
        state: state of the study.
        summary: summary of its rows.
        use: sentences about how the slots were used.
    """
    attempt = _PartMaker()
    made = [
        attempt(f"the picture {name}", drawing)
        for name, drawing in _drawings(state, summary, use).items()
    ]
    return Parts(
        pictures=[picture for picture in made if picture is not None and picture.light],
        tables=attempt("the further tables", lambda: tables(state)) or [],
        explore=attempt("the plots to explore", lambda: interactive(state)),
        failed=attempt.failed,
    )


@dataclass
class _PartMaker:
    """Makes parts of a report; ``failed`` describes the parts that could not be made."""

    failed: list[str] = field(default_factory=list)

    def __call__(self, what: str, make: Callable[[], T]) -> T | None:
        """Return the part; on an error warn and return None."""
        try:
            return make()
        except Exception as error:  # any error: the rest of the report is still correct
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self.failed.append(f"{what[0].upper()}{what[1:]} could not be made ({why}).")
            warnings.warn(f"Report: {self.failed[-1]}", RuntimeWarning, stacklevel=2)
            return None


def _drawings(
    state: StudyState, summary: Summary, use: list[str]
) -> dict[str, Callable[[], Picture]]:
    """Return a function that draws each picture, by file name.

    The bytes are empty if there is nothing to show.
    """
    draw = drawings(state, summary)
    notes = {"slots": " ".join(use)}

    def drawing(name: str) -> Callable[[], Picture]:
        title, alt = caption(name, summary.metric)
        return lambda: Picture(
            file=f"{name}.png",
            title=title,
            alt=alt,
            light=_png(draw[name](LIGHT)),
            dark=_png(draw[name](DARK)),
            note=notes.get(name, ""),
        )

    return {name: drawing(name) for name in TITLES}


def caption(name: str, metric: Metric) -> tuple[str, str]:
    """Return a picture's title and description, by its name in :data:`TITLES`."""
    title, alt = (
        text.format(
            words=metric.words, test=metric.test_words, short=metric.short,
            Short=capital(metric.short), best=metric.best_word,
        )
        for text in TITLES[name]
    )  # fmt: skip
    return title, alt


def _png(figure: Figure | None) -> bytes:
    return b"" if figure is None else png(figure)


def drawings(state: StudyState, summary: Summary) -> dict[str, Callable[[Theme], Figure | None]]:
    """Return a function that draws each picture's figure, by its name in :data:`TITLES`.

    The function returns None if there is nothing to show.
    """

    metric = summary.metric

    @cache
    def found() -> list[Entry]:
        return entries(state)

    @cache
    def weighed() -> Importance | None:
        return importance(state)

    return {
        "differences": lambda theme: draw_differences(state, summary, theme),
        "law_of_bits": lambda theme: draw_bits(summary, theme),
        "memory": lambda theme: draw_memory(state, theme),
        "ranks": lambda theme: draw_ranks(claimed_ranks(state), theme),
        "test_error": lambda theme: draw_bars(state, summary, theme),
        "error_per_epoch": lambda theme: draw_epochs(state, summary, theme),
        "pareto": lambda theme: draw_front(
            [entry for entry in found() if entry.eligible], spread_measures(found()), metric, theme
        ),
        "heat_map": lambda theme: draw_heat_map(heat_map(found(), metric), metric, theme),
        "categories": lambda theme: draw_groups(groups(state), metric, theme),
        "slices": lambda theme: draw_slices(state, theme),
        "population": lambda theme: draw_population(state, theme),
        "importance": lambda theme: draw_importance(weighed(), metric, theme),
        "dependence": lambda theme: draw_dependence(weighed(), metric, theme),
        "parallel": lambda theme: draw_parallel(found(), metric, theme),
        "budget": lambda theme: draw_budget(
            best_of_budget(state) if state.config.space else {}, metric, theme
        ),
        "best_of_k": lambda theme: draw_best_of_k(best_of_k(state), metric, theme),
        "slots": lambda theme: draw_slots(state.run, list(state.rows()), theme),
    }


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table; the first column contains text."""

    title: str
    headings: list[str]
    lines: list[list[str]]
    note: str = ""


def tables(state: StudyState) -> list[Table]:
    """Return the further tables of the page, without empty ones."""
    metric = state.config.primary_metric
    tests = [_tests(group, metric) for group in groups(state)]
    made = [_formats(entries(state), metric), *tests, _failures(state), _costs(state)]
    return [table for table in made if table.lines]


def _formats(found: list[Entry], metric: Metric) -> Table:
    ranked = rank_formats(found, metric)
    shown = {METRIC: metric.figure, "bits": "{:.4g}".format, "seconds": "{:.4g}".format}
    lines = [
        [
            line["format"],
            line["entry"],
            *(
                f"{show(line[key])} ({line[f'rank_{key}']})" if key in line else "-"
                for key, show in shown.items()
            ),
        ]
        for line in ranked
    ]
    return Table(
        title="Number formats",
        headings=["format", "its best", metric.heading(metric.words), "bits", "seconds"],
        lines=lines if len(lines) > 1 else [],
        note=(
            f"Exploratory: the best of each format, chosen by the {metric.short} that is shown; in"
            " brackets its rank."
        ),
    )


def _tests(group: Groups, metric: Metric) -> Table:
    lines = []
    for name, values in group.figures.items():
        contrast = group.contrasts.get(name)
        figures = ["-"] * 3
        if contrast is not None:
            figures = [
                f"{metric.difference(contrast.difference)} ± {metric.spread(contrast.half)}",
                contrast.over,
                f"{contrast.p:.2g}",
            ]
        lines.append(
            [
                name,
                str(len(values)),
                metric.figure(statistics.fmean(values)),
                *figures,
                _verdict(name, contrast, group),
            ]
        )
    tests = next((contrast.tests for contrast in group.contrasts.values() if contrast), 0)
    note = (
        f"Student's t over what differs in the {group.category} alone, seed by seed; 95 % intervals"
        f" and p are corrected for the {tests} tests of these tables (Bonferroni). Undecided: the"
        " interval holds 0; in brackets the smallest difference that would have shown in"
        f" {100 * POWER:.0f} % of such studies."
    )
    return Table(
        title=f"By {group.category}" + (" (exploratory)" if group.exploratory else ""),
        headings=[
            group.category,
            "trials",
            metric.heading(f"mean {metric.words}"),
            f"minus {group.reference}",
            "tested over",
            "p",
            "verdict",
        ],
        lines=lines,
        note=" ".join(
            [
                *([f"Exploratory: {group.exploratory}."] if group.exploratory else []),
                *([note] if tests else []),
            ]
        ),
    )


def _verdict(name: str, contrast: Contrast | None, group: Groups) -> str:
    if name == group.reference:
        return "-"
    if contrast is None:
        return "not tested"
    if contrast.decided:
        return "lower" if contrast.difference < 0 else "higher"
    return f"undecided ({contrast.least:.2g} would show)"


def _failures(state: StudyState) -> Table:
    lines = [[error, str(count), ", ".join(ids)] for error, count, ids in failures(state)]
    return Table(title="Failures", headings=["cause", "trials", "such as"], lines=lines)


def _costs(state: StudyState) -> Table:
    def show(name: str, value: float) -> str:
        seconds = name.endswith("seconds") or name.startswith("of them")
        return duration(value) if seconds else f"{value:,.4g}"

    return Table(
        title="Cost",
        headings=["", "total"],
        lines=[[name, show(name, value)] for name, value in costs(state).items()],
    )


@dataclass(frozen=True, kw_only=True)
class Links:
    """Addresses of a study's runs in MLflow's interface; empty if unknown."""

    study: str = ""
    local: bool = False  # whether the links need a running `lns-study ui`
    rows: dict[str, str] | None = None
    trials: dict[str, str] | None = None


def links(state: StudyState, folder: Path) -> Links:
    """Return the addresses of the runs, from ``mlflow.json`` in the study's folder."""
    try:
        place: dict[str, Any] = read_own_json(folder / WHERE)
        local = not is_server(place["uri"])
        base = f"http://{HOST}:{PORT}/" if local else f"{without_login(place['uri']).rstrip('/')}/"
        whole = base + page(place["experiment"], place["view"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the file is untrusted
        return Links()

    def search(condition: str) -> str:
        query = urllib.parse.urlencode(
            {"searchFilter": condition, "workflowType": "machine_learning"}
        )
        return f"{base}#/experiments/{place['experiment']}/runs?{query}"

    rows = {row: search(f"tags.row = {_quoted(row)}") for row in state.rows()}
    trials = {trial.id: search(f"tags.trial = '{trial.id}'") for trial in state.trials}
    return Links(study=whole, local=local, rows=rows, trials=trials)


def _quoted(text: str) -> str:
    """Quote a string for MLflow's search syntax."""
    return f'"{text}"' if "'" in text else f"'{text}'"
