"""The checks of the command ``doctor``, each with a remedy: of this machine, or of a study's ledger
and checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lns_ops
from study.config import StudyConfig, check_tracking_uri, default_tracking_uri
from study.engines.preflight import check_address
from study.engines.ray_session import ray_session
from study.errors import UserError
from study.ledger.events import trial_of
from study.ledger.lock import LOCK
from study.ledger.log import how_to_repair, open_ledger, read_ledger
from study.ledger.provenance import hardware, provenance
from study.ledger.state import fold
from study.ledger.storage import check_storage, refresh
from study.ledger.studies import find, folders, placed
from study.ops.repair.ledger import needs_repair, repair
from study.plan.checkpoints import check_checkpoints
from study.program import lns_study
from study.text import counted
from study.tracking.address import OFF, check_default, store_of
from study.tracking.writer_supervisor import check_tracking
from study.tracking_uri import REMEDY, hide, stored
from trainers.object_store import is_url, local_folder, place_of

DAMAGED_SHOWN, RECOVERED_SHOWN = 3, 20
SHORT_OF_SPACE = 2 << 30
"""The storage counts as short of space below this number of free bytes."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check, with a ``remedy`` if it is not good."""

    name: str
    good: bool
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "ok  " if self.good else "BAD "
        return f"{mark} {self.name}: {self.text}" + (f"\n     {self.remedy}" if self.remedy else "")


def examine(
    storage: str, tracking_uri: str | None, address: str | None, say: Callable[[str], None]
) -> list[Finding]:
    """Check this machine; print each finding at once."""
    findings = []
    for finding in _findings(storage, tracking_uri, address):
        say(str(finding))
        findings.append(finding)
    return findings


def examine_study(
    study: str, storage: str, tracking_uri: str | None, say: Callable[[str], None]
) -> bool:
    """Check a study's ledger and checkpoints, print the findings, and return whether all are good.

    Raises:
        ValueError: the study does not exist.
    """
    folder = _folder(study, storage)
    wrong = needs_repair(folder)
    contents = open_ledger(folder)
    checks = "every one checked" if contents.checked else "of version 1, which has no checks"
    text = wrong or f"{contents.number} lines, {checks}"
    say(
        str(
            Finding(
                name="ledger",
                good=not wrong,
                text=text,
                remedy=f"to repair it: {how_to_repair(folder)}" if wrong else "",
            )
        )
    )
    places = list(check_checkpoints(folder))
    damaged = [place for place, whole in places if not whole]
    text = f"{len(places) - len(damaged)} whole" + (
        f", {len(damaged)} damaged ({', '.join(damaged[:DAMAGED_SHOWN])})" if damaged else ""
    )
    remedy = (
        "trials resume from an earlier one or from the start, and give the same figures"
        if damaged
        else ""
    )
    say(str(Finding(name="checkpoints", good=not damaged, text=text, remedy=remedy)))
    return not wrong and not damaged


def repair_study(
    study: str, storage: str, tracking_uri: str | None, say: Callable[[str], None]
) -> bool:
    """Repair the ledger of a study if it is damaged; return whether nothing is lost.

    Args:
        study: name or folder of the study.
        storage: folder of all studies.
        tracking_uri: MLflow store to read; None for the study's own, ``none`` for none.
        say: prints a line for the user.

    Raises:
        ValueError: the study does not exist or is running, or the store does not answer.
    """
    folder = _folder(study, storage)
    wrong = needs_repair(folder)
    if not wrong:
        say(f"{folder.name}: its ledger is whole; nothing was changed")
        return True
    try:
        done = repair(folder, _store(folder, tracking_uri))
    except UserError:
        raise
    except ValueError as error:
        raise ValueError(f"{error}; to repair without MLflow, add --tracking-uri none") from None
    say(f"{folder.name}: {wrong}")
    say(f"Kept: {done.kept}" if done.kept else "There was no file to keep.")
    for event in done.recovered[:RECOVERED_SHOWN]:
        epoch = f", epoch {event['epoch']}" if "epoch" in event else ""
        trial = event["planned"]["id"] if event["event"] == "added" else trial_of(event)
        say(f"Restored: {event['event']} of trial {trial}{epoch} ({event['recovered']})")
    if len(done.recovered) > RECOVERED_SHOWN:
        say(f"Restored: {len(done.recovered) - RECOVERED_SHOWN} more events")
    for line in done.lost:
        say(f"Lost: {line}")
    again = "repeat the command that ran the study; its finished epochs are kept"
    if done.planned:
        again = lns_study("run", "--resume", folder.name, storage=storage)
    say(f"To continue: {again}")
    return not done.lost


def _folder(study: str, storage: str) -> Path:
    """Return the folder of a study, even if its ledger is missing."""
    stored = StudyConfig(name=study, storage=storage).folder
    refresh(stored)
    for folder in (Path(study), stored):
        if (
            (folder / "checkpoints").is_dir()
            or (folder / "train").is_dir()
            or (folder / LOCK).exists()
        ):
            return folder.resolve()
    return find(study, storage)


def _store(folder: Path, tracking_uri: str | None) -> str | None:
    """Return the MLflow store that may have the study's data, or None."""
    plan = fold(read_ledger(folder)).plan
    uri = tracking_uri or default_tracking_uri(place_of(folder.parent))
    if not plan and not tracking_uri:
        check_default(uri, place_of(folder.parent))
    if plan:
        uri = store_of(placed(StudyConfig.from_dict(plan["study"]), folder), tracking_uri)
    missing = uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()
    return None if uri == OFF or missing else uri


def _findings(storage: str, tracking_uri: str | None, address: str | None) -> Iterator[Finding]:
    yield _packages()
    yield _machine()
    yield from _kernels()
    yield _storage(storage)
    yield from _passwords(storage)
    yield _tracking(hide(tracking_uri) if tracking_uri else None, storage)
    yield _ray(address)


def _packages() -> Finding:
    code = provenance()
    missing = [
        name
        for name, version in code["versions"].items()
        if version == "not installed" and name != "lns-study"
    ]
    text = ", ".join(f"{name} {version}" for name, version in code["versions"].items())
    return Finding(
        name="packages",
        good=not missing,
        text=text,
        remedy=f"pip install {' '.join(missing)}" if missing else "",
    )


def _machine() -> Finding:
    found = hardware()
    gpus = ", ".join(found["gpus"]) or "no GPU"
    return Finding(
        name="machine",
        good=True,
        text=(
            f"{found['processor']}, {found['cores']} cores, {found['memory'] / 2**30:.0f} GiB,"
            f" {gpus}"
        ),
    )


def _kernels() -> Iterator[Finding]:
    for device, info in lns_ops.backends().items():
        text = (
            "; ".join(f"{key}: {value}" for key, value in info.items())
            if isinstance(info, dict)
            else str(info)
        )
        yield Finding(name=f"LNS kernels on {device}", good=True, text=text)


def _storage(storage: str) -> Finding:
    folder = local_folder(storage)
    place = f"{storage} can be written; cache " if is_url(storage) else ""
    try:
        check_storage(storage)
    except ValueError as error:
        return Finding(name="storage", good=False, text=storage, remedy=str(error))
    free = shutil.disk_usage(folder).free
    remedy = (
        "free some space, or choose another folder with storage=..."
        if free < SHORT_OF_SPACE
        else ""
    )
    return Finding(
        name="storage",
        good=not remedy,
        text=f"{place}{folder}, {free / 2**30:.1f} GiB free",
        remedy=remedy,
    )


def _passwords(storage: str) -> Iterator[Finding]:
    """Yield a finding for every ledger that contains a password."""
    try:
        found = folders(storage)
    except ValueError:  # the object store does not answer; an earlier check reports it
        return
    for folder in found:
        try:
            uris = stored(read_ledger(folder))
        except ValueError as error:
            yield Finding(name=folder.name, good=False, text="cannot be read", remedy=str(error))
            continue
        for uri in uris:
            yield Finding(
                name=folder.name,
                good=False,
                text=f"its ledger holds the password of {uri}",
                remedy=REMEDY,
            )


def _tracking(given: str | None, storage: str) -> Finding:
    uri = given or default_tracking_uri(storage)
    try:
        check_tracking_uri(uri)
        if given is None:
            check_default(uri, storage)
        check_tracking(uri)
    except ValueError as error:
        return Finding(name="MLflow", good=False, text=uri, remedy=str(error))
    return Finding(name="MLflow", good=True, text=f"{uri} answers")


def _ray(address: str | None) -> Finding:
    try:
        check_address(address)
        with ray_session(StudyConfig(name="doctor", address=address)) as session:
            found = session.resources()
            nodes = sum(node["Alive"] for node in session.nodes())
    except (UserError, ValueError) as error:
        return Finding(name="Ray", good=False, text=str(address), remedy=str(error))
    text = f"{counted(nodes, 'node')}, {found.get('CPU', 0):g} CPUs, {found.get('GPU', 0):g} GPUs"
    return Finding(name="Ray", good=True, text=f"{address or 'a local one'} starts: {text}")
