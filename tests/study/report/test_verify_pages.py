"""Texts put into a report's pages by hand, where a part of the page may differ for good reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.ledger.log import read_ledger
from study.ledger.state import fold
from study.report import pictures
from study.report.verify import verify
from study.report.write import write_report
from tests.study.conftest import made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
FALSE = "Final error of lns12: 1.02 % (0.99 to 1.05)"
LOST = "The picture slots could not be made (ValueError: no)."


@pytest.fixture
def report(tiny: Tiny) -> Path:
    study = tiny("pages", "seeds=[0,1,2]")
    events = made_up_events(study)
    write_ledger(study, events)
    write_report(fold(events), study.folder / "report")
    assert not list(verify(study.folder, "none"))
    return study.folder


def tamper(folder: Path, file: str, old: str, new: str) -> list[str]:
    path = folder / "report" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return list(verify(folder, "none"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</body>", f"<p>{FALSE}, the other could not be made (x)</p></body>"),
        ("</body>", f"<p>{LOST}</p></body>"),
        ("</body>", f"<figure><p>{FALSE}</p></figure></body>"),
        ("</picture></figure>", f"</picture><figcaption>{FALSE}</figcaption></figure>"),
        ("</body>", f'<section id="explore"><p>{FALSE}</p></section></body>'),
        ("</body>", f'<input value="{FALSE}"></body>'),
        ("</body>", f'<img alt="{FALSE}"></body>'),
        ("</body>", f'<script type="text/plain" style="display: block">{FALSE}</script></body>'),
        ("</body>", "<p>All runs in MLflow</p></body>"),
        ("Bars: final test error", "Bars: final test error of 1.02 %, that is: test error"),
        ("<h2>Learning</h2>", "<h2>Learned</h2>"),
    ],
)
def test_a_text_that_is_added_to_the_page_is_told(report: Path, old: str, new: str) -> None:
    found = tamper(report, "report.html", old, new)
    assert any(line.startswith("report.html: it ") for line in found), found


def test_a_line_that_is_added_to_the_text_is_told(report: Path) -> None:
    line = f"- {FALSE}, the other could not be made (x)\n"
    found = tamper(report, "report.md", "- 0 trials", f"{line}- 0 trials")
    assert any(each.startswith("report.md: it says") for each in found), found


def test_a_part_that_is_there_was_made(report: Path) -> None:
    """The sentence stands in its place on both pages, and the picture too."""
    lost = LOST.replace("slots", "test_error")
    for file, old, new in (
        ("report.md", "0 restarts\n", f"0 restarts\n- {lost}\n"),
        ("report.html", "<h2>", f'<p class="remark">{lost}</p>\n<h2>'),
    ):
        found = tamper(report, file, old, new)
    assert any("the picture test_error, of which it says" in line for line in found), found


def test_a_part_that_could_not_be_made_is_no_difference(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("module has no\nattribute '_inside'")

    state = fold(read_ledger(report))
    with monkeypatch.context() as patched:
        patched.setattr(pictures, "draw_epochs", fail)
        with pytest.warns(RuntimeWarning, match="_inside"):
            write_report(state, report / "report")
    assert "could not be made (AttributeError" in (report / "report" / "report.md").read_text()
    assert not list(verify(report, "none"))
