"""Checks of config values, for the ``__post_init__`` of the frozen dataclasses, and their values.

Every error message has the value, the rule and the remedy. Every rule of one key goes through
:func:`require`, from whose calls ``docs/_ext/key_rules.py`` makes the site's page of keys.
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
    """Refuse a value that does not keep its rule.

    Args:
        given: the key and its value, ``epochs=0``, maybe with that of another key.
        holds: whether the value keeps the rule.
        rule: what must be.
        remedy: what to do about it.

    Raises:
        ValueError: with ``given``, ``rule`` and ``remedy``.
    """
    if not holds:
        raise ValueError(f"{given}: {rule}; {remedy}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among ``allowed``.

    Raises:
        ValueError: with ``name``, ``value``, what is allowed and an example.
    """
    rule, remedy = f"must be one of {', '.join(allowed)}", f"use for example {name}={allowed[0]}"
    require(f"{name}={value!r}", value in allowed, rule, remedy)


def at_least(name: str, value: int | None, low: int, remedy: str) -> None:
    """Refuse a value that is not a whole number of at least ``low``.

    None, where a key may be left out, passes.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``remedy``.
    """
    holds = value is None or (isinstance(value, int) and value >= low)
    require(f"{name}={value}", holds, f"must be a whole number of at least {low}", remedy)


def finite(name: str, value: float | None, low: float, remedy: str) -> None:
    """Refuse a NaN, an infinity, or a value below ``low``.

    None, where a key may be left out, passes.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``remedy``.
    """
    holds = value is None or (math.isfinite(value) and value >= low)
    require(f"{name}={value}", holds, f"must be a finite number of at least {low:g}", remedy)


def positive(name: str, value: float, example: str) -> None:
    """Refuse a NaN, an infinity, and what is not above 0.

    Raises:
        ValueError: with ``name``, ``value``, the rule and ``example``.
    """
    holds = 0 < value < math.inf
    require(f"{name}={value}", holds, "must be positive and finite", f"use for example {example}")


def check_named(part: str, name: str, ours: tuple[str, ...]) -> None:
    """Refuse a name that is neither one of ``ours`` nor of the user's code.

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
    """Refuse a size that the memory of this machine cannot hold.

    Args:
        what: name of what needs the memory.
        size: bytes needed, at the least.
        remedy: what to do about it.

    Raises:
        ValueError: with both sizes and ``remedy``.
    """
    if size > (have := memory()):
        raise ValueError(
            f"{what}: needs {size / 2**30:,.0f} GiB at the least, and this machine has"
            f" {have / 2**30:,.0f}; {remedy}"
        )


def memory() -> int:
    """Return the bytes of this machine's memory."""
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
    """Return what ``dataclasses.asdict`` does, in a fifth of its time.

    A study asks for a trial's values half a dozen times.
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
"""Types of arguments and fields, each with what a value may be."""


@dataclass(frozen=True, kw_only=True)
class NoArguments:
    """The arguments of what takes none."""


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
        kind: dataclass whose fields are of :data:`KINDS`, or None where that is a type of theirs.
        args: values by name.

    Raises:
        ValueError: an argument that there is not, of the wrong type, or out of range.
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
    """Let a config's dataclass take the values that Python programs have (:func:`plain`).

    Its fields then hold what a YAML file would have given. A value of another type than the
    field's is refused before the rules of the class see it.
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
    """Return a value from Python as YAML has it: numbers, texts, true and false, lists, mappings.

    Scalars and arrays of NumPy, torch and pandas become numbers and lists; so do tuples and ranges.
    Paths become texts.

    Args:
        key: name of the value, for errors.
        value: the value.

    Raises:
        ValueError: it is, or holds, anything else; the message says what to write instead.
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
    """Return what to write instead of a value that :func:`plain` does not take."""
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
    """Return a field's value, made plain.

    Raises:
        ValueError: it is of another type than the field.
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
    """Return a value of the type ``hint``, made plain.

    Raises:
        TypeError: it is of another type.
        ValueError: it holds what no config holds.
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
    """Return what a value of a type is, in words."""
    kinds, origin = get_args(hint), get_origin(hint)
    if NoneType in kinds:
        return f"{_words(kinds[0])}, or None"
    if origin is list:
        return "a list" if kinds[0] is Any else f"a list, each entry {_words(kinds[0])}"
    if origin is dict:
        return "a dict" if kinds[1] is Any else f"a dict, each value {_words(kinds[1])}"
    return KINDS[hint][1] if hint in KINDS else f"of type {hint.__name__}"


def _example(config: Any, name: str, hint: Any) -> str:
    """Return an example of a field's value: its default, unless that is empty."""
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
    """Refuse a probability that does not lie in [0, 1).

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
        keys: dotted names of the keys, the one that asks for too much first.
        when: whether a config has the combination.
        because: why the keys cannot be together.
        use: what to use instead. Both texts may name keys in braces, which stand for their values,
            and ``{common_multiple}`` (:func:`common_multiple`).
    """

    keys: tuple[str, ...]
    when: Callable[[Any], bool]
    because: str
    use: str

    def message(self, config: Any) -> str:
        """Return what is wrong with a config that has the combination."""
        first, *others = [f"{key}={show(attrgetter(key)(config))}" for key in self.keys]
        values = vars(config) | {"common_multiple": common_multiple(config)}
        texts = f"{self.because}; use {self.use}".format(**values)
        return f"{first} with {', '.join(others)}: {texts}"


def common_multiple(config: Any) -> int:
    """Return the smallest batch that every number of workers of a trial shares evenly."""
    sizes = range(config.min_workers or config.workers, config.workers + 1)
    return math.lcm(*sizes) * int(config.layout.micro_batches)
