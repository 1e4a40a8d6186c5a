"""Checks and conversions of config values, for the ``__post_init__`` of the frozen dataclasses.

Every error message has the value, the rule and the remedy. Every rule about a single key is a call
of :func:`require`; ``docs/_ext/key_rules.py`` makes the site's page of keys from these calls.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from operator import attrgetter
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from trainers.user_code import names_code, split_name

Arguments = TypeVar("Arguments")
Config = TypeVar("Config")


def require(given: str, holds: bool, rule: str, remedy: str) -> None:
    """Raise an error unless a value satisfies its rule.

    Args:
        given: the key and its value, ``epochs=0``, possibly followed by a second key and its value.
        holds: whether the value satisfies the rule.
        rule: the rule, ``must be ...``.
        remedy: advice, ``use ...``.

    Raises:
        ValueError: with ``given``, ``rule`` and ``remedy``.
    """
    if not holds:
        raise ValueError(f"{given}: {rule}; {remedy}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among ``allowed``.

    Raises:
        ValueError: with ``name``, ``value``, the allowed values and an example.
    """
    rule, remedy = f"must be one of {', '.join(allowed)}", f"use for example {name}={allowed[0]}"
    require(f"{name}={value!r}", value in allowed, rule, remedy)


def at_least(name: str, value: int | None, low: int, remedy: str) -> None:
    """Refuse a value that is neither an integer of at least ``low`` nor None.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``remedy``.
    """
    holds = value is None or (isinstance(value, int) and value >= low)
    require(f"{name}={value}", holds, f"must be a whole number of at least {low}", remedy)


def finite(name: str, value: float | None, low: float, remedy: str) -> None:
    """Refuse a NaN, an infinity, or a value below ``low``; accept None.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``remedy``.
    """
    holds = value is None or (math.isfinite(value) and value >= low)
    require(f"{name}={value}", holds, f"must be a finite number of at least {low:g}", remedy)


def positive(name: str, value: float, example: str) -> None:
    """Refuse a NaN, an infinity, or a value of at most 0.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``example``.
    """
    holds = 0 < value < math.inf
    require(f"{name}={value}", holds, "must be positive and finite", f"use for example {example}")


def check_named(part: str, name: str, ours: tuple[str, ...]) -> None:
    """Refuse a name that is neither among ``ours`` nor the name of a user's factory.

    Raises:
        ValueError: with the name, the rule and the remedy.
    """
    if names_code(name):
        split_name(f"{part}.name", name)
    either = f"one of {', '.join(ours)}, or " if ours else ""
    require(
        f"{part}.name={name!r}",
        names_code(name) or name in ours,
        f"must be {either}a factory of your own, file.py:factory or package.module:factory",
        f"use for example {part}.name={ours[0] if ours else 'torchmetrics:R2Score'}",
    )


def fits(what: str, size: float, remedy: str) -> None:
    """Refuse a size that exceeds the memory of this machine.

    Args:
        what: beginning of the message: the key or object that needs the memory.
        size: minimum number of bytes needed.
        remedy: advice, ``use ...``.

    Raises:
        ValueError: with both sizes and ``remedy``.
    """
    if size > (have := memory()):
        raise ValueError(
            f"{what}: needs {size / 2**30:,.0f} GiB at the least, and this machine has"
            f" {have / 2**30:,.0f}; {remedy}"
        )


def memory() -> int:
    """Return the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def show(value: object) -> str:
    """Return a value as YAML writes it; whole floats without their point, texts without quotes,
    unless they are empty."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return str(value) or "''"


def as_dict(config: Any) -> dict[str, Any]:
    """Return the result of ``dataclasses.asdict``, in a fifth of its time.

    A study calls this function about six times per trial.
    """
    found = {}
    for name in _names(config.__class__):
        value = getattr(config, name)
        found[name] = value if type(value) in _CONSTANT else _copied(value)
    return found


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind in (list, tuple):
        return kind(map(_copied, value))
    if kind is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    return as_dict(value) if is_dataclass(kind) else deepcopy(value)


_CONSTANT = {bool, float, int, str, NoneType}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


KINDS: dict[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "a text"),
    bool: (bool, "True or False"),
}
"""Types of arguments and fields, each with the accepted types of a value and their description."""


@dataclass(frozen=True, kw_only=True)
class NoArguments:
    """The arguments of a data set or model without arguments."""


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    return get_type_hints(kind)


def make_arguments(
    part: str, name: str, kind: type[Arguments], args: Mapping[str, Any]
) -> Arguments:
    """Return an object of the dataclass ``kind`` with the values of ``args``.

    Args:
        part: ``model`` or ``data``.
        name: name of the model or data set.
        kind: dataclass with fields of types in :data:`KINDS`, optional or not.
        args: values by name.

    Raises:
        ValueError: an argument is unknown, of the wrong type, or out of range.
    """
    hints = field_types(kind)  # type: ignore[arg-type]
    known = fields(kind)  # type: ignore[arg-type]
    listed = ", ".join(f"{field.name}={field.default}" for field in known)
    for key, value in args.items():
        said = f"{part}.args.{key}={value!r} with {part}.name={name}"
        if not hints:
            raise ValueError(
                f"{said}: it takes no arguments; leave them out (in a row by"
                f" {part}.args.{key}=null), or use {part}.name=file.py:factory for a factory of"
                " your own"
            )
        if key not in hints:
            raise ValueError(
                f"{said}: there is no such argument; there are {listed}; leave it out, in a row by"
                f" {part}.args.{key}=null"
            )
        kinds = get_args(hints[key]) or (hints[key],)
        if value is None and NoneType in kinds:
            continue
        types, words = KINDS[kinds[0]]
        if isinstance(value, bool) or not isinstance(value, types):
            raise ValueError(
                f"{said}: must be {words}; use for example {part}.args.{key}={getattr(kind, key)}"
            )
    return kind(**args)


# --------------------------------------------------------------------------------------------------


def plain_values(kind: type[Config]) -> type[Config]:
    """Let a config's dataclass accept usual Python values and convert them (:func:`plain`).

    The fields then have the same values as from a YAML file. A value of the wrong type is refused
    before the class checks its rules.
    """
    made = kind.__init__

    @wraps(made)
    def convert(self: Any, **values: Any) -> None:
        hints = field_types(kind)  # type: ignore[arg-type]
        made(
            self,
            **{
                name: value if name not in hints else _typed(kind, name, hints[name], value)
                for name, value in values.items()
            },
        )

    kind.__init__ = convert  # type: ignore[method-assign]
    return kind


def plain(key: str, value: Any) -> Any:
    """Convert a Python value to YAML's types: numbers, strings, booleans, lists and dicts.

    Scalars and arrays of NumPy, torch and pandas become numbers and lists; tuples and ranges become
    lists, and paths become strings.

    Args:
        key: name of the value, for errors.
        value: the value.

    Raises:
        ValueError: the value, or one of its entries, has another type; the message has advice.
    """
    if type(value) in _CONSTANT:
        return value
    if isinstance(value, Mapping):
        names = ((plain(key, name), entry) for name, entry in value.items())
        return {name: plain(f"{key}.{name}", entry) for name, entry in names}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(key, entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if hasattr(value, "tolist") and type(listed := value.tolist()) is not type(value):
        return plain(key, listed)
    for base, made in ((int, int), (float, float), (str, str.__str__)):  # members of an IntEnum ...
        if isinstance(value, base):
            return made(value)
    raise ValueError(
        f"{key}: {reprlib.repr(value)} is of type {type(value).__name__}; a config holds numbers,"
        f" texts, paths, True, False, None, lists, arrays and dicts; {_instead(value)}"
    )


def _instead(value: Any) -> str:
    """Return advice for a value that :func:`plain` does not accept."""
    if isinstance(value, Set):
        return "a set has no order: use sorted(...)"
    if isinstance(value, Enum):
        return "use its .value"
    if is_dataclass(value):
        return "use dataclasses.asdict(...) of it"
    if hasattr(value, "__float__"):
        return "use float(...) of it"
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return "use list(...) of it"
    return "use one of these"


def _typed(config: type, name: str, hint: Any, value: Any) -> Any:
    """Return a field's value, converted by :func:`plain`.

    Raises:
        ValueError: the value does not have the field's type.
    """
    if type(value) is hint and hint in _CONSTANT:
        return value
    try:
        return _converted(name, hint, value)
    except TypeError:
        raise ValueError(
            f"{name}={reprlib.repr(value)}: must be {_words(hint)}; use for example"
            f" {name}={_example(config, name, hint)}"
        ) from None


def _converted(key: str, hint: Any, value: Any) -> Any:
    """Return a value of the type ``hint``, converted by :func:`plain`.

    Raises:
        TypeError: the value does not have the type.
        ValueError: an entry cannot be converted.
    """
    if is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise TypeError
        return value
    kinds = get_args(hint)
    if NoneType in kinds:
        return None if value is None else _converted(key, kinds[0], value)
    origin = get_origin(hint)
    if origin is dict and isinstance(value, Mapping):
        entries = ((plain(key, name), entry) for name, entry in value.items())
        return {name: _converted(f"{key}.{name}", kinds[1], entry) for name, entry in entries}
    if origin is list and isinstance(value, list | tuple):
        return [_converted(key, kinds[0], entry) for entry in value]
    if origin and is_dataclass(value):
        raise TypeError
    found = plain(key, value)
    if origin is list and isinstance(found, list):
        return [_converted(key, kinds[0], entry) for entry in found]
    if hint is not Any:
        types, _ = KINDS.get(hint, (NoneType, ""))
        if not isinstance(found, types) or isinstance(found, bool) is not (hint is bool):
            raise TypeError
    return found


def _words(hint: Any) -> str:
    """Return a description of a type's values, for example "a list"."""
    kinds, origin = get_args(hint), get_origin(hint)
    if NoneType in kinds:
        return f"{_words(kinds[0])}, or None"
    if origin is list:
        return "a list" if kinds[0] is Any else f"a list, each entry {_words(kinds[0])}"
    if origin is dict:
        return "a dict" if kinds[1] is Any else f"a dict, each value {_words(kinds[1])}"
    return KINDS[hint][1] if hint in KINDS else f"of type {hint.__name__}"


def _example(config: Any, name: str, hint: Any) -> str:
    """Return an example of a field's value: its default, unless the default is empty."""
    (entry,) = (entry for entry in fields(config) if entry.name == name)
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    if is_dataclass(default):
        return f"{hint.__name__}()"
    if default not in (None, MISSING, "") and default != [] and default != {}:
        return repr(default)
    inner: Any = next(iter(get_args(hint)), hint)
    if get_origin(hint) is list:
        return "[1, 2]" if inner in KINDS else f"[{inner.__name__}(...)]"
    return {int: "2", float: "2.5", bool: "True", str: "'abc'"}.get(inner, "{}")


def share_of_one(name: str, value: float) -> None:
    """Refuse a probability outside [0, 1).

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    require(
        f"{name}={value}", 0 <= value < 1, "must be at least 0 and below 1", "use for example 0.1"
    )


@dataclass(frozen=True)
class Rule:
    """A combination of keys that is refused.

    Attributes:
        keys: dotted names of the keys, first the key that should change.
        when: function that returns whether a config has the combination.
        because: why the keys cannot be combined.
        use: what to use instead. In both texts, names of keys in braces are replaced by their
            values, and ``{common_multiple}`` by the result of :func:`common_multiple`.
    """

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    because: str
    use: str

    def message(self, config: Any) -> str:
        """Return the error message for a config that has the combination."""
        first, *others = [f"{key}={show(attrgetter(key)(config))}" for key in self.keys]
        values = vars(config) | {"common_multiple": common_multiple(config)}
        texts = f"{self.because}; use {self.use}".format(**values)
        return f"{first} with {', '.join(others)}: {texts}"


def common_multiple(config: Any) -> int:
    """Return the smallest batch size that every possible number of workers divides evenly."""
    sizes = range(config.min_workers or config.workers, config.workers + 1)
    return math.lcm(*sizes) * int(config.layout.micro_batches)
