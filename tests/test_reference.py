"""The generated page of config keys has a rule for each key, and the code enforces this rule."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.config.claims import AmendmentConfig, ClaimConfig
from study.config.study import RowConfig, StudyConfig
from trainers.config import MetricConfig, TrialConfig
from trainers.config.data import DATA
from trainers.config.model import ARGUMENTS

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_ext"))
try:
    generate = importlib.import_module("generate")
    key_rules = importlib.import_module("key_rules")
finally:
    del sys.path[0]

UNDOTTED = (StudyConfig, TrialConfig, RowConfig, ClaimConfig, AmendmentConfig)
BOUND = re.compile(r"(at least|above|below|at most|\.\.) (?:2\^\d+ = )?(\d[\d.e-]*)")


def configs(config: type) -> Iterator[type]:
    """Yield the class of a config and of the configs in it."""
    yield config
    for each in dataclasses.fields(config):
        value = generate.default_of(each)
        if generate.is_config(value):
            yield from configs(type(value))


def cases() -> Iterator[tuple[type, str, str, str]]:
    """Yield every rule of a key with one value: config, key, type and rule."""
    own = [RowConfig, ClaimConfig, AmendmentConfig, MetricConfig, *ARGUMENTS.values()]
    own += [info.arguments for info in DATA.values()]
    for config in dict.fromkeys([*configs(StudyConfig), *own]):
        kinds = {each.name: str(each.type) for each in dataclasses.fields(config)}
        for key, rule in key_rules.asked(config):
            last = key.rpartition(".")[2]
            mine = last in kinds and ("." in key) != (config in UNDOTTED)
            if mine and not kinds[last].startswith("dict"):
                yield config, key, kinds[last], rule


CASES = list(cases())


def near(word: str, bound: float, whole: bool, inside: bool) -> float:
    """Return the value next to a bound that keeps the rule, or the one that breaks it."""
    if inside == (word in ("at least", "at most", "..")):
        return bound
    up = (word in ("above", "at most", "..")) if not inside else word == "above"
    if whole:
        return bound + (1 if up else -1)
    return math.nextafter(bound, math.inf if up else -math.inf)


def values(kind: str, rule: str, inside: bool) -> list[Any]:
    """Return values just inside or just outside of a rule's bounds."""
    found: list[Any] = []
    whole = "int" in kind
    for word, number in BOUND.findall(rule):
        bound = int(number) if whole else float(number)
        found.append(near(word, bound, whole, inside))
    if "finite" in rule and not inside:
        found += [math.nan, math.inf]
    if rule.startswith("positive"):
        found += [math.nextafter(0.0, 1.0) if inside else 0.0]
    if rule.startswith("one of "):
        words = re.split(", ", rule.removeprefix("one of ").partition(", or ")[0])
        found += words if inside else ["neither"]
    twice = 2 if "two numbers" in rule else 1
    return [[value] * twice for value in found] if kind.startswith("list") else found


def refusal(config: type, key: str, value: Any) -> str:
    """Return a config's error for a value; nothing if it accepts the value."""
    base = dict(key_rules.ASKING.get(config, ({},))[0])
    try:
        config(**base | {key.rpartition(".")[2]: value})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("config", "key", "kind", "rule"),
    CASES,
    ids=[f"{config.__name__}-{key}-{rule[:24]}" for config, key, _, rule in CASES],
)
def test_a_rule_is_the_one_that_is_enforced(config: type, key: str, kind: str, rule: str) -> None:
    for value in values(kind, rule, inside=False):
        said = refusal(config, key, value)
        assert f"{key}=" in said, value
        assert rule in said or "must be a" in said, value
    for value in values(kind, rule, inside=True):
        assert rule not in refusal(config, key, value), value


def test_most_rules_have_values_outside() -> None:
    assert sum(bool(values(kind, rule, inside=False)) for _, _, kind, rule in CASES) > 100


def test_every_key_has_a_rule_or_is_marked() -> None:
    page = generate.configuration()
    rows = re.findall(r"^\| `([^`]+)` \| `.*?` \| (?:`.*?`|must be given) \| (.*?) \| ", page, re.M)
    assert len(rows) == len(re.findall(r"^\| `", page, re.M)) > 190
    assert [key for key, rule in rows if not rule.strip()] == []
    assert key_rules.MARKED.keys() <= {key for key, _ in rows}


def test_a_key_without_a_rule_is_seen() -> None:
    with pytest.raises(LookupError, match=r"trial\.new: no rule is asked"):
        key_rules.rule_of("trial.new", "int", key_rules.asked(TrialConfig))
