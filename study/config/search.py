"""Options of a search: how configurations are sampled from a study's space and compared."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from study.config.metric import MODES, Metric
from study.config.space import Space
from trainers.config.validation import at_least, one_of, plain_values, require

ALGORITHMS = ("random", "sobol", "grid", "tpe", "gp", "cmaes", "nsga2", "auto")
ADAPTIVE = ("tpe", "gp", "cmaes", "nsga2", "auto")
"""Algorithms whose proposals depend on the results of earlier trials."""
SCHEDULERS = ("none", "asha", "hyperband", "median", "halving", "pbt", "pb2")
POPULATIONS = ("pbt", "pb2")
OBJECTIVES = {"validation/error": "min"}
"""Default objectives; a study replaces them by its metric and mode."""
MOST_VALUES = 100_000
"""Maximum number of seeds, or rows, of a study."""
MOST_SAMPLES = 1_000_000
"""Maximum number of configurations of a row."""
FEW = 250
"""Maximum number of configurations for which ``auto`` chooses a Gaussian process.

The time to fit one grows with the cube of that number.
"""
BOUND = re.compile(r"\s*(<=|>=)\s*(\S+)\s*")


def unique(name: str, values: Sequence[object], remedy: str) -> None:
    """Check that a list has no duplicates and at most :data:`MOST_VALUES` values.

    Raises:
        ValueError: it does not; the message ends in ``remedy``.
    """
    if len(values) > MOST_VALUES:
        raise ValueError(f"{name}: {len(values):,}; must be at most {MOST_VALUES:,}; {remedy}")
    counts = Counter(map(str, values))
    repeated = sorted(text for text, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(f"{name}: {', '.join(repeated)} appears more than once; {remedy}")


@plain_values
@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How the search space is searched, in the same way for every row.

    Attributes:
        algorithm: ``random``, ``sobol`` (evenly spread points), ``grid`` (all points of a space of
            lists), ``tpe`` (Bergstra et al. 2011), ``gp`` (a Gaussian process with expected
            improvement, Jones et al. 1998), ``cmaes`` (Hansen 2016; ranges only), ``nsga2`` (Deb et
            al. 2002; several objectives) or ``auto``. The last five use Optuna; ``auto`` chooses
            among the other four by the rule of :func:`choose_sampler`.
        num_samples: number of configurations per row and grid point; ignored by ``grid``.
        seed: seed of the search; the same seed proposes the same configurations.
        per_seed: whether every seed of the study has its own search, with its own configurations
            and its own best one. A row's figure is then the mean over these best ones, and its
            interval is about the average result of such searches. Otherwise every configuration is
            trained with every seed.
        objectives: metrics, each with ``min`` or ``max``: metrics that a trial reports
            (``validation/error``, ``validation/loss``, ``train/...``, ``samples_per_second``),
            ``seconds`` (of training), ``bits`` (of the number format) or ``weight_bits`` (of a
            weight, including its copy and compensation). Only tpe, gp, nsga2 and auto accept
            several. The first one selects a row's best configuration. The default is the study's
            ``metric`` and ``mode``.
        constraints: metrics as in ``objectives``, each with a bound on the mean over seeds:
            ``{bits: "<= 12", seconds: "<= 60"}``. tpe, gp and nsga2 learn from them. A
            configuration that violates one cannot be a row's best, in the Pareto front, or
            confirmed.
        scheduler: scheduler that ends trials early when they fall behind in the first objective:
            ``none``, ``asha`` (asynchronous successive halving, Li et al. 2020), ``hyperband``
            (asha with several brackets, the later ones with a longer grace period) or ``median``
            (Golovin et al. 2017). ``halving`` first compares all configurations on a part of the
            training data, then the best on more (:mod:`study.search.halving`). ``pbt`` and ``pb2``
            instead train ``num_samples`` configurations as a population
            (:mod:`study.search.population`); they search optimizer options, which change during
            training.
        grace_period: minimum number of epochs before asha, hyperband or median may end a trial.
        reduction_factor: factor eta of asha, hyperband and halving: one trial in eta is promoted.
        perturbation_interval: number of epochs per generation of pbt and pb2.
        quantile_fraction: fraction of a pbt or pb2 population that is replaced at the end of a
            generation by copies of members of the equally large best fraction.
        resample_probability: probability that pbt resamples a value instead of changing it by a
            fifth.
        confirm: number of each row's best configurations that run with more seeds after its search
            has ended; 0 for none. They race: after each seed, configurations significantly worse
            than the leader drop out (:mod:`study.search.racing`).
        confirm_seeds: seeds of these confirmation runs, in order; must differ from the study's.

    Example::

        >>> search = SearchConfig(algorithm="tpe", num_samples=32, scheduler="asha")
    """

    algorithm: str = "random"
    num_samples: int = 16
    seed: int = 0
    per_seed: bool | None = None
    objectives: dict[str, str] = field(default_factory=OBJECTIVES.copy)
    constraints: dict[str, str] = field(default_factory=dict)
    scheduler: str = "none"
    grace_period: int = 1
    reduction_factor: int = 3
    perturbation_interval: int = 4
    quantile_fraction: float = 0.25
    resample_probability: float = 0.25
    confirm: int = 0
    confirm_seeds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("search.algorithm", self.algorithm, ALGORITHMS)
        one_of("search.scheduler", self.scheduler, SCHEDULERS)
        at_least("search.num_samples", self.num_samples, 1, "use for example 16")
        require(
            f"search.num_samples={self.num_samples}",
            self.num_samples <= MOST_SAMPLES,
            f"must be at most {MOST_SAMPLES}",
            "use for example 16",
        )
        at_least("search.seed", self.seed, 0, "use for example 0")
        at_least("search.grace_period", self.grace_period, 1, "use for example 1")
        at_least("search.reduction_factor", self.reduction_factor, 2, "use for example 3")
        at_least("search.perturbation_interval", self.perturbation_interval, 1, "use for example 4")
        for name, most in (("quantile_fraction", 0.5), ("resample_probability", 1.0)):
            require(
                f"search.{name}={getattr(self, name)}",
                0 <= getattr(self, name) <= most,
                f"must be in 0 .. {most:g}",
                "use for example 0.25",
            )
        self._check_rounds()
        self._check_per_seed()
        at_least("search.confirm", self.confirm, 0, "0 repeats none")
        if bool(self.confirm) != bool(self.confirm_seeds):
            raise ValueError(
                f"search.confirm={self.confirm} with search.confirm_seeds={self.confirm_seeds}: how"
                " many configurations to repeat, and with which seeds, belong together; use for"
                " example search.confirm=3 search.confirm_seeds=[101,102,103,104]"
            )
        self._check_objectives()
        self._check_constraints()

    def _check_rounds(self) -> None:
        if self.in_rounds and self.algorithm not in ("random", "sobol"):
            raise ValueError(
                f"search.scheduler={self.scheduler} with search.algorithm={self.algorithm}: the"
                " results of each round decide the next one; use search.algorithm=random or"
                " sobol, which draw the first round's configurations"
            )
        if self.in_rounds and (len(self.objectives) > 1 or self.num_samples < 2):
            raise ValueError(
                f"search.scheduler={self.scheduler} with {len(self.objectives)} objectives and"
                f" search.num_samples={self.num_samples}: they are ranked by one objective, and"
                " there must be at least two; use for example search.num_samples=8"
            )

    def _check_per_seed(self) -> None:
        clash = (
            f"search.algorithm={self.algorithm}"
            if self.algorithm == "grid"
            else f"search.scheduler={self.scheduler}"
            if self.ends_early
            else f"search.confirm={self.confirm}"
            if self.confirm
            else ""
        )
        if self.per_seed and clash:
            raise ValueError(
                f"search.per_seed=true with {clash}: it is one search for all seeds; leave one of"
                " the two out"
            )

    def _check_objectives(self) -> None:
        require(
            "search.objectives={}",
            bool(self.objectives),
            "needs at least one metric",
            "use for example {validation/error: min}",
        )
        for metric, mode in self.objectives.items():
            if metric.startswith("test/"):
                raise ValueError(
                    f"search.objectives: {metric}: nothing may be chosen by the test set; use"
                    f" validation{metric.removeprefix('test')}"
                )
            one_of(f"search.objectives.{metric}", mode, MODES)
        if len(self.objectives) > 1 and self.algorithm == "cmaes":
            raise ValueError(
                f"search.algorithm=cmaes with {len(self.objectives)} objectives: it minimises one;"
                " use search.algorithm=nsga2 or tpe"
            )

    def _check_constraints(self) -> None:
        for metric, bound in self.constraints.items():
            if metric.startswith("test/"):
                raise ValueError(
                    f"search.constraints: {metric}: nothing may be chosen by the test set; use"
                    f" validation{metric.removeprefix('test')}"
                )
            excess(f"search.constraints.{metric}", bound, 0.0)
        if self.constraints and self.in_rounds:
            raise ValueError(
                f"search.constraints with search.scheduler={self.scheduler}: its rounds promote by"
                " the objective alone; use search.scheduler=asha, or leave the constraints out"
            )
        if self.constraints and self.algorithm == "cmaes":
            raise ValueError(
                "search.constraints with search.algorithm=cmaes: it learns from the objective"
                " alone; use search.algorithm=tpe, gp or nsga2"
            )

    @property
    def first(self) -> Metric:
        """First objective, which ranks configurations."""
        name, mode = next(iter(self.objectives.items()))
        return Metric(name=name, mode=mode)

    @property
    def adaptive(self) -> bool:
        """Whether proposals depend on the results of earlier trials."""
        return self.algorithm in ADAPTIVE or self.in_rounds

    def by_seed(self, seeds: Sequence[int]) -> list[tuple[SearchConfig, list[int]]]:
        """Return the searches of a row, each with its seeds: one for all seeds, or one per seed."""
        if not self.per_seed:
            return [(self, list(seeds))]
        return [(replace(self, seed=_joined(self.seed, seed)), [seed]) for seed in seeds]

    @property
    def ends_early(self) -> bool:
        """Whether the scheduler ends trials before their last epoch."""
        return self.scheduler != "none" and not self.in_rounds

    @property
    def in_rounds(self) -> bool:
        """Whether the configurations compete in rounds (:mod:`study.search.rounds`)."""
        return self.population or self.scheduler == "halving"

    @property
    def population(self) -> bool:
        """Whether the configurations train as a population."""
        return self.scheduler in POPULATIONS


def _joined(search: int, trial: int) -> int:
    """Return a 32-bit seed for the search that belongs to the trial seed ``trial``."""
    return int(np.random.SeedSequence([search, trial]).generate_state(1)[0])


def excess(name: str, bound: str, value: float) -> float:
    """Return by how much ``value`` exceeds a bound: ``value - b`` for ``<= b``, ``b - value`` for
    ``>= b``. The bound is satisfied if the result is not positive.

    Raises:
        ValueError: ``bound`` is not a valid bound; the message begins with ``name``.
    """
    found = BOUND.fullmatch(bound) if isinstance(bound, str) else None
    sign, number = found.groups() if found else ("", "nan")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    rule, remedy = "must be <= or >= and a finite number", "use for example '<= 12'"
    require(f"{name}={bound!r}", math.isfinite(limit), rule, remedy)
    return value - limit if sign == "<=" else limit - value


def broken(constraints: Mapping[str, str], values: Mapping[str, float]) -> list[str]:
    """Return the constraints that ``values`` violate, as ``bits 16 <= 12``.

    NaN violates every bound.
    """
    return [
        f"{metric} {values[metric]:.4g} {bound.strip()}"
        for metric, bound in constraints.items()
        if not excess(metric, bound, values[metric]) <= 0
    ]


def choose_sampler(search: SearchConfig, space: Space) -> tuple[str, str]:
    """Return the algorithm that ``auto`` chooses, and the reason as text.

    - A key is a choice or has a ``when``: ``tpe``, which models each group of keys that occur
      together.
    - Otherwise, up to :data:`FEW` configurations: ``gp``, which needs the fewest results.
    - More configurations: ``nsga2`` for several objectives; ``cmaes`` for one objective without
      constraints and at least two keys; else ``tpe``.

    The rule depends only on the config, so a continued study keeps its sampler. An algorithm other
    than ``auto`` is returned unchanged.
    """
    if search.algorithm != "auto":
        return search.algorithm, "as the config says"
    for domain in space.sampled:
        if domain.categorical or domain.when:
            kind = "has a when" if domain.when else "is a choice"
            return "tpe", f"space.{domain.key} {kind}"
    if search.num_samples <= FEW:
        return "gp", f"all keys are ranges, search.num_samples={search.num_samples} <= {FEW}"
    many = f"all keys are ranges, search.num_samples={search.num_samples} > {FEW}"
    if len(search.objectives) > 1:
        return "nsga2", f"{many}, {len(search.objectives)} objectives"
    if search.constraints or len(space.sampled) < 2:
        return "tpe", f"{many}, " + ("with constraints" if search.constraints else "one key")
    return "cmaes", f"{many}, one objective"
