"""``run`` and ``plan`` of a stored study: continue it, extend it, run its failed trials again, or
verify a trial."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli.manage import TRIAL, add_storage, open_study
from study.errors import UserError, refusals
from study.program import STORAGE, lns_study
from study.text import counted

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.ledger.state import StudyState

PLACE = ("address", "insecure", "cpus", "max_concurrent", "tracking_uri")
"""Keys that determine where a study runs, without any effect on its results."""
Run = Callable[["StudyConfig", str], int]
"""Runs ``all`` trials of a config, only ``unfinished`` ones, or only ``failed`` ones."""


def add_modes(parser: argparse.ArgumentParser, *, runs: bool) -> None:
    """Add ``--storage``, and the options with which CONFIG is a stored study.

    With ``runs``, those that a plan lacks are included.
    """
    group = parser.add_argument_group("a stored study: CONFIG is its name or its folder")
    modes = group.add_mutually_exclusive_group()
    modes.add_argument(
        "--resume",
        action="store_true",
        help="continue it with its stored config (also if it is paused), without its failed"
        f" trials; key=value only changes where it runs: {', '.join(PLACE)}",
    )
    modes.add_argument(
        "--extend",
        action="store_true",
        help="change it and run the additions: seeds, rows, samples, epochs; while it runs, only"
        " limits can change, as in limits.hours=5",
    )
    if runs:
        modes.add_argument(
            "--retry-failed", action="store_true", help="run only its failed trials again"
        )
        modes.add_argument(
            "--verify",
            metavar="TRIAL",
            help="train one of its trials again and compare whether every figure is bit-equal;"
            f" TRIAL is {TRIAL}",
        )
    add_storage(group, default=None)


def has_mode(options: argparse.Namespace) -> bool:
    """Return whether an option says that CONFIG is a stored study."""
    modes = ("resume", "extend", "retry_failed", "verify")
    return any(getattr(options, mode, None) for mode in modes)


def is_stored(options: argparse.Namespace) -> bool:
    """Return whether CONFIG is a stored study: by an option, or if no config has this name."""
    from study.config.compose import find_study

    if has_mode(options):
        return True
    with suppress(ValueError):
        find_study(options.config)
        return False
    from study.ledger.studies import find

    with suppress(ValueError):
        find(options.config, options.storage or STORAGE)
        return True
    return False


def load_config(options: argparse.Namespace, *, download: bool) -> StudyConfig:
    """Return the config of a file, or of a name in conf/study, with the options' changes."""
    from study.config.compose import load

    overrides = [f"storage={options.storage}"] if options.storage else []
    return load(
        options.config,
        [*overrides, *options.overrides],
        lambda line: print(line, file=sys.stderr),
        download=download,
        small=options.small,
    )


def stored_config(options: argparse.Namespace) -> StudyConfig:
    """Return the config of a stored study with the options' changes, for a plan."""
    from study.ledger.studies import find, placed, read
    from study.plan.extend import extended

    _check_small(options)
    folder = find(options.config, options.storage or STORAGE)
    return placed(extended(read(folder), options.overrides), folder)


def run_stored(options: argparse.Namespace, run: Run) -> int:
    """Run what the options select of a stored study; return the exit code."""
    from study.engines.control import Wish, ask
    from study.ledger.lock import is_locked
    from study.ledger.state import ALL, FAILED, ONLY_FAILED, UNFINISHED
    from study.ledger.studies import continued
    from study.plan.extend import extended

    storage = options.storage or STORAGE
    _check_small(options)
    folder, state = open_study(options.config, storage)
    if options.verify:
        return _verify(options, state)
    _check_changes(options)
    with refusals():
        locked = is_locked(folder)
    if locked and options.extend:
        return _edit(options, folder, state)
    if locked:
        if options.retry_failed or options.overrides:
            stop = lns_study("stop", options.config, storage=storage)
            raise UserError(
                f"{state.config.name}: is running; wait for it, or stop it with `{stop}`"
            )
        ask(folder, wish=Wish.RUN)
        print(f"{state.config.name}: is running; if it was paused, it continues")
        return 0
    if options.retry_failed and not state.damage and FAILED not in state.counts():
        return _say_nothing_failed(options, state)
    with refusals():
        study = continued(extended(state, options.overrides), folder)
    return run(
        study, ALL if options.extend else ONLY_FAILED if options.retry_failed else UNFINISHED
    )


def _check_small(options: argparse.Namespace) -> None:
    if options.small:
        raise UserError(
            f"--small: the stored study {options.config} has its form already; leave it out, or"
            f" name {options.config}-small"
        )


def _check_changes(options: argparse.Namespace) -> None:
    """Check that the study has changes to be extended by, and else only changes of its place.

    Raises:
        UserError: it has none, or an override has another key.
    """
    storage = options.storage or STORAGE
    if options.extend:
        if not options.overrides:
            again = lns_study("run", "--resume", options.config, storage=storage)
            raise UserError(
                f"--extend {options.config}: needs changes, such as 'seeds=[0,1,2]'; to continue"
                f" the study as it is: `{again}`"
            )
        return
    for override in options.overrides:
        if override.partition("=")[0] not in PLACE:
            extend = lns_study("run", "--extend", options.config, override, storage=storage)
            raise UserError(
                f"{override}: would change the study; --resume and --retry-failed accept only"
                f" {', '.join(PLACE)}; to change it: `{extend}`"
            )


def _say_nothing_failed(options: argparse.Namespace, state: StudyState) -> int:
    from study.ledger.state import ENDED

    left = sum(trial.status not in ENDED for trial in state.trials)
    again = lns_study("run", "--resume", options.config, storage=options.storage or STORAGE)
    print(
        f"{state.config.name}: no trial has failed, so there is nothing to retry"
        + (f"; {left} are left, run them with: {again}" if left else "")
    )
    return 0


def _edit(options: argparse.Namespace, folder: Path, state: StudyState) -> int:
    """Change the limits of a running study."""
    from study.engines.control import ask
    from study.plan.extend import extended

    for override in options.overrides:
        if not override.startswith("limits."):
            stop = lns_study("stop", options.config, storage=options.storage or STORAGE)
            raise UserError(
                f"--extend {override}: only limits can be changed while a study runs; stop it with"
                f" `{stop}` and repeat the same command"
            )
    with refusals():
        if state.limits:
            planned = state.plan | {"study": state.plan["study"] | {"limits": state.limits}}
            state = dataclasses.replace(state, plan=planned)
        limits = dataclasses.asdict(extended(state, options.overrides).limits)
    ask(folder, limits=limits)
    given = ", ".join(f"{key} {value}" for key, value in limits.items() if value is not None)
    print(f"{state.config.name}: limits are now {given or 'none'}")
    return 0


def _verify(options: argparse.Namespace, state: StudyState) -> int:
    from study.evidence.rerun import rerun
    from study.ledger.state import name_of
    from study.ledger.studies import find_trial
    from study.lifecycle import run_study
    from study.views.console import PrintableConsole
    from study.views.progress import PlainView

    if options.overrides or options.dry_run:
        raise UserError("--verify: repeats a trial as it was; leave out --dry-run and key=value")
    console = PrintableConsole()
    with refusals():
        trial = find_trial(state, options.verify)
        done = rerun(
            state,
            trial,
            lambda study: run_study(study, PlainView(console), lambda line: None).state,
        )
    if not done.differences:
        print(
            f"{trial.id} ({name_of(trial)}): every figure of"
            f" {counted(len(done.again.reports), 'epoch')} came out bit-equal"
        )
        return 0
    print(f"{trial.id} ({name_of(trial)}): NOT bit-equal:", file=sys.stderr)
    for line in done.differences[:20]:
        print(f"  {line}", file=sys.stderr)
    return 1
