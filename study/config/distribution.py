"""Conversion of a search space's domain into an Optuna distribution."""

from __future__ import annotations

import logging
import warnings
from functools import cache
from typing import Any

from study.config.space import Domain


@cache
def quiet_optuna() -> Any:
    """Import Optuna and turn its log output off; only adaptive searches and importance need it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def distribution(domain: Domain) -> Any:
    """Return the Optuna distribution of a domain; a choice is encoded as its index."""
    optuna = quiet_optuna()
    if domain.categorical:
        return optuna.distributions.CategoricalDistribution(list(range(len(domain.values))))
    low, high, *step = domain.values
    if domain.kind.endswith("randint"):
        return optuna.distributions.IntDistribution(low, high - 1, log=domain.kind == "lograndint")
    if step:
        return optuna.distributions.FloatDistribution(low, high, step=step[0])
    return optuna.distributions.FloatDistribution(low, high, log=domain.kind == "loguniform")
