"""The pages of the repository: the first one's code runs, every link and every path leads
somewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lns_ops

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "lns_ops" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
REFERENCE = ROOT / "docs" / "reference"
GENERATED = {
    REFERENCE / f"{name}.md"
    for name in (
        "configuration",
        "compatibility",
        "commands",
        "ledger",
        "formats",
        "operations",
        "python",
    )
}


def test_the_first_pages_code_trains() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.removesuffix("optimizer.step()\n"), names)
    weight = names["model"][0].weight
    before = weight.codes.clone()
    names["optimizer"].step()
    assert isinstance(weight, lns_ops.LNSTensor)
    assert not torch.equal(weight.codes, before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    if page in GENERATED:
        return
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [
        link
        for link in links
        if not (page.parent / link).exists() and (page.parent / link).resolve() not in GENERATED
    ]
    paths = re.findall(
        r"`((?:study|trainers|lns_ops|tests|scripts|conf|docs)/[\w./-]+)(?:::\w+)?`", text
    )
    if "log" not in page.parts:
        missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_the_page_of_rules_has_all_of_them_and_pairs_what_is_right_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    page = importlib.import_module("rules")
    text = page.page()
    assert len(re.findall(r"^\| `.*? \| .+ \| .+ \|$", text.partition("## Rules")[2], re.M)) == len(
        page.RULES
    )
    choices = (*page.LAYOUTS, *page.PRECISIONS, *page.EXCHANGES)
    assert [choice for choice in choices if not page.allowed(choice)] == []
    assert not page.allowed({"layout.tp": 2}, {"precision.format": "lns12"})
    assert f"| {page.label({'precision.format': 'lns12'})} | yes | **no** | **no** | yes |" in text


PROSE = 100
"""Most characters of a line of prose; tables, code and links of their own may be longer."""


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_prose_is_as_narrow_as_code(page: Path) -> None:
    if page in GENERATED:
        return
    text = re.sub(r"^( *)(`{3,}).*?^\1\2$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > PROSE]
    assert [line for line in long if not line.lstrip().startswith("|") and " " in line] == []
