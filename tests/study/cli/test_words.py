"""Typing errors on the command line, and help on a terminal with eighty columns."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

import pytest

from study.cli import main
from study.cli.entry import GROUPS, build_parser


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
    assert len(listed) == len(set(listed))
    for name in listed:
        assert f"\n  {name} " in printed.getvalue()
        with pytest.raises(SystemExit) as ended, redirect_stdout(io.StringIO()):
            main([name, "--help"])
        assert ended.value.code == 0


def test_the_studies_are_listed_with_their_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the working folder too, which need no question."""
    (tmp_path / "conf" / "study").mkdir(parents=True)
    (tmp_path / "conf" / "study" / "mine.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    assert main(["studies"]) == 0
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
