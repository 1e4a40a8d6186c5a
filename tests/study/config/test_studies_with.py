"""Which studies of ``conf/study``, with their groups, have a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from study.config.compose import load, override_trial, studies_with
from study.plan.plan import make_plan
from trainers.config import TrialConfig
from trainers.training.check import check_optimizer

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["search_space_odyssey_lns"])
def test_a_study_has_the_claims_of_its_groups(name: str) -> None:
    assert load(name, download=False).claims
    assert name in studies_with("claims")


@pytest.mark.slow
def test_a_study_that_takes_its_groups_claims_away_has_none() -> None:
    found = studies_with("claims")
    assert all(load(name, download=False).claims for name in found)
    assert "quickstart" not in found


@pytest.mark.parametrize("name", ["law_of_bits", "swish", "update_rules", "energy"])
def test_the_pages_say_how_many_trials_a_small_form_has(name: str) -> None:
    """Searches whose results do not lead to further trials."""
    size = make_plan(load(name, small=True, download=False), download=False).size
    (line,) = re.findall(rf"^\| `{name}`.*$", (ROOT / "docs/studies/index.md").read_text(), re.M)
    assert f"| {size} trials" in line
    comment = (ROOT / "conf" / "study" / f"{name}.yaml").read_text()
    said = re.findall(r"--small +(\d+) trials", comment)
    assert said in ([], [str(size)])


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
def test_every_rate_of_every_study_has_a_code(small: bool) -> None:
    """Studies whose trials are known before they run; the data are not read."""
    files = (ROOT / "conf" / "study").glob("*.yaml")
    for name in studies_with("small") if small else [file.stem for file in files]:
        study = load(name, small=small, download=False)
        if study.space or study.trial.own_loop:
            continue
        for row in study.rows:
            values = override_trial(study.trial.to_dict(), row.overrides)
            check_optimizer(TrialConfig.from_dict(values))
