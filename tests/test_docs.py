"""The repository's pages: the first page's code runs, and every link and path exists."""

from __future__ import annotations

import doctest
import importlib
import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lns_ops
from study.cli.entry import parse
from study.config.compose import load

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "lns_ops" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
SHELLS = ("", "sh", "bash", "console")
"""Languages of fences that hold commands."""
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
try:
    generate = importlib.import_module("generate")
    rules_page = importlib.import_module("rules")
finally:
    del sys.path[0]
GENERATED = {ROOT / "docs" / "reference" / name for name in generate.PAGES}


def test_the_first_pages_code_trains() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.removesuffix("optimizer.step()\n"), names)
    weight = names["model"][0].weight
    before = weight.codes.clone()
    names["optimizer"].step()
    assert isinstance(weight, lns_ops.LNSTensor)
    assert not torch.equal(weight.codes, before)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```pycon" in page.read_text()],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_sessions_print_what_the_page_shows(page: Path) -> None:
    blocks = re.findall(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL)
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    failed, attempted = doctest.DocTestRunner(verbose=False).run(session)
    assert attempted
    assert failed == 0


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
        r"`((?:study|trainers|lns_ops|tests|scripts|conf|docs|examples)/[\w./-]+)(?:::\w+)?`", text
    )
    if "log" not in page.parts:
        missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_every_page_of_the_site_is_in_its_contents() -> None:
    """Pages in no toctree, and links to pages outside of the site; Sphinx needs a minute to find
    these."""
    docs = ROOT / "docs"
    listed = {docs / "index.md"}
    outside = []
    for page in docs.rglob("*.md"):
        text = page.read_text()
        for entries in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
            for entry in re.findall(r"^(?:.+<)?([^:<>\n]+)>?$", entries, re.M):
                listed |= {path.resolve() for path in page.parent.glob(f"{entry}.md")}
        included = re.findall(r"```{include} (\S+)", text)
        listed |= {(page.parent / path).resolve() for path in included}
        links = re.findall(r"\]\(([^)#\s:]+\.md)", text)
        outside += [link for link in links if docs not in (page.parent / link).resolve().parents]
    assert set(docs.rglob("*.md")) - listed - GENERATED == set()
    assert outside == []


def test_the_page_of_rules_has_all_of_them_and_pairs_what_is_right_alone() -> None:
    page = rules_page
    text = page.page()
    rules, _, within = text.partition("## Rules\n")[2].partition("## Rules within")
    assert len(re.findall(r"^\| `.*? \| .+ \| .+ \|$", rules, re.M)) == len(page.RULES)
    assert len(re.findall(r"^\| `.*? \| `.+` \| .+ \| .+ \|$", within, re.M)) >= 38
    assert "| `layout.schedule`, `layout.pp` | `schedule not in ('1f1b', 'gpipe') and pp" in within
    assert "| `trainable.args`, `trainable.name` | `not (name), args` |" in within
    choices = (*page.LAYOUTS, *page.PRECISIONS, *page.EXCHANGES)
    assert [choice for choice in choices if not page.allowed(choice)] == []
    assert not page.allowed({"layout.tp": 2}, {"precision.format": "lns12"})
    assert f"| {page.label({'precision.format': 'lns12'})} | yes | **no** | **no** | yes |" in text


CLAIM = re.compile(r"(?m)^\| (\w+): .*? \| (holds|fails|undecided) \|")


def test_the_page_of_claims_counts_its_verdicts() -> None:
    """Its parts are written at different times."""
    page = (ROOT / "docs" / "studies" / "full" / "claims.md").read_text()
    found = [verdict for _, verdict in CLAIM.findall(page)]
    holds, fails, undecided = map(found.count, ("holds", "fails", "undecided"))
    assert f"**{len(found)} claims: {holds} hold, {fails} fail, {undecided} undecided.**" in page


PROSE = 100
"""Maximum number of characters in a line of prose; tables, code and separate links may be
longer."""


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_prose_is_as_narrow_as_code(page: Path) -> None:
    if page in GENERATED:
        return
    text = re.sub(r"^( *)(`{3,}).*?^\1\2$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > PROSE]
    assert [line for line in long if not line.lstrip().startswith("|") and " " in line] == []


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of a page's commands with this program and its scripts."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for kind, text in fences if kind in SHELLS for line in text.splitlines()]
    found = []
    for line in lines:
        line = re.sub(r"^ *(\$ )?([A-Z_]+=\S* )*", "", line)
        if either := re.match(r"lns-study (\w+(?: \| \w+)+) (.*)", line):
            found += [["lns-study", name, *words(either[2])] for name in either[1].split(" | ")]
        elif re.match(r"lns-study |python (-m pytest|\S+/)|\./scripts/", line):
            found.append(words(line))
    return found


def words(line: str) -> list[str]:
    """Return a command's words, without its comment and what follows ``|``, ``&&`` or ``;``."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    return list(itertools.takewhile(lambda word: set(word) - set(";|&"), lexer))


def check_commands(page: Path) -> None:
    for command in commands_of(page):
        check_command(*command)


def check_command(program: str, *arguments: str) -> None:
    """Assert that the program, a script or pytest accepts a command's arguments."""
    if program == "lns-study":
        options = parse(arguments)
        named = getattr(options, "config", None)
        if isinstance(named, str) and (ROOT / "conf" / "study" / f"{named}.yaml").exists():
            load(named, options.overrides)
    elif arguments[:2] == ("-m", "pytest"):
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
    else:
        script, *rest = arguments if program == "python" else (program, *arguments)
        source = (ROOT / script).read_text()
        chosen = [word for word in rest if not re.search("[A-Z ]|^[0-9.]+$", word)]
        assert [w for w in chosen if not re.search(rf"(?<![\w-]){w}(?![\w-])", source)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_program_and_its_scripts_take_what_a_page_gives_them(page: Path) -> None:
    check_commands(page)


def test_the_commands_of_all_pages_are_found() -> None:
    """A page that names the program in a fence has commands."""
    found = {page: len(commands_of(page)) for page in PAGES}
    naming = [page for page in PAGES if re.search(r"```(sh)?\nlns-study ", page.read_text())]
    assert [page for page in naming if found[page] == 0] == []
    assert sum(found.values()) > 110


@pytest.mark.parametrize(
    "line",
    [
        "lns-study run table trial.lerning_rate=1   # a comment",
        "lns-study pause | halt table",
        "lns-study status table --watched",
        "lns-study status table --watched; test $? = 1",
        "python scripts/bench_cpu.py --pears",
        "python scripts/bench_gpus.py",
        "$ ./scripts/quickest",
        "python -m pytest tests/no_such_folder",
    ],
)
def test_a_command_that_is_not_taken_is_seen(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```yaml\nname: a\n```\nIn between.\n```\n{line}\n```\n")
    with pytest.raises((AssertionError, ValueError, SystemExit, OSError)):
        check_commands(page)
