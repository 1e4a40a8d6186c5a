"""Functions behind the commands: run a study, write its report, send it to MLflow.

Scripts and notebooks use :mod:`study.api`. The steps of a run are: make the plan, check it
(preflight), open the ledger, run the trials, update MLflow, write the report.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import StudyConfig
from study.engines.control import Control, Decision, clear, storage_refused
from study.engines.launch_times import continued, launch_of_job
from study.engines.preflight import check_same_data, check_same_name, preflight, say_changed_code
from study.engines.ray.options import TuneOptions
from study.engines.ray.start import RayStart
from study.engines.runner import run_plan
from study.errors import StorageError, refusals
from study.evidence.statement import state_claims
from study.ledger.events import Event
from study.ledger.lock import is_locked
from study.ledger.log import FILE, Ledger, LedgerError, LedgerGoneError
from study.ledger.provenance import hardware, provenance
from study.ledger.state import ALL, ENDED, FAILED, FINISHED, ONLY_FAILED, StudyState, fold
from study.ledger.storage import check_storage, check_writable, fetch_report, share
from study.ledger.studies import placed, read
from study.plan.candidates import by_rule
from study.plan.checkpoints import check_same_ledger
from study.plan.engine_choice import by_ray
from study.plan.extend import continuations
from study.plan.plan import Plan, make_plan
from study.program import lns_study
from study.results.idle_time import remark
from study.search.agenda import adopt
from study.text import NAME, counted, one_line
from study.tracking.address import OFF, how_to_open, page, store_of
from study.tracking.tensorboard_alerts import Sinks, check_sinks
from study.tracking.writer import sync
from study.tracking.writer_supervisor import (
    NoTracker,
    Tracker,
    check_study,
    check_tracking,
    make_tracker,
)
from study.tracking_uri import REMEDY, name_address, stored
from study.views.view import StepView, View
from trainers.files import check_own_folder
from trainers.object_store import local_folder
from trainers.workers.node import Node

if TYPE_CHECKING:  # imports torch
    from trainers.telemetry.tally import Moment

EXCLUDED_SHOWN = 3
LATER_SECONDS = 5.0
FEW_CORES = 4
LOADED = time.time()
"""Unix time at which this process had imported a run's code; this module is imported last."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a run of a study.

    Attributes:
        state: state of the study.
        report: folder of the report.
        tracking: URI of the MLflow store that has the runs.
        tracking_error: why MLflow lacks part of the study, or "".
        page: address of the study's page in MLflow's interface, or "".
    """

    state: StudyState
    report: Path
    tracking: str
    tracking_error: str
    page: str = ""

    @property
    def failed(self) -> int:
        """Number of failed trials."""
        return sum(trial.status == FAILED for trial in self.state.trials)


def run_study(
    study: StudyConfig,
    view: View,
    say: Callable[[str], None],
    only: str = ALL,
    node: Node | None = None,
    began: float | None = None,
    job: bool = False,
    options: TuneOptions | None = None,
) -> Outcome:
    """Run a study, or the rest of a study that was started before.

    Args:
        study: the config.
        view: progress display.
        say: prints one line for the user, such as a warning.
        only: ``all`` runs every trial that has not finished, ``unfinished`` skips the failed
            ones, and ``failed`` runs only these.
        node: node process of this machine that is already starting; ended with the study.
        began: start time of the command on the :func:`time.monotonic` clock; None for now.
        job: whether a job controller started this run, which then continues an interrupted run.
        options: additions by the caller to the Tuner of the ray engine.

    Raises:
        UserError: the study cannot start; nothing was changed.
        StorageError: a write to the storage failed during the run; the same command continues
            once the storage is writable.
        KeyboardInterrupt: after Ctrl-C; ledger, MLflow runs and report are closed.
    """
    began = time.monotonic() if began is None else began
    name_address(study.tracking)
    with (
        RayStart(say, options) as ray,
        _opened(study, say, node, job, ray) as (plan, data, ledger, before, node, spent),
    ):
        for uri in stored(ledger.history):
            say(f"The ledger holds the password of {uri}: {REMEDY}.")
        say_changed_code(plan, before, say)
        rules = by_rule(plan.excluded)
        for count, entry in rules[:EXCLUDED_SHOWN]:
            more = f" (and {count - 1} more)" if count > 1 else ""
            say(f"Left out: {entry}{more}")
        if len(plan.excluded) > min(len(rules), EXCLUDED_SHOWN):
            say(
                f"Left out: {len(plan.excluded)} configurations in all;"
                f" `{lns_study('plan', 'CONFIG')}` lists them"
            )
        return _run(plan, data, ledger, before, view, say, only, node, began, spent, ray)


def create_study(study: StudyConfig, say: Callable[[str], None]) -> Path:
    """Check a study and write its plan to its ledger without running it; return its folder.

    The ledger does not change if its last plan has the same config, data and code.

    Raises:
        UserError: the study cannot start (nothing was changed), or its storage is not writable.
    """
    with _opened(study, say) as (plan, data, ledger, before, *_):
        if not _in_plan(plan, before) or before.plan.get("study") != plan.study.to_dict():
            try:
                _enter_plan(plan, data, ledger, ALL)
                ledger.append({"event": "ended", "outcome": "stopped"})
            except LedgerError as error:
                raise storage_refused(f"storage: ledger: {error}", ledger.folder) from None
        return ledger.folder


@contextmanager
def _opened(
    study: StudyConfig,
    say: Callable[[str], None],
    node: Node | None = None,
    job: bool = False,
    ray: RayStart | None = None,
) -> Iterator[tuple[Plan, list[dict[str, Any]], Ledger, StudyState, Node, float]]:
    """Check a study and open its ledger.

    Yields the plan, the data, the ledger, the state before this run, the node that checked the
    trials, and the seconds that earlier runs of the same job took. For a new study with the ray
    engine, ``ray`` starts during the checks, because all trials have yet to run.
    """
    with refusals():
        check_storage(study.storage)
        plan = make_plan(study)
    with Node() if node is None else nullcontext(node) as own:
        with refusals():
            check_sinks(study)
            meanwhile = None
            if ray is not None and by_ray(study) and not (study.folder / FILE).exists():
                meanwhile = functools.partial(ray.begin, plan)
            plan, data = preflight(plan, own, say, meanwhile)
            check_study(plan, say)
        if data:
            say(f"Data: {'; '.join(entry['source'] for entry in data)}")
        with refusals():
            ledger = Ledger(plan.study.folder)
        with ledger:
            with refusals():
                before = fold(ledger.history)
                earlier = continued(before.runs, launch_of_job(LOADED)) if job else []
                # before the slow steps, so that later requests are not lost
                clear(plan.study.folder, keep=bool(earlier))
                check_same_name(plan.study, before)
                check_same_data(data, before)
                check_same_ledger(ledger, before)
                plan = adopt(plan, before)
            yield plan, data, ledger, before, own, sum(run.end - run.begin for run in earlier)


def _in_plan(plan: Plan, state: StudyState) -> bool:
    """Return whether the study's last plan has all trials of ``plan``."""
    last = {trial.id for trial in state.trials}
    return all(trial.id in last for trial in plan.trials)


def _enter_plan(
    plan: Plan, data: list[dict[str, Any]], ledger: Ledger, only: str, began: float | None = None
) -> None:
    code, here, launch = provenance(), hardware(), launch_of_job(LOADED)
    planned = plan.to_event(ledger.id)
    planned |= {"only": only, "stated": state_claims(plan.study.to_dict())}
    if began is not None:
        planned["prepared"] = time.monotonic() - began
    planned |= {"data": data, "provenance": code, "hardware": here}
    if launch:
        planned["launch"] = launch
    ledger.append(planned)


def _begin(
    plan: Plan,
    data: list[dict[str, Any]],
    ledger: Ledger,
    state: StudyState,
    only: str,
    say: Callable[[str], None],
    began: float,
) -> None:
    """Write the plan of a run to the ledger and print which trials are left."""
    try:
        _enter_plan(plan, data, ledger, only, began)
        longer = continuations(ledger, state)
    except LedgerError as error:
        refused = f"storage: ledger: {error}; nothing was started"
        raise storage_refused(refused, plan.study.folder) from None
    if longer:
        say(
            f"{longer} trials continue from the last checkpoint of the same trial with fewer"
            " epochs."
        )
    _say_what_is_left(state, say)
    _say_unused_gpus(plan, state, say)


def _step_of(view: View) -> Callable[[str, Moment], None] | None:
    return view.step if isinstance(view, StepView) else None


def _run(
    plan: Plan,
    data: list[dict[str, Any]],
    ledger: Ledger,
    state: StudyState,
    view: View,
    say: Callable[[str], None],
    only: str,
    node: Node,
    began: float,
    spent: float,
    ray: RayStart,
) -> Outcome:
    ids = None if only != ONLY_FAILED else _failed(plan, state)
    broken_off = ids is not None and state.outcome not in (FINISHED, FAILED)
    ledger.listen(state.apply)
    _begin(plan, data, ledger, state, only, say, began)
    folder = plan.study.folder
    artifacts, shown = _artifacts(plan.study), lambda where: _say_where(plan, where, say)
    tracker = make_tracker(folder, plan.study.tracking, artifacts, say, shown)
    sinks = Sinks(plan.study, say)
    later = _DeferredStart(tracker.start, sinks.start)
    ledger.listen(later.hear)
    ledger.listen(view.listen)
    view.start(state)
    edited = lambda limits: ledger.append({"event": "edited", "limits": limits})  # noqa: E731
    control, outcome = Control(folder, state, plan.study.limits, edited, spent), "interrupted"
    try:
        run_plan(plan, ledger, state, control, node, ids, say, ray=ray, moment=_step_of(view))
        decision = control.decide(fresh=True)
        outcome = _describe_end(plan, state, decision, broken_off)
        if decision.reason and not control.storage_error:
            say(_ended_early(decision.reason))
    finally:
        later.start()
        with control.watch_storage():
            ledger.append({"event": "ended", "outcome": outcome})
        view.stop()
        # writing a report would create the deleted folder again
        report = None if isinstance(ledger.broken, LedgerGoneError) else folder / "report"
        error = ""
        with control.watch_storage():
            error = _close(state, report, tracker, sinks, say)
    if report is None:
        raise StorageError(f"storage: {ledger.broken}")
    if control.storage_error:
        raise storage_refused(control.storage_error, folder, StorageError)
    if idle := remark(state.runs[-1]):
        say(idle)
    return _outcome(state, report, plan.study, error, tracker.where())


def _ended_early(reason: str) -> str:
    limited = reason.startswith("limits.")
    left = "raise or drop it to continue" if limited else "the same command continues"
    return f"Ended early: {reason}; {left}."


def _share(report: Path, say: Callable[[str], None]) -> None:
    """Send the report to the study's object store, if it has one."""
    if error := share(report):
        say(f"The report is in {report} only: {error}")


def _failed(plan: Plan, state: StudyState) -> list[str]:
    """Return the ids of the plan's trials that have failed."""
    known = (state.known[trial.id] for trial in plan.trials if trial.id in state.known)
    return [trial.id for trial in known if trial.status == FAILED]


def _describe_end(
    plan: Plan, state: StudyState, decision: Decision, broken_off: bool = False
) -> str:
    """Return the outcome of a run.

    It is ``stopped`` if trials are left, ``failed`` if a trial has failed, and else ``finished``.

    Args:
        plan: the plan.
        state: state of the study.
        decision: why the run ended early, if it did.
        broken_off: whether an earlier run was interrupted and this one only repeats failed trials.
    """
    left = len(state.trials) < plan.size
    if (
        any(trial.status not in ENDED for trial in state.trials)
        or (decision.reason and left)
        or (broken_off and (left or plan.study.search.confirm))
    ):
        return "stopped"
    return "failed" if any(trial.status == FAILED for trial in state.trials) else "finished"


def write_report(state: StudyState, folder: Path, *, run_checks: bool) -> Path:
    """Write the report, see :func:`study.report.write.write_report`."""
    from study.report.write import write_report  # takes a second; trials should not wait for it

    return write_report(state, folder, run_checks=run_checks)


class _DeferredStart:
    """Deferred start of background work, so that it does not delay the first epoch.

    This work is the processes that write to MLflow and to the sinks, and the import of the code
    that draws the report. It starts with the first epoch report or after :data:`LATER_SECONDS`. On
    a machine with at least :data:`FEW_CORES` cores it starts at once.

    Args:
        starts: functions that start these processes; each is called once.
    """

    def __init__(self, *starts: Callable[[], None]) -> None:
        self._starts = starts
        self._lock = threading.Lock()
        self._started = False
        spare = len(os.sched_getaffinity(0)) >= FEW_CORES
        self._timer = threading.Timer(0.0 if spare else LATER_SECONDS, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def hear(self, event: Event) -> None:
        """Start the tracker and load the report's code at the first report."""
        if event["event"] == "report" and not self._started:
            self.start()
            threading.Thread(target=_load_report, daemon=True, name="load report").start()

    def start(self) -> None:
        """Start the tracker now, unless it has been started."""
        with self._lock:
            if not self._started:
                self._started = True
                self._timer.cancel()
                for start in self._starts:
                    start()

    def _begin(self) -> None:
        self.start()
        _load_report()


def _load_report() -> None:
    import scipy.stats  # noqa: F401  for the tests of the report

    import study.report.write  # noqa: F401


def _close(
    state: StudyState, folder: Path | None, tracker: Tracker | NoTracker, sinks: Sinks,
    say: Callable[[str], None],
) -> str:  # fmt: skip
    """Write the report and close the MLflow runs and the sinks, these also if the report fails.

    ``folder`` None skips the report. Returns why MLflow lacks part of the study, or "".
    """
    report = None
    try:
        if folder is not None:
            sent = "" if isinstance(tracker, NoTracker) else ", and to MLflow what it lacks"
            say(f"Writing the report{sent} ...")
            report = write_report(state, folder, run_checks=True)  # the code of this run's plan
    finally:
        error = tracker.close(report)
        sinks.close()
    if report:
        _share(report, say)
    return error


def report_study(
    folder: Path, say: Callable[[str], None], tracking_uri: str | None = None,
    *, run_checks: bool = False,
) -> Outcome:  # fmt: skip
    """Write a study's report again from its ledger, and send missing data to MLflow.

    MLflow is skipped while the study runs, because the study's own process updates it.

    Args:
        folder: folder of the study.
        say: prints one line for the user.
        tracking_uri: MLflow store to update; None for the study's own.
        run_checks: whether to run the check functions of the claims, which the ledger names.

    Raises:
        UserError: ``folder`` has no study, the report cannot be written, or the server at
            ``tracking_uri`` does not answer; nothing was written.
    """
    with refusals():
        state = _reportable(folder)
        study = placed(state.config, folder)
        uri, unnamed = tracking_uri, ""
        try:
            uri = store_of(study, tracking_uri)
        except ValueError as refused:
            unnamed = str(refused)
        study = dataclasses.replace(study, tracking_uri=uri or study.tracking_uri)
        check_writable(
            folder / "report",
            "report",
            "mend its permissions, move what is in its place, or report a copy of the folder",
        )
        if tracking_uri:
            check_tracking(study.tracking)
        if any(claim.check for claim in study.claims) and not run_checks:
            fetch_report(folder)  # it has their verdicts
    report = write_report(state, folder / "report", run_checks=run_checks)
    _share(report, say)
    error, where = "", dict[str, str]()
    if state.damage:
        say(f"{one_line(state.config.name, NAME)}: {state.damage}")
    elif folder.name != study.slug:
        named = one_line(study.name, NAME)
        say(f"MLflow: nothing was sent; {folder} is a renamed folder, or a copy, of {named!r}")
    elif unnamed:
        say(one_line(f"MLflow: nothing was sent; {unnamed}"))
    elif not is_locked(folder) and study.tracking != OFF:
        error, where = sync_study(folder, study, report)
    return _outcome(state, report, study, error, where)


def sync_study(folder: Path, study: StudyConfig, report: Path | None) -> tuple[str, dict[str, str]]:
    """Send MLflow the data that it lacks of the ledger in ``folder``.

    Returns:
        Why that failed, or "", and the place of the runs in MLflow.
    """
    where: dict[str, str] = {}
    error = sync(folder, study.tracking, _artifacts(study), report, where.update)
    return error, where


def _say_where(plan: Plan, where: dict[str, str], say: Callable[[str], None]) -> None:
    address = page(where["experiment"], where["view"])
    say(f"MLflow: {how_to_open(plan.study.tracking, plan.study.storage, address)}")


def _outcome(
    state: StudyState, report: Path, study: StudyConfig, error: str, where: dict[str, str]
) -> Outcome:
    address = page(where["experiment"], where["view"]) if "view" in where else ""
    return Outcome(
        state=state, report=report, tracking=study.tracking, tracking_error=error, page=address
    )


def _reportable(folder: Path) -> StudyState:
    if not (folder / FILE).exists():
        raise ValueError(
            f"{folder}: holds no study (no ledger with a plan); run one with"
            f" `{lns_study('run', 'CONFIG')}`, or name its storage with --storage"
        )
    check_own_folder(folder / "report")
    state = read(folder)
    if not state.outcome and not is_locked(folder):
        state.outcome = "interrupted"
    return state


def _artifacts(study: StudyConfig) -> Path:
    return local_folder(study.storage) / "artifacts"


def _say_what_is_left(state: StudyState, say: Callable[[str], None]) -> None:
    finished = sum(trial.status == FINISHED for trial in state.trials)
    begun = sum(trial.status != FINISHED and trial.epoch > 0 for trial in state.trials)
    if finished or begun:
        say(
            f"Resuming: {finished} of {len(state.trials)} trials are finished, {begun} continue"
            " from their last checkpoint."
        )


def _say_unused_gpus(plan: Plan, state: StudyState, say: Callable[[str], None]) -> None:
    gpus = hardware()["gpus"] if plan.study.address is None else []
    known = state.known
    left = [
        trial.config
        for trial in (*plan.trials, *plan.first)
        if trial.id not in known or known[trial.id].status not in ENDED
    ]
    if gpus and left and not any(config.device == "cuda" for config in left):
        say(f"{counted(len(gpus), 'GPU')} ({gpus[0]}) not in use: trial.device=cuda takes GPUs.")
