"""Typing errors on the command line, and help on a terminal with eighty columns."""

from __future__ import annotations

import argparse
import io
import shlex
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

import pytest

from study.cli import main
from study.cli.entry import GROUPS, OLD, build_parser, parse


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser."""
    (found,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return found.choices


def test_help_fits_eighty_columns() -> None:
    for words in ([], ["run"], ["launch"], ["reproduce"]):
        parser = build_parser()
        with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as printed:
            parser.parse_args([*words, "--help"])
        assert not [line for line in printed.getvalue().splitlines() if len(line) > 80]


def test_help_lists_every_command_once() -> None:
    with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as printed:
        main(["--help"])
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(verbs(build_parser()))
    assert len(listed) <= 18
    for name in listed:
        assert f"\n  {name} " in printed.getvalue()
        with pytest.raises(SystemExit) as ended, redirect_stdout(io.StringIO()):
            main([name, "--help"])
        assert ended.value.code == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cancel mine --storage 'my studies'", "stop --now mine --storage 'my studies'"),
        ("dashboard mine --port 5009", "report --serve mine --port 5009"),
        ("edit mine limits.hours=5", "run --extend mine limits.hours=5"),
        ("extend mine 'seeds=[0,1]' --plain", "run --extend mine 'seeds=[0,1]' --plain"),
        ("reconcile mine", "mlflow verify --repair mine"),
        ("reconcile --check mine", "mlflow verify mine"),
        ("rerun mine 3f2a", "run mine --verify 3f2a"),
        ("rerun --storage there mine 3f2a", "run --storage there mine --verify 3f2a"),
        ("resume mine address=null", "run --resume mine address=null"),
        ("retry mine", "run --retry-failed mine"),
        ("simulate mine --slots 4 60", "plan mine --slots 4 60"),
        ("simulate mine.yaml epochs=3", "plan mine.yaml epochs=3 --slots"),
        ("studies", "list --available"),
        (
            "sync mine --tracking-uri sqlite:///m.db",
            "mlflow sync mine --tracking-uri sqlite:///m.db",
        ),
    ],
)
def test_an_old_command_prints_the_new_one_and_does_nothing(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words := shlex.split(old))
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"{words[0]} is now: lns-study {new}\n")
    assert list(tmp_path.iterdir()) == []
    parse(shlex.split(new))  # it is a command


def test_every_old_command_is_new_to_the_parser() -> None:
    assert set(OLD) & set(verbs(build_parser())) == set()
    for new in OLD.values():
        parser = build_parser()
        for word in new.split():
            if word.startswith("-"):
                assert f" {word} " in parser.format_help().replace("]", " ]").replace("[", "[ ")
            else:
                parser = verbs(parser)[word]


def test_the_studies_are_listed_with_their_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the working folder too, which need no question."""
    (tmp_path / "conf" / "study").mkdir(parents=True)
    (tmp_path / "conf" / "study" / "mine.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    assert main(["list", "--available"]) == 0
    printed = capsys.readouterr().out
    assert "\nmine\n    no question\n" in printed
    assert "\nformat_atlas  (--small)\n    Which number format" in printed
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runn", "table"], "'runn': no such command (did you mean 'run'?)"),
        (["run", "table", "--epochs", "3"], "a key is set without dashes, as in trial.epochs=3"),
        (["status", "x", "--foo"], "unknown argument '--foo'; see lns-study status --help"),
        (["run"], "arguments are required: CONFIG\n"),
        ([], "usage: lns-study"),
    ],
)
def test_a_slip_of_the_command_line_is_told_its_remedy(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_checkout_that_is_not_installed_tells_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    installed = metadata.version("lns-study")
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SystemExit) as ended, redirect_stdout(io.StringIO()) as printed:
        main(["--version"])
    assert ended.value.code == 0
    assert printed.getvalue() == f"lns-study {installed}\n"
