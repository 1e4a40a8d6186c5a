"""Reports changed by hand, where parts of a page may differ for good reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.evidence.verify import verify
from study.ledger.log import read_ledger
from study.ledger.state import fold
from study.report import pictures
from study.report.write import write_report
from study.tracking.address import WHERE
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
        ("<tr><td>", "<tr hidden><td>"),
        ("</style>", "td { display: none }\n</style>"),
        ('<script>"use strict";', '<script>"use strict"; explore = null;'),
        ('"data:image/png;base64,', '"data:image/png;base64,AAAA'),
        ("\n", "\r\n"),
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
    """The sentence is in its place on both pages, and so is the picture."""
    lost = LOST.replace("slots", "test_error")
    for file, old, new in (
        ("report.md", "0 restarts\n", f"0 restarts\n- {lost}\n"),
        ("report.html", "<h2>", f'<p class="remark">{lost}</p>\n<h2>'),
    ):
        found = tamper(report, file, old, new)
    assert "test_error.png: the ledger gives no such file" in found
    assert any(line.startswith("report.html: it says '<figure>") for line in found), found


def test_data_of_the_plots_with_the_true_ones_in_a_comment_are_told(report: Path) -> None:
    page = (report / "report" / "report.html").read_text(encoding="utf-8")
    data = page.partition('id="explore-data">')[2].partition("</script>")[0]
    altered = data.replace('"curve":[[1,', '"curve":[[9,')
    assert altered != data
    found = tamper(report, "report.html", data, f"{altered}</script><!--{data}-->")
    assert any(line.startswith("report.html: it ") for line in found), found


@pytest.mark.parametrize("file", ["report.html", "report.md", "test_error.png"])
def test_a_file_that_is_missing_is_told(report: Path, file: str) -> None:
    (report / "report" / file).unlink()
    assert f"{file}: it is missing" in list(verify(report, "none"))


def test_a_picture_in_place_of_another_is_told(report: Path) -> None:
    folder = report / "report"
    (folder / "test_error.png").write_bytes((folder / "error_per_epoch.png").read_bytes())
    assert list(verify(report, "none")) == ["test_error.png: it is not what the ledger gives"]


def test_addresses_of_mlflow_are_no_difference(report: Path) -> None:
    """A storage that was moved since has other links than its report."""
    state = fold(read_ledger(report))
    where = {"uri": "http://server", "experiment": "1", "view": "x"}
    (report / WHERE).write_text(json.dumps(where))
    assert not list(verify(report, "none"))
    write_report(state, report / "report")
    assert "http://server" in (report / "report" / "report.html").read_text()
    (report / WHERE).unlink()
    assert not list(verify(report, "none"))


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
