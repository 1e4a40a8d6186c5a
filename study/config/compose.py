"""Composition of one validated :class:`~study.config.StudyConfig` from YAML files and overrides.

A study file is YAML. Its optional ``groups`` list names files under ``conf/`` that are merged in
order, later over earlier; ``_self_`` marks the position of the file itself (default: last)::

    groups: [model/mlp_512, data/mnist, _self_, budget/full]

On the command line ``model=mlp_128`` swaps the file of a group, and ``trial.epochs=3``, or
``epochs=3`` as in rows, sets a key; keys win over files. Values are YAML: ``seeds=[0,1]``,
``trial.data.train_size=null``. Mappings are merged; ``{}`` empties a mapping. Files are searched
first in the working folder (``./conf``), then among the files installed with this package, so
studies work without a checkout.

A value may refer to another key, ``${trial.epochs}``; OmegaConf's other resolvers, which can read
the environment, are disabled (:mod:`study.config.yaml_loader`).

OmegaConf uses the frozen dataclasses as its schema and rejects unknown keys and values of the wrong
type. The dataclasses reject values outside their range. All errors give value, rule and remedy.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from study.config.explain import (
    check_lists,
    explain,
    first_line,
    known_keys,
    refuse_examples,
    schema,
    trial_schema,
    unknown_key,
)
from study.config.keys import leaves, locate, spell_out
from study.config.new import check_new
from study.config.overrides import is_trial_key, parse_override, refuse_numbers, undotted
from study.config.script import is_script, read_script
from study.config.space import flatten_space
from study.config.study import StudyConfig, check_executor
from study.config.yaml_loader import as_text, check_references, read_mapping
from study.tracking_uri import refuse_passwords
from trainers.config.validation import plain
from trainers.data import resolve
from trainers.text import nearest

SELF = "_self_"
GROUP = re.compile(r"\w[\w-]*")
"""Pattern of a group's name, which is the name of a folder in `conf`."""
_json = partial(json.dumps, ensure_ascii=False)
SMALL = "-small"
"""Suffix of the name of a study's small form."""


def load(
    config: str | StudyConfig,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    *,
    download: bool = True,
    small: bool = False,
) -> StudyConfig:
    """Return the study of a config file and its overrides.

    Args:
        config: path of a YAML or Python file (:mod:`study.config.script`), the name of a YAML file
            in ``conf/study``, or a config. File names in a config are relative to the working
            folder.
        overrides: ``key=value`` and ``group=file``.
        say: prints a line for the user, for example why ``data.name=auto`` is not MNIST.
        download: whether MNIST may be downloaded to resolve ``data.name=auto``; if not, auto counts
            as MNIST.
        small: whether to return the study's small form: its changes ``small`` are applied before
            ``overrides``, and its name ends in ``-small``.

    Raises:
        ValueError: the file does not exist, a key is unknown or a value is invalid.
    """
    path = Path("study") if isinstance(config, StudyConfig) else find_study(config)
    if is_script(path):
        config = read_script(path)
    groups, keys = _split_overrides(overrides)
    merged = _merge_layers(config, path, groups)
    if small:
        groups, keys = _split_overrides([*_small_form(merged, path), *overrides])
        merged = _merge_layers(config, path, groups)
    swapped = [
        layer
        for group, file in groups.items()
        for layer in _expand(_find_group(group, file, path), groups, set())
    ]
    study = check_new(_check_trial_keys(_with_data(merged, swapped, keys, say, download)))
    if not small and study.small:  # check the small form now, not only when it is used
        groups, keys = _split_overrides(as_overrides(study.small))
        try:
            _with_keys(_merge_layers(config, path, groups), keys)
        except ValueError as error:
            raise ValueError(f"small: {error}") from None
    return study


def _merge_layers(config: str | StudyConfig, path: Path, groups: dict[str, str]) -> DictConfig:
    layers = _layers(config, path, groups)
    located = ((source, spell_out(locate(values, path.parent))) for source, values in layers)
    return _merged(schema(), located)


def _small_form(merged: DictConfig, path: Path) -> list[str]:
    """Return the overrides that make a study's small form."""
    changes = OmegaConf.to_container(merged.small, resolve=True)
    if not isinstance(changes, dict) or not changes:
        raise ValueError(
            f"--small: {path} has no small form; add the changes that make it one, for example"
            " small: {epochs: 2, seeds: [0, 1]}, or leave --small out"
        )
    named = {str(key): value for key, value in changes.items()}
    return as_overrides({**named, "name": f"{merged.name}{SMALL}"})


def change(study: StudyConfig, overrides: Sequence[str]) -> StudyConfig:
    """Return an existing study with ``key=value`` changes.

    Groups cannot be swapped, because an existing study does not record its config files.

    Raises:
        ValueError: a key is unknown, a value is invalid, or an override is a group.
    """
    groups, keys = _split_overrides(overrides)
    if groups:
        name, value = next(iter(groups.items()))
        raise ValueError(
            f"override '{name}={value}': names a file of conf/{name}, which cannot be swapped any"
            " more; set its keys instead"
        )
    known = _merged(schema(), [("study", as_text(study.to_change()))])
    return _check_trial_keys(_finish(_with_keys(known, keys)))


def _check_trial_keys(study: StudyConfig) -> StudyConfig:
    """Check that all keys of ``digits`` (except ``seeds``) and ``comparable`` are trial keys.

    Otherwise a wrong key would have no effect, or raise an error only at the end of the study.

    Raises:
        ValueError: a key is not a trial key.
    """
    for keys in undotted(study.digits, "digits"):
        if keys.keys() != {"seeds"}:
            override_trial(study.trial.to_dict(), keys, "digits")
    known = {name.removeprefix("trial.") for name in known_keys() if name.startswith("trial.")}
    for source, keys in [
        ("", study.comparable),
        *((f"row {row.label!r}: ", row.comparable) for row in study.rows),
    ]:
        for key in keys:
            if key not in known:
                raise unknown_key(f"{source}comparable", f"trial.{key}", inside="trial.")
    return study


def _with_keys(merged: DictConfig, keys: Sequence[str]) -> DictConfig:
    return _merged(merged, ((f"override {key!r}", parse_override(key)) for key in keys))


def _with_data(
    merged: DictConfig,
    swapped: Sequence[tuple[str, dict[str, Any]]],
    keys: Sequence[str],
    say: Callable[[str], None],
    download: bool,
) -> StudyConfig:
    """Return the study with ``keys`` set and ``data.name=auto`` resolved.

    If the data are digits, the ``digits`` overrides are applied. The command line has precedence
    over them, so its group files and then its keys are merged again.
    """
    study = _finish(_with_keys(merged, keys))
    auto = study.trial.data.name == "auto" and not study.trial.own_loop
    data = study.trial.data
    if auto:
        data = resolve(data, download=download, say=say)
    changes: list[tuple[str, dict[str, Any]]] = []
    if data.name == "digits" and study.digits:
        on_digits = undotted(study.digits, "digits")
        layers = (keys if keys.keys() == {"seeds"} else {"trial": keys} for keys in on_digits)
        changes += [*(("digits", keys) for keys in layers), *swapped]
    if auto:
        changes.append(("data", {"trial": {"data": {"name": data.name, "root": data.root}}}))
    if not changes:
        return study
    return _finish(_with_keys(_merged(merged, changes), keys))


def find_study(config: str) -> Path:
    """Return the path of the study file called ``config``.

    Searches for the name as given, with .yaml, in ./conf/study, and in the installed package. The
    path of a Python file is returned unchecked.

    Raises:
        ValueError: not found; the message lists the known names.
    """
    if is_script(Path(config)):
        return Path(config)
    direct = [Path(config), Path(f"{config}.yaml")]
    for path in [*direct, *(root / "study" / f"{config}.yaml" for root in _roots())]:
        if path.is_file():
            return path
    refuse_examples(config, _roots())
    known = sorted({path.stem for root in _roots() for path in root.glob("study/*.yaml")})
    raise ValueError(
        f"config {config!r}: no such config{nearest(config, known)}; it must be a YAML or Python"
        f" file, the name of a stored study, or one of {', '.join(known) or '(none)'}; copy one of"
        " those to write your own"
    )


def config_file(name: str) -> Path:
    """Return the path of a file in ``conf``; the working folder has precedence."""
    paths = [root / name for root in _roots()]
    return next((path for path in paths if path.is_file()), paths[-1])


def studies_with(key: str) -> list[str]:
    """Return the sorted names of the studies in conf/study with a non-empty top-level key.

    The key may be in the study's file or in one of its groups; the last one counts.
    """
    return [name for name, values in _studies() if values.get(key)]


def questions() -> dict[str, tuple[str, bool]]:
    """Return the question of each study in conf/study, by name, and whether it has a small form."""
    return {
        name: (str(values.get("question") or ""), bool(values.get("small")))
        for name, values in _studies()
    }


def _studies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names of the studies in conf/study, sorted, with the top-level keys of their files
    and groups; the last file with a key counts."""
    files = {path.stem: path for root in reversed(_roots()) for path in root.glob("study/*.yaml")}
    for name in sorted(files):
        layers = _layers(name, files[name], {})
        yield name, {key: value for _, values in layers for key, value in values.items()}


def override_trial(base: dict[str, Any], overrides: Any, name: str = "overrides") -> dict[str, Any]:
    """Merge a row's overrides into a trial's dict.

    Args:
        base: ``TrialConfig.to_dict()``.
        overrides: mapping with nested or dotted keys, list of ``key=value``, or None.
        name: name of the key that holds the overrides, for errors.

    Raises:
        ValueError: an override's key is not a trial key, or its value has the wrong type.
    """
    changes = [] if overrides is None else undotted(overrides, name)
    layers = [(name, {"trial": change}) for change in changes]
    merged = _merged(_trial_of(pickle.dumps(base)), layers, inside="trial.")
    trial: dict[str, Any] = _plain(merged)["trial"]
    return trial


@lru_cache(maxsize=8)
def _trial_of(base: bytes) -> DictConfig:
    """Return a pickled trial's dict as a config; cached, because rows and domains share it."""
    return _merged(trial_schema(), [("trial", {"trial": as_text(pickle.loads(base))})])


def overridden(overrides: Any) -> set[str]:
    """Return the dotted trial keys that a row's overrides set, for all forms of overrides."""
    changes = [] if overrides is None else undotted(overrides, "overrides")
    return set[str]().union(*map(leaves, changes))


def group_options(group: str) -> list[str]:
    """Return the sorted file names of a config group, without suffix; empty if it does not
    exist."""
    return (
        sorted({path.stem for root in _roots() for path in root.glob(f"{group}/*.yaml")})
        if group.isidentifier()
        else []
    )


def _roots() -> list[Path]:
    """Return the folders with ``study/``, ``model/`` ..., in order of precedence.

    The working folder's ``conf`` comes first, then the ``conf`` installed in this package or, in a
    checkout, beside it.
    """
    package = Path(__file__).resolve().parents[1]
    ours = package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
    return list(dict.fromkeys([Path("conf").resolve(), ours]))


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Convert changes to command-line overrides, ``key=value``.

    Raises:
        ValueError: a value cannot be written as YAML, or is a number where the schema has a text:
            in Python 1.10 equals 1.1, so the intended text is ambiguous.
    """
    values = {key: plain(key, value) for key, value in changes.items()}
    for key, value in values.items():
        refuse_numbers(f"trial.{key}" if is_trial_key(key) else key, value)
    return [
        f"{key}={value if isinstance(value, str) and group_options(key) else _json(value)}"
        for key, value in values.items()
    ]


def _split_overrides(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate group swaps (``model=mlp_128``) from keys (``trial.epochs=3``)."""
    groups, keys = dict[str, str](), list[str]()
    for override in overrides:
        name, equals, value = override.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*(\[|\.\d+(\.|$)).*", name):
            raise ValueError(
                f"override {override!r}: the entries of a list cannot be set one by one; give the"
                " whole list, for example seeds=[0,1], or change the study file"
            )
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise ValueError(
                f"override {override!r}: must be key=value; write for example trial.epochs=3,"
                " seeds=[0,1] or model=mlp_128"
            )
        if name not in StudyConfig.__dataclass_fields__ and name != "study" and group_options(name):
            if "/" in value or ".." in value:
                raise ValueError(
                    f"override {override!r}: must be the name of a file in conf/{name}, without"
                    f" folders; use one of {', '.join(group_options(name))}"
                )
            groups[name] = value
        else:
            keys.append(f"trial.{override}" if is_trial_key(name) else override)
    return groups, keys


def _layers(
    config: str | StudyConfig, path: Path, swaps: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the contents to merge, in order, each after its source for error messages.

    They come from files, or from a config and the swapped groups. Groups that the study does not
    list come last.
    """
    named: set[str] = set()
    if isinstance(config, StudyConfig):
        yield str(path), as_text(config.to_dict())
    else:
        layers = list(_expand(path, swaps, named))
        if not any(body for _, body in layers):
            raise ValueError(f"{path}: holds nothing; start with `name: my-study`")
        yield from layers
    for group, file in swaps.items():
        if group not in named:
            yield from _expand(_find_group(group, file, path), swaps, named)


def _expand(
    path: Path, swaps: dict[str, str], named: set[str], chain: tuple[Path, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the contents of a file's groups and, at ``_self_``, of the file itself.

    Group files may also list groups. The names of all groups are added to ``named``.
    """
    chain = _extend(chain, path)
    body = read_mapping(path)
    groups = body.pop("groups", [])
    if not isinstance(groups, list) or not all(isinstance(entry, str) for entry in groups):
        raise ValueError(
            f"{path}: groups={groups!r}: must be a list of group/file names; use for example"
            " [model/mlp_512, data/mnist]"
        )
    for entry in groups if SELF in groups else [*groups, SELF]:
        group, _, file = entry.partition("/")
        if entry == SELF:
            yield str(path), body
        else:
            named.add(group)
            yield from _expand(
                _find_group(group, swaps.get(group, file), path), swaps, named, chain
            )


def _extend(chain: tuple[Path, ...], path: Path) -> tuple[Path, ...]:
    """Return ``chain``, the files that led to ``path``, with ``path`` appended.

    Raises:
        ValueError: the file includes itself.
    """
    chain = (*chain, path.resolve())
    if path.resolve() in chain[:-1]:
        names = " -> ".join(f"{file.parent.name}/{file.stem}" for file in chain)
        raise ValueError(
            f"{path}: groups must not lead back to their own file ({names}); take it out of one"
            " `groups` list"
        )
    return chain


def _find_group(group: str, file: str, study: Path) -> Path:
    """Return the path of a group's file.

    Looks beside the study's own ``conf`` folder, in ./conf, and in the installed package.
    """
    if not GROUP.fullmatch(group) or ".." in Path(file).parts:
        raise ValueError(
            f"groups: {group}/{file}: must be GROUP/FILE, for a file conf/GROUP/FILE.yaml, and no"
            " path of another form; use for example model/mlp_512"
        )
    for root in [study.resolve().parent.parent, *_roots()]:
        path = root / group / f"{file}.yaml"
        if path.is_file():
            return path
    options = group_options(group)
    raise ValueError(
        f"{group}={file}: no such config{nearest(file, options)}; must be one of"
        f" {', '.join(options) or '(none)'}; use one of those or write"
        f" conf/{group}/{file or 'mine'}.yaml"
    )


def _merged(
    base: DictConfig, layers: Iterable[tuple[str, dict[str, Any]]], inside: str = ""
) -> DictConfig:
    """Return a copy of ``base`` with layers merged over it in order.

    Args:
        base: the config so far.
        layers: nested dicts of keys to set, each after its source for error messages.
        inside: prefix of keys that users can omit; error messages omit it too.
    """
    merged = copy.deepcopy(base)
    for source, values in layers:
        _merge(merged, values, source, inside)
    return merged


def _merge(merged: DictConfig, values: dict[str, Any], source: str, inside: str) -> None:
    """Merge ``values`` into ``merged``, in place; after an error ``merged`` is incomplete.

    - Mappings are merged key by key, lists are replaced. An empty mapping resets a section to its
      defaults and empties a plain mapping.
    - A domain of the space replaces the earlier domain as a whole; null removes it.
    - The objectives of the search replace all earlier objectives.
    """
    check_references(values, source)
    check_lists(values, source, inside)
    if isinstance(values.get("space"), dict) and values["space"]:
        space = flatten_space(values["space"])
        # keep the old position, because `when` may only name earlier keys
        changed = {key: space.pop(key, spec) for key, spec in merged.space.items()}
        merged.space = {key: spec for key, spec in changed.items() if spec is not None}
        others = {key: value for key, value in values.items() if key != "space"}
        values = others | ({"space": space} if space else {})
    search = values.get("search")
    if isinstance(search, dict) and isinstance(search.get("objectives"), dict):
        merged.search.objectives = {}
    _empty(merged, schema(), values)
    try:
        OmegaConf.unsafe_merge(merged, OmegaConf.create(values))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise explain(error, values, source, inside) from None


def _empty(node: DictConfig, fresh: Any, values: dict[str, Any]) -> None:
    """Reset the parts of ``node`` for which ``values`` has an empty mapping.

    Args:
        node: config to change, in place.
        fresh: the same part of the schema, with its defaults; None if the schema lacks it.
        values: values that will be merged.
    """
    for key, value in values.items():
        below = node[key] if isinstance(value, dict) and key in node else None
        if not isinstance(below, DictConfig):
            continue
        default = fresh[key] if isinstance(fresh, DictConfig) and key in fresh else None
        if value:
            _empty(below, default, value)
        else:
            node[key] = copy.deepcopy(default) if OmegaConf.get_type(below) is not dict else {}


def _finish(merged: DictConfig) -> StudyConfig:
    values = _plain(merged)
    refuse_passwords(values)
    check_executor(values["executor"])
    return StudyConfig.from_dict(values)


def _plain(merged: DictConfig | ListConfig) -> dict[str, Any]:
    """Return plain Python values with interpolations resolved.

    Raises:
        ValueError: a value is missing.
    """
    try:
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "")
        raise ValueError(f"{key}: {first_line(error)}; set it, for example {key}=...") from None
    return cast("dict[str, Any]", values)
