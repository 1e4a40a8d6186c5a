"""Exploration in a population: hyperparameters move at random (``pbt``) or by a bandit (``pb2``).

For ``pb2`` a Gaussian process over (time, values) models the gain of the last generations: how far
the objective fell. Covariance between two observations, at generations t, t' and with values x, x'
in the unit cube::

    k = variance exp(-|x - x'|^2 / (2 length^2)) (1 - forgetting)^(|t - t'| / 2) + noise [same]

with variance, length, forgetting (as a length in time) and noise by maximum likelihood. The next
values maximise ``mean + sqrt(beta) deviation`` over random points of the space. The values that
other members of the same generation have just been given count as observed at their predicted mean:
the deviation shrinks there, so that members do not all choose the same. ``beta`` is ``0.2 + max(0,
log(0.4 t))``. Values from lists are moved as in ``pbt``.

Sources: J. Parker-Holder et al. 2020 (arXiv:2002.02518); I. Bogunovic et al. 2016, "Time-Varying
Gaussian Process Bandit Optimization".
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from study.config.space import Domain, Params

FACTORS = (0.8, 1.2)
"""Factors, one of which a number is multiplied by."""
POINTS = 1000
"""Number of random points among which the bound is maximised."""
FEWEST = 2
"""Number of observations below which points are sampled at random."""
_FIXED = (1e6, 1e6 * (1 + 1e-9))
"""Bounds of the length scale of a dimension that the kernel should ignore."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberStep:
    """A member's values in one generation, in the unit cube, and their gain (NaN while unknown)."""

    generation: int
    units: dict[str, float]
    gain: float


def explored(
    domain: Domain, value: Any, resample_probability: float, generator: np.random.Generator
) -> Any:
    """Return a value near ``value``.

    A number is multiplied by 0.8 or 1.2, within the domain; a value of a list moves to a neighbour.
    With ``resample_probability`` the value is instead sampled from the whole domain.
    """
    if generator.random() < resample_probability:
        return domain.at(generator.random())
    up = bool(generator.integers(2))
    if domain.categorical:
        place = domain.index(value) + (1 if up else -1)
        return domain.values[min(max(place, 0), len(domain.values) - 1)]
    return domain.nearest(value * FACTORS[up])


def propose_step(
    known: Sequence[MemberStep], chosen: Sequence[MemberStep], domains: Sequence[Domain],
    now: Params, generation: int, generator: np.random.Generator
) -> Params:  # fmt: skip
    """Return values for ``domains`` in ``generation``.

    Args:
        known: steps of earlier generations.
        chosen: steps chosen for other members of the same generation.
        domains: domains of the values.
        now: current values; values of lists stay or move to a neighbour.
        generation: number of the generation.
        generator: source of random numbers.
    """
    numbers = [domain for domain in domains if not domain.categorical]
    lists = {
        domain.key: explored(domain, now[domain.key], 0.0, generator)
        for domain in domains
        if domain.categorical
    }
    keys = [domain.key for domain in numbers]
    alike = [step for step in known if step.units.keys() == set(keys)]
    points = generator.random((POINTS, len(keys)))
    taken = [step for step in chosen if step.units.keys() == set(keys)]
    best = (
        _best(alike, taken, keys, points, generation)
        if keys and len(alike) >= FEWEST
        else points[0]
    )
    return lists | {
        domain.key: domain.at(float(unit)) for domain, unit in zip(numbers, best, strict=True)
    }


def _best(
    known: Sequence[MemberStep],
    chosen: Sequence[MemberStep],
    keys: list[str],
    points: NDArray[np.float64],
    generation: int,
) -> Any:
    """Return the one of ``points`` with the highest upper confidence bound."""
    from sklearn.gaussian_process import GaussianProcessRegressor

    x, y = _rows(known, keys), np.array([step.gain for step in known])
    scale = float(y.std()) or 1.0
    y = (y - y.mean()) / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a length scale at its bound is an answer
        process = GaussianProcessRegressor(
            _kernel(len(keys)), n_restarts_optimizer=2, random_state=generation
        ).fit(x, y)
        if chosen:
            taken = _rows(chosen, keys)
            process = GaussianProcessRegressor(process.kernel_, optimizer=None).fit(
                np.concatenate([x, taken]), np.concatenate([y, process.predict(taken)])
            )
        mean, deviation = process.predict(
            np.column_stack([np.full(len(points), float(generation)), points]), return_std=True
        )
    beta = 0.2 + max(0.0, math.log(0.4 * generation))
    return points[int(np.argmax(mean + math.sqrt(beta) * deviation))]


def _rows(steps: Sequence[MemberStep], keys: list[str]) -> NDArray[np.float64]:
    return np.array(
        [[float(step.generation), *(step.units[key] for key in keys)] for step in steps]
    )


def _kernel(dimensions: int) -> Any:
    """Return the kernel above; Matern's with nu = 1/2 is exp(-|t - t'| / length)."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

    space = RBF([1e6] + [0.3] * dimensions, [_FIXED] + [(0.05, 5.0)] * dimensions)
    time = Matern([2.0] + [1e6] * dimensions, [(0.5, 50.0)] + [_FIXED] * dimensions, nu=0.5)
    return ConstantKernel(1.0, (0.1, 10.0)) * space * time + WhiteKernel(0.1, (1e-4, 1.0))
