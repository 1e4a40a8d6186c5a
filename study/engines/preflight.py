"""Preflight: checks of folder, data, trials, CPUs, GPUs and cluster before any work starts.

Each check raises ``ValueError`` with the value, the rule and the remedy; the command line prints it
and exits with code 2.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from study.config import StudyConfig
from study.engines.control import grace_seconds
from study.engines.user_files import check_user_files
from study.ledger.provenance import different_data
from study.ledger.state import StudyState
from study.ledger.storage import check_storage, check_writable
from study.plan.engine_choice import choose_gang, needs_ray
from study.plan.identity import code_digests
from study.plan.plan import Plan
from study.plan.resources import local_cpus
from study.plan.trials import Excluded, PlannedTrial
from trainers.data import DatasetInfo, describe_download
from trainers.training.device import gpu_models
from trainers.workers.messages import DIED
from trainers.workers.node import Node
from trainers.workers.resources import MOST_TRIALS, cpus_of

_T = TypeVar("_T")
CONNECT_SECONDS = 5.0
CHANGES_SHOWN = 5
"""Maximum number of names in the note on global changes by the user's code."""
SLOW_SECONDS = 10.0
"""Print a notice if the check takes longer than this (seconds)."""


def preflight(
    plan: Plan,
    node: Node | None = None,
    say: Callable[[str], None] = lambda line: None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Plan, list[dict[str, Any]]]:
    """Run all checks; return the plan of the trials that can run, and their data sets.

    Sampled configurations that the data or the number format rule out are removed from the plan.

    Args:
        plan: the plan.
        node: process manager of this machine, if there is one: its process reads the data and
            checks the trials, so that this process need not load torch.
        say: prints one line for the user.
        meanwhile: called while another thread reads the data and checks the trials.

    Raises:
        ValueError: the first problem that would make the study fail.
    """
    grace_seconds()
    check_storage(plan.study.storage)
    check_writable(plan.study.folder, "storage")
    check_cpus(plan)
    check_elastic(plan)
    check_gpus(plan)
    check_address(plan.study.address)
    check_engine(plan.study)
    check_user_files(plan.study)
    examined = functools.partial(_examine, plan, node, say, _device(plan))
    data, reasons = examined() if meanwhile is None else _beside(examined, meanwhile)
    plan = _without_forbidden(plan, reasons)
    return plan, [dataclasses.asdict(info) for info in data]


def check_here(plan: Plan) -> tuple[Plan, str]:
    """Check a plan's trials as far as this machine can, without running the user's code or
    downloading data.

    Returns:
        The plan without the sampled configurations that data or number format rule out, and a
        description of the checks that were skipped, or "".

    Raises:
        ValueError: a trial that was not sampled could only fail.
    """
    checked = plan.trials or plan.first
    if any(trial.config.user_code for trial in checked):
        return plan, "your own code, which a plan does not run"
    if plan.downloads:
        return plan, f"what the data allow: a run downloads MNIST first, {describe_download()}"
    try:
        reasons = _examine(plan, None, lambda line: None, "cpu")[1]
    except ValueError as error:
        return plan, f"what the data allow: {error}"
    return _without_forbidden(plan, reasons), ""


def check_cpus(plan: Plan) -> None:
    """Refuse trials that need more CPUs than this machine has. Skipped for a cluster.

    Raises:
        ValueError: a trial needs more CPUs than there are.
    """
    have = local_cpus(plan.study)
    for trial in plan.trials:
        need = cpus_of(trial.config.to_dict())
        if plan.study.address is None and need > have:
            raise ValueError(
                f"row {trial.row!r}: workers={trial.config.workers} x"
                f" threads={trial.config.threads} = {need} CPUs a trial, but Ray has cpus={have};"
                f" lower trial.workers or trial.threads, or set cpus={need} to share the cores"
            )


def check_gpus(plan: Plan) -> None:
    """Refuse trials for more GPUs than this machine has, unless a cluster runs them.

    Each worker of a gang needs its own GPU. Whether the LNS kernels run on the GPUs is checked
    where trials are examined.

    Raises:
        ValueError: there are too few.
    """
    on_gpu = [trial for trial in plan.trials if trial.config.device == "cuda"]
    if plan.study.executor == "packed":
        _check_shares(on_gpu)
    if on_gpu and plan.study.address is None:
        largest = max(on_gpu, key=lambda trial: trial.config.workers)
        have, need = len(gpu_models()), largest.config.workers
        if need > have > 0:
            raise ValueError(
                f"row {largest.row!r}: workers={need} with device=cuda: every worker computes on a"
                f" GPU of its own, and this machine has {have}; use workers={have}, or address=..."
                " for a cluster that has more"
            )


def check_elastic(plan: Plan) -> None:
    """Refuse trials whose number of workers changes while they run, unless Ray Train runs them.

    Raises:
        ValueError: the workers are forked.
    """
    for trial in plan.trials:
        by_train = choose_gang(plan.study, trial, {}).by_train
        if trial.config.min_workers is not None and not by_train:
            raise ValueError(
                f"row {trial.row!r}: min_workers={trial.config.min_workers}: only Ray Train changes"
                " the number of workers of a running trial; use gang=train, or leave out"
                " trial.min_workers"
            )


def _check_shares(on_gpu: list[PlannedTrial]) -> None:
    for trial in on_gpu:
        if trial.config.gpus is not None and trial.config.gpus < 1 / MOST_TRIALS:
            raise ValueError(
                f"row {trial.row!r}: gpus={trial.config.gpus:g} with executor=packed: at most"
                f" {MOST_TRIALS} trials share a process; use trial.gpus={1 / MOST_TRIALS:g} or"
                " more, or executor=auto"
            )


def check_address(address: str | None) -> None:
    """Refuse a cluster's host and port if nothing listens there.

    ``auto`` and other names are left to Ray.

    Raises:
        ValueError: nothing listens there.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"address={address!r}: no Ray cluster answers ({error}); start one with `ray start"
            " --head`, correct the address, or leave it out for a local one"
        ) from None


def check_engine(study: StudyConfig) -> None:
    """Refuse an engine that cannot run the study.

    Raises:
        ValueError: the local engine is asked for what needs Ray.
    """
    if study.engine == "local" and (setting := needs_ray(study)):
        raise ValueError(
            f"engine=local with {setting}: the local engine runs trials on this machine alone, and"
            f" without Ray; use engine=auto, or leave out {setting.partition('=')[0]}"
        )


def _device(plan: Plan) -> str:
    """Return the device that this machine must have for a plan's trials."""
    here = plan.study.address is None
    on_gpu = any(trial.config.device == "cuda" for trial in plan.trials or plan.first)
    return "cuda" if here and on_gpu else "cpu"


def _beside(work: Callable[[], _T], meanwhile: Callable[[], None]) -> _T:
    """Run ``work`` in a thread while this one runs ``meanwhile``; return its result."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # a daemon, because the thread is not joined if `meanwhile` raises
    threading.Thread(target=run, daemon=True, name="check").start()
    meanwhile()
    return future.result()


def _examine(
    plan: Plan, node: Node | None, say: Callable[[str], None], device: str
) -> tuple[list[DatasetInfo], list[str | None]]:
    """Describe the data sets of a plan's trials, and return for each trial why it must fail, or
    None.

    For a search without trials yet, the first trial of each row is examined. If there is a node,
    one of its processes does it, because it has torch loaded.

    Raises:
        ValueError: the device is missing, or files are missing, corrupt or too few, or end the
            process that loads them.
    """
    trials = plan.trials or plan.first
    configs = [trial.config for trial in trials]
    own = any(config.user_code for config in configs)
    if node is None and own:
        with Node() as other:
            return _examine(plan, other, say, device)
    if node is not None and configs:
        # own code may compute on a GPU
        sees_gpus = device != "cpu" or own
        slow = threading.Timer(
            SLOW_SECONDS, say, [f"Checking trials and their data: {len(configs)} trials"]
        )
        slow.start()
        try:
            message = node.examine(
                configs, {} if sees_gpus else {"CUDA_VISIBLE_DEVICES": ""}, device
            )
        finally:
            slow.cancel()
        if message.kind == DIED:
            raise ValueError(
                "trials cannot be checked, as loading their data and models fails"
                f" ({message.payload}); look whether they need more memory than there is, or"
                " whether code of your own ends its process"
            )
        if isinstance(message.payload, str):
            raise ValueError(message.payload)
        examined = message.payload
        for line in _describe_changes(trials, examined.changes):
            say(line)
    else:
        from trainers.workers.worker_process import examine

        examined = examine(configs, device)
    return list(examined.data.values()), examined.reasons


def _describe_changes(
    trials: Sequence[PlannedTrial], changes: Sequence[list[str]]
) -> Iterator[str]:
    """Yield notes on global changes that the user's code makes in its process, by rows."""
    rows: dict[tuple[str, ...], dict[str, None]] = {}
    for trial, changed in zip(trials, changes, strict=True):
        if changed:
            rows.setdefault(tuple(changed), {})[trial.row] = None
    for names, labels in rows.items():
        more = len(names) - CHANGES_SHOWN
        yield (
            f"Note: code of your own ({', '.join(f'row {label!r}' for label in labels)}) changes"
            f" {', '.join(names[:CHANGES_SHOWN])}{f' and {more} more' if more > 0 else ''} for"
            " all of its process; each of its trials has a process of its own, so no other trial"
            " is affected"
        )


def _without_forbidden(plan: Plan, reasons: list[str | None]) -> Plan:
    """Return the plan without the sampled configurations that data or number format rule out, such
    as too large a batch or a learning rate that underflows.

    Args:
        plan: the plan.
        reasons: why each of its trials, or of the first trials of a search, must fail, or None.

    Raises:
        ValueError: a trial that was not sampled could only fail, or a row has no trial left.
    """
    kept: list[PlannedTrial] = []
    excluded: dict[tuple[str, int], Excluded] = {}
    if plan.first and not plan.trials and None not in reasons:
        raise ValueError(f"row {plan.first[0].row!r}: {reasons[0]}")
    for trial, reason in zip(plan.trials, reasons, strict=bool(plan.trials)):
        if reason is None:
            kept.append(trial)
        elif trial.number is None:
            raise ValueError(f"row {trial.row!r}: {reason}")
        else:
            excluded[trial.row, trial.number] = Excluded(
                row=trial.row, params=trial.params, reason=reason
            )
    able = {trial.row for trial in kept}
    if lost := [entry for entry in excluded.values() if entry.row not in able]:
        raise ValueError(
            f"row {lost[0].row!r}: no point of the space makes a trial that can run; the first:"
            f" {lost[0]}"
        )
    return dataclasses.replace(
        plan, trials=tuple(kept), excluded=(*plan.excluded, *excluded.values())
    )


def check_same_name(study: StudyConfig, before: StudyState) -> None:
    """Refuse a study whose folder belongs to a study with another name.

    Names that differ only in characters that a folder cannot have share one.

    Raises:
        ValueError: the folder belongs to another study.
    """
    known = before.plan["study"]["name"] if before.plan else study.name
    if known != study.name:
        raise ValueError(
            f"name={study.name!r}: its folder {study.folder} belongs to the study {known!r}; two"
            " studies must not share one; choose another name, or continue that study with"
            f" name={shlex.quote(known)}"
        )


def check_same_data(data: list[dict[str, Any]], before: StudyState) -> None:
    """Refuse to resume a study on data with other bytes than those it began with.

    Raises:
        ValueError: a data set of the same name had other files.
    """
    if found := different_data(data, before.plan.get("data", [])):
        now, then = found
        place = f" in {now['root']}" if now["root"] else ""
        raise ValueError(
            f"data {now['name']!r}{place}: sha256 {now['digest'][:12]} differs from"
            f" {then['digest'][:12]}, on which this study began; restore the files, or start a new"
            " study with name=..."
        )


def say_changed_code(plan: Plan, before: StudyState, say: Callable[[str], None]) -> None:
    """Print the names of user code that changed since the last run; its trials are new ones."""
    now = code_digests(trial.config.to_dict() for trial in (*plan.trials, *plan.first))
    for name, then in code_digests(trial.config for trial in before.trials).items():
        gone, new = then - now.get(name, set()), now.get(name, set()) - then
        if gone and new:
            say(
                f"The code of {name} has changed since the last run ({', '.join(sorted(gone))} to"
                f" {', '.join(sorted(new))}): its trials are trained again; trials with the earlier"
                " code stay in the ledger."
            )
