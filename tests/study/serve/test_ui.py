"""How to get to the runs in a browser, wherever they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from study.config import default_tracking_uri
from study.serve.ui import check_servable
from study.tracking.address import WHERE, how_to_open, pages_of

PAGE = "#/experiments/1/runs/2"
THEN = "   then open its link to this study"


@pytest.mark.parametrize(
    ("uri", "storage", "said"),
    [
        (default_tracking_uri("studies"), "studies", f"lns-study ui{THEN}"),
        (
            default_tracking_uri("my studies"),
            "my studies",
            f"lns-study ui --storage 'my studies'{THEN}",
        ),
        (
            "sqlite:////data/a b.db",
            "studies",
            f"lns-study ui --tracking-uri 'sqlite:////data/a b.db'{THEN}",
        ),
        (
            "sqlite:////data/a.db",
            "/s",
            f"lns-study ui --tracking-uri sqlite:////data/a.db --storage /s{THEN}",
        ),
        (
            "postgresql://me:secret@host/db",
            "studies",
            f"lns-study ui --tracking-uri 'postgresql://me:***@host/db'{THEN}",
        ),
        ("http://127.0.0.1:5001", "studies", f"http://127.0.0.1:5001/{PAGE}"),
        ("https://host/", "/s", f"https://host/{PAGE}"),
        ("https://me:secret@host/", "/s", f"https://host/{PAGE}"),
    ],
)
def test_how_to_open_a_store(uri: str, storage: str, said: str) -> None:
    assert how_to_open(uri, storage, PAGE) == said


def test_the_latest_studies_of_a_store_come_first(tmp_path: Path) -> None:
    for age, (name, uri) in enumerate({"b": "sqlite:///x", "a": "sqlite:///x", "c": "y"}.items()):
        note = tmp_path / name / WHERE
        note.parent.mkdir()
        note.write_text(json.dumps({"uri": uri, "experiment": str(age), "view": "v"}))
        os.utime(note, (1000 - age, 1000 - age))
    (tmp_path / "a" / "x").mkdir()
    pages = pages_of(tmp_path, "sqlite:///x")
    assert list(pages) == ["b", "a"]
    assert pages["a"].startswith("#/experiments/1/runs?viewStateShareKey=v")


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://host:1", r"server already; open http://host:1"),
        ("file:/x", r"must start with one of"),
    ],
)
def test_what_the_ui_cannot_serve_is_refused(uri: str, said: str) -> None:
    check_servable("sqlite:////data/a.db")
    with pytest.raises(ValueError, match=said):
        check_servable(uri)
