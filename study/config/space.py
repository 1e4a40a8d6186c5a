"""The search space: the trial keys that vary, and their values.

A space maps dotted trial keys to domains, written with Ray Tune's names::

    space:
      optimizer.lr: {loguniform: [0.001, 1.0]}
      batch_size: {choice: [64, 128, 256]}
      optimizer.momentum: {uniform: [0.0, 0.95], when: {optimizer.name: sgd}}
      precision:                # a key with a mapping below it: one choice sets several keys
        choice:
          - {format: float32}
          - {format: lns12, scope: everywhere, kahan_sum: true}

A domain is one of::

    {choice: [a, b, ...]}            any YAML values, all equally likely
    {grid: [a, b, ...]}              every value, multiplied out with the other grids; the other
                                     domains are searched at each grid point
    {uniform: [low, high]}           low <= x < high
    {loguniform: [low, high]}        uniform in the logarithm
    {quniform: [low, high, step]}    low plus multiples of step
    {randint: [low, high]}           integers low <= n < high
    {lograndint: [low, high]}        integers low <= n < high, uniform in the logarithm

``when`` makes a domain conditional: the key varies only if every key in ``when`` has the given
value (or one of a list); otherwise it keeps the value of the base trial. The keys in ``when`` must
be earlier keys of the space, or keys inside their mappings.

Every domain maps a number in [0, 1) to a value, so random numbers, Sobol sequences and grids share
one definition.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from study.config.keys import is_number, leaves, lookup
from trainers.config.validation import fits

Params = dict[str, Any]
"""Sampled values by dotted trial key."""
POINT_BYTES = 256
"""Minimum memory per point of the space, in bytes."""

CATEGORICAL = ("choice", "grid")
RANGES = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "lograndint": 2}
EXAMPLE = (
    "use for example optimizer.lr: {loguniform: [0.001, 1.0]} or batch_size: {choice: [64, 128]}"
)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One varying key.

    Attributes:
        key: dotted trial key.
        kind: kind of domain, as listed in the module docstring.
        values: the choices, or the limits of the range.
        when: dotted keys, each with the values for which this domain varies.
        real: whether the key takes floats; integers sampled from a range then become floats.
    """

    key: str
    kind: str
    values: tuple[Any, ...]
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    real: bool = False

    @property
    def categorical(self) -> bool:
        """Whether the domain is a list of values rather than a range."""
        return self.kind in CATEGORICAL

    @property
    def sets(self) -> set[str]:
        """Trial keys that the domain sets: its own, or the keys inside its mappings."""
        values = self.values if self.categorical else (None,)
        return {key for value in values for key in leaves({self.key: value})}

    def at(self, unit: float) -> Any:
        """Return the value for a number in [0, 1)."""
        if self.categorical:
            return self.values[int(unit * len(self.values))]
        value = self._in_range(unit)
        return float(value) if self.real else value

    def _in_range(self, unit: float) -> int | float:
        low, high, *step = map(float, self.values)
        if self.kind == "uniform":
            return low + unit * (high - low)
        if self.kind == "loguniform":
            return min(max(low * math.pow(high / low, unit), low), high)
        if self.kind == "quniform":
            return _tidy(
                math.floor(unit * (math.floor((high - low) / step[0] + 1e-9) + 1)) * step[0] + low
            )
        if self.kind == "randint":
            return math.floor(low + unit * (high - low))
        return min(int(low * math.pow(high / low, unit)), int(high) - 1)

    def index(self, value: Any) -> int:
        """Return the index of a value in a list of values; true and 1 are different values."""
        return list(map(canonical, self.values)).index(canonical(value))

    def unit(self, value: Any) -> float:
        """Return a number in [0, 1] that :meth:`at` maps to ``value``, approximately for floats."""
        if self.categorical:
            return (self.index(value) + 0.5) / len(self.values)
        low, high, *step = map(float, self.values)
        if self.kind == "quniform":
            return (round((float(value) - low) / step[0]) + 0.5) / (
                math.floor((high - low) / step[0] + 1e-9) + 1
            )
        middle = float(value) + (0.5 if self.kind.endswith("randint") else 0.0)
        unit: float = (
            math.log(middle / low) / math.log(high / low)
            if self.kind.startswith("log")
            else (middle - low) / (high - low)
        )
        return min(max(unit, 0.0), 1.0)

    def nearest(self, value: float) -> Any:
        """Return the value of the range nearest to a number."""
        low, high, *step = self.values
        inside = min(max(value, low), high)
        if step:
            inside = _tidy(low + round((inside - low) / step[0]) * step[0])
            inside = inside if inside <= high else _tidy(inside - step[0])
        elif self.kind.endswith("randint"):
            inside = min(round(inside), high - 1)
        return float(inside) if self.real else inside

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` is in the domain."""
        if self.categorical:
            return canonical(value) in map(canonical, self.values)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        low, high, *step = self.values
        whole = self.kind.endswith("randint")
        steps = (value - low) / (step[0] if step else 1)
        return bool(low <= value <= high - whole) and (
            abs(steps - round(steps)) < 1e-8 or not (step or whole)
        )

    def applies(self, params: Mapping[str, Any]) -> bool:
        """Return whether ``when`` holds, given the values of the keys before it."""
        return all(_among(_value_of(key, params), allowed) for key, allowed in self.when)


@dataclass(frozen=True, kw_only=True)
class Space:
    """All varying keys, in the config's order.

    Grids are handled separately, because they are multiplied out instead of sampled.
    """

    domains: tuple[Domain, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.domains)

    @property
    def sampled(self) -> tuple[Domain, ...]:
        """Domains that the search algorithm samples."""
        return tuple(domain for domain in self.domains if domain.kind != "grid")

    def grid_points(self) -> list[Params]:
        """Return the product of the grids, later keys fastest; without grids, one empty point.

        A point lacks the grids whose ``when`` does not hold.
        """
        return self._product([domain for domain in self.domains if domain.kind == "grid"])

    def all_points(self) -> list[Params]:
        """Return the product of all lists; the space must not have ranges.

        Raises:
            ValueError: a domain is a range.
        """
        for domain in self.domains:
            if not domain.categorical:
                raise ValueError(
                    f"space.{domain.key}: {domain.kind} has no end of values, search.algorithm=grid"
                    " needs lists; use {grid: [a, b, c]}, or search.algorithm=random"
                )
        return self._product(self.domains)

    def _product(self, domains: Sequence[Domain]) -> list[Params]:
        """Return the product of all ``domains``, without keys whose ``when`` does not hold.

        Raises:
            ValueError: the points do not fit into this machine's memory.
        """
        count = math.prod(len(domain.values) for domain in domains)
        fits(
            f"space: {count:.3g} points",
            count * POINT_BYTES,
            "use fewer values or keys, or sample them with choice",
        )
        points: list[Params] = [{}]
        for domain in domains:
            points = [point | {domain.key: value} for point in points for value in domain.values]
        return _distinct(self.pruned(point) for point in points)

    def point(self, units: Sequence[float], grid: Params) -> Params:
        """Return the point for one number in [0, 1) per sampled domain, at one grid point."""
        drawn = {
            domain.key: domain.at(unit) for domain, unit in zip(self.sampled, units, strict=True)
        }
        return self.pruned(grid | drawn)

    def holds(self, params: Params) -> bool:
        """Return whether ``params`` are a point of the space."""
        kept: Params = {}
        for domain in self.domains:
            if domain.applies(kept):
                if domain.key not in params or not domain.holds(params[domain.key]):
                    return False
                kept[domain.key] = params[domain.key]
        return len(kept) == len(params)

    def pruned(self, params: Params) -> Params:
        """Return ``params`` in the space's order, without the keys whose ``when`` does not hold."""
        kept: Params = {}
        for domain in self.domains:
            if domain.key in params and domain.applies(kept):
                kept[domain.key] = params[domain.key]
        return kept


def parse_space(values: Mapping[str, Any]) -> Space:
    """Parse a config's ``space``.

    Raises:
        ValueError: an entry is not a domain, or a key in ``when`` is not an earlier key.
    """
    domains: list[Domain] = []
    for key, spec in flatten_space(values).items():
        domains.append(_parse_domain(key, spec))
        _check_when(domains)
    return Space(domains=tuple(domains))


def flatten_space(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a space with dotted keys, even if it is nested (``{optimizer: {lr: ...}}``)."""
    flat: dict[str, Any] = {}
    for key, spec in values.items():
        nested = (
            isinstance(spec, Mapping)
            and spec
            and not any(kind in spec for kind in (*CATEGORICAL, *RANGES, "when"))
        )
        if nested and all(isinstance(entry, Mapping | None) for entry in spec.values()):
            flat |= flatten_space(spec, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = spec
    return flat


def describe(params: Mapping[str, Any]) -> str:
    """Describe sampled values in one line: ``lr=0.0213, precision={format: lns12}``."""
    names = short_names(params)
    return ", ".join(f"{names[key]}={show(value)}" for key, value in params.items())


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return a name for each dotted key: its last part if that is unique, else the whole key."""
    last = {key: key.rpartition(".")[2] for key in keys}
    count = Counter(last.values())
    return {key: short if count[short] == 1 else key for key, short in last.items()}


def show(value: Any) -> str:
    """Return a value as text: floats with four digits, mappings in YAML's flow style, unquoted."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )


def params_at(params: Mapping[str, Any], epoch: float = math.inf) -> Params:
    """Return the sampled values in force after ``epoch`` epochs, by default at the end.

    Values can change during training (:mod:`trainers.config.schedule_changes`).
    """
    values = {key: value for key, value in params.items() if key != "changes"}
    for change in params.get("changes", []):
        if change["epoch"] <= epoch:
            values |= {key: value for key, value in change.items() if key != "epoch"}
    return values


def _parse_domain(key: str, spec: Any) -> Domain:
    if not isinstance(spec, Mapping):
        raise ValueError(f"space.{key}: {show(spec)} is not a domain; {EXAMPLE}")
    kinds = [kind for kind in spec if kind in (*CATEGORICAL, *RANGES)]
    unknown = [name for name in spec if name not in kinds and name != "when"]
    if len(kinds) != 1 or unknown:
        raise ValueError(
            f"space.{key}: {show(dict(spec))} must have exactly one of"
            f" {', '.join((*CATEGORICAL, *RANGES))}, and may have when; {EXAMPLE}"
        )
    kind, values = kinds[0], spec[kinds[0]]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"space.{key}.{kind}: {show(values)} must be a list; {EXAMPLE}")
    if not values:
        raise ValueError(f"space.{key}.{kind}: [] must have at least one value; {EXAMPLE}")
    if kind in RANGES:
        _check_range(key, kind, values)
    elif len({canonical(value) for value in values}) < len(values):
        raise ValueError(
            f"space.{key}.{kind}: {show(list(values))} has a value twice; take one out"
        )
    return Domain(key=key, kind=kind, values=tuple(values), when=_parse_when(key, spec.get("when")))


def _check_range(key: str, kind: str, values: Sequence[Any]) -> None:
    if len(values) != RANGES[kind] or not all(map(is_number, values)):
        wanted = "[low, high, step]" if kind == "quniform" else "[low, high]"
        raise ValueError(
            f"space.{key}.{kind}: {show(list(values))} must be {wanted}, finite numbers; {EXAMPLE}"
        )
    rule = _broken_rule(kind, *values)
    if rule:
        given = f"space.{key}.{kind}: {show(list(values))}"
        raise ValueError(f"{given}: {rule}; use for example {_mended(kind, *values)}")


def _broken_rule(kind: str, low: float, high: float, step: float = 1.0) -> str:
    """Return the rule that the limits of a range violate, or ""."""
    whole = kind.endswith("randint")
    if whole and not (isinstance(low, int) and isinstance(high, int)):
        return "must be whole numbers"
    if kind.startswith("log") and low <= 0:
        return f"low={low} must be positive, its logarithm is taken"
    if not low < high:
        without = " (which is left out)" if whole else ""
        return f"low={low} must be below high={high}{without}"
    return "" if step > 0 else f"step={step} must be positive"


def _mended(kind: str, low: float, high: float, *step: float) -> str:
    """Return a valid domain, as text, near to an invalid range."""
    low, high = min(low, high), max(low, high)
    if kind.endswith("randint"):
        low, high = math.floor(low), math.ceil(high)
    if kind.startswith("log"):
        most = high if high > 0 else 1
        low = low if low > 0 else 1 if kind == "lograndint" else most / 1000
        high = max(most, 2 * low) if most <= low and high != low else most
    if low == high:
        return show({"choice": [low]})
    if step and step[0] <= 0:
        step = ((high - low) / 10,)
    return show({kind: [low, high, *step]})


def _parse_when(key: str, when: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    if when is None:
        return ()
    if not isinstance(when, Mapping) or not when:
        raise ValueError(
            f"space.{key}.when: {show(when)} must map keys to values; use for example when:"
            " {optimizer.name: sgd}"
        )
    return tuple(
        (str(name), tuple(value) if isinstance(value, list | tuple) else (value,))
        for name, value in when.items()
    )


def _check_when(domains: list[Domain]) -> None:
    """Check that the keys in the last domain's ``when`` are set by earlier domains.

    Raises:
        ValueError: they are not.
    """
    *earlier, domain = domains
    for name, _ in domain.when:
        if not any(_sets(other, name) for other in earlier):
            known = ", ".join(other.key for other in earlier) or "there is none"
            raise ValueError(
                f"space.{domain.key}.when: {name} must be a key of the space before {domain.key}"
                f" ({known}), or one inside its choices; put {name} first"
            )


def _sets(domain: Domain, key: str) -> bool:
    if domain.key == key:
        return True
    inner = key.removeprefix(f"{domain.key}.")
    return inner != key and any(
        isinstance(value, Mapping) and lookup(value, inner) is not None for value in domain.values
    )


def _among(value: Any, allowed: Iterable[Any]) -> bool:
    """Return whether a value is one of ``allowed``; true differs from 1, but 1 equals 1.0."""
    kind = isinstance(value, bool)
    return any(value == other and isinstance(other, bool) is kind for other in allowed)


def _value_of(key: str, params: Mapping[str, Any]) -> Any:
    """Return the value of ``key``, which may be inside a shorter key's mapping; None if absent."""
    if key in params:
        return params[key]
    for name, value in params.items():
        if key.startswith(f"{name}.") and isinstance(value, Mapping):
            return lookup(value, key.removeprefix(f"{name}."))
    return None


def _distinct(points: Iterator[Params]) -> list[Params]:
    return list({canonical(point): point for point in points}.values())


def canonical(value: Any) -> str:
    """Return a value as canonical JSON, which is the same for equal values."""
    return json.dumps(value, sort_keys=True)


def _tidy(value: float) -> float:
    """Round away the last digits of binary arithmetic: 0.30000000000000004 becomes 0.3."""
    return float(f"{value:.12g}")


def unit_points(
    algorithm: str, dimensions: int, count: int, seed: int
) -> Iterator[Sequence[float]]:
    """Yield ``count`` points of the unit cube.

    The first n points do not depend on ``count``, so a study can be extended.

    Args:
        algorithm: ``random`` (independent) or ``sobol`` (scrambled, low discrepancy; Owen 1998).
        dimensions: number of coordinates.
        count: number of points.
        seed: seed of the sequence.
    """
    if algorithm == "sobol":
        from torch.quasirandom import SobolEngine

        engine = SobolEngine(dimensions, scramble=True, seed=seed)
        for _ in range(count):
            yield engine.draw(1)[0].tolist()
    else:
        generator = np.random.default_rng([seed, dimensions])
        for _ in range(count):
            yield generator.random(dimensions).tolist()
