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
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from study.config import RowConfig, StudyConfig
from study.config.compose import overridden
from study.config.space import Params, Space, canonical
from study.ledger.events import Planned
from study.plan.candidates import (
    bind_space,
    candidates,
    common_keys,
    draw,
    first_point,
    generation_ends,
    halved,
    is_history,
    rows_of,
)
from study.plan.identity import digest
from study.plan.trials import Base, Excluded, PlannedTrial, refuse_seed, refuse_twins
from trainers.config.validation import fits
from trainers.data import DownloadError, resolve

TRIAL_BYTES = 2048
"""Least memory that a planned trial takes, in bytes."""
PAIRS = 3
"""Seeds from which on a race tests a difference."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's config and its trials.

    Seeds vary slowest, so that every row has a figure early.

    Attributes:
        study: the config.
        trials: the trials, in the order in which they begin.
        excluded: configurations that are left out; in an adaptive search, the points of the grids
            at which a row has no valid configuration.
        first: of an adaptive search, the first valid trial of each row and point of the grids,
            which are checked in place of the trials that it will propose.

    Raises:
        ValueError: two of the trials are the same.
    """

    study: StudyConfig
    trials: tuple[PlannedTrial, ...]
    excluded: tuple[Excluded, ...] = ()
    first: tuple[PlannedTrial, ...] = ()

    def __post_init__(self) -> None:
        refuse_twins(self.trials, {})

    @property
    def rows(self) -> list[RowConfig]:
        """Rows of the study; one named like the study if it has none."""
        return rows_of(self.study)

    @property
    def size(self) -> int:
        """Total number of trials, including the future proposals of an adaptive search and its
        proposals in a space that has been changed since.
        """
        study = self.study
        if not study.search.adaptive:
            return len(self.trials)
        history = sum(is_history(trial.params, study.parsed_space) for trial in self.trials)
        return history + sum(map(self.size_of, self.rows))

    def size_of(self, row: RowConfig) -> int:
        """Return the number of a row's trials, without those in a space that has changed since."""
        if not self.study.search.adaptive:
            return sum(trial.row == row.label for trial in self.trials)
        each = len(self.study.seeds) * _configurations_proposed(self.study)
        return self.points(row) * each

    @property
    def downloads(self) -> bool:
        """Whether a run would download MNIST first: a trial takes it, and it is not here."""
        return any(
            trial.config.data.name == "mnist"
            and trial.config.data.root is None
            and not trial.config.own_loop
            for trial in self.trials or self.first
        )

    def points(self, row: RowConfig) -> int:
        """Return at how many points of the grids an adaptive search searches a row."""
        left_out = sum(entry.row == row.label for entry in self.excluded)
        return len(self.study.parsed_space.grid_points()) - left_out

    @property
    def key(self) -> str:
        """Hash over the study's name and trials: a study planned twice has the same key."""
        return digest(
            {
                "name": self.study.name,
                "trials": [[trial.row, trial.seed, trial.id] for trial in self.trials],
            }
        )

    def to_event(self, ledger: str = "") -> Planned:
        """Return the part of the ``planned`` event of a ledger with this id that the plan knows."""
        return {
            "event": "planned",
            "ledger": ledger,
            "key": self.key,
            "study": self.study.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
            "size": self.size,
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
    refuse_seed("trial.seed", study.trial.seed)
    study = _resolve_data(study, download)
    space = bind_space(study)
    _check_count(study, space)
    if space:
        return _plan_search(study, space, download)
    bases = [Base(study, row, download) for row in rows_of(study)]
    return Plan(
        study=study, trials=tuple(base.trial(seed) for seed in study.seeds for base in bases)
    )


def likely_trials(plan: Plan) -> tuple[PlannedTrial, ...]:
    """Return trials that take what the plan's will: its own; for an adaptive search that has none
    yet, random ones, and where too few of these are valid, the first of each row."""
    study = plan.study
    if plan.trials or not study.search.adaptive:
        return plan.trials
    try:
        search = dataclasses.replace(study.search, algorithm="random", scheduler="none")
        drawn = make_plan(dataclasses.replace(study, search=search), download=False)
    except ValueError:
        return plan.first
    return drawn.trials


def confirmation_rounds(plan: Plan) -> list[list[PlannedTrial]]:
    """Return trials for the confirmation of the best (:mod:`study.search.racing`), by round.

    The best configurations are not known yet, so the first ones of each row represent them. A race
    may drop some early; all are included here.
    """
    study, first = plan.study, [t for t in likely_trials(plan) if t.seed == plan.study.seeds[0]]
    races: list[list[list[PlannedTrial]]] = []
    for row in plan.rows if study.search.confirm else ():
        mine = [trial for trial in first if trial.row == row.label]
        count = _finalists(plan, row) if study.search.adaptive else len(mine)
        best = list(itertools.islice(itertools.cycle(mine), min(study.search.confirm, count)))
        rounds = rounds_of_race(len(best), len(study.seeds), study.search.confirm_seeds)
        races.append(
            [[each.with_seed(seed) for seed in seeds for each in best] for seeds in rounds]
        )
    return [list(itertools.chain(*each)) for each in itertools.zip_longest(*races, fillvalue=[])]


def rounds_of_race(candidates: int, seeds: int, more: Sequence[int]) -> list[list[int]]:
    """Return the seeds of each round of a race (:mod:`study.search.racing`).

    A round ends where a test can save seeds: with two candidates or more, :data:`PAIRS` seeds or
    more, and seeds that are left.

    Args:
        candidates: configurations that begin the race.
        seeds: seeds that each has before it.
        more: further seeds, in order.
    """
    rounds: list[list[int]] = [[]]
    for count, seed in enumerate(more, 1):
        rounds[-1].append(seed)
        if candidates > 1 and seeds + count >= PAIRS and count < len(more):
            rounds.append([])
    return rounds


def _finalists(plan: Plan, row: RowConfig) -> int:
    """Return how many configurations of an adaptive search train in a row to the end."""
    search = plan.study.search
    if search.scheduler == "halving":
        return plan.points(row) * halved(search.num_samples, search.reduction_factor)[-1]
    return plan.points(row) * search.num_samples


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
    for base in bases:
        _refuse_one_rate(study, base, space)
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
    first: list[PlannedTrial] = []
    if study.search.adaptive:
        refuse_twins(trials, {})
        trials, first = [], trials
    order = {seed: place for place, seed in enumerate(study.seeds)}
    # seeds slowest, then configurations, then rows: every row has its first trials early; of
    # searches of their own seeds come last, as a row has figures once every one has
    each = study.search.num_samples * len(space.grid_points()) if study.search.per_seed else 0
    trials.sort(
        key=lambda trial: (
            (((trial.number or 1) - 1) % each, order[trial.seed])
            if each
            else (order[trial.seed], trial.number or 0)
        )
    )
    return Plan(study=study, trials=tuple(trials), excluded=tuple(excluded), first=tuple(first))


def _refuse_searched(row: RowConfig, space: Space, population: bool) -> None:
    """Refuse overrides of a row that set a key of the search.

    The row's trials would be another row's trials under its label.
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


def _refuse_one_rate(study: StudyConfig, base: Base, space: Space) -> None:
    """Refuse a population that changes the rate of an optimizer which takes it once."""
    rates = any(domain.key == "optimizer.lr" for domain in space.domains)
    if study.search.population and rates and base.values({})["optimizer"]["name"] == "rprop":
        raise ValueError(
            f"row {base.row.label!r}: optimizer.name=rprop with"
            f" search.scheduler={study.search.scheduler} and space.optimizer.lr: it takes the rate"
            " in its first step alone, and the population changes it later; use another optimizer,"
            " or leave the rate out of the space"
        )


def _first_points(
    study: StudyConfig, base: Base, space: Space
) -> tuple[list[PlannedTrial], list[Excluded]]:
    """Return a row's first valid trial at each point of the grids, and the points without one.

    They are of the first seed, where each is a search of its own; the others must have some, too.
    Where two rows are the same, so are these trials.
    """
    points, searches = space.grid_points(), study.search.by_seed(study.seeds)
    tried = [first_point(searches[0][0], study.seeds[0], base, space, point) for point in points]
    for search, seeds in searches[1:]:
        for point, first in zip(points, tried, strict=True):
            found = first_point(search, seeds[0], base, space, point)
            if isinstance(first, PlannedTrial) and isinstance(found, Excluded):
                _refuse_lone_seed(base.row, seeds[0], [found])
    return (
        [entry for entry in tried if isinstance(entry, PlannedTrial)],
        [entry for entry in tried if isinstance(entry, Excluded)],
    )


def _configurations(
    study: StudyConfig, base: Base, space: Space
) -> tuple[list[PlannedTrial], list[Excluded]]:
    """Return a row's trials over all seeds, and the configurations left out."""
    trials: list[PlannedTrial] = []
    excluded: dict[str, Excluded] = {}
    seen: set[str] = set()

    def make(seeds: list[int], params: Params, number: int) -> list[PlannedTrial]:
        return [base.trial(seed, number, params) for seed in seeds]

    for search, seeds in study.search.by_seed(study.seeds):
        for group, sampled in candidates(search, space):
            wanted = None if group is None else search.num_samples
            found, left_out = draw(
                base, partial(make, seeds), sampled, seen, wanted=wanted, before=len(seen)
            )
            trials += [trial for of_seeds in found for trial in of_seeds]
            excluded |= {canonical(entry.params): entry for entry in left_out}
            if search.per_seed and not found:
                _refuse_lone_seed(base.row, seeds[0], left_out)
    return trials, list(excluded.values())


def _refuse_lone_seed(row: RowConfig, seed: int, left_out: Sequence[Excluded]) -> None:
    """Refuse a search of one seed that has no configuration; its row would never have a figure.

    Raises:
        ValueError: always.
    """
    why = f", such as {left_out[0].reason}" if left_out else ""
    raise ValueError(
        f"row {row.label!r}: the search of seed {seed} has drawn no valid trial{why}; use another"
        " seed or search.seed, a narrower space, or search.per_seed=false"
    )


def _resolve_data(study: StudyConfig, download: bool) -> StudyConfig:
    """Resolve ``data.name=auto`` once, in the base trial, before the rows copy it.

    A loop of the user's own has its own data. Data that are nowhere to be found are left to the
    rows: each may name others, and one that does not is refused.
    """
    if study.trial.own_loop:
        return study
    try:
        data = resolve(study.trial.data, download=download)
    except DownloadError:
        if not study.rows:
            raise
        return study
    return dataclasses.replace(study, trial=dataclasses.replace(study.trial, data=data))
