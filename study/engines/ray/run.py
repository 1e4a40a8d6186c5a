"""A study's run on a Ray cluster, with a restart after this process has lost its node."""

from __future__ import annotations

import functools
from collections.abc import Callable

from study.engines.loop import Loop
from study.engines.ray.engine import TuneEngine
from study.engines.ray.hosts import Hosts
from study.engines.ray.options import TuneOptions
from study.engines.ray.trials import TuneTrials
from study.engines.ray_session import Session
from study.errors import UserError
from trainers.workers.messages import DIED, Died


class RayLostError(Exception):
    """The Ray node that this process uses is gone; the process can reconnect."""


def run_on_ray(
    session: Session,
    hosts: Hosts,
    make_hosts: Callable[[], Hosts],
    make_loop: Callable[[TuneTrials], Loop],
    say: Callable[[str], None],
    options: TuneOptions,
) -> None:
    """Run a study on the Ray cluster that this process is connected to.

    If the connection is lost, this process reconnects and the trials resume from their checkpoints.

    Args:
        session: the connection to Ray.
        hosts: the process hosts of its nodes, already started.
        make_hosts: creates them again, after this process has reconnected.
        make_loop: creates the study's loop.
        say: prints a line for the user.
        options: the caller's additions to the Tuner.

    Raises:
        UserError: Ray has not responded for too long, or reconnecting failed.
    """
    loop: Loop | None = None
    said = set[str]()
    while True:
        trials = TuneTrials(hosts, session.ask)
        if loop is None:
            loop = make_loop(trials)
        loop.use(trials)
        try:
            watch = functools.partial(_watch, session, say, said)
            TuneEngine(trials, hosts, loop, watch, session.use, options).run()
        except RayLostError as error:
            say(f"Ray: {error}; waiting for it")
            loop.take_in([Died(DIED, trial, f"Ray: {error}") for trial in trials.running])
            if not session.renew():
                raise UserError(
                    f"Ray: {error}, and joining it again fails; finished epochs are kept; the same"
                    " command continues once the cluster is back"
                ) from None
            say("Ray is back.")
            hosts = make_hosts()
        else:
            return
        finally:
            session.ask([])
            hosts.close()


def _watch(session: Session, say: Callable[[str], None], said: set[str]) -> None:
    """Check that Ray responds, and print a notice if it does not.

    Raises:
        UserError: it has not responded for too long.
        RayLostError: the connection to the cluster is lost.
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
