"""The ray engine: a study is a ``ray.tune.Tuner``.

Tune makes an actor for each trial, Ray places it, and Ray's tools show it. The study's loop
(:mod:`study.execution.loop`) decides what runs next and writes the ledger, as on one machine; here
it is called by what Tune calls: a searcher hands trials to Tune, a scheduler passes on what they
report and answers, a callback does what is due. All of it runs in a thread of ``Tuner.fit``'s; the
caller's looks after Ray.

A trial that died is a trial of Tune's that has ended: the loop starts it again as a new one, from
its last checkpoint. So Tune retries nothing, and the ledger says what is left to do; the same
command goes on from it.
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

from study._compat import evict_cached_actors, held_by_actors
from study.execution.loop import Loop
from study.execution.ray_session import Use
from study.execution.tune.hosts import Hosts
from study.execution.tune.options import TuneOptions
from study.execution.tune.supervisor import JOB, MESSAGES, TrialSupervisor
from study.execution.tune.trials import Handed, TuneTrials
from trainers.workers.messages import DIED, UNPLACED, Message, last_line
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
"""Variables of Tune's while it runs: the ledger keeps what it would write, the terminal is ours,
Ctrl-C cancels the study, and trials are held back by the study's loop."""
IDLE_SECONDS = 2.0
"""Seconds for which an actor is kept for a next trial while none waits."""
ROUND_SECONDS = 0.05
"""Seconds between rounds of the loop, unless a trial has ended."""
LOOK_SECONDS = 1.0
"""Seconds between looks at what others use of the cluster."""
DEFAULT = tune.RunConfig().storage_path
"""Where Tune keeps what it writes unless it is told."""
ABORT_SECONDS = 5.0
"""Seconds for which the end of a run waits for Tune where Ray is gone."""
END_SECONDS = 10.0
"""Seconds that trials have to end before Tune stops them."""


class AbortRun(BaseException):
    """Ends Tune's run at once, without its clean-up, which would wait for a Ray that is gone."""


class TuneEngine:
    """Runs one study's trials as those of a ``Tuner``.

    Args:
        trials: the trials; the loop's pool.
        hosts: process hosts of the nodes.
        loop: the study's loop.
        watch: looks whether the cluster is there; raises to end the run.
        look: returns how much of the cluster is in use.
        options: what the caller adds to the Tuner.
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
        """Trials by Tune's id of them."""
        self._controller: Any = None
        self._error: BaseException | None = None
        self._abort: BaseException | None = None
        """What ends the run at once."""
        self._next_round = self._next_look = 0.0
        self._others_wait, self._idle_since = False, time.monotonic()
        self._goes_on, self._ends_at = True, float("inf")

    def run(self) -> None:
        """Run the study to its end.

        Raises:
            UserError, KeyboardInterrupt: as the loop and the control do.
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
        """Run the Tuner in a thread, and end without it where a control store has died: a call to
        one that is silent does not return.

        Raises:
            Exception: the cluster is gone.
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
        """Return the Tuner, which keeps what it must in a folder, or where the caller says."""
        given = self._options.run_config or tune.RunConfig(verbose=0)
        own = given.storage_path in (None, DEFAULT)
        return tune.Tuner(
            TrialSupervisor,
            tune_config=tune.TuneConfig(
                search_alg=StudySearcher(self),
                scheduler=StudyScheduler(self),
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
                callbacks=[StudyCallback(self), *(given.callbacks or [])],
                failure_config=tune.FailureConfig(max_failures=0),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )

    def suggest(self, tune_id: str) -> dict[str, Any] | str | None:
        """Return the config of the next trial; None while there is none, or that no more come."""
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

    def hear(self, tune_id: str, messages: list[Message]) -> bool:
        """Pass on what a trial has said; tell whether it goes on."""
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
        """Pass on that the actor of a trial has died."""
        with self._guard():
            handed = self._handed[tune_id]
            for rank, node in enumerate(handed.nodes):
                self._hosts.call(node, "end", [f"{handed.job.run}/{rank}"], error)
            self._take_in(self._trials.hear(handed, [Message(DIED, handed.job.trial, error)]))

    def forget(self, tune_id: str) -> None:
        """Note that Tune is done with a trial."""
        self._handed.pop(tune_id, None)

    def round(self) -> None:
        """Have the loop do what is due."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            use = self._look()
            self._hosts.poll(self._loop.waits, self._trials.used)
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
            # of what Ray has not placed nobody would hear
            and (now > self._ends_at or not self._trials.used)
        ):
            self._controller.request_stop_experiment()

    def use(self, controller: Any) -> None:
        """Look after Tune's actors: none is kept that keeps resources from whoever waits."""
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
        """Trials whose workers Ray Train places. It may wait for CPUs that an idle actor holds."""
        return [
            handed
            for handed in self._handed.values()
            if handed.job.shape.executor == RAY_TRAIN and not handed.over
        ]

    def _take_in(self, messages: list[Message]) -> None:
        if self._goes_on and messages:
            self._loop.take_in(messages)
            self._next_round = 0.0
        if any(message.kind in (DIED, UNPLACED) for message in messages):
            self._next_look = 0.0  # its node may be gone, and it must not start there again

    def _end_if_aborted(self) -> None:
        if self._abort is not None:
            raise AbortRun

    def _look_at_others(self, use: Use) -> None:
        """Note what others hold of the cluster, and keep free what one of them waits for.

        They hold what is neither free nor any actor's of ours. Where they hold half of the cluster
        already, nothing more is kept free for them.
        """
        room, mine = self._trials.room, dict[str, float]()
        if self._controller is not None:
            mine = held_by_actors(self._controller)
        gangs = [handed.job.shape for handed in self._gangs]  # Ray Train holds what they need
        held = (
            mine.get("CPU", 0.0) + sum(shape.cpus for shape in gangs),
            mine.get("GPU", 0.0) + sum(shape.gpus_in_all for shape in gangs),
        )
        room.note_others(use.free, held)
        ours = sum(not handed.nodes for handed in self._handed.values()) + len(gangs)
        asked = [*use.requests, *use.groups[ours:]]
        self._others_wait = bool(asked)
        room.kept = max(asked) if asked and room.others[0] < room.total[0] / 2 else (0.0, 0.0)

    def _end_deaf(self) -> None:
        """Kill the supervisors that do not tell of the end of their processes."""
        deaf = set(self._trials.deaf())
        for trial in self._controller.get_live_trials() if deaf else ():
            handed = self._handed.get(trial.trial_id)
            if handed is not None and handed.job.trial in deaf and not handed.over:
                with contextlib.suppress(Exception):  # it may have died meanwhile
                    ray.kill(trial.temporary_state.ray_actor)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Keep the first error, and end Tune's run: Tune would make another of it, or go on."""
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
    """What calls an engine. Tune writes such objects to its folder, to restore a run from there; a
    study goes on from its ledger, so the engine is left out."""

    _engine: TuneEngine

    def __getstate__(self) -> dict[str, Any]:
        return {}


class StudySearcher(_OfEngine, Searcher):  # type: ignore[misc]
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
        """Do nothing: the scheduler and the callback tell the study."""

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        """Refuse nothing: a study has its own objectives."""
        return True

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the ledger has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: the ledger has it."""


class StudyScheduler(_OfEngine, FIFOScheduler):  # type: ignore[misc]
    """Passes on what trials report, and ends those early that the study's scheduler ends."""

    def __init__(self, engine: TuneEngine) -> None:
        super().__init__()
        self._engine = engine

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        """Choose none: pending trials start in their order anyway."""
        self._engine.use(tune_controller)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return Tune's decision after a result that is not the last one."""
        goes_on = self._engine.hear(trial.trial_id, result[MESSAGES])
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Pass on the last result; one after which the trial was ended is known."""
        self._engine.hear(trial.trial_id, result.get(MESSAGES, []))
        self._engine.forget(trial.trial_id)


class StudyCallback(_OfEngine, tune.Callback):  # type: ignore[misc]
    """Tells a study of trials whose actors died."""

    def __init__(self, engine: TuneEngine) -> None:
        self._engine = engine

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass on that the actor of a trial has died."""
        error = trial.get_error() or "its supervisor died"
        self._engine.note_error(trial.trial_id, last_line(str(error)))
        self._engine.forget(trial.trial_id)
