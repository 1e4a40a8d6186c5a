"""From a study's config to its trials, each with an identity that survives restarts.

A trial's id is a sha256 over what its resolved config has other than the defaults, so a key that a later version adds changes no id
(and a default, once published, must not change). Equal ids mean equal work, so a study that is run again skips finished trials, and one
extended by seeds or rows keeps what it has. Left out of the hash is what changes no result: the folder of the data files (the data's own
digest is checked at resume instead) and the share of a GPU that a trial takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from study.compose import override_trial
from study.config import RowConfig, StudyConfig
from trainers.config import DataConfig, TrialConfig

ID_LENGTH = 12
"""Hex digits kept of the hash: 48 bits, ample for the trials of one study."""


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """One trial to run: ``row`` is the label, ``id`` the hash of ``config``."""

    id: str
    row: str
    seed: int
    config: TrialConfig

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of JSON values."""
        return {"id": self.id, "row": self.row, "seed": self.seed, "config": self.config.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's config and its trials, seeds varying slowest, so that every row has a figure early."""

    study: StudyConfig
    trials: tuple[PlannedTrial, ...]

    @property
    def key(self) -> str:
        """Hash over the study's name and its trials: the same study planned twice has the same key."""
        return digest({"name": self.study.name, "trials": [[trial.row, trial.seed, trial.id] for trial in self.trials]})

    def to_event(self) -> dict[str, Any]:
        """The part of the ledger's ``planned`` event that the plan knows."""
        return {"key": self.key, "study": self.study.to_dict(), "trials": [trial.to_dict() for trial in self.trials]}


def make_plan(study: StudyConfig, *, download: bool = True) -> Plan:
    """Every row with every seed, data resolved to a concrete name and folder, ``device=auto`` to what this machine has.

    Args:
        study: the config.
        download: whether MNIST may be downloaded; if not, trials for which it would be have ``data.root`` None.

    Raises:
        ValueError: a row's overrides give no valid trial, two rows are the same trial, or the data cannot be found.
    """
    _refuse_seed("trial.seed", study.trial.seed)
    study = _resolve_data(study, download)
    rows = study.rows or [RowConfig(label=study.name)]
    trials = tuple(_trial(study, row, seed, download) for seed in study.seeds for row in rows)
    _refuse_twins(trials)
    return Plan(study=study, trials=trials)


def trial_id(config: TrialConfig) -> str:
    """The id of a trial: the hash of what its config has other than the defaults, the data's folder and the share of a GPU left out."""
    values = config.to_dict()
    del values["data"]["root"], values["gpus"]
    return digest(_departures(values, TrialConfig().to_dict()))


def _departures(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``values`` that differ from ``defaults``, nested dicts likewise."""
    found = {}
    for key, value in values.items():
        if value != defaults[key]:
            found[key] = _departures(value, defaults[key]) if isinstance(value, dict) else value
    return found


def digest(values: Any) -> str:
    """First :data:`ID_LENGTH` hex digits of the sha256 of ``values`` as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _resolve_data(study: StudyConfig, download: bool) -> StudyConfig:
    """The study with ``data.name=auto`` made concrete, once, in the base trial, before rows copy it."""
    return dataclasses.replace(study, trial=dataclasses.replace(study.trial, data=resolve_data(study.trial.data, download)))


def resolve_data(config: DataConfig, download: bool = True) -> DataConfig:
    """Concrete name, folder and sizes; the import waits because it loads torch."""
    from trainers.data import resolve

    return resolve(config, download=download)


def _trial(study: StudyConfig, row: RowConfig, seed: int, download: bool) -> PlannedTrial:
    try:
        values = override_trial(study.trial.to_dict(), row.overrides)
        _refuse_seed("seed", values["seed"])
        config = TrialConfig.from_dict(values | {"seed": seed})
    except ValueError as error:
        raise ValueError(f"row {row.label!r}: {error}") from None
    if config.data != study.trial.data:
        config = dataclasses.replace(config, data=resolve_data(config.data, download))
    if config.device == "auto":
        config = dataclasses.replace(config, device=_auto_device(config))
    return PlannedTrial(id=trial_id(config), row=row.label, seed=seed, config=config)


def _auto_device(config: TrialConfig) -> str:
    """This machine's GPU if there is one, for trials that can use it; the import waits because it loads torch."""
    from trainers.device import resolve_device

    return resolve_device("auto") if config.workers == 1 else "cpu"


def _refuse_seed(key: str, value: int) -> None:
    if value != TrialConfig.seed:
        raise ValueError(f"{key}={value}: every row runs with every one of the study's seeds; use seeds=[{value}]")


def _refuse_twins(trials: tuple[PlannedTrial, ...]) -> None:
    seen: dict[str, PlannedTrial] = {}
    for trial in trials:
        twin = seen.setdefault(trial.id, trial)
        if twin is not trial:
            raise ValueError(
                f"rows {twin.row!r} and {trial.row!r} with seed {trial.seed}: both are the same trial; change the overrides of "
                "one or drop it"
            )
