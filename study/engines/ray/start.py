"""The start of the ray engine: a study's Ray, and the process hosts of its nodes.

The hosts load torch and the data, and compare both with this machine's, which takes seconds. So a
new study starts them while its own process checks the trials. Loads no Ray when imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from study.config import StudyConfig
from study.engines.engine import Engine
from study.engines.loop import Loop
from study.engines.ray.options import TuneOptions
from study.engines.ray_session import Session, ray_session
from study.engines.user_files import user_modules
from study.ledger.lock import OUTPUT
from study.plan.plan import Plan
from study.plan.resources import visible_gpus
from trainers.config import TrialConfig
from trainers.workers.node import is_compared

if TYPE_CHECKING:  # loads Ray
    from study.engines.ray.hosts import Hosts

DATA_SETS = 4
"""Largest number of data sets kept in memory."""


class RayStart:
    """A study's Ray and the process hosts of its nodes; a context that ends both.

    Args:
        say: prints a line for the user.
        options: what the caller adds to the Tuner.
    """

    def __init__(self, say: Callable[[str], None], options: TuneOptions | None = None) -> None:
        self._say, self._options = say, options or TuneOptions()
        self._stack = ExitStack()
        self._begun: tuple[Session, Callable[[], Hosts], Hosts] | None = None
        self._digests = set[str]()

    def __enter__(self) -> RayStart:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, plan: Plan) -> None:
        """Join Ray, or start one, and start the hosts.

        Raises:
            UserError: nothing answers at ``address``, or Ray does not start.
        """
        study = plan.study
        self._say(
            f"Joining the Ray cluster at {study.address} ..."
            if study.address
            else "Starting Ray on this machine ..."
        )
        configs = [trial.config for trial in plan.trials or plan.first]
        here = study.address is None and uses_gpus(study, configs)
        by_train = study.gang != "forked" and has_gangs(plan)
        session = self._stack.enter_context(
            ray_session(study, gpus=len(visible_gpus()) if here else 0, dashboard=by_train)
        )
        # loads Ray, which reads then whether it asks for a token
        from study.engines.ray.hosts import Hosts

        compared = {config.data: config for config in filter(is_compared, configs)}
        make_hosts = functools.partial(
            Hosts,
            (data_of(configs or [study.trial]),),
            session.nodes,
            self._say,
            user_modules(study),
            (list(compared.values()), self._digests),
            study.folder / OUTPUT,
        )
        hosts = make_hosts()
        self._stack.callback(hosts.close)
        hosts.start()
        self._begun = session, make_hosts, hosts

    def run(
        self, plan: Plan, digests: Iterable[str], make_loop: Callable[[Engine, Session], Loop]
    ) -> None:
        """Run a study on Ray, which is joined first if that was not done.

        Args:
            plan: the study's plan.
            digests: SHA-256 digests of the examples that every node must have.
            make_loop: creates the study's loop.

        Raises:
            UserError: see :meth:`begin`, or Ray has not responded for too long.
        """
        if self._begun is None:
            self.begin(plan)
        assert self._begun is not None
        session, make_hosts, hosts = self._begun
        self._digests.update(digests)
        from study.engines.ray.run import run_on_ray

        try:
            loop = lambda trials: make_loop(trials, session)  # noqa: E731
            run_on_ray(session, hosts, make_hosts, loop, self._say, self._options)
        finally:
            self._stack.close()


def has_gangs(plan: Plan) -> bool:
    """Return whether a plan has trials of several workers, or searches their number."""
    trials = plan.trials or plan.first
    return "workers" in plan.study.space or any(trial.config.workers > 1 for trial in trials)


def uses_gpus(study: StudyConfig, configs: Iterable[TrialConfig]) -> bool:
    """Return whether a trial of a study may use a GPU."""
    return '"cuda"' in json.dumps(study.to_dict()) or any(
        config.device == "cuda" for config in configs
    )


def data_of(configs: Iterable[TrialConfig]) -> list[dict[str, Any]]:
    """Return the data sets of the first trials, which every machine loads once."""
    used = [config.data for config in configs if not config.own_loop]
    return [dataclasses.asdict(config) for config in list(dict.fromkeys(used))[:DATA_SETS]]
