"""The loop of a study whose trials run in processes of a pool."""

from __future__ import annotations

from collections.abc import Callable

from study.config import StudyConfig
from study.errors import UserError
from study.execution.control import Control
from study.execution.local.pool import Machines, Pool
from study.execution.loop import ROUND_SECONDS, Loop
from study.execution.ray_session import Session
from study.ledger.log import Ledger
from study.ledger.state import StudyState
from study.search.agenda import Agenda


class LocalLoop(Loop):
    """The loop of a study by a pool, which waits for what processes say.

    Args:
        study, agenda, ledger, state, control: see :class:`~study.execution.loop.Loop`.
        pool: processes that train the trials.
        ray: Ray of the study, if it needs one.
        find: finds machines anew after Ray was lost; None if they stay.
        say: prints a line for the user.
    """

    def __init__(
        self,
        study: StudyConfig,
        agenda: Agenda,
        ledger: Ledger,
        state: StudyState,
        control: Control,
        pool: Pool,
        ray: Session | None = None,
        find: Callable[[], Machines] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(
            study, agenda, ledger, state, control, pool, say,
            lambda: "" if ray is None else ray.address,
        )  # fmt: skip
        self._processes, self._ray, self._find = pool, ray, find
        self._ray_problem, self._fresh = "", True

    def run(self) -> None:
        """Run until no trial is left, or the control ends the study."""
        while self.begin_round():
            poll = self._fresh and self._leaves_until is None
            self.take_in(self._processes.wait(ROUND_SECONDS, waiting=self._waiting, poll=poll))

    def _is_there(self) -> bool:
        """Tell whether the study's Ray is there, if it needs one.

        A Ray that was lost is started or joined again, and its trials begin again.
        """
        ray, self._fresh = self._ray, True
        if ray is None:
            return True
        try:
            self._fresh = ray.look()
        except UserError:
            self._processes.leave()
            raise
        problem = ray.lost or ray.silent
        if problem and not self._ray_problem:
            self._say(f"Ray: {problem}; waiting for it")
        had_problem = bool(problem or self._ray_problem)
        if ray.lost:
            self._processes.end_all(f"Ray: {ray.lost}")
            if self._find is not None:
                self._processes.use(None)
            if ray.renew():
                problem = ""
                if self._find is not None:
                    self._processes.use(self._find())
        if had_problem and not problem:
            self._say("Ray is back.")
        self._ray_problem = problem
        self._fresh = self._fresh and not problem
        return not problem
