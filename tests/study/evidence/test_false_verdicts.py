"""Verdicts that were wrong or too sure, each from a made-up ledger."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from study.config import ClaimConfig, Metric
from study.evidence.analyses import chosen, critical_difference, difference_of_seeds
from study.evidence.judge import judge
from study.evidence.record import SAME, record
from study.evidence.reproduction import reproduced
from study.evidence.verdict import Verdict, decide, judge_mean, of_mean
from study.ledger.state import fold
from study.ledger.studies import read
from study.results.summary import summarise
from study.tracking.payload import claim_tags
from tests.study.conftest import made_up_events, write_ledger
from tests.study.evidence.test_verdicts import BETTER, FIVE, WORSE, Tiny, claim, planned
from tests.study.results.test_answer import with_errors


@pytest.mark.parametrize(("first", "second"), [((33, 30), (21, 18)), ((10, 7), (40, 37))])
def test_differences_that_are_equal_but_for_rounding_have_no_spread(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    """At both seeds three more of 297 examples are wrong."""
    gaps = [100.0 * (ours / 297) - 100.0 * (theirs / 297) for ours, theirs in (first, second)]
    assert 0 < abs(gaps[0] - gaps[1]) < 1e-12
    about = ClaimConfig(**claim(difference={"rows": ["a", "b"], "at_least": 1.0}))
    assert judge_mean(about, gaps, "points", "seeds").outcome == "undecided"
    assert of_mean(gaps, "points")["verdict"] == "undecided"
    assert judge_mean(about, gaps * 3, "points", "seeds").outcome == "holds"


def test_a_figure_that_is_shown_as_nothing_has_no_sign() -> None:
    about = ClaimConfig(**claim(difference={"rows": ["a", "b"], "at_most": 1.0}))
    found = Verdict(claim=about, outcome="holds", figure=-0.001, low=-0.3, high=0.3, unit="points")
    assert found.shown == "0.00 (-0.30 to 0.30) points"
    assert Metric(name="validation/error").difference(-0.001) == "+0.00"


@pytest.mark.parametrize(
    ("k", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (9, 3.102), (10, 3.164)]
)
def test_critical_differences_are_those_of_the_published_table(k: int, q: float) -> None:
    """Demsar 2006, table 5 (a), truncated to three decimals."""
    assert critical_difference(k, 14) == pytest.approx(
        q * math.sqrt(k * (k + 1) / (6 * 14)), abs=1e-3 * math.sqrt(k * (k + 1) / 84)
    )


def judge_three(tiny: Tiny, errors: dict[str, list[float]], **check: Any) -> Verdict:
    rows = (
        "rows=[{label: a}, {label: b, overrides: {epochs: 4}}, {label: c, overrides: {epochs: 5}}]"
    )
    checks = json.dumps([claim(no_row_beats={"row": "a", **check})])
    seeds = f"seeds={list(range(len(errors['a'])))}"
    study = tiny("three", seeds, rows, "baseline=null", f"claims={checks}")
    (found,) = judge(fold(with_errors(study, errors)), study.folder)
    return found


def test_what_is_shown_of_a_best_row_is_what_decides(tiny: Tiny) -> None:
    """The rival with the larger mean is significantly worse by a little; another one may be
    better."""
    small = [0.01, 0.02, 0.0, 0.01, 0.01]
    wide = [3.0, -3.0, 2.0, -2.0, -0.5]
    errors = {
        "a": BETTER,
        "b": [x + y for x, y in zip(BETTER, small, strict=True)],
        "c": [x + 0.1 + y for x, y in zip(BETTER, wide, strict=True)],
    }
    found = judge_three(tiny, errors, by=0.3)
    assert found.outcome == "undecided"
    assert found.figure is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.figure <= found.high
    assert decide((-math.inf, 0.3), found.low, found.high) == "undecided"


def test_a_row_that_cannot_be_tested_keeps_a_claim_open(tiny: Tiny) -> None:
    """It is better by 0.29 at all three seeds, which gives no interval; 0.3 is allowed."""
    ours = WORSE[:3]
    errors = {"a": ours, "b": [x - 0.29 for x in ours], "c": [x + 9 + y for x, y in
              zip(ours, BETTER, strict=False)]}  # fmt: skip
    found = judge_three(tiny, errors, by=0.3)
    assert found.outcome == "undecided"
    assert "b cannot be tested" in found.note


def test_an_own_function_waits_for_a_seed_that_failed(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(study): return {'figure': 1, 'low': 0, 'high': 2}")
    check = claim(check=f"{tmp_path}/own.py:f", at_most=5)
    study = tiny("own_check", FIVE, f"claims={json.dumps([check])}")
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    write_ledger(study, events)
    (found,) = judge(fold(events), study.folder, run_checks=True)
    assert found.outcome == "holds"
    lost = next(event for event in events if event["event"] == "finished")["trial"]
    events = [event for event in events if event.get("trial") != lost]
    events.insert(1, {"event": "failed", "trial": lost, "error": "made up", "time": 1.0})
    write_ledger(study, events)
    (found,) = judge(fold(events), study.folder, run_checks=True)
    assert (found.outcome, found.note) == (
        "undecided", "float32 has no figure of seed 0: it failed"
    )  # fmt: skip


@pytest.mark.parametrize(("blocks", "outcome"), [(4, "undecided"), (5, "undecided"), (6, "holds")])
def test_two_values_need_six_blocks(tiny: Tiny, blocks: int, outcome: str) -> None:
    """Four of four is within Nemenyi's difference, and happens by chance in one of eight cases."""
    check = claim(ranks={"of": "row", "blocks": ["batch_size"], "best": "float32"})
    space = f"space={{batch_size: {{grid: {list(range(16, 16 + blocks))}}}}}"
    study = tiny(
        "claims", "seeds=[0,1]", space, "search.algorithm=grid", f"claims=[{json.dumps(check)}]"
    )
    events = with_errors(study, {"float32": [2.0, 2.0], "lns matmul": [3.0, 3.0]})
    (found,) = judge(fold(events), study.folder)
    assert found.outcome == outcome
    assert "the sign test's p" in found.note


@pytest.mark.parametrize(
    ("last", "outcome"), [([2.1, 3.2], "holds"), ([9.0, 3.1], "undecided")]
)  # fmt: skip
def test_ten_blocks_of_one_data_set_are_no_ten(tiny: Tiny, last: list[float], outcome: str) -> None:
    """One bad seed of three is bad in every block: ten equal blocks, but only one seed of
    difference."""
    check = claim(ranks={"of": "row", "blocks": ["batch_size"], "best": "float32"})
    study = tiny(
        "claims", "seeds=[0,1,2]", f"space={{batch_size: {{grid: {list(range(16, 26))}}}}}",
        "search.algorithm=grid", f"claims=[{json.dumps(check)}]",
    )  # fmt: skip
    errors = {"float32": [2.0, 2.2, last[0]], "lns matmul": [3.0, 3.3, last[1]]}
    (found,) = judge(fold(with_errors(study, errors)), study.folder)
    assert found.outcome == outcome
    assert (found.figure > 0) == (outcome == "holds")
    assert "of 1 data set, so that the seeds must agree" in found.note


def test_tukeys_difference_of_seeds() -> None:
    """By hand: three values by three seeds, squared residuals 0.0533 with four degrees of freedom,
    q(0.05; 3, 4) = 5.040 (table of the studentized range)."""
    ranks = np.array([[1.0, 2.0, 3.0], [1.2, 1.8, 3.0], [1.0, 2.0, 3.0]])
    rests = ranks - ranks.mean(0)  # all rows have the mean 2
    expected = 5.040 * math.sqrt(float((rests**2).sum()) / 4 / 3)
    assert difference_of_seeds(ranks) == pytest.approx(expected, rel=1e-3)
    assert difference_of_seeds(ranks[:1]) == math.inf


def test_a_value_ranks_by_its_confirmed_configuration(tiny: Tiny) -> None:
    """One of two configurations ran with more seeds; the other has the lower error at one seed."""
    space = "space={optimizer.lr: {grid: [0.1, 0.2]}}"
    study = tiny("claims", "seeds=[0,1,2]", space, "search.algorithm=grid")
    plan, *events = made_up_events(study)
    gone = [each["id"] for each in plan["trials"] if each["number"] == 2 and each["seed"]]
    plan["trials"] = [each for each in plan["trials"] if each["id"] not in gone]
    lucky = [each["id"] for each in plan["trials"] if each["number"] == 2]
    events = [event for event in events if event.get("trial") not in gone]
    for event in events:
        if event.get("trial") in lucky and event["event"] == "report":
            event["metrics"]["validation/error"] = 0.001
    state = fold([plan, *events])
    (cell,) = chosen(state, "row", ["epochs"]).values()
    assert {name: len(trials) for name, trials in cell.items()} == {"float32": 3, "lns matmul": 3}
    assert [trial.number for row in summarise(state).rows for trial in row.trials] == [1] * 6


def test_a_searched_rows_mean_tells_of_the_choice(tiny: Tiny) -> None:
    check = claim(value={"row": "float32", "at_most": 9})
    space = "space={optimizer.lr: {grid: [0.1, 0.2]}}"
    study = tiny("claims", FIVE, space, "search.algorithm=grid", f"claims=[{json.dumps(check)}]")
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    (found,) = judge(fold(events), study.folder)
    assert "best of 2 configurations" in found.note


def test_a_function_that_is_edited_after_the_run_is_told(tiny: Tiny, tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("def f(study): return {'figure': 1, 'low': 0, 'high': 2}")
    check = claim(check=f"{code}:f", at_most=1)
    study = tiny("edited", FIVE, f"claims={json.dumps([check])}")
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    events[0] |= planned(study, 0.0)
    write_ledger(study, events)
    state = fold(events)

    def figures() -> dict[str, Any]:
        return record(state, summarise(state), judge(state, study.folder, run_checks=True))

    def judged() -> dict[str, Any]:
        return dict(figures()["claims"][0])

    assert (judged()["outcome"], judged()["stated"]) == ("undecided", SAME)
    before = hashlib.sha256(code.read_bytes()).hexdigest()
    code.write_text("def f(study): return {'figure': 1, 'low': 1, 'high': 1}")
    assert judged()["outcome"] == "holds"
    assert judged()["stated"] == f"changed: check was own.py:f {before[:12]}"
    tags = claim_tags(figures())
    assert tags["claim.c"].startswith("NOT AS STATED, holds")
    facts = reproduced(read(study.folder), study.folder, "lns-study run edited").facts
    assert f"c (changed: check was own.py:f {before[:12]})" in facts["Statement"]
    assert "CLAIMS CHANGED" not in facts.get("Remarks", "")  # shown once on a page of claims
