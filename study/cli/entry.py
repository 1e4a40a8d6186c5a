"""The entry point of the command line: ``lns-study run | plan | report | ui | ...``, also ``python
-m study``.

:data:`EXIT_CODES`, which ``--help`` prints, lists the exit codes. Commands import heavy modules
(torch, Ray, MLflow) only when they need them, so ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from study.cli.data import add_data
from study.cli.doctor import add_doctor
from study.cli.launch import add_launch
from study.cli.manage import Commands, add_commands
from study.cli.plan import add_plan
from study.cli.report import add_compare, add_report
from study.cli.reproduce import add_reproduce
from study.cli.run import EXIT_CODES, add_run
from study.cli.tracking import add_mlflow
from study.errors import StorageError, UserError, refusals
from study.program import NAME, lns_study, own_version, process_began
from study.text import PrintableStream, cut
from trainers.object_store import check_links
from trainers.text import nearest

DESCRIPTION = """\
Run a study: train the same network in several number formats, several seeds
each, and compare the test errors.

  lns-study run quickstart   the four-row table with a small budget: two
                             minutes, or seconds on digits
  lns-study run table        the full table on MNIST (12 trials of 20 epochs)
  lns-study run table 'seeds=[0,1,2,3,4]'
                             more seeds; finished trials are not repeated
  lns-study plan search      what a study would run, and how long it would take
  lns-study status table     progress of a study, also from another terminal
  lns-study report table     print the table again, rewrite the report, send
                             missing data to MLflow
  lns-study ui               open the runs in MLflow's web interface
"""
GROUPS = {
    "Run": ("init", "run", "plan", "launch", "import"),
    "Watch": ("list", "status"),
    "Change": ("pause", "stop"),
    "Results": ("report", "show", "export", "compare", "reproduce"),
    "MLflow": ("ui", "mlflow"),
    "Data and repair": ("data", "doctor"),
}
"""The commands in the order of ``--help``."""
OLD = {
    "cancel": "stop --now",
    "dashboard": "report --serve",
    "edit": "run --extend",
    "extend": "run --extend",
    "reconcile": "mlflow verify",
    "rerun": "run",
    "resume": "run --resume",
    "retry": "run --retry-failed",
    "simulate": "plan",
    "studies": "list --available",
    "sync": "mlflow sync",
}
"""Earlier names of commands: each prints its new command (:func:`renamed`) and exits with 2."""
WIDTH, COLUMN = 79, 13
"""Width of the list of commands, and of the column of their names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    ``options.began`` is the time at which this process, or the call from Python, began.
    """
    began = process_began() if arguments is None else time.monotonic()
    _print_whatever_the_locale()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = PrintableStream(sys.stdout), PrintableStream(sys.stderr)
    try:
        return _run(arguments, began)
    finally:
        if arguments is not None:  # otherwise a traceback may still be printed
            sys.stdout, sys.stderr = streams


def _run(arguments: Sequence[str] | None, began: float) -> int:
    """Run the command line; return the exit code."""
    options = parse(arguments)
    options.began = began
    for notice in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(notice) is not signal.SIG_IGN:
            signal.signal(notice, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        signal.signal(signal.SIGHUP, lambda *_: _hang_up(terminals))
    try:
        with refusals():
            check_links(getattr(options, "storage", None) or "")
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"lns-study: error: {cut(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, StorageError) else 2
    except BrokenPipeError:  # the reader of a pipe has exited: lns-study plan NAME | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("\nlns-study: interrupted", file=sys.stderr)
        return 130


def _print_whatever_the_locale() -> None:
    """Print characters that the terminal's encoding lacks as ``?`` instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _interrupt(*_: object) -> None:
    """Exit as cleanly as after Ctrl-C, on a signal from a job controller.

    This also works if the process was started with ``&`` in a script and so ignores SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def _hang_up(terminals: Sequence[int]) -> None:
    """Exit as cleanly as after Ctrl-C if the terminal was closed.

    ``terminals`` are the file descriptors that wrote to it.
    """
    for stream in terminals:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    _interrupt()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    return _build()[0]


def _build() -> tuple[argparse.ArgumentParser, Iterable[str]]:
    """Return the parser of every command, and the commands' names."""
    parser = argparse.ArgumentParser(
        prog="lns-study",
        usage="lns-study [-h] [--version] COMMAND ...",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {own_version()}")
    commands = _Described(
        parser.add_subparsers(
            required=True, prog="lns-study", metavar="COMMAND", help=argparse.SUPPRESS
        )
    )
    for add in (
        *(add_run, add_plan, add_launch, add_commands, add_report, add_compare, add_reproduce),
        *(add_mlflow, add_doctor, add_data),
    ):
        add(commands)
    parser.description = f"{DESCRIPTION}\n{_listed(commands.texts)}"
    return parser, commands.texts


class _Described:
    """Argparse's subparsers, with the text of each command for a list in groups.

    Argparse lists all commands in one group, in the order in which they were added.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.texts: dict[str, str] = {}

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        self.texts[name] = help
        parser: argparse.ArgumentParser = self._commands.add_parser(name, **options)
        return parser


def _listed(texts: Mapping[str, str]) -> str:
    """Return the commands with their texts, by :data:`GROUPS`."""
    lines = []
    for group, names in GROUPS.items():
        lines.append(f"{group}:")
        for name in names:
            lines += textwrap.wrap(
                texts[name],
                WIDTH,
                initial_indent=f"  {name}".ljust(COLUMN),
                subsequent_indent=" " * COLUMN,
            )
        lines.append("")
    return "\n".join(lines[:-1])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; unlike argparse, accept ``run CONFIG --plain key=value``."""
    parser, commands = _build()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if words[0] in OLD:
        print(f"{words[0]} is now: {renamed(words[0], words[1:])}", file=sys.stderr)
        raise SystemExit(2)
    if wrong := _unknown_command(words[0], commands):
        parser.error(wrong)
    options, rest = parser.parse_known_args(words)
    takes_keys = hasattr(options, "overrides")
    if flags := [word for word in rest if word.startswith("-")]:
        keys = "; a key is set without dashes, as in trial.epochs=3" if takes_keys else ""
        parser.error(f"unknown argument {flags[0]!r}{keys}; see lns-study {words[0]} --help")
    if rest and not takes_keys:
        parser.error(f"unknown argument {rest[0]!r}; see lns-study {words[0]} --help")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def renamed(old: str, words: Sequence[str]) -> str:
    """Return the new command line for one with a name of :data:`OLD`."""
    new, words = OLD[old].split(), list(words)
    if old == "reconcile":
        new += [] if "--check" in words else ["--repair"]
        words = [word for word in words if word != "--check"]
    elif old == "simulate" and not any(word.startswith("--slots") for word in words):
        words.append("--slots")
    elif old == "rerun":  # STUDY TRIAL
        starts = [word[:1] for word in ["", *words]]
        names = [at for at in range(len(words)) if "-" not in starts[at : at + 2]]
        at = names[1] if len(names) > 1 else len(words)
        words.insert(at, "--verify")
    return lns_study(*new, *words)


def _unknown_command(word: str, commands: Iterable[str]) -> str:
    """Return an error message if ``word`` is not a command, else ""."""
    if word.startswith("-") or word in commands:
        return ""
    return f"{word!r}: no such command{nearest(word, list(commands))}; see lns-study --help"
