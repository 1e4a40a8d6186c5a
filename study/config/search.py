"""Options of a search: how the configurations of a study's space are chosen and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from study.config.metric import MODES, Metric
from trainers.config.validation import at_least, one_of

ALGORITHMS = ("random", "sobol", "grid", "tpe", "cmaes", "nsga2")
ADAPTIVE = ("tpe", "cmaes", "nsga2")
"""Algorithms whose proposals depend on the results of earlier trials."""
SCHEDULERS = ("none", "asha", "hyperband", "median", "halving", "pbt", "pb2")
POPULATIONS = ("pbt", "pb2")
OBJECTIVES = {"validation/error": "min"}
"""Default of the objectives, for which a study of another metric takes that one."""


def unique(name: str, values: Sequence[object], remedy: str) -> None:
    """Refuse an empty list, and one with a value twice.

    Raises:
        ValueError: the list is either; the message ends in ``remedy``.
    """
    if not values:
        raise ValueError(f"{name}=[]: must have at least one entry; {remedy}")
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{name}: {', '.join(repeated)} appears more than once; {remedy}")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How the search space is searched, alike for every row.

    Attributes:
        algorithm: ``random``, ``sobol`` (even cover of the space), ``grid`` (every point of lists),
            ``tpe`` (Bergstra et al. 2011), ``cmaes`` (Hansen 2016; ranges only) or ``nsga2`` (Deb
            et al. 2002; several objectives), the last three by Optuna.
        num_samples: number of configurations per row and grid point; ignored by ``grid``.
        seed: seed of the search; the same seed proposes the same configurations.
        objectives: metrics, each with ``min`` or ``max``: metrics that a trial reports
            (``validation/error``, ``validation/loss``, ``train/...``, ``samples_per_second``),
            ``seconds`` (of training) or ``bits`` (of the number format). Only tpe and nsga2 take
            several. The first one selects a row's best configuration. Left at their default, they
            are the study's ``metric`` and ``mode``.
        scheduler: scheduler that ends trials early when they fall behind in the first objective:
            ``none``, ``asha`` (asynchronous successive halving, Li et al. 2020), ``hyperband``
            (asha with several brackets, the later ones with a longer grace period) or ``median``
            (Golovin et al. 2017). ``halving`` first compares all configurations on a part of the
            training data, then the best on more (:mod:`study.search.halving`). ``pbt`` and ``pb2``
            instead train ``num_samples`` configurations as a population
            (:mod:`study.search.population`); they search options of the optimizer, which change
            during training.
        grace_period: epochs that asha, hyperband and median give every trial before they may end
            it.
        reduction_factor: factor eta of asha, hyperband and halving: one trial in eta is promoted.
        perturbation_interval: epochs of a generation of pbt and pb2.
        quantile_fraction: fraction of a pbt or pb2 population that, at the end of a generation,
            takes over the weights of members from the equally large best fraction.
        resample_probability: probability with which pbt samples a value anew instead of changing it
            by a fifth.
        confirm: number of each row's best configurations that run with more seeds once its search
            has ended; 0 for none. They race: after each seed, configurations significantly worse
            than the leader drop out (:mod:`study.search.racing`).
        confirm_seeds: seeds of these confirmation runs, in order; none of the study's own.
    """

    algorithm: str = "random"
    num_samples: int = 16
    seed: int = 0
    objectives: dict[str, str] = field(default_factory=OBJECTIVES.copy)
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
        at_least("search.seed", self.seed, 0, "use for example 0")
        at_least("search.grace_period", self.grace_period, 1, "use for example 1")
        at_least("search.reduction_factor", self.reduction_factor, 2, "use for example 3")
        at_least("search.perturbation_interval", self.perturbation_interval, 1, "use for example 4")
        for name, most in (("quantile_fraction", 0.5), ("resample_probability", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(
                    f"search.{name}={getattr(self, name)}: must lie in 0 .. {most:g}; use for"
                    " example 0.25"
                )
        if self.in_rounds and self.algorithm not in ("random", "sobol"):
            raise ValueError(
                f"search.scheduler={self.scheduler} with search.algorithm={self.algorithm}: the"
                " results of each round decide what comes next; use search.algorithm=random or"
                " sobol, which draw the first one's configurations"
            )
        if self.in_rounds and (len(self.objectives) > 1 or self.num_samples < 2):
            raise ValueError(
                f"search.scheduler={self.scheduler} with {len(self.objectives)} objectives and"
                f" search.num_samples={self.num_samples}: they are ranked by one objective, and"
                " there must be at least two; use for example search.num_samples=8"
            )
        at_least("search.confirm", self.confirm, 0, "0 repeats none")
        if bool(self.confirm) != bool(self.confirm_seeds):
            raise ValueError(
                f"search.confirm={self.confirm} with search.confirm_seeds={self.confirm_seeds}: how"
                " many configurations to repeat, and with which seeds, belong together; use for"
                " example search.confirm=3 search.confirm_seeds=[101,102,103,104]"
            )
        if not self.objectives:
            raise ValueError(
                "search.objectives={}: needs at least one metric; use for example"
                " {validation/error: min}"
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

    @property
    def first(self) -> Metric:
        """First objective, which ranks configurations."""
        name, mode = next(iter(self.objectives.items()))
        return Metric(name=name, mode=mode)

    @property
    def adaptive(self) -> bool:
        """Whether proposals depend on the results of earlier trials."""
        return self.algorithm in ADAPTIVE or self.in_rounds

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
