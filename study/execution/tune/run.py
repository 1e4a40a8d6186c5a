"""A study on a cluster, from joining its Ray to leaving it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from study.errors import UserError
from study.execution.loop import Loop
from study.execution.ray_session import Session
from study.execution.tune.engine import TuneEngine
from study.execution.tune.hosts import Hosts
from study.execution.tune.options import TuneOptions
from study.execution.tune.trials import TuneTrials
from trainers.config import TrialConfig
from trainers.workers.messages import DIED, Message


class RayLostError(Exception):
    """The part of Ray that this process has joined is gone; it may be joined again."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What every node must have.

    Attributes:
        make: arguments of :class:`~study.execution.tune.process_host.ProcessHost`.
        modules, data: see :class:`~study.execution.tune.hosts.Hosts`.
    """

    make: tuple[Any, ...]
    modules: Sequence[str]
    data: tuple[Sequence[TrialConfig], Collection[str]]


def run_on_ray(
    session: Session,
    needs: Needs,
    make_loop: Callable[[TuneTrials], Loop],
    say: Callable[[str], None],
    options: TuneOptions,
) -> None:
    """Run a study on the Ray that this process has joined.

    Where that part of Ray is lost, it is joined again, and trials that ran there go on from their
    checkpoints.

    Args:
        session: the Ray.
        needs: what every node must have.
        make_loop: makes the study's loop.
        say: prints a line for the user.
        options: what the caller adds to the Tuner.

    Raises:
        UserError: Ray has been silent for too long, or cannot be joined again.
    """
    loop: Loop | None = None
    said = set[str]()
    while True:
        hosts = Hosts(needs.make, session.nodes, say, needs.modules, needs.data)
        trials = TuneTrials(hosts, session.ask)
        if loop is None:
            loop = make_loop(trials)
        loop.use(trials)
        try:
            watch = functools.partial(_watch, session, say, said)
            TuneEngine(trials, hosts, loop, watch, session.use, options).run()
        except RayLostError as error:
            say(f"Ray: {error}; waiting for it")
            loop.take_in([Message(DIED, trial, f"Ray: {error}") for trial in trials.running])
            if not session.renew():
                raise UserError(
                    f"Ray: {error}, and joining it again fails; finished epochs are kept; the same"
                    " command goes on once the cluster is back"
                ) from None
            say("Ray is back.")
        else:
            return
        finally:
            session.ask([])
            hosts.close()


def _watch(session: Session, say: Callable[[str], None], said: set[str]) -> None:
    """Check that Ray is there, and say if it does not answer.

    Raises:
        UserError: it has been silent for too long.
        RayLostError: what this process has joined is gone.
    """
    session.look()
    if session.lost:
        raise RayLostError(session.lost)
    if session.silent and not said:
        say(f"Ray: {session.silent}; waiting for it")
        said.add(session.silent)
    elif said and not session.silent:
        say("Ray is back.")
        said.clear()
