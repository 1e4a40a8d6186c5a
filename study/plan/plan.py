"""The plan of a study: its trials, each with an identity that survives restarts.

A trial's id is a sha256 over the keys of its resolved config that differ from the defaults, so a
key that a later version adds changes no id (and a default, once published, must not change). Equal
ids mean equal work: a study that is run again skips finished trials, and one extended by seeds or
rows keeps what it has. The hash leaves out what changes no result: the folder of the data files
(the data's own digest is checked at resume instead) and the share of a GPU that a trial takes.

Where a space is searched, a row has numbered *configurations*: the base trial, the row's overrides,
then the sampled values. Configurations that make no valid trial are left out with the reason.
Algorithms that learn from results propose later; see :mod:`study.search.agenda`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from study.config import RowConfig, StudyConfig
from study.config.compose import overridden, override_trial
from study.config.keys import apply
from study.config.space import Params, Space, describe
from study.plan.candidates import (
    bind_space,
    candidates,
    common_keys,
    generation_ends,
    halved,
    is_history,
    rows_of,
)
from study.plan.identity import digest, trial_id
from trainers.config import DataConfig, TrialConfig
from trainers.config.validation import fits
from trainers.workers.resources import choose_share, parameters

TRIAL_BYTES = 2048
"""Least memory that a planned trial takes, in bytes."""


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

    def to_dict(self) -> dict[str, Any]:
        """Return a plain nested dict of JSON values."""
        values: dict[str, Any] = {
            "id": self.id,
            "row": self.row,
            "seed": self.seed,
            "config": self.config.to_dict(),
        }
        if self.number is not None:
            values |= {"number": self.number, "params": self.params}
        return values | {"asked": self.asked} if self.asked else values


@dataclass(frozen=True, kw_only=True)
class Excluded:
    """A configuration that makes no valid trial, with the rule that it breaks."""

    row: str
    params: Params
    reason: str

    def __str__(self) -> str:
        return f"{self.row}: {describe(self.params)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's config and its trials.

    Seeds vary slowest, so that every row has a figure early.

    Attributes:
        study: the config.
        trials: the trials, in the order in which they begin.
        excluded: configurations left out.

    Raises:
        ValueError: two of the trials are the same.
    """

    study: StudyConfig
    trials: tuple[PlannedTrial, ...]
    excluded: tuple[Excluded, ...] = ()

    def __post_init__(self) -> None:
        refuse_twins(self.trials, {})

    @property
    def rows(self) -> list[RowConfig]:
        """Rows of the study; one named like the study if it has none."""
        return rows_of(self.study)

    @property
    def size(self) -> int:
        """Number of trials in all.

        Includes those that an adaptive search has yet to propose, and those it proposed in a space
        that has been changed since.
        """
        study = self.study
        if not study.search.adaptive:
            return len(self.trials)
        history = sum(is_history(trial.params, study.parsed_space) for trial in self.trials)
        return history + len(self.rows) * len(study.parsed_space.grid_points()) * len(
            study.seeds
        ) * _configurations_proposed(study)

    @property
    def key(self) -> str:
        """Hash over the study's name and trials: a study planned twice has the same key."""
        return digest(
            {
                "name": self.study.name,
                "trials": [[trial.row, trial.seed, trial.id] for trial in self.trials],
            }
        )

    def to_event(self) -> dict[str, Any]:
        """Return the part of the ledger's ``planned`` event that the plan knows."""
        return {
            "key": self.key,
            "study": self.study.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
        }


def make_plan(study: StudyConfig, *, download: bool = True) -> Plan:
    """Return the plan of every row with every seed.

    The data are resolved to a concrete name and folder, ``device=auto`` to what this machine has.

    Args:
        study: the config.
        download: whether MNIST may be downloaded; if not, trials for which it would be have
            ``data.root`` None.

    Raises:
        ValueError: a row's overrides give no valid trial or set a key that the space sets too, two
            rows are the same trial, or the data cannot be found.
    """
    _refuse_seed("trial.seed", study.trial.seed)
    study = _resolve_data(study, download)
    space = bind_space(study)
    _check_count(study, space)
    if space:
        return _plan_search(study, space, download)
    bases = [Base(study, row, download) for row in rows_of(study)]
    return Plan(
        study=study, trials=tuple(base.trial(seed) for seed in study.seeds for base in bases)
    )


def _check_count(study: StudyConfig, space: Space) -> None:
    """Refuse more trials than this machine can keep in memory, and in the ledger."""
    each = study.search.num_samples if space.sampled else 1
    count = float(len(rows_of(study)) * len(study.seeds) * each * len(space.grid_points()))
    fits(
        f"{count:.3g} trials",
        count * TRIAL_BYTES,
        "use fewer rows, seeds, grid points or search.num_samples",
    )


def _configurations_proposed(study: StudyConfig) -> int:
    """Return how many configurations an adaptive search proposes per row and grid point."""
    search = study.search
    if search.population:
        return search.num_samples * len(
            generation_ends(study.trial.epochs, search.perturbation_interval)
        )
    if search.scheduler == "halving":
        return sum(halved(search.num_samples, search.reduction_factor))
    return search.num_samples


def _plan_search(study: StudyConfig, space: Space, download: bool) -> Plan:
    """Return the plan of a search: the configurations of every row that depend on no results."""
    trials: list[PlannedTrial] = []
    excluded: list[Excluded] = []
    for row in rows_of(study):
        _refuse_searched(row, space, study.search.population)
    bases = [Base(study, row, download) for row in rows_of(study)]
    if study.search.adaptive:
        refuse_twins([trial for base in bases for trial in _first_points(study, base, space)], {})
    else:
        for base in bases:
            found, left_out = _configurations(study, base, space)
            trials += found
            excluded += left_out
    order = {seed: place for place, seed in enumerate(study.seeds)}
    # seeds slowest, then configurations, then rows: every row has its first trials early
    trials.sort(key=lambda trial: (order[trial.seed], trial.number or 0))
    return Plan(study=study, trials=tuple(trials), excluded=tuple(excluded))


def _refuse_searched(row: RowConfig, space: Space, population: bool) -> None:
    """Refuse overrides of a row that set a key which the search sets.

    The row's trials would be those of another row, under its label.
    """
    searched = {f"space.{domain.key}": domain.sets for domain in space.domains}
    if population:
        searched["the population"] = {"changes"}
    for name, keys in searched.items():
        if clash := common_keys(overridden(row.overrides), keys):
            raise ValueError(
                f"row {row.label!r}: {clash[0]}: its overrides and {name} both set it, so that its"
                " trials would be another row's; take it out of one of them"
            )


def _first_points(study: StudyConfig, base: Base, space: Space) -> Iterator[PlannedTrial]:
    """Yield, for each point of the grids, the first point that makes a valid trial of a row.

    Where two rows are the same, so are these trials.
    """
    for _, sampled in candidates(study, space):
        for params in sampled:
            try:
                yield base.trial(study.seeds[0], None, params)
            except ValueError:
                continue
            break


def _configurations(
    study: StudyConfig, base: Base, space: Space
) -> tuple[list[PlannedTrial], list[Excluded]]:
    """Return a row's trials over all seeds, and the configurations left out.

    A random point that is invalid or known already is replaced by the next one.
    """
    wanted = study.search.num_samples
    trials: list[PlannedTrial] = []
    excluded: list[Excluded] = []
    seen: set[str] = set()
    number = 0
    for group, sampled in candidates(study, space):
        kept = 0
        for params in sampled:
            if kept == wanted and group is not None:
                break
            try:
                of_seeds = [base.trial(seed, number + 1, params) for seed in study.seeds]
            except ValueError as error:
                excluded.append(base.exclude(params, error))
                continue
            if of_seeds[0].id not in seen:
                seen.add(of_seeds[0].id)
                trials += of_seeds
                number += 1
                kept += 1
    if not trials:
        raise ValueError(
            f"row {base.row.label!r}: no point of the space makes a valid trial; change the"
            f" space or the row's overrides; the first point: {excluded[0].reason}"
        )
    return trials, excluded


def _resolve_data(study: StudyConfig, download: bool) -> StudyConfig:
    """Resolve ``data.name=auto`` once, in the base trial, before the rows copy it."""
    return dataclasses.replace(
        study, trial=dataclasses.replace(study.trial, data=resolve_data(study.trial.data, download))
    )


def resolve_data(config: DataConfig, download: bool = True) -> DataConfig:
    """Return the data config with concrete name, folder and sizes.

    The import is inside because it loads torch.
    """
    from trainers.data import resolve

    return resolve(config, download=download)


class Base:
    """The common part of a row's trials: the base trial with the row's overrides.

    Raises:
        ValueError: the overrides fit no trial, or the row's data cannot be found.
    """

    def __init__(self, study: StudyConfig, row: RowConfig, download: bool = True) -> None:
        self.study, self.row = study, row
        try:
            self._values = override_trial(study.trial.to_dict(), row.overrides)
            _refuse_seed("seed", self._values["seed"])
            data = DataConfig(**self._values["data"])
        except ValueError as error:
            raise ValueError(f"row {row.label!r}: {error}") from None
        if data != study.trial.data:
            self._values["data"] = dataclasses.asdict(resolve_data(data, download))

    @property
    def data(self) -> DataConfig:
        """Config of the row's data."""
        return DataConfig(**self._values["data"])

    def trial(
        self, seed: int, number: int | None = None, params: Params | None = None
    ) -> PlannedTrial:
        """Return the trial with the sampled ``params`` and the seed.

        Raises:
            ValueError: the result is no valid trial.
        """
        try:
            config = TrialConfig.from_dict(apply(self._values, params or {}) | {"seed": seed})
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
    """Return ``cuda`` if this machine has a GPU that the trial can use, else ``cpu``.

    The import is inside because it loads torch.
    """
    from trainers.training.device import resolve_device

    return resolve_device("auto") if config.workers == 1 else "cpu"


def _refuse_seed(key: str, value: int) -> None:
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
