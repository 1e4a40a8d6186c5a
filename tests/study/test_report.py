"""The report: whole, self-contained, escaped, honest about what is missing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.report import render_text, write_report
from study.state import fold
from tests.study.conftest import made_up_events

Tiny = Callable[..., StudyConfig]
EVIL = '"><script>alert(1)</script>'


class Tags(HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
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
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("error_per_epoch.png", "test_error.png"))


def test_the_page_is_self_contained_and_knows_dark(tiny: Tiny, tmp_path: Path) -> None:
    page = page_of(tiny("report"), tmp_path)
    tags = Tags(page)
    assert not [value for name, value in tags.attributes if name in ("src", "srcset") and not (value or "").startswith("data:")]
    assert "prefers-color-scheme: dark" in page
    assert tags.tags.count("source") == tags.tags.count("img") >= 2
    assert len(page) < 5e6
    assert page_hashes(page) == set(re.findall(r"'(sha256-[^']+)'", page))


def page_hashes(page: str) -> set[str]:
    """What the policy must name: the script that runs, and the one that it unpacks."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    (packed,) = re.findall(r'<script type="text/plain" id="plotly-gz">(.*?)</script>', page, re.S)
    texts = [script.encode(), gzip.decompress(base64.b64decode(packed))]
    return {f"sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}" for text in texts}


def test_names_and_labels_are_escaped(tiny: Tiny, tmp_path: Path) -> None:
    study = tiny("report", f"question='{EVIL}'", f"rows=[{{label: '{EVIL}'}}]", "baseline=null", f"name='{EVIL}'")
    page = page_of(study, tmp_path)
    assert Tags(page).tags.count("script") == 3
    assert "alert(1)" in page
    assert re.search(r"<script>alert", page) is None
    assert "/" not in study.slug


def test_the_text_has_two_decimals_and_the_published_figures(tiny: Tiny) -> None:
    text = render_text(fold(made_up_events(tiny("report", "seeds=[0,1]"), {"float32": 2.345, "lns matmul": 2.5})))
    assert "2.35 ± 0.01" in text
    assert "2.14" in text
    assert "2.12" in text


@pytest.mark.parametrize("drop", ["finished", "report"])
def test_an_unfinished_study_has_a_report_that_says_so(tiny: Tiny, tmp_path: Path, drop: str) -> None:
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
    failed = [{**event, "event": "failed", "error": "boom"} if event["event"] == "finished" else event for event in events]
    text = render_text(fold(failed))
    assert text.count("boom") == 3
    assert "FAILED: 3 more" in text


def test_a_diverged_trial_does_not_break_the_pictures(tiny: Tiny, tmp_path: Path) -> None:
    events = made_up_events(tiny("report"))
    for event in events:
        if event["event"] == "report":
            event["metrics"] |= {"validation/error": float("nan"), "validation/loss": float("nan")}
    assert "INCOMPLETE" not in (write_report(fold(events), tmp_path) / "report.md").read_text()
