"""The ray engine: a study is a ``ray.tune.Tuner``.

Tune creates one actor per trial, Ray places it, and Ray's tools show it. The study's loop
(:mod:`study.engines.loop`) decides which trial runs next and writes the ledger, as on one
machine. Tune calls it through three objects: the searcher hands trials to Tune, the scheduler
forwards their reports and returns the decision, and the callback reports actors that died. All of
this runs in one thread, in ``Tuner.fit``; the calling thread checks that Ray responds.

Tune never retries a trial. When one dies, the loop starts a new Tune trial from its last
checkpoint. The ledger records the remaining work, so the same command resumes the study.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from study._compat import evict_cached_actors
from study.engines.loop import Loop
from study.engines.ray.hosts import Hosts
from study.engines.ray.options import TuneOptions
from study.engines.ray.trial_supervisor import JOB, MESSAGES, TrialSupervisor
from study.engines.ray.trials import Handed, TuneTrials
from study.engines.ray_session import Use
from trainers.workers.messages import DIED, UNPLACED, Died, ForLoop, last_line
from trainers.workers.resources import RAY_TRAIN

ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1e9",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_MAX_PENDING_TRIALS_PG": "100000",
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    "RAY_TRAIN_COUNT_PREEMPTION_AS_FAILURE": "1",  # a study starts such trials again itself
}
"""Environment of Tune while it runs. The ledger replaces Tune's own logs, the study draws the
terminal, Ctrl-C cancels the study, and the study's loop limits the number of trials."""
IDLE_SECONDS = 2.0
"""Seconds for which an idle actor is kept for another trial when the queue is empty."""
ROUND_SECONDS = 0.05
"""Seconds between two rounds of the loop; the end of a trial starts one at once."""
LOOK_SECONDS = 1.0
"""Seconds between two polls of the cluster's state."""
DEFAULT = tune.RunConfig().storage_path
"""Tune's default folder for its own files."""
ABORT_SECONDS = 5.0
"""Longest wait for Tune's thread after Ray was lost (seconds)."""
END_SECONDS = 10.0
"""Grace period of running trials before Tune stops them (seconds)."""


class AbortRun(BaseException):
    """Ends Tune's run without its clean-up, which would block because Ray is gone."""


class TuneEngine:
    """Runs one study's trials in a ``Tuner``.

    Args:
        trials: the trials; the loop's pool.
        hosts: the nodes' process hosts.
        loop: the study's loop.
        watch: checks that the cluster responds; raises an error to end the run.
        look: returns the cluster's current use.
        options: the caller's additions to the Tuner.
    """

    def __init__(
        self,
        trials: TuneTrials,
        hosts: Hosts,
        loop: Loop,
        watch: Callable[[], None],
        look: Callable[[], Use],
        options: TuneOptions,
    ) -> None:
        self._trials, self._hosts, self._loop = trials, hosts, loop
        self._watch, self._look, self._options = watch, look, options
        self._handed: dict[str, Handed] = {}
        """Trials by Tune's trial id."""
        self._controller: Any = None
        self._error: BaseException | None = None
        self._abort: BaseException | None = None
        """Error that ends the run immediately, or None."""
        self._next_round = self._next_look = 0.0
        self._others_wait, self._idle_since = False, time.monotonic()
        self._goes_on, self._ends_at = True, float("inf")

    def run(self) -> None:
        """Run the study to its end.

        Raises:
            UserError, KeyboardInterrupt: from the loop or the control.
        """
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            with tempfile.TemporaryDirectory(
                prefix="lns-study-tune-", ignore_cleanup_errors=True
            ) as folder:
                self._run(folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        if self._error is not None:
            raise self._error

    def _run(self, folder: str) -> None:
        """Run the Tuner in a thread, and abandon the thread if Ray's control store (GCS) is lost: a
        call to a dead store never returns.

        Raises:
            Exception: the error of ``watch``.
        """

        def fit() -> None:
            try:
                self.tuner(folder).fit()
            except AbortRun:
                return
            except BaseException as error:
                self._error = self._error or error

        thread = threading.Thread(target=fit, daemon=True, name="tune")
        thread.start()
        try:
            thread.join(LOOK_SECONDS)
            while thread.is_alive():
                self._watch()
                thread.join(LOOK_SECONDS)
        except BaseException as error:
            self._abort = error
            thread.join(ABORT_SECONDS)
            raise

    def tuner(self, folder: str) -> tune.Tuner:
        """Return the Tuner; its files go to ``folder`` unless the caller chose another place."""
        given = self._options.run_config or tune.RunConfig(verbose=0)
        own = given.storage_path in (None, DEFAULT)
        return tune.Tuner(
            TrialSupervisor,
            tune_config=tune.TuneConfig(
                search_alg=EngineSearcher(self),
                scheduler=EngineScheduler(self),
                num_samples=-1,
                reuse_actors=True,
                trial_name_creator=lambda trial: trial.config["trial"],
                trial_dirname_creator=lambda trial: trial.config[JOB].run,
            ),
            run_config=tune.RunConfig(
                name=given.name or "study",
                storage_path=folder if own else given.storage_path,
                verbose=given.verbose,
                progress_reporter=given.progress_reporter,
                callbacks=[EngineCallback(self), *(given.callbacks or [])],
                failure_config=tune.FailureConfig(max_failures=0),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )

    def suggest(self, tune_id: str) -> dict[str, Any] | str | None:
        """Return the next trial's config, None if no trial can start now, or ``FINISHED``."""
        with self._guard():
            self.round()
            while self._goes_on and not self._trials.running:  # Tune would ask once a second
                time.sleep(ROUND_SECONDS)
                self.round()
            handed = self._trials.next()
            if handed is not None:
                self._handed[tune_id] = handed
                return self._loop.describe(handed.job.trial) | {JOB: handed.job}
        return None if self._goes_on or self._trials.running else Searcher.FINISHED

    def hear(self, tune_id: str, messages: list[ForLoop]) -> bool:
        """Forward a trial's messages to the loop; return whether the trial continues."""
        with self._guard():
            handed = self._handed[tune_id]
            handed.goes_on = True
            if found := self._trials.hear(handed, messages):
                self._take_in(found)
            if not handed.goes_on:
                self._take_in(self._trials.note_stop(handed))
            return handed.goes_on
        return False

    def note_error(self, tune_id: str, error: str) -> None:
        """Report to the loop that a trial's actor has died."""
        with self._guard():
            handed = self._handed[tune_id]
            for rank, node in enumerate(handed.nodes):
                self._hosts.call(node, "end", [f"{handed.job.run}/{rank}"], error)
            self._take_in(self._trials.hear(handed, [Died(DIED, handed.job.trial, error)]))

    def forget(self, tune_id: str) -> None:
        """Drop a trial that Tune has finished with."""
        self._handed.pop(tune_id, None)

    def round(self) -> None:
        """Poll the cluster if that is due, then run one round of the study's loop."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            use = self._look()
            self._hosts.poll(self._loop.waits or self._trials.started, self._trials.used)
            self._trials.room.nodes = self._hosts.rooms
            self._look_at_others(use)
            self._end_deaf()
            self._end_if_aborted()
        if now < self._next_round:
            return
        self._next_round = now + ROUND_SECONDS
        if self._goes_on:
            self._goes_on = self._loop.begin_round()
            self._trials.ask_for(self._loop.waits_for if self._goes_on else None)
            if not self._goes_on:
                self._trials.end_all("the study ends")
                self._ends_at = now + END_SECONDS
        elif (
            self._trials.running
            and self._controller is not None
            # a trial that Ray has not placed never reports its end
            and (now > self._ends_at or not self._trials.used)
        ):
            self._controller.request_stop_experiment()

    def use(self, controller: Any) -> None:
        """End Tune's idle actors if another trial or another user waits for their resources."""
        self._controller = controller
        with self._guard():
            self.round()
            if self._loop.waits or self._trials.started:
                self._idle_since = time.monotonic()
            idle = time.monotonic() - self._idle_since > IDLE_SECONDS
            if self._others_wait or self._gangs or self._hosts.draining or idle:
                evict_cached_actors(controller)

    @property
    def _gangs(self) -> list[Handed]:
        """Trials whose workers Ray Train places. They may need the CPUs of an idle actor."""
        return [
            handed
            for handed in self._handed.values()
            if handed.job.shape.executor == RAY_TRAIN and not handed.over
        ]

    def _take_in(self, messages: list[ForLoop]) -> None:
        if self._goes_on and messages:
            self._loop.take_in(messages)
            self._next_round = 0.0
        if any(message.kind in (DIED, UNPLACED) for message in messages):
            self._next_look = 0.0  # its node may be gone, and it must not start there again

    def _end_if_aborted(self) -> None:
        if self._abort is not None:
            raise AbortRun

    def _look_at_others(self, use: Use) -> None:
        """Update the resources that other users hold, and reserve room for their largest pending
        request. Nothing is reserved once other users hold half of the cluster."""
        room = self._trials.room
        gangs = [handed.job.shape for handed in self._gangs]  # Ray Train holds their CPUs
        held = (
            use.mine[0] + sum(shape.cpus for shape in gangs),
            use.mine[1] + sum(shape.gpus_in_all for shape in gangs),
        )
        room.note_others(use.free, held)
        ours = sum(not handed.nodes for handed in self._handed.values()) + len(gangs)
        asked = [*use.requests, *use.groups[ours:]]
        self._others_wait = bool(asked)
        room.kept = max(asked) if asked and room.others[0] < room.total[0] / 2 else (0.0, 0.0)

    def _end_deaf(self) -> None:
        """Kill supervisors that do not report the end of their processes."""
        deaf = set(self._trials.deaf())
        for trial in self._controller.get_live_trials() if deaf else ():
            handed = self._handed.get(trial.trial_id)
            if handed is not None and handed.job.trial in deaf and not handed.over:
                with contextlib.suppress(Exception):  # it may have died meanwhile
                    ray.kill(trial.temporary_state.ray_actor)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Record the first error and stop Tune, which would otherwise wrap or ignore it."""
        if self._error is not None:
            self._goes_on = False
        self._end_if_aborted()
        try:
            yield
        except AbortRun:
            raise
        except BaseException as error:
            self._error = self._error or error
            self._goes_on = False
            self._trials.forget_all()
            if self._controller is not None:
                self._controller.request_stop_experiment()


class _OfEngine:
    """Base of the objects that Tune calls. Tune pickles them to restore a run; a study resumes from
    its ledger instead, so the engine is not pickled."""

    _engine: TuneEngine

    def __getstate__(self) -> dict[str, Any]:
        return {}


class EngineSearcher(_OfEngine, Searcher):  # type: ignore[misc]
    """Hands a study's trials to Tune, in the order of the study."""

    def __init__(self, engine: TuneEngine) -> None:
        super().__init__()
        self._engine = engine

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial's config, see :meth:`TuneEngine.suggest`."""
        return self._engine.suggest(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Do nothing: the scheduler and the callback inform the study."""

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        """Accept any metric: a study has its own objectives."""
        return True

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the ledger has the search state."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: the ledger has the search state."""


class EngineScheduler(_OfEngine, FIFOScheduler):  # type: ignore[misc]
    """Forwards reports to the study, and stops the trials that its scheduler stops."""

    def __init__(self, engine: TuneEngine) -> None:
        super().__init__()
        self._engine = engine

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        """Return None: Tune starts pending trials in order."""
        self._engine.use(tune_controller)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return Tune's decision after a result other than the last."""
        goes_on = self._engine.hear(trial.trial_id, result[MESSAGES])
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Forward the last result; the study already knows a result after which it stopped the
        trial."""
        self._engine.hear(trial.trial_id, result.get(MESSAGES, []))
        self._engine.forget(trial.trial_id)


class EngineCallback(_OfEngine, tune.Callback):  # type: ignore[misc]
    """Reports trials whose actors died to the study."""

    def __init__(self, engine: TuneEngine) -> None:
        self._engine = engine

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report that a trial's actor has died."""
        error = trial.get_error() or "its supervisor died"
        self._engine.note_error(trial.trial_id, last_line(str(error)))
        self._engine.forget(trial.trial_id)
