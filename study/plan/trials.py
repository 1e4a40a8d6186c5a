"""The trials of a plan: the base that a row's trials share, and each trial with its id."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from study.config import RowConfig, StudyConfig
from study.config.compose import overridden, override_trial
from study.config.keys import apply
from study.config.space import Params, describe
from study.ledger.events import NamedTrial, TrialValues
from study.plan.identity import NAMED, pace_key, trial_id
from trainers.config import DataConfig, TrainableConfig, TrialConfig
from trainers.config.validation import fits
from trainers.data import resolve
from trainers.training.device import resolve_device
from trainers.user_code import digest_source, names_code
from trainers.workers.resources import choose_share, parameters


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """One trial to run.

    Attributes:
        id: hash of ``config``.
        row: label of its row.
        seed: its seed.
        config: its complete config.
        number: number of the configuration in its row, from 1; None if nothing is searched.
        params: sampled values by dotted key.
        asked: notes of an adaptive algorithm that proposed the values; it needs them again when the
            study is continued.
    """

    id: str
    row: str
    seed: int
    config: TrialConfig
    number: int | None = None
    params: Params = dataclasses.field(default_factory=dict)
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> TrialValues:
        """Return a plain nested dict of JSON values."""
        named: NamedTrial = {"id": self.id, "row": self.row, "seed": self.seed}
        return {**named, "config": self.config.to_dict(), **self.origin}

    def with_seed(self, seed: int) -> PlannedTrial:
        """Return the same trial with another seed."""
        config = dataclasses.replace(self.config, seed=seed)
        return dataclasses.replace(self, id=trial_id(config), seed=seed, config=config)

    @cached_property
    def pace(self) -> str:
        """Its :func:`~study.plan.identity.pace_key`, for which a full agenda asks often."""
        return pace_key(self.config.to_dict())

    @property
    def origin(self) -> NamedTrial:
        """Values of :meth:`to_dict` but the config."""
        values: NamedTrial = {"id": self.id, "row": self.row, "seed": self.seed}
        if self.number is not None:
            values |= {"number": self.number, "params": self.params}
        return values | {"asked": self.asked} if self.asked else values


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A configuration that makes no valid trial, with the rule that it breaks."""

    row: str
    params: Params
    reason: str

    @property
    def rule(self) -> str:
        """The reason without the values before it, which differ from point to point."""
        return self.reason.partition(": ")[2] or self.reason

    def __str__(self) -> str:
        return f"{self.row}: {describe(self.params)}: {self.reason}"


def _placed(data: DataConfig, study: StudyConfig, row: RowConfig) -> DataConfig:
    """Return a row's data without the file or folder of the base trial's, where the row reads
    others: sets of different names may have files of the same name."""
    base = study.trial.data
    others = data.name != base.name or data.args.get("collection") != base.args.get("collection")
    named = "data.root" in overridden(row.overrides)
    if not (others or named):
        return data
    return dataclasses.replace(data, root=data.root if named else None, code="")


class Base:
    """The common part of a row's trials: the base trial with the row's overrides.

    The first trial that names code of the user's fixes the digest of the code for all. If the code
    changes later, the trials are refused before they train.

    Raises:
        ValueError: the overrides fit no trial, or the row's data cannot be found.
    """

    def __init__(self, study: StudyConfig, row: RowConfig, download: bool = True) -> None:
        self.study, self.row = study, row
        try:
            self._values = override_trial(study.trial.to_dict(), row.overrides)
            refuse_seed("seed", self._values["seed"])
            data = _placed(DataConfig(**self._values["data"]), study, row)
        except ValueError as error:
            raise ValueError(f"row {row.label!r}: {error}") from None
        self._digests: dict[str, str] = {}
        unresolved = data != study.trial.data or study.trial.own_loop
        if unresolved and not self._values["trainable"]["name"]:
            self._values["data"] = dataclasses.asdict(resolve(data, download=download))

    @property
    def data(self) -> DataConfig:
        """Config of the row's data."""
        return DataConfig(**self._values["data"])

    @property
    def trainable(self) -> TrainableConfig:
        """Config of the row's own loop; without a name if it has none."""
        return TrainableConfig(**self._values["trainable"])

    def values(self, params: Params) -> dict[str, Any]:
        """Return a trial's nested dict with ``params`` set, which may make no valid trial."""
        return apply(self._values, params)

    def trial(
        self, seed: int, number: int | None = None, params: Params | None = None
    ) -> PlannedTrial:
        """Return the trial with the sampled ``params`` and the seed.

        Raises:
            ValueError: the result is not a valid trial.
        """
        try:
            values = self.values(params or {}) | {"seed": seed}
            config = with_code(TrialConfig.from_dict(values), self._digests)
            _check_loop(self.study, config)
            if params and not config.own_loop:
                _check_optimizer(config)
        except ValueError as error:
            raise ValueError(f"row {self.row.label!r}: {error}") from None
        if self.study.address is None:
            _check_memory(self.row, config)
        if config.device == "auto":
            config = dataclasses.replace(config, device=_auto_device(config))
        if config.device == "cuda" and config.workers == 1 and config.gpus is None:
            config = dataclasses.replace(config, gpus=choose_share(config))
        return PlannedTrial(
            id=trial_id(config),
            row=self.row.label,
            seed=seed,
            config=config,
            number=number,
            params=params or {},
        )

    def exclude(self, params: Params, error: ValueError) -> Excluded:
        """Return the note that ``params`` make no valid trial, with the reason."""
        return Excluded(
            row=self.row.label,
            params=params,
            reason=str(error).removeprefix(f"row {self.row.label!r}: "),
        )


def with_code(config: TrialConfig, digests: dict[str, str] | None = None) -> TrialConfig:
    """Return a trial with the digests of the user's code that it names; other code makes another
    trial.

    Args:
        config: the trial.
        digests: digests by name; missing ones are added.

    Raises:
        ValueError: the code does not exist.
    """
    known: dict[str, str] = {} if digests is None else digests
    coded = {part: _with_digest(part, getattr(config, part), known) for part in NAMED}
    metrics = {
        name: _with_digest(f"metrics.{name}", metric, known)
        for name, metric in config.metrics.items()
    }
    return dataclasses.replace(config, **coded, metrics=metrics)


def _with_digest(part: str, named: Any, digests: dict[str, str]) -> Any:
    """Return the config of a part with the digest of the code that it names, if it does."""
    if not names_code(named.name):
        return named
    if named.name not in digests:
        digests[named.name] = digest_source(f"{part}.name", named.name)
    return dataclasses.replace(named, code=digests[named.name])


def _check_optimizer(config: TrialConfig) -> None:
    """Refuse sampled options of the optimizer that a trial's format has no code for.

    Raises:
        ValueError: with the value and the format.
    """
    from trainers.training.check import check_optimizer
    from trainers.workers.process_reset import kept_settings

    with kept_settings():
        check_optimizer(config)


def _check_loop(study: StudyConfig, config: TrialConfig) -> None:
    """Refuse what a study cannot do with a loop of the user's own.

    Raises:
        ValueError: Ray Train runs the trials, or rounds decide on their length.
    """
    if not config.own_loop:
        return
    name = config.trainable.name
    if study.gang == "train":
        raise ValueError(
            f"gang=train with trainable.name={name}: Ray Train calls our loop, and its workers"
            " would not know of this one's reports; use gang=auto"
        )
    if study.search.in_rounds:
        raise ValueError(
            f"search.scheduler={study.search.scheduler} with trainable.name={name}: it changes the"
            " optimizer or the data of our loop; use search.scheduler=asha, hyperband or median"
        )


def _check_memory(row: RowConfig, config: TrialConfig) -> None:
    """Refuse a model whose weights and gradients do not fit this machine.

    If trials compute on a GPU, the gradients are in the GPU's own memory and do not count.
    """
    codes = config.precision.lns_format is not None and config.precision.scope == "everywhere"
    count = parameters(config)
    fits(
        f"row {row.label!r}: model.hidden={config.model.hidden}, {count:.3g} parameters",
        count * (4 if codes or config.device != "cpu" else 8),
        "use a smaller model.hidden or model.channels, or address=... for a cluster with larger"
        " machines",
    )


def _auto_device(config: TrialConfig) -> str:
    """Return ``cuda`` if this machine has a GPU that the trial can use, else ``cpu``."""
    return resolve_device("auto") if config.workers == 1 else "cpu"


def refuse_seed(key: str, value: int) -> None:
    if value != TrialConfig.seed:
        raise ValueError(
            f"{key}={value}: every row runs with every one of the study's seeds; use"
            f" seeds=[{value}]"
        )


def refuse_twins(trials: Iterable[PlannedTrial], entered: dict[str, PlannedTrial]) -> None:
    """Refuse trials with equal ids.

    Equal ids are equal work: it would be trained twice into one folder and counted as two trials.

    Args:
        trials: trials to enter.
        entered: trials entered before, by id; ``trials`` are added to it.

    Raises:
        ValueError: a trial has been entered before.
    """
    for trial in trials:
        twin = entered.setdefault(trial.id, trial)
        if twin is not trial:
            raise ValueError(
                f"rows {twin.row!r} and {trial.row!r} with seed {trial.seed}: both are the same"
                " trial; change the overrides of one or drop it"
            )
