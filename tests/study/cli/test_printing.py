"""Output of commands for a ledger that may come from a stranger."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.api import load
from study.cli import main
from study.evidence.record import FILE as FIGURES
from study.evidence.record import read_record
from study.ledger.log import read_ledger
from study.ledger.state import fold
from study.report.figures.style import LABEL, tag
from study.report.write import write_report
from study.text import cut, printable, printable_json
from tests.study.conftest import made_up_events, write_ledger
from tests.study.tracking.conftest import Tiny

UNSEEN = "\xad\u034f\u115f\u17b4\u180e\u3164\ufe0f\uffa0\ufff9\U0001d173\U000e0041\U000e0101"
"""Characters that terminals and pages do not show, so that two labels look the same."""
HOSTILE = (
    "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\u2066\u061c\u200f\u200e\u200b\u2060\ufeff\r" + UNSEEN
)
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    rf"{UNSEEN}]"
)


def hostile_study(tiny: Tiny) -> Any:
    """A study whose question, labels and errors control a terminal or reverse the text."""
    study = tiny("hostile", "seeds=[0,1]")
    events = made_up_events(study)
    plan = events[0]
    plan["study"]["question"] = f"Why {HOSTILE}?"
    plan["study"]["rows"][0]["label"] += HOSTILE
    plan["data"][0]["source"] += HOSTILE
    plan["provenance"]["commit"] += HOSTILE
    for trial in plan["trials"]:
        trial["row"] += HOSTILE if trial["row"] == plan["trials"][0]["row"] else ""
    if plan["study"].get("baseline"):
        plan["study"]["baseline"] = plan["study"]["rows"][0]["label"]
    first = plan["trials"][0]["id"]
    events = [
        event | {"event": "failed", "error": f"raised {HOSTILE}"}
        if event["event"] == "finished" and event["trial"] == first
        else event
        for event in events
    ]
    write_ledger(study, events)
    return study, first


def test_no_control_character_of_a_ledger_is_printed_or_in_a_report(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, first = hostile_study(tiny)
    there = ["--storage", study.storage]
    for words in (
        ["report", study.slug, "--format", "latex", *there],
        ["report", study.slug, "--format", "csv", *there],
        ["status", study.slug, *there],
        ["show", study.slug, first, *there],
        ["show", study.slug, "none", *there],
        ["list", *there],
        ["compare", study.slug, study.slug, *there],
        ["export", study.slug, "-o", str(tmp_path / "x.csv"), *there],
        ["doctor", study.slug, *there],
    ):
        main(words)
        said = capsys.readouterr()
        assert CONTROLS.search(said.out + said.err) is None, words
        if words[0] in ("report", "status"):
            assert r"\x1b" in said.out, words
    files = [tmp_path / "x.csv", *(study.folder / "report").glob("*.[mhtcj]*")]
    assert {file.suffix for file in files} == {".csv", ".md", ".html", ".tex", ".json"}
    for file in files:
        assert CONTROLS.search(file.read_bytes().decode().replace("\r\n", "\n")) is None, file


def test_no_control_character_of_an_exception_is_printed_by_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text(
        "from trainers import report\n\n\ndef train(config):\n"
        f"    report({{'validation/error': 0.5}})\n    raise RuntimeError({HOSTILE!r})\n"
    )
    (tmp_path / "own.yaml").write_text(
        f"name: own\nquestion: {json.dumps(f'Why {HOSTILE}?')}\n"
        f"trial: {{trainable: {{name: '{tmp_path}/loop.py:train'}}}}\nseeds: [0]\n"
        f"storage: {tmp_path}/studies\ntracking_uri: none\n"
    )
    assert main(["run", str(tmp_path / "own.yaml"), "--plain"]) == 1
    said = "".join(capsys.readouterr())
    assert said.count(r"\x1b[2J") >= 2
    assert CONTROLS.search(said) is None


def test_every_control_character_and_separator_of_unicode_is_escaped() -> None:
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    wanted = [each for each in every if unicodedata.category(each) in kinds and each not in "\t\n"]
    assert not [hex(ord(each)) for each in wanted if printable(each) == each]
    for each in (*wanted, *UNSEEN):
        assert json.loads(printable_json(json.dumps(each, ensure_ascii=False))) == each
    assert printable("Größe 日本語 ± σ² e\u0301") == "Größe 日本語 ± σ² e\u0301"


@pytest.mark.parametrize("label", ["sgd [bold]", "a [link=http://h/]b[/link]", "c [/]", "[red]d"])
def test_a_label_with_brackets_is_shown_as_it_is(
    tiny: Tiny, label: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that draws the tables of ``status`` reads tags in brackets, such as links."""
    study = tiny("tags", f"rows=[{{label: '{label}'}}]", "baseline=null")
    write_ledger(study, made_up_events(study))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["status", study.slug, "--storage", study.storage]) == 0
    assert label in capsys.readouterr().out


def test_no_control_character_of_a_ledger_is_in_what_python_shows(tiny: Tiny) -> None:
    study, _ = hostile_study(tiny)
    shown = load(study.slug, study.storage)
    for text in (repr(shown), shown._repr_html_()):
        assert CONTROLS.search(text) is None


def test_the_figures_file_escapes_control_characters_and_holds_the_same_texts(tiny: Tiny) -> None:
    """JSON has an escape for each, so ``cat`` is safe and programs see no difference."""
    study, _ = hostile_study(tiny)
    state = fold(read_ledger(study.folder))
    folder = write_report(state, study.folder / "report")
    label = state.plan["study"]["rows"][0]["label"]
    assert HOSTILE in label
    content = (folder / FIGURES).read_text()
    assert CONTROLS.search(content) is None
    assert r"\u009b" in content
    assert label in {row["label"] for row in read_record(folder)["rows"]}


def test_no_control_character_of_a_ledger_is_in_what_a_page_draws(tiny: Tiny) -> None:
    """Its script shows names that it reads from JSON, where every character has an escape."""
    study, _ = hostile_study(tiny)
    page = write_report(fold(read_ledger(study.folder)), study.folder / "report") / "report.html"
    data = page.read_text().partition('id="explore-data">')[2].partition("</script>")[0]
    shown = list(texts_of(json.loads(data)))
    assert any(r"\x1b" in text for text in shown)
    assert not [text for text in shown if CONTROLS.search(text)]


def test_a_label_in_a_picture_is_one_short_line_without_control_characters(tiny: Tiny) -> None:
    """A bidirectional override would reverse the text after it; a long label hides the picture."""
    label = "\x1b\u202e\n" + 1000 * "long "
    found = tag(label)
    assert len(found) <= LABEL + 20
    assert not CONTROLS.search(found)
    assert "\n" not in found


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in JSON's values, including names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from (name, *texts_of(each))
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)


def test_a_name_or_label_is_no_link_or_picture_in_the_report(tiny: Tiny) -> None:
    """In Markdown the text must not become HTML, and is shown as it is."""
    live = "![x](http://127.0.0.1:9/x) <img src=x> [y]: http://127.0.0.1:9"
    study = tiny("tiny", f"rows=[{{label: '{live}'}}]", "baseline=null")
    study = dataclasses.replace(study, question=live)
    write_ledger(study, made_up_events(study))
    assert main(["report", study.slug, "--storage", study.storage]) == 0
    text = (study.folder / "report" / "report.md").read_text()
    assert r"![x\](http: //127.0.0.1:9/x) \<img src=x> [y\]: http" in text
    assert re.search(r"(?<!\\)(\]\s*[(:]|<[a-z])", text) is None


def test_a_bare_address_is_none_in_the_report(tiny: Tiny) -> None:
    """Many Markdown viewers turn addresses in the text into links."""
    bare = "https://evil.example/a www.evil.example me@evil.example WWW.evil.example ftp://evil/x"
    study = tiny("bare", f"rows=[{{label: '{bare}'}}]", "baseline=null")
    study = dataclasses.replace(study, question=bare)
    write_ledger(study, made_up_events(study))
    assert main(["report", study.slug, "--storage", study.storage]) == 0
    text = (study.folder / "report" / "report.md").read_text()
    assert "https: //evil.example/a www. evil.example me@ evil.example" in text
    assert re.search(r"(?i)://|www\.\S|@\S", text) is None
    assert main(["report", study.slug, "--verify", "--storage", study.storage]) == 0


def odd_study(tiny: Tiny, name: str, odd: str) -> Any:
    """A study; the label of its first row, and the question, end in ``odd``."""
    study = tiny(name)
    events = made_up_events(study)
    text = json.dumps(events).replace('"float32"', json.dumps(f"float32{odd}"))
    text = text.replace(json.dumps(f'format": "float32{odd}')[1:-1], 'format": "float32')
    events = json.loads(text)
    for trial in events[0]["trials"]:
        trial["config"]["precision"]["format"] = "float32"
    events[0]["study"] = study.to_dict() | {"question": f"Why{odd}?"}
    events[0]["study"]["rows"][0]["label"] = f"float32{odd}"
    events[0]["study"]["baseline"] = f"float32{odd}"
    write_ledger(study, events)
    return study


def commands(study: Any, tmp_path: Path) -> Iterator[list[str]]:
    there = ["--storage", study.storage]
    yield ["report", study.slug, *there]
    yield ["report", study.slug, "--format", "csv", *there]
    yield ["status", study.slug, *there]
    yield ["list", *there]
    yield ["compare", study.slug, study.slug, *there]
    yield ["export", study.slug, "-o", str(tmp_path / "x.csv"), *there]
    yield ["report", study.slug, "--verify", *there]


def test_half_a_surrogate_pair_ends_no_command(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = odd_study(tiny, "surrogate", "\ud800")
    for words in commands(study, tmp_path):
        assert main(words) == 0, words
    said = capsys.readouterr()
    assert "float32\N{REPLACEMENT CHARACTER}" in said.out
    assert "float32\N{REPLACEMENT CHARACTER}" in (tmp_path / "x.csv").read_text()


def test_names_of_any_length_are_cut_where_they_are_shown(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The csv file and the ledger have them whole."""
    study = odd_study(tiny, "long", "x" * 100_000)
    events = list(read_ledger(study.folder))
    events[0]["study"]["name"] = "long" + "x" * 100_000
    write_ledger(study, events)
    for words in commands(study, tmp_path):
        assert main(words) == 0, words
        said = "".join(capsys.readouterr())
        assert "xx...xx" in said or words[0] in ("list", "export") or "--verify" in words, words
        assert max(map(len, said.splitlines())) < 2200, words
        assert len(said) < 10_000, words
    page = (study.folder / "report" / "report.md").read_text()
    assert max(map(len, page.splitlines())) < 2200
    assert "x" * 100_000 in (tmp_path / "x.csv").read_text()


def test_an_error_about_a_value_of_any_length_is_cut_and_ends_with_its_remedy(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny("endless")
    events = made_up_events(study)
    events[0]["study"] |= {"name": "n" * 100_000, "mode": "m" * 100_000}
    write_ledger(study, events)
    assert main(["status", study.slug, "--storage", study.storage]) == 2
    said = capsys.readouterr().err
    assert said.endswith("read it with that one\n")
    assert len(said) < 2200


@pytest.mark.parametrize("length", [1, 9, 10, 11, 100_000])
def test_a_text_is_cut_in_its_middle(length: int) -> None:
    text = "".join(str(place % 10) for place in range(length))
    assert cut(text, 10) == (text if length <= 10 else f"0123...{text[-3:]}")


def test_a_line_break_in_a_label_forges_no_line(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = odd_study(tiny, "broken", "\nFORGED: holds\r\n| FORGED | x |\u2028FORGED")
    for words in commands(study, tmp_path):
        if words[0] != "status":  # a terminal's width may break its cells anywhere
            assert main(words) == 0, words
    report = study.folder / "report"
    texts = [capsys.readouterr().out, (tmp_path / "x.csv").read_text()]
    texts += [(report / name).read_text() for name in ("report.md", "trials.csv")]
    for text in texts:
        assert "FORGED" in text
        lines = [line for line in text.splitlines() if re.match(r"[|\s\"]*FORGED", line)]
        assert not lines, lines
