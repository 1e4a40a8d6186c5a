"""The statement of a study (its design and claims before the first trial) and later changes to it.

The last plan in the ledger before the first trial is the statement. Later plans are compared with
it, key by key and claim by claim. The code of check functions is compared too, because the current
code gives the verdict.

Limits: deleting a study's folder deletes its statement, although MLflow's parent run keeps the
digest. For a check function only its own file is compared, not the modules that it imports.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from study.config import StudyConfig
from study.config.claims import digest, statement
from study.config.compose import as_overrides
from study.config.keys import leaves, lookup, without, without_folders
from study.config.yaml_loader import parse
from study.ledger.events import Planned
from study.ledger.state import StudyState
from study.plan.identity import code_digests
from study.text import when
from trainers.config.data import DATA
from trainers.user_code import find_source

MOST_CODE = 64 * 2**20
"""Maximum size of the file of a check function, in bytes."""
DESIGN = ("question", "rows", "seeds", "space", "search", "metric", "mode")
"""Keys of a statement that depend only on the study's file, not on the machine or its data."""
SETTINGS = (
    "name", "trial", "seeds", "search", "metric", "mode", "limits", "baseline", "cpus",
    "max_concurrent", "executor", "gang", "checkpoint_every", "max_failures",
    "heartbeat",
)  # fmt: skip
"""Keys that a command can override and that change a study's trials or their duration."""
OF_THE_FILE = ("question", "rows", "space", "digits", "comparable")
"""Keys that a command cannot override as a whole. If they differ, the study is of another file."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The statement of a study and its later changes.

    Attributes:
        digest: SHA-256 of the statement, 64 hexadecimal digits.
        time: Unix time of the plan that contains the statement, in seconds.
        changed: keys other than ``claims`` that have changed since.
        claims: description of each later change of a claim, by the claim's name.
    """

    digest: str
    time: float
    changed: list[str]
    claims: dict[str, str]

    @property
    def sentence(self) -> str:
        """A sentence with time and digest of the statement, and later changes."""
        said = f"Stated before the first trial, {when(self.time)}: sha256 {self.digest}."
        if self.changed:
            said += f" CHANGED since: {', '.join(self.changed)}."
        if self.claims:
            listed = "; ".join(f"{name} ({what})" for name, what in self.claims.items())
            said += f" CLAIMS CHANGED after the first trial: {listed}."
        return said


def state_claims(study: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of ``stated`` in a ``planned`` event.

    It has the digest of the statement, the SHA-256 of the code of each check function by the
    claim's name, and a flag that each claim states its own statistic.

    Args:
        study: ``StudyConfig.to_dict()``.
    """
    code = {claim["name"]: _hash(claim["check"]) for claim in study["claims"] if claim["check"]}
    return {"digest": digest(statement(study, code)), "code": code, "statistics": True}


def statement_of(
    plan: Planned, code: Mapping[str, str] = MappingProxyType({}), like: Planned | None = None
) -> dict[str, Any]:
    """Return the statement in a ``planned`` event, in the form of the version that wrote it.

    Args:
        plan: the event.
        code: SHA-256 of check functions by claim, in place of those that the event has.
        like: event whose form to use, so that the two can be compared; None for ``plan``'s own.
    """
    noted = plan.get("stated", {})
    own = bool((like or plan).get("stated", {}).get("statistics"))
    return statement(plan["study"], {**noted.get("code", {}), **code}, own)


def stated(state: StudyState) -> Stated | None:
    """Return the statement of a study; None for a ledger of a version without statements."""
    first, now = state.stated, state.plan
    if "stated" not in first:
        return None
    then, today = statement_of(first), statement_of(now, _code_now(now), first)
    code = _code_of_trials(first)
    if code and code == _code_of_trials(now):  # same code, so ignore where its files are
        then, today = without_folders(then), without_folders(today)
    keys = (then.keys() | today.keys()) - {"claims"}
    return Stated(
        digest=first["stated"]["digest"],
        time=float(first["time"]),
        changed=sorted(key for key in keys if then.get(key) != today.get(key)),
        claims=_changed_claims(then.get("claims", []), today.get("claims", [])),
    )


def _code_of_trials(plan: Planned) -> set[str]:
    """Return the digests of the user's code in all trials of a ``planned`` event."""
    digests = code_digests(trial["config"] for trial in plan.get("trials", []))
    return set().union(*digests.values())


def _code_now(plan: Planned) -> dict[str, str]:
    """Return the current SHA-256 of each check function's file, by claim.

    Missing files are left out; such a claim is undecided, with a note.
    """
    claims = plan["study"]["claims"]
    found = {claim["name"]: _hash(claim["check"]) for claim in claims if claim["check"]}
    return {name: digest for name, digest in found.items() if digest}


def differences_of(plan: Planned, file: Mapping[str, Any]) -> list[str]:
    """Return the keys and claims in which a study's file differs from a plan.

    Args:
        plan: ``planned`` event.
        file: ``StudyConfig.to_dict()`` of the current file.
    """
    code = plan.get("stated", {}).get("code", {})
    then, now = (without_folders(statement(study, code)) for study in (plan["study"], file))
    keys = [key for key in DESIGN if then.get(key) != now.get(key)]
    return keys + list(_changed_claims(then.get("claims", []), now.get("claims", [])))


def overrides_of(ran: StudyConfig, file: StudyConfig) -> list[str] | None:
    """Return the ``key=value`` overrides that make a study's file equal to a study that ran.

    Returns None if the file is of another study, or if overrides cannot express the difference.
    Folders and digests of data and code are left out, and so is the data's default validation
    split. Paths of code files are relative to the working directory.
    """
    then, now = (
        {key: study.to_dict()[key] for key in (*SETTINGS, *OF_THE_FILE)} for study in (ran, file)
    )
    if any(without_folders(then[key]) != without_folders(now[key]) for key in OF_THE_FILE):
        return None
    if max(len(study.search.objectives) for study in (ran, file)) < 2:  # derived from the metric
        then, now = (without(values, "search.objectives") for values in (then, now))
    name = ran.trial.data.name
    of_data = DATA[name].validation if name in DATA else None
    found = {}
    for key in sorted(leaves(then) | leaves(now)):
        value, other = lookup(then, key), lookup(now, key)
        if key == "trial.data.validation_size" and other is None and value == of_data:
            continue
        told = key.partition(".")[0] in SETTINGS and not isinstance(value, Mapping)
        found_here = key == "trial.data.root" or key.endswith(".code")
        if told and not found_here and without_folders(value) != without_folders(other):
            found[key] = _from_here(value)
    return [
        f"{key}={value}" if _is_plain(value) else as_overrides({key: value})[0]
        for key, value in found.items()
    ]


def _from_here(value: Any) -> Any:
    """Return a value; the path of a code file becomes relative to the working directory."""
    if without_folders(value) == value or not isinstance(value, str):
        return value
    return os.path.relpath(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a string that YAML reads unchanged without quotation marks."""
    word = isinstance(value, str) and re.fullmatch(r"[\w./+:-]+", value)
    return bool(word) and parse(value) == value


def _changed_claims(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, str]:
    before = {claim["name"]: claim for claim in then}
    after = {claim["name"]: claim for claim in now}
    found = {name: "dropped" for name in before if name not in after}
    for name, claim in after.items():
        if name not in before:
            found[name] = "added"
        elif claim != before[name]:
            keys = sorted(
                key
                for key in claim.keys() | before[name].keys()
                if claim.get(key) != before[name].get(key)
            )
            was = ", ".join(f"{key} was {_short(before[name].get(key))}" for key in keys)
            found[name] = f"changed: {was}"
    return found


def _short(value: Any) -> str:
    """Return a claim's value as text, with a SHA-256 cut to twelve digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))


def _hash(name: str) -> str:
    """Return the SHA-256 of the file that contains a check function; "" if it is missing.

    Also "" for files above :data:`MOST_CODE`, because an untrusted ledger may name any file.
    """
    with suppress(OSError, ValueError):
        path = find_source("check", name)
        if path.stat().st_size <= MOST_CODE:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
