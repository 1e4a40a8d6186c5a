"""Every ``key=value`` that an error about a config shows as a remedy is accepted."""

from __future__ import annotations

import re

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.config.explain import known_keys
from tests.study.config.test_compose import REFUSED

SHOWN = re.compile(r"(?<![\w`.])[a-z_.]+=(?:\[[^]]*\]|\{[^}]*\}+|'[^']*'|[^\s,;\"]+)")
TOGETHER = {
    "claims", "layout.virtual_stages", "limits.joules", "precision.gradient_format",
    "precision.master_format", "search.confirm_seeds", "search.constraints", "search.per_seed",
    "trainable.args",
    "trainable.name",
}  # fmt: skip
"""Keys with a value that requires a value of another key, which the next error names."""


def key_of(override: str) -> str:
    return override.partition("=")[0].removeprefix("trial.")


def remedies(message: str, key: str) -> list[str]:
    """Return the settings of a key that the last part of an error shows."""
    found = SHOWN.findall(message.rpartition("; ")[2])
    return [shown for shown in found if key_of(shown) == key and "..." not in shown]


def refusal(config: str | StudyConfig, *overrides: str) -> str:
    try:
        load(config, overrides, download=False)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bad", ["abc", "[]"])
def test_the_remedy_for_a_wrong_value_of_any_key_is_taken(bad: str) -> None:
    study, tried = StudyConfig(), 0
    for name in known_keys():
        key = name.removeprefix("trial.")
        for shown in remedies(refusal(study, "data=digits", f"{name}={bad}"), key):
            tried += 1
            again = refusal(study, "data=digits", shown)
            assert not again or key in TOGETHER, (f"{name}={bad}", shown, again)
    assert tried > 20


def test_the_remedies_of_other_refusals_are_not_refused_for_the_same_key() -> None:
    tried = 0
    for (config, *overrides), _ in REFUSED:
        for key in {key_of(override) for override in overrides}:
            for shown in remedies(refusal(config, *overrides), key):
                tried += 1
                others = [override for override in overrides if key_of(override) != key]
                again = refusal(config, *others, shown)
                assert f"{key}=" not in again.partition(":")[0], (shown, again)
    assert tried > 10
