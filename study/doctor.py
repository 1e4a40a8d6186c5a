"""``lns-study doctor``: what a study needs of this machine, tried out one by one, each with the remedy where it fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from study.config import StudyConfig, default_tracking_uri
from study.errors import UserError
from study.preflight import check_address, check_writable
from study.provenance import hardware, provenance
from study.tracking_uri import REMEDY, hide, stored

SHORT_OF_SPACE = 2 << 30
"""Bytes of free disk below which Ray and checkpoints soon fail."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at; ``remedy`` where it is not good."""

    name: str
    good: bool
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "ok  " if self.good else "BAD "
        return f"{mark} {self.name}: {self.text}" + (f"\n     {self.remedy}" if self.remedy else "")


def examine(storage: str, tracking_uri: str | None, address: str | None, say: Callable[[str], None]) -> list[Finding]:
    """Look at everything, telling each finding as it is made."""
    findings = []
    for finding in _findings(storage, tracking_uri, address):
        say(str(finding))
        findings.append(finding)
    return findings


def _findings(storage: str, tracking_uri: str | None, address: str | None) -> Iterator[Finding]:
    yield _packages()
    yield _machine()
    yield from _kernels()
    yield _storage(storage)
    yield from _passwords(storage)
    yield _tracking(hide(tracking_uri) if tracking_uri else default_tracking_uri(storage))
    yield _ray(address)


def _packages() -> Finding:
    code = provenance()
    missing = [name for name, version in code["versions"].items() if version == "not installed" and name != "lns-study"]
    text = ", ".join(f"{name} {version}" for name, version in code["versions"].items())
    return Finding(name="packages", good=not missing, text=text, remedy=f"pip install {' '.join(missing)}" if missing else "")


def _machine() -> Finding:
    found = hardware()
    gpus = ", ".join(found["gpus"]) or "no GPU"
    return Finding(
        name="machine", good=True, text=f"{found['processor']}, {found['cores']} cores, {found['memory'] / 2**30:.0f} GiB, {gpus}"
    )


def _kernels() -> Iterator[Finding]:
    import lns_ops

    for device, info in lns_ops.backends().items():
        text = ", ".join(f"{key} {value}" for key, value in info.items()) if isinstance(info, dict) else str(info)
        yield Finding(name=f"LNS kernels on {device}", good=True, text=text)


def _storage(storage: str) -> Finding:
    folder = Path(storage).expanduser().resolve()
    try:
        check_writable(folder, "storage")
    except ValueError as error:
        return Finding(name="storage", good=False, text=str(folder), remedy=str(error))
    free = shutil.disk_usage(folder).free
    remedy = "free some space, or choose another folder with storage=..." if free < SHORT_OF_SPACE else ""
    return Finding(name="storage", good=not remedy, text=f"{folder}, {free / 2**30:.1f} GiB free", remedy=remedy)


def _passwords(storage: str) -> Iterator[Finding]:
    """Of ledgers that hold a password."""
    from study.ledger import read_ledger
    from study.manage import folders

    for folder in folders(storage):
        for uri in stored(read_ledger(folder)):
            yield Finding(name=folder.name, good=False, text=f"its ledger holds the password of {uri}", remedy=REMEDY)


def _tracking(uri: str) -> Finding:
    from study.config import check_tracking_uri
    from study.tracking import check_tracking

    try:
        check_tracking_uri(uri)
        check_tracking(uri)
    except ValueError as error:
        return Finding(name="MLflow", good=False, text=uri, remedy=str(error))
    return Finding(name="MLflow", good=True, text=f"{uri} answers")


def _ray(address: str | None) -> Finding:
    import ray

    from study.ray_session import ray_session

    try:
        check_address(address)
        with ray_session(StudyConfig(name="doctor", address=address)) as session:
            found = session.resources()
            nodes = sum(node["Alive"] for node in ray.nodes()) if address is not None else 1
    except (UserError, ValueError) as error:
        return Finding(name="Ray", good=False, text=str(address), remedy=str(error))
    text = f"{nodes} node(s), {found.get('CPU', 0):g} CPUs, {found.get('GPU', 0):g} GPUs"
    return Finding(name="Ray", good=True, text=f"{address or 'a local one'} starts: {text}")
