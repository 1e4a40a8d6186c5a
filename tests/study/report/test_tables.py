"""The report is complete, self-contained and escaped, and shows missing parts."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import html
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from study.config import StudyConfig
from study.config.metric import Metric
from study.ledger.state import fold
from study.report import pictures
from study.report.figures.results import draw_bars
from study.report.figures.slots import draw_slots
from study.report.figures.style import COLOURS, DARK, LIGHT, Theme, canvas, png, value_axis
from study.report.html import render_html
from study.report.latex import render_latex
from study.report.pictures import Links, Parts
from study.report.tables import render_markdown, render_text
from study.report.write import write_report
from study.results.idle_time import sentences
from study.results.summary import summarise
from tests.study.conftest import made_up_events, write_ledger
from tests.study.made_up_slots import Held, run_of, with_slots

Tiny = Callable[..., StudyConfig]
EVIL = '"><script>alert(1)</script>'
EVIL_NAME = '"><img src=x onerror=alert(1)>'
"""A name without a slash."""


class Tags(HTMLParser):
    """Collect the tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record it."""
        self.tags.append(tag)
        self.attributes += attrs


def page_of(study: StudyConfig, folder: Path) -> str:
    return (write_report(fold(made_up_events(study)), folder) / "report.html").read_text()


def test_the_files_are_there_and_are_pictures(tiny: Tiny, tmp_path: Path) -> None:
    write_report(fold(made_up_events(tiny("report", "seeds=[0,1]"))), tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= {
        "report.html",
        "report.md",
        "error_per_epoch.png",
        "test_error.png",
    }
    assert all(
        (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        for name in ("error_per_epoch.png", "test_error.png")
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["pipe", "settings"])
def test_no_picture_follows_settings_in_the_current_folder(
    tiny: Tiny, tmp_path: Path, kind: str
) -> None:
    """matplotlib reads them first, and would wait for a pipe in their place."""
    study, here = tiny("drawn", f"storage={tmp_path}/studies"), tmp_path / "here"
    write_ledger(study, made_up_events(study))
    here.mkdir()
    drawn = []
    for folder in (tmp_path, here):
        if folder == here and kind == "pipe":
            os.mkfifo(here / "matplotlibrc")
        elif folder == here:
            (here / "matplotlibrc").write_text("text.usetex: true\nfont.size: 1\n")
        words = [sys.executable, "-m", "study", "report", "drawn", "--storage", study.storage]
        there = {"PYTHONPATH": str(Path(__file__).parents[3])}
        subprocess.run([*words, "--tracking-uri", "none"], cwd=folder, env=os.environ | there,
                       check=True, timeout=60)  # fmt: skip
        drawn.append((study.folder / "report" / "test_error.png").read_bytes())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "broken", ["importance", "draw_epochs", "entries", "tables", "interactive"]
)
def test_what_cannot_be_made_leaves_a_note_and_the_rest_of_the_report(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """As after an update of a library that draws or computes."""

    def fail(*_: object) -> None:
        raise AttributeError("module has no attribute '_inside'")

    state = fold(made_up_events(tiny("broken", "seeds=[0,1]")))
    write_report(state, tmp_path)
    monkeypatch.setattr(pictures, broken, fail)
    with pytest.warns(RuntimeWarning, match="_inside"):
        write_report(state, tmp_path)
    for page in ((tmp_path / name).read_text() for name in ("report.html", "report.md")):
        assert re.search(
            r"could not be made \(AttributeError: module has no attribute .*_inside", page
        )
        assert "2.00" in page
    assert (tmp_path / "test_error.png").exists()
    assert (tmp_path / "error_per_epoch.png").exists() == (broken != "draw_epochs")


def test_the_page_is_self_contained_and_knows_dark(tiny: Tiny, tmp_path: Path) -> None:
    page = page_of(tiny("report"), tmp_path)
    tags = Tags(page)
    assert not [
        value
        for name, value in tags.attributes
        if name in ("src", "srcset") and not (value or "").startswith("data:")
    ]
    assert "prefers-color-scheme: dark" in page
    assert tags.tags.count("source") == tags.tags.count("img") >= 2
    assert len(page) < 5e6
    assert page_hashes(page) == set(re.findall(r"'(sha256-[^']+)'", page))


def page_hashes(page: str) -> set[str]:
    """The policy must name the script that runs, and the one that it unpacks."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    (packed,) = re.findall(r'<script type="text/plain" id="plotly-gz">(.*?)</script>', page, re.S)
    texts = [script.encode(), gzip.decompress(base64.b64decode(packed))]
    return {f"sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}" for text in texts}


def test_names_and_labels_are_escaped(tiny: Tiny, tmp_path: Path) -> None:
    study = tiny(
        "report",
        f"question='{EVIL}'",
        f"rows=[{{label: '{EVIL}'}}]",
        "baseline=null",
        f"name='{EVIL_NAME}'",
    )
    page = page_of(study, tmp_path)
    assert Tags(page).tags.count("script") == 3
    assert "alert(1)" in page
    assert re.search(r"<script>alert", page) is None
    assert not [name for name, _ in Tags(page).attributes if name == "onerror"]


def test_the_text_has_two_decimals_and_the_published_figures(tiny: Tiny) -> None:
    text = render_text(
        fold(made_up_events(tiny("report", "seeds=[0,1]"), {"float32": 2.345, "lns matmul": 2.5}))
    )
    assert "2.35 ± 0.01" in text
    assert "2.14" in text
    assert "2.12" in text


def test_figures_that_were_published_for_another_recipe_are_not_shown(
    tiny: Tiny, tmp_path: Path
) -> None:
    """MNIST's published 2.14 % was shown beside the 14.81 % on scikit-learn's digits."""
    events = made_up_events(tiny("report", "seeds=[0,1]", "comparable={epochs: 20}"))
    folder = write_report(fold(events), tmp_path)
    summary = summarise(fold(events))
    assert summary.rows[0].published == 2.14
    page = (folder / "report.html").read_text().partition("<details>")[0]
    for text in (render_text(fold(events)), (folder / "report.md").read_text(), page):
        assert "SMALL BUDGET" in text
        assert "2.14" not in text
        assert "within 0.15" not in text
    figure = draw_bars(fold(events), summary, LIGHT)
    assert figure is not None
    assert len(figure.axes[0].patches) == 2


@pytest.mark.parametrize("form", ["text", "markdown", "html", "latex"])
def test_columns_that_are_empty_in_every_row_are_left_out(tiny: Tiny, form: str) -> None:
    def heads(*overrides: str) -> str:
        state = fold(made_up_events(tiny("report", "seeds=[0,1]", *overrides)))
        summary = summarise(state)
        made = Parts(pictures=[], tables=[], explore=None, failed=[])
        pages = {
            "text": lambda: render_text(state),
            "markdown": lambda: render_markdown(state, summary, []),
            "html": lambda: render_html(state, summary, made, Links()),
            "latex": lambda: render_latex(state),
        }
        lines = pages[form]().partition("<details>")[0].splitlines()
        return next(line for line in lines if "seeds" in line and "row" in line)

    columns = ("published", "minus float32", "required", "verdict")
    assert all(column in heads() for column in columns)
    bare = heads("rows=[{label: float32}, {label: b, overrides: {precision.format: lns12}}]")
    assert [column in bare for column in columns] == [False, True, False, False]
    alone = heads("rows=[{label: float32}]", "baseline=null")
    assert not any(column in alone for column in ("published", "minus", "required", "verdict"))


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_table_is_as_wide_as_the_terminal(tiny: Tiny, width: int) -> None:
    rows = (
        "rows=[{label: float32, overrides: {precision.format: float32}, published: 2.14}, {label:"
        " lns everywhere + kahan, overrides: {precision.format: lns12}, published: 3.62, worse_by:"
        " 0.8}]"
    )
    state = fold(made_up_events(tiny("report", "seeds=[0,1,2]", rows)))
    text = render_text(state, width)
    assert max(map(len, text.splitlines())) <= width
    assert "worse than float32 by at least 0.80" in " ".join(text.split())
    lines = text.splitlines()
    (rule,) = [number for number, line in enumerate(lines) if line and not line.strip("-")]
    table = lines[rule - 1 : rule + 3]
    assert [line.split()[0] for line in table] == ["row", table[1], "float32", "lns"]
    assert all("2.0" in line for line in table[2:])
    if width >= 80:
        assert "lns everywhere + kahan" in table[3]
        assert "published" in table[0]


def test_a_piped_table_has_one_line_a_row(tiny: Tiny) -> None:
    label = "a row with a label that is long enough to fill a line of a terminal by itself"
    rows = f"rows=[{{label: float32}}, {{label: {label}, overrides: {{epochs: 2}}, within: 0.2}}]"
    text = render_text(fold(made_up_events(tiny("report", "seeds=[0,1]", rows))))
    (line,) = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    assert "within 0.20 of float32" in line


def test_the_program_prints_a_table_for_the_terminal_it_is_in(tiny: Tiny) -> None:
    study = tiny("report-in-terminal", "seeds=[0,1]")
    write_ledger(study, made_up_events(study))
    words = [sys.executable, "-m", "study", "report", study.slug, "--storage", study.storage]
    there = {"PYTHONPATH": str(Path(__file__).parents[3]), "COLUMNS": "60"}
    ours, theirs = pty.openpty()
    try:
        subprocess.run([*words, "--tracking-uri", "none"], env=os.environ | there, check=True,
                       timeout=60, stdout=theirs)  # fmt: skip
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while part := os.read(ours, 65536):
                shown += part
    finally:
        os.close(ours)
    lines = shown.decode().replace("\r", "").partition("Report:")[0].splitlines()
    assert any(line.startswith("float32  ") for line in lines)
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("drop", ["finished", "report"])
def test_an_unfinished_study_has_a_report_that_says_so(
    tiny: Tiny, tmp_path: Path, drop: str
) -> None:
    gone = {"finished": {"finished"}, "report": {"finished", "report"}}[drop]
    state = fold([event for event in made_up_events(tiny("report")) if event["event"] not in gone])
    page = (write_report(state, tmp_path) / "report.html").read_text()
    assert "INCOMPLETE: 2 of 2 trials" in page


def test_failures_and_mixed_code_are_said(tiny: Tiny) -> None:
    events = made_up_events(tiny("report"))
    trial = events[1]["trial"]
    later = {**events[0], "provenance": {**events[0]["provenance"], "commit": "decade"}}
    failed = {"event": "failed", "time": events[-1]["time"], "trial": trial, "error": "boom"}
    text = render_text(fold([*events, later, {**events[1]}, failed]))
    assert "FAILED: float32, seed 0: boom" in text
    assert "MIXED CODE" in text


def test_many_failures_are_counted(tiny: Tiny) -> None:
    events = made_up_events(tiny("report", "seeds=[0,1,2]"))
    failed = [
        {**event, "event": "failed", "error": "boom"} if event["event"] == "finished" else event
        for event in events
    ]
    text = render_text(fold(failed))
    assert text.count("boom") == 3
    assert "FAILED: 3 more" in text


def test_a_diverged_trial_does_not_break_the_pictures(tiny: Tiny, tmp_path: Path) -> None:
    events = made_up_events(tiny("report"))
    for event in events:
        if event["event"] == "report":
            event["metrics"] |= {"validation/error": float("nan"), "validation/loss": float("nan")}
    assert "INCOMPLETE" not in (write_report(fold(events), tmp_path) / "report.md").read_text()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_loss_that_is_no_number_is_told_where_the_error_is_one(tiny: Tiny, split: str) -> None:
    """After a divergence the earlier weights remain, and their error looks normal."""
    events = made_up_events(tiny("report"))
    assert "DIVERGED" not in render_text(fold(events))
    first = next(event["trial"] for event in events if event["event"] == "report")
    for event in events:
        if event["event"] == "report" and event["trial"] == first:
            event["metrics"][f"{split}/loss"] = float("nan")
    text = render_text(fold(events))
    assert "DIVERGED: 1 of 2 trials, whose last loss or validation error is not finite" in text
    assert "(float32: 1 of 1)" in text


def test_a_best_value_at_an_end_of_those_tried_is_told(tiny: Tiny) -> None:
    space = "space={optimizer.lr: {grid: [0.1, 0.2, 0.4]}}"
    events = made_up_events(tiny("report", space, "search={algorithm: grid}"))
    best = {"float32": 0.4, "lns matmul": 0.2}
    trials = {trial["id"]: trial for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report":
            trial = trials[event["trial"]]
            is_best = trial["params"]["optimizer.lr"] == best[trial["row"]]
            event["metrics"]["validation/error"] = 0.1 if is_best else 0.2
    text = render_text(fold(events))
    assert text.count("AT AN END") == 1
    assert "optimizer.lr is 0.4, the largest that was tried, in 1 of 2 rows;" in text


def pixels(png: bytes, colour: str) -> int:
    """Return the points of a picture in a colour, as far as the palette keeps it."""
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((abs(image - wanted).max(axis=2) < 12).sum())


def test_the_slots_of_a_run_are_drawn_and_told(tiny: Tiny, tmp_path: Path) -> None:
    state = fold(with_slots(made_up_events(tiny("report"))))
    page = (write_report(state, tmp_path) / "report.html").read_text()
    assert (tmp_path / "slots.png").read_bytes().startswith(b"\x89PNG")
    assert "<h2>Slots</h2>" in page
    for sentence in sentences(state):
        assert sentence in html.unescape(page)
        assert f"- {sentence}" in (tmp_path / "report.md").read_text()


def test_without_slots_in_the_ledger_there_is_no_picture_of_them(
    tiny: Tiny, tmp_path: Path
) -> None:
    assert "<h2>Slots</h2>" not in page_of(tiny("report"), tmp_path)
    assert not (tmp_path / "slots.png").exists()
    assert draw_slots(run_of([], [(0, 2, 0)], 10), ["row"], LIGHT) is None


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_bars_are_as_long_as_trials_and_pale_during_their_starts(theme: Theme) -> None:
    def draw(reports: list[float], end: float, seconds: list[float] | None = None) -> bytes:
        held = Held(trial="a", begin=0, end=end, reports=reports, seconds=seconds)
        figure = draw_slots(run_of([held], [(0, 2, 0)], 100), ["row"], theme)
        assert figure is not None
        return png(figure)

    short, long, starting = draw([0.1], 40), draw([0.1], 80), draw([60.0], 80)
    legend = pixels(draw([], 1), COLOURS[0])
    assert pixels(long, COLOURS[0]) - legend == pytest.approx(
        2 * (pixels(short, COLOURS[0]) - legend), rel=0.03
    )
    assert pixels(starting, COLOURS[0]) - legend == pytest.approx(
        0.25 * (pixels(long, COLOURS[0]) - legend), rel=0.05
    )
    said = draw([60.0], 80, [20.0])  # its epoch started at 40
    assert pixels(said, COLOURS[0]) - legend == pytest.approx(
        0.5 * (pixels(long, COLOURS[0]) - legend), rel=0.05
    )


@pytest.mark.parametrize(("prepared", "label"), [(None, "plan"), (4.0, "command")])
def test_the_axis_names_what_it_counts_from(prepared: float | None, label: str) -> None:
    held = [Held(trial="a", begin=0, end=40, reports=[10.0])]
    figure = draw_slots(run_of(held, [(0, 2, 0)], 100, prepared=prepared), ["row"], LIGHT)
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_xlabel() == f"seconds since the {label}"
    assert axes.get_xlim()[1] == 100 + (prepared or 0)


@pytest.mark.parametrize("slots", [4, 300])
def test_few_and_many_slots_are_drawn(slots: int) -> None:
    hows = ["finished", "stopped", "failed", "restarted", "relieved"]
    held = [
        Held(
            trial=f"{n}",
            begin=10 * (n // slots),
            end=10 * (n // slots) + 9,
            slots=[n % slots],
            reports=[10 * (n // slots) + 2],
            how=hows[n % 5],
        )
        for n in range(7 * slots)
    ]
    figure = draw_slots(run_of(held, [(0, slots, 0)], 70), ["row"], LIGHT)
    assert figure is not None
    picture = png(figure)
    assert len(picture) < 200_000
    width, height = Image.open(io.BytesIO(picture)).size
    assert width == 1280
    assert 300 < height < 900


def test_the_run_that_is_drawn_may_have_had_other_rows(tiny: Tiny, tmp_path: Path) -> None:
    events = with_slots(made_up_events(tiny("report")))
    later = {
        **made_up_events(tiny("report", "rows=[]", "baseline=null"))[0],
        "time": events[-1]["time"] + 1,
    }
    write_report(fold([*events, later]), tmp_path)
    assert (tmp_path / "slots.png").exists()


def test_a_lying_bar_has_its_figure_beside_the_dots_of_its_seeds(tiny: Tiny) -> None:
    rows = ",".join(
        f"{{label: row{n}, overrides: {{optimizer.lr: {0.01 * (n + 1):.2f}}}}}" for n in range(8)
    )
    state = fold(made_up_events(tiny("bars", f"rows=[{rows}]", "seeds=[0,1,2]", "baseline=null")))
    figure = draw_bars(state, summarise(state), LIGHT)
    assert figure is not None
    axes = figure.axes[0]
    dots = [offsets[:, 0].max() for offsets in (c.get_offsets().data for c in axes.collections)]
    figures = [text.xy[0] for text in axes.texts]
    means = [bar.get_width() for bar in axes.patches]
    assert len(figures) == len(dots) == len(means) == 8
    assert figures == dots
    assert any(dot > mean for dot, mean in zip(dots, means, strict=True))


def test_a_standing_bar_has_its_figure_above_the_dots_of_its_seeds(tiny: Tiny) -> None:
    state = fold(made_up_events(tiny("bars", "seeds=[0,1,2,3]", "baseline=null")))
    figure = draw_bars(state, summarise(state), LIGHT)
    assert figure is not None
    axes = figure.axes[0]
    dots = [c.get_offsets().data[:, 1].max() for c in axes.collections if len(c.get_offsets()) > 1]
    tops = [text.xy[1] for text in axes.texts if text.get_text() != "2.14"]
    assert dots
    assert all(top >= dot for top, dot in zip(tops, dots, strict=False))


@pytest.mark.parametrize(("low", "high"), [(8.7, 14.5), (2.0, 2.4), (7.0, 80.0), (0.01, 90.0)])
def test_a_logarithmic_axis_has_labels_enough_to_read_it(low: float, high: float) -> None:
    """The range 8.7 to 14.5 had one label, 10."""
    figure, axes = canvas(LIGHT)
    axes.plot([0, 1], [low, high])
    value_axis(axes, Metric(name="validation/error"), [low, high])
    figure.draw_without_rendering()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert 3 <= len(ticks) <= 12


@pytest.mark.parametrize(("values", "logarithmic"), [([0.0, 0.0], False), ([0.0, 2.5], True)])
def test_errors_of_nothing_have_a_linear_axis(values: list[float], logarithmic: bool) -> None:
    """A study whose trials all end at 0 % warned that its axis cannot be logarithmic."""
    assert Metric(name="validation/error").logarithmic(values) is logarithmic
