"""Which studies of ``conf/study`` have a key, their groups included."""

from __future__ import annotations

import pytest

from study.config.compose import load, studies_with


@pytest.mark.parametrize("name", ["search_space_odyssey_lns", "are_gans_equal_lns"])
def test_a_study_has_the_claims_of_its_groups(name: str) -> None:
    assert load(name, download=False).claims
    assert name in studies_with("claims")


def test_a_study_that_takes_its_groups_claims_away_has_none() -> None:
    found = studies_with("claims")
    assert all(load(name, download=False).claims for name in found)
    assert "quickstart" not in found
