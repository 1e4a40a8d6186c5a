"""From a study's config to its trials, each with an identity that survives restarts.

A trial's id is a sha256 over what its resolved config has other than the defaults, so a key that a
later version adds changes no id (and a default, once published, must not change). Equal ids mean
equal work, so a study that is run again skips finished trials, and one extended by seeds or rows
keeps what it has. Left out of the hash is what changes no result: the folder of the data files (the
data's own digest is checked at resume instead) and the share of a GPU that a trial takes.

Where a space is searched, a row has numbered *configurations*: the base trial, the row's overrides,
then the sampled values. Those that make no valid trial are left out with the reason. Algorithms
that learn from results propose later; see :mod:`study.search.agenda`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from study.config import RowConfig, StudyConfig
from study.config.compose import overridden, override_trial
from study.config.keys import apply
from study.config.space import Params, Space, canonical, describe
from study.plan.candidates import (
    bind_space,
    candidates,
    common_keys,
    generation_ends,
    halved,
    is_history,
    rows_of,
    sampled_points,
)
from study.plan.identity import digest, trial_id
from trainers.config import DataConfig, TrialConfig
from trainers.config.validation import fits
from trainers.workers.resources import choose_share, parameters

TRIAL_BYTES = 2048
"""Of memory that a planned trial takes at the least."""


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """One trial to run: ``row`` is the label, ``id`` the hash of ``config``.

    Attributes:
        number: of the configuration in its row, from 1; None where nothing is searched.
        params: the sampled values by dotted key.
        asked: what an adaptive algorithm noted when it proposed them, and needs again where the
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
        """Plain nested dict of JSON values."""
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
    """A configuration that makes no valid trial, and the rule that says so."""

    row: str
    params: Params
    reason: str

    @property
    def rule(self) -> str:
        """The reason without the values before it, which differ from point to point."""
        return self.reason.partition(": ")[2] or self.reason

    def __str__(self) -> str:
        return f"{self.row}: {describe(self.params)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's config and its trials, seeds varying slowest, so that every row has a figure early.

    Attributes:
        excluded: configurations left out; of an adaptive search, the points of the grids at which a
            row has none.

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
        """The study's rows; one named like the study if it has none."""
        return rows_of(self.study)

    @property
    def size(self) -> int:
        """Trials in all, those that an adaptive search has yet to propose, or proposed in another
        space, counted in."""
        study = self.study
        if not study.search.adaptive:
            return len(self.trials)
        history = sum(is_history(trial.params, study.parsed_space) for trial in self.trials)
        points = len(self.rows) * len(study.parsed_space.grid_points()) - len(self.excluded)
        return history + points * len(study.seeds) * _configurations_proposed(study)

    @property
    def key(self) -> str:
        """Hash over the study's name and its trials: the same study planned twice has the same
        key."""
        return digest(
            {
                "name": self.study.name,
                "trials": [[trial.row, trial.seed, trial.id] for trial in self.trials],
            }
        )

    def to_event(self) -> dict[str, Any]:
        """The part of the ledger's ``planned`` event that the plan knows."""
        return {
            "key": self.key,
            "study": self.study.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
        }


def make_plan(study: StudyConfig, *, download: bool = True) -> Plan:
    """Every row with every seed, data resolved to a concrete name and folder, ``device=auto`` to
    what this machine has.

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
    """What is planned is kept in memory, and in the ledger."""
    each = study.search.num_samples if space.sampled else 1
    count = float(len(rows_of(study)) * len(study.seeds) * each * len(space.grid_points()))
    fits(
        f"{count:.3g} trials",
        count * TRIAL_BYTES,
        "use fewer rows, seeds, grid points or search.num_samples",
    )


def _configurations_proposed(study: StudyConfig) -> int:
    """How many an adaptive search proposes for a row at a point of the grids."""
    search = study.search
    if search.population:
        return search.num_samples * len(
            generation_ends(study.trial.epochs, search.perturbation_interval)
        )
    if search.scheduler == "halving":
        return sum(halved(search.num_samples, search.reduction_factor))
    return search.num_samples


def _plan_search(study: StudyConfig, space: Space, download: bool) -> Plan:
    """The configurations of every row, where they do not depend on results."""
    trials: list[PlannedTrial] = []
    excluded: list[Excluded] = []
    for row in rows_of(study):
        _refuse_searched(row, space, study.search.population)
    bases = [Base(study, row, download) for row in rows_of(study)]
    for base in bases:
        found, left_out = (_first_points if study.search.adaptive else _configurations)(
            study, base, space
        )
        if not found:
            raise ValueError(
                f"row {base.row.label!r}: no point of the space makes a valid trial; the first:"
                f" {left_out[0].reason}"
            )
        trials += found
        excluded += left_out
    if study.search.adaptive:
        refuse_twins(trials, {})
        trials = []
    order = {seed: place for place, seed in enumerate(study.seeds)}
    # Seeds slowest, then configurations, then rows: all rows have their first ones early.
    trials.sort(key=lambda trial: (order[trial.seed], trial.number or 0))
    return Plan(study=study, trials=tuple(trials), excluded=tuple(excluded))


def _refuse_searched(row: RowConfig, space: Space, population: bool) -> None:
    """A row's overrides set nothing that the search sets: its trials would be those of another row,
    under its label."""
    searched = {f"space.{domain.key}": domain.sets for domain in space.domains}
    if population:
        searched["the population"] = {"changes"}
    for name, keys in searched.items():
        if clash := common_keys(overridden(row.overrides), keys):
            raise ValueError(
                f"row {row.label!r}: {clash[0]}: its overrides and {name} both set it, so that its"
                " trials would be another row's; take it out of one of them"
            )


def _first_points(
    study: StudyConfig, base: Base, space: Space
) -> tuple[list[PlannedTrial], list[Excluded]]:
    """For each point of the grids the first one that makes a valid trial of a row: where two rows
    are the same, so are these; or the point of the grids, if it makes none."""
    tried = [first_point(study, base, space, point) for point in space.grid_points()]
    return (
        [entry for entry in tried if isinstance(entry, PlannedTrial)],
        [entry for entry in tried if isinstance(entry, Excluded)],
    )


def first_point(
    study: StudyConfig, base: Base, space: Space, point: Params
) -> PlannedTrial | Excluded:
    """Return the first trial that a row can have at a point of the grids; the point and the rule
    that refuses what was tried first, if none of those that a search would try is valid."""

    def make(params: Params, number: int) -> list[PlannedTrial]:
        return [base.trial(study.seeds[0], None, params)]

    found, excluded = draw(base, make, sampled_points(study.search, space, point), set(), wanted=1)
    return found[0][0] if found else dataclasses.replace(excluded[0], params=point)


def _configurations(
    study: StudyConfig, base: Base, space: Space
) -> tuple[list[PlannedTrial], list[Excluded]]:
    """A row's trials over all seeds."""
    trials: list[PlannedTrial] = []
    excluded: list[Excluded] = []
    seen: set[str] = set()

    def make(params: Params, number: int) -> list[PlannedTrial]:
        return [base.trial(seed, number, params) for seed in study.seeds]

    for group, sampled in candidates(study, space):
        wanted = None if group is None else study.search.num_samples
        found, left_out = draw(base, make, sampled, seen, wanted=wanted, before=len(seen))
        trials += [trial for of_seeds in found for trial in of_seeds]
        excluded += left_out
    return trials, excluded


def draw(
    base: Base,
    make: Callable[[Params, int], list[PlannedTrial]],
    points: Iterable[Params],
    seen: set[str],
    *,
    wanted: int | None = None,
    before: int = 0,
) -> tuple[list[list[PlannedTrial]], list[Excluded]]:
    """Make the trials of the first ``wanted`` points that are valid and new, or of all. A point
    that is refused or known already is replaced by the next.

    Args:
        base: of the row.
        make: gives a configuration's trials, of its sampled values and its number.
        points: to try, in order.
        seen: ids of the first trials of configurations that are known; takes those found.
        wanted: configurations; None for as many as there are.
        before: configurations of the row that have numbers already.

    Returns:
        The trials by configuration, and the points that were refused, each once.

    Raises:
        ValueError: some points are valid, but too few, and it is refused ones that used them up.
    """
    found: list[list[PlannedTrial]] = []
    refused: dict[str, Excluded] = {}
    tried = 0
    for params in points:
        if len(found) == wanted:
            break
        tried += 1
        try:
            trials = make(params, before + len(found) + 1)
        except ValueError as error:
            refused.setdefault(canonical(params), base.exclude(params, error))
            continue
        if trials[0].id not in seen:
            seen.add(trials[0].id)
            found.append(trials)
    if wanted is not None and 0 < len(found) < wanted:
        refuse_scarcity(base.row, len(found), wanted, tried, list(refused.values()))
    return found, list(refused.values())


def refuse_scarcity(
    row: RowConfig, found: int, wanted: int, tried: int, refused: Sequence[Excluded]
) -> None:
    """Refuse a search that hardly finds a valid point; one whose few points are all known has
    ended.

    Args:
        row: searched.
        found: configurations.
        wanted: configurations.
        tried: points that it took.
        refused: those of them that are no valid trial, each once.

    Raises:
        ValueError: more of the tries were refused than were repetitions.
    """
    if len(refused) > tried - found - len(refused):
        count, entry = by_rule(refused)[0]
        raise ValueError(
            f"row {row.label!r}: search.num_samples={wanted}, but {tried} points of the space gave"
            f" {found} valid trials; {count} were refused as this one was, {describe(entry.params)}"
            f": {entry.reason}; narrow the space or tie its keys by when, or use fewer samples"
        )


def by_rule(excluded: Iterable[Excluded]) -> list[tuple[int, Excluded]]:
    """Group what is left out by the rule that says so: how many, and the first of them; most
    first."""
    groups: dict[str, list[Excluded]] = {}
    for entry in excluded:
        groups.setdefault(entry.rule, []).append(entry)
    return sorted(((len(group), group[0]) for group in groups.values()), key=lambda of: -of[0])


def _resolve_data(study: StudyConfig, download: bool) -> StudyConfig:
    """The study with ``data.name=auto`` made concrete, once, in the base trial, before rows copy
    it."""
    return dataclasses.replace(
        study, trial=dataclasses.replace(study.trial, data=resolve_data(study.trial.data, download))
    )


def resolve_data(config: DataConfig, download: bool = True) -> DataConfig:
    """Concrete name, folder and sizes; the import waits because it loads torch."""
    from trainers.data import resolve

    return resolve(config, download=download)


class Base:
    """What a row's trials have in common: the base trial with the row's overrides.

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
        """The row's data."""
        return DataConfig(**self._values["data"])

    def values(self, params: Params) -> dict[str, Any]:
        """Return a trial's nested dict with ``params`` set, which may make no valid trial."""
        return apply(self._values, params)

    def trial(
        self, seed: int, number: int | None = None, params: Params | None = None
    ) -> PlannedTrial:
        """One trial: the base, the sampled ``params``, the seed.

        Raises:
            ValueError: that is no valid trial.
        """
        try:
            config = TrialConfig.from_dict(self.values(params or {}) | {"seed": seed})
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
        """The note that ``params`` make no valid trial."""
        return Excluded(
            row=self.row.label,
            params=params,
            reason=str(error).removeprefix(f"row {self.row.label!r}: "),
        )


def _check_memory(row: RowConfig, config: TrialConfig) -> None:
    """Weights and gradients must fit this machine; on a GPU its own memory has the gradients."""
    codes = config.precision.lns_format is not None and config.precision.scope == "everywhere"
    count = parameters(config)
    fits(
        f"row {row.label!r}: model.hidden={config.model.hidden}, {count:.3g} parameters",
        count * (4 if codes or config.device != "cpu" else 8),
        "use a smaller model.hidden or model.channels, or address=... for a cluster with larger"
        " machines",
    )


def _auto_device(config: TrialConfig) -> str:
    """This machine's GPU if there is one, for trials that can use it; the import waits because it
    loads torch."""
    from trainers.training.device import resolve_device

    return resolve_device("auto") if config.workers == 1 else "cpu"


def _refuse_seed(key: str, value: int) -> None:
    if value != TrialConfig.seed:
        raise ValueError(
            f"{key}={value}: every row runs with every one of the study's seeds; use"
            f" seeds=[{value}]"
        )


def refuse_twins(trials: Iterable[PlannedTrial], entered: dict[str, PlannedTrial]) -> None:
    """Every trial once: equal ids are equal work, trained twice into one folder and counted as if
    it were two.

    Args:
        trials: to enter.
        entered: those before them by id; takes them.

    Raises:
        ValueError: one of them is there already.
    """
    for trial in trials:
        twin = entered.setdefault(trial.id, trial)
        if twin is not trial:
            raise ValueError(
                f"rows {twin.row!r} and {trial.row!r} with seed {trial.seed}: both are the same"
                " trial; change the overrides of one or drop it"
            )
