"""Verdicts from made-up ledgers, statements, and claims that a config refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.config import ClaimConfig, StudyConfig
from study.config.compose import load
from study.config.study import RowConfig
from study.evidence.judge import by_row, judge
from study.evidence.record import FILE, record, write_record
from study.evidence.statement import state_claims, stated
from study.evidence.verdict import Verdict, decide
from study.ledger.events import Event
from study.ledger.state import fold
from study.plan.plan import make_plan
from study.plan.trials import PlannedTrial
from study.report.claims import claims_markdown
from study.report.write import write_report
from study.results.answer import answer
from study.results.summary import summarise
from study.tracking.payload import claim_tags
from tests.study.conftest import made_up_events, write_ledger
from tests.study.results.test_answer import with_errors
from tests.study.search.conftest import Pretend

Tiny = Callable[..., StudyConfig]
FIVE = "seeds=[0,1,2,3,4]"
BETTER = [2.0, 2.1, 2.2, 2.0, 2.2]
WORSE = [3.0, 3.2, 3.1, 2.9, 3.3]


def claim(name: str = "c", **check: Any) -> dict[str, Any]:
    return {"name": name, "claim": "It is so.", "source": "a talk", **check}


def verdict(
    tiny: Tiny, check: dict[str, Any], float32: list[float], lns: list[float]
) -> dict[str, Any]:
    seeds = f"seeds={list(range(len(float32)))}"
    study = tiny("claims", seeds, f"claims={json.dumps([claim(**check)])}")
    state = fold(with_errors(study, {"float32": float32, "lns matmul": lns}))
    return record(state, summarise(state), judge(state, study.folder))["claims"][0]


@pytest.mark.parametrize(
    ("bound", "outcome"),
    [
        ({"at_most": 2.5}, "holds"),
        ({"at_most": 2.1}, "undecided"),
        ({"at_least": 2.5}, "fails"),
        ({"within": [1.9, 2.3]}, "holds"),
        ({"within": [2.15, 2.3]}, "undecided"),
        ({"within": [2.5, 2.7]}, "fails"),
    ],
)
def test_the_interval_of_a_mean_decides(tiny: Tiny, bound: dict[str, Any], outcome: str) -> None:
    found = verdict(tiny, {"value": {"row": "float32", **bound}}, BETTER, WORSE)
    # mean 2.1, sd 0.1, t(4, 0.975) = 2.776
    assert found["outcome"] == outcome
    assert found["shown"] == "2.10 (1.98 to 2.22) %"
    assert found["runs"] == 5


def test_a_difference_is_paired_by_seed_and_has_the_sign_of_its_rows(tiny: Tiny) -> None:
    rows = ["lns matmul", "float32"]
    found = verdict(tiny, {"difference": {"rows": rows, "at_least": 0.5}}, BETTER, WORSE)
    assert found["outcome"] == "holds"
    assert found["figure"] == pytest.approx(1.0)
    found = verdict(tiny, {"difference": {"rows": rows[::-1], "at_least": 0.5}}, BETTER, WORSE)
    assert (found["outcome"], round(found["figure"], 9)) == ("fails", -1.0)


def test_one_seed_decides_nothing_and_two_say_what_they_could_show(tiny: Tiny) -> None:
    check = {"difference": {"rows": ["lns matmul", "float32"], "at_least": 1.5}}
    one = verdict(tiny, check, [2.0], [3.0])
    assert (one["outcome"], one["low"]) == ("undecided", None)
    assert "one seed has no interval" in one["note"]
    two = verdict(tiny, check, [2.0, 2.2], [3.0, 3.4])
    assert two["outcome"] == "undecided"
    assert "2 seeds show a distance from the bound of" in two["note"]


def test_seeds_without_spread_need_to_be_enough(tiny: Tiny) -> None:
    check = {"value": {"row": "float32", "at_most": 2.0}}
    assert verdict(tiny, check, [3.0] * 2, [3.0] * 2)["outcome"] == "undecided"
    assert verdict(tiny, check, [3.0] * 5, [3.0] * 5)["outcome"] == "fails"


def test_no_row_beats_another_by_chance_or_by_little(tiny: Tiny) -> None:
    best = {"no_row_beats": {"row": "float32"}}
    assert verdict(tiny, best, BETTER, WORSE)["outcome"] == "holds"
    assert verdict(tiny, best, WORSE, BETTER)["outcome"] == "fails"
    alike = [2.1, 2.0, 2.3, 1.9, 2.2]
    assert verdict(tiny, best, BETTER, alike)["outcome"] == "holds"
    assert verdict(tiny, best, BETTER[:3], alike[:3])["outcome"] == "undecided"
    by = {"no_row_beats": {"row": "float32", "by": 0.01}}
    assert verdict(tiny, by, BETTER, alike)["outcome"] == "undecided"


@pytest.mark.parametrize("by", [{}, {"by": 0.5}])
@pytest.mark.parametrize(("seeds", "outcome"), [(5, "fails"), (3, "undecided")])
def test_a_row_that_is_better_by_the_same_at_every_seed_is_seen(
    tiny: Tiny, by: dict[str, float], seeds: int, outcome: str
) -> None:
    rows = (
        "rows=[{label: a}, {label: b, overrides: {epochs: 4}}, {label: c, overrides: {epochs: 5}}]"
    )
    check = json.dumps([claim(no_row_beats={"row": "a", **by})])
    study = tiny("same", f"seeds={list(range(seeds))}", rows, "baseline=null", f"claims={check}")
    ours = WORSE[:seeds]
    others = {"b": [x - 1 for x in ours], "c": [x + y for x, y in zip(ours, BETTER, strict=False)]}
    state = fold(with_errors(study, {"a": ours, **others}))
    (found,) = judge(state, study.folder)
    assert found.outcome == outcome


def test_a_row_that_diverged_at_a_seed_beats_none_and_is_not_judged(tiny: Tiny) -> None:
    for loss in (math.nan, math.inf):
        check = json.dumps([claim(row, no_row_beats={"row": row}) for row in ("a", "b")])
        rows = "rows=[{label: a}, {label: b, overrides: {epochs: 4}}]"
        study = tiny(
            "loss", FIVE, rows, "baseline=null", "metric=validation/loss", f"claims={check}"
        )
        events = made_up_events(study)
        first = next(event for event in events if event["event"] == "finished")
        first["metrics"]["test/loss"] = loss
        state = fold(events)
        found = {verdict.claim.name: verdict for verdict in judge(state, study.folder)}
        row = state.known[first["trial"]].row
        assert found[row].outcome == "undecided"
        assert "diverged" in found[row].note
        assert (write_report(state, study.folder / "report") / "report.html").is_file()
        answered = answer(state, summarise(state))
        assert f"Lowest test loss: {'b' if row == 'a' else 'a'}" in answered


def test_a_search_that_was_broken_off_decides_nothing(tiny: Tiny, tmp_path: Path) -> None:
    check = json.dumps([claim(difference={"rows": ["lns matmul", "float32"], "at_least": 0.0})])
    study = tiny(
        "broken-off",
        FIVE,
        "space={optimizer.lr: {loguniform: [0.001, 1.0]}}",
        "search={algorithm: tpe, num_samples: 4}",
        f"claims={check}",
    )

    def errors(trial: PlannedTrial) -> list[float]:
        worse = 1.3 if trial.row == "lns matmul" else 1.0
        return [(0.1 + 0.01 * trial.seed) * worse] * trial.config.epochs

    for done in (3, 12, 39):
        begun = Pretend(make_plan(study), errors)
        begun.run(at_most=done)
        assert [each.outcome for each in judge(begun.state, tmp_path)] == ["undecided"]
        assert set(by_row(begun.state, summarise(begun.state)).values()) <= {"c undecided"}


@pytest.mark.parametrize("search", ["random", "tpe"])
@pytest.mark.parametrize("failed", [False, True])
def test_a_row_without_a_figure_decides_nothing_and_is_named(
    tiny: Tiny, tmp_path: Path, search: str, failed: bool
) -> None:
    """One search has no trials because all its points were refused; all trials of another
    failed."""
    (tmp_path / "own.py").write_text("def f(study): return {'figure': 1, 'verdict': 'holds'}")
    checks = [
        claim("best", no_row_beats={"row": "float32"}),
        claim("gap", difference={"rows": ["lns matmul", "float32"], "at_least": 0.0}),
        claim("first", ranks={"of": "row", "blocks": ["epochs"], "best": "float32"}),
        claim("matters", importance={"key": "optimizer.lr", "at_least": 0.0}),
        claim("own", check=f"{tmp_path}/own.py:f"),
    ]
    rows = (
        "rows=[{label: float32}, {label: lns matmul, overrides: {precision.format: lns12}},"
        " {label: third, overrides: {batch_size: 16}}]"
    )
    space = "space={optimizer.lr: {loguniform: [0.001, 1.0]}}"
    study = tiny("without", FIVE, rows, space, "search.num_samples=2",
                 f"claims={json.dumps(checks)}")  # fmt: skip
    plan, *events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE, "third": WORSE})
    plan["study"]["search"]["algorithm"] = search
    gone = [trial["id"] for trial in plan["trials"] if trial["row"] == "lns matmul"]
    events = [event for event in events if event.get("trial") not in gone]
    lost = [{"event": "failed", "trial": id_, "error": "made up", "time": 1.0} for id_ in gone]
    if failed:
        events = lost + events
    else:
        plan["trials"] = [trial for trial in plan["trials"] if trial["id"] not in gone]
    state = fold([plan, *events])
    found = {verdict.claim.name: verdict for verdict in judge(state, study.folder)}
    named = [found[name] for name in (["best", "gap", "first"] if failed else found)]
    assert {verdict.outcome for verdict in named} == {"undecided"}
    assert all("lns matmul" in verdict.note for verdict in named)
    write_report(state, tmp_path / "report")
    for page in ("report.md", "report.html"):
        assert "NO FIGURE: lns matmul" in (tmp_path / "report" / page).read_text()
    figures = json.loads((tmp_path / "report" / FILE).read_text())
    assert [row["label"] for row in figures["rows"]] == ["float32", "lns matmul", "third"]


def test_what_is_claimed_after_results_were_taken_over_is_not_stated_before(tiny: Tiny) -> None:
    old = tiny("late", FIVE)
    new = tiny(
        "late", FIVE, f"claims={json.dumps([claim(value={'row': 'float32', 'at_most': 9})])}"
    )
    events = [event for event in made_up_events(old) if event["event"] in ("planned", "report")]
    plans = [
        {**events[0], "study": each.to_dict(), "stated": state_claims(each.to_dict()), "time": time}
        for each, time in ((old, 1.0), (new, 9e9))
    ]
    said = stated(fold([plans[0], *events[1:], plans[1]]))
    assert said is not None
    assert said.claims == {"c": "added"}


def test_a_claim_waits_for_every_seed(tiny: Tiny) -> None:
    check = json.dumps([claim(value={"row": "float32", "at_most": 9})])
    study = tiny("claims", FIVE, f"claims={check}")
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    last = next(n for n, event in enumerate(events) if event["event"] == "finished")
    state = fold(events[:last] + events[last + 1 :])
    (found,) = judge(state, study.folder)
    assert (found.outcome, found.note) == ("undecided", "4 of 5 seeds of float32 have finished")


def test_another_recipe_leaves_a_published_figure_undecided(tiny: Tiny) -> None:
    check = claim(published=2.1, value={"row": "float32", "at_most": 9})
    study = tiny("claims", FIVE, f"claims={json.dumps([check])}", "comparable={epochs: 20}")
    (found,) = judge(
        fold(with_errors(study, {"float32": BETTER, "lns matmul": WORSE})), study.folder
    )
    assert found.outcome == "undecided"
    assert found.note == "not comparable with the published figure"


def test_an_own_function_gets_the_study(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def count(study):\n    n = len(study.trials)\n"
        "    return {'figure': n, 'low': n - 1, 'high': n + 1, 'unit': 'trials'}\n"
        "def broken(study):\n    return 1 / 0\n"
        "def vague(study):\n    return {'figure': 1}\n"
    )
    claims = [
        claim("counts", check=f"{tmp_path}/own.py:count", at_least=5),
        claim("breaks", check=f"{tmp_path}/own.py:broken"),
        claim("is_vague", check=f"{tmp_path}/own.py:vague"),
    ]
    study = tiny("own_check", FIVE, f"claims={json.dumps(claims)}")
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / "ledger.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    counts, breaks, vague = judge(fold(events), study.folder, run_checks=True)
    assert (counts.outcome, counts.shown) == ("holds", "10.00 (9.00 to 11.00) trials")
    assert "ZeroDivisionError" in breaks.note
    assert "needs a verdict" in vague.note


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("{'figure': math.nan, 'verdict': 'holds'}", "figure=nan: must be a number"),
        ("{'figure': math.nan, 'low': 1, 'high': 2}", "figure=nan: must be a number"),
        ("{'figure': 1, 'low': math.nan, 'high': 2}", "low=nan: must be a number"),
        ("{'figure': 1, 'low': 2, 'high': 1}", "low 2 is above high 1"),
        ("{'figure': 3, 'low': 0, 'high': 2}", "figure 3 that is not in its interval 0 to 2"),
        ("{'figure': '1', 'low': 0, 'high': 2}", "figure='1': must be a number"),
        ("{'figure': True, 'low': 0, 'high': 2}", "figure=True: must be a number"),
        ("{'figure': None, 'verdict': 'fails'}", "figure=None: must be a number"),
        ("{'figure': 1j, 'low': 0, 'high': 2}", "figure=1j: must be a number"),
        ("{'figure': 10**400, 'low': 0, 'high': 2}", "must be a number"),
        ("{'figure': np.ones(2), 'low': 0, 'high': 2}", "must be a number"),
        ("{'figure': 1, 'verdict': 'maybe'}", "needs a verdict"),
        ("{'figure': 1, 'verdict': ['holds']}", "needs a verdict"),
        ("{'figure': 1, 'verdict': np.array(['holds', 'fails'])}", "needs a verdict"),
        ("{'figure': 9, 'low': 8, 'high': 10, 'verdict': 'holds'}", "says holds, .* fails"),
        ("{'figure': 1, 'low': 0, 'high': 2, 'runs': 'many'}", "runs='many': must be a whole"),
        ("{'figure': 1, 'low': 0, 'high': 2, 'runs': -1}", "runs=-1: must be a whole"),
        ("{'figure': 1, 'low': 0, 'high': 2, 'note': Odd()}", "raised .*no text"),
        ("Odd()", "returned an Odd: must be a mapping"),
        ("{'figure': Odd(), 'verdict': 'holds'}", "must be a number"),
        ("{1: 2}", "must be a mapping"),
        ("sys.exit(0)", "raised SystemExit"),
        ("open('http://ada:pa-ss@h/x')", r"http://ada:\*\*\*@h"),
        ("{'figure': 'http://ada:pa-ss@h/x'}", r"http://ada:\*\*\*@h"),
        ("{'figure': 1, 'verdict': 'undecided', 'note': 'http://ada:pa-ss@h'}", r"//ada:\*\*\*@h"),
        ("'x' * 10**6", "must be a mapping"),
    ],
)
def test_an_own_function_that_returns_nonsense_decides_nothing(
    tiny: Tiny, tmp_path: Path, returned: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(
        "import math, sys\nimport numpy as np\n"
        "class Odd:\n    def __repr__(self):\n        raise TypeError('no text')\n"
        f"def check(study):\n    return {returned}\n"
    )
    checks = [claim("own", check=f"{tmp_path}/own.py:check", at_most=5, published=1.0)]
    study = tiny("nonsense", FIVE, f"claims={json.dumps(checks)}")
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    write_ledger(study, events)
    (found,) = judge(fold(events), study.folder, run_checks=True)
    assert found.outcome == "undecided"
    assert re.search(said, found.note)
    assert len(found.note) < 1000
    assert "pa-ss" not in found.note
    json.dumps(record(fold(events), summarise(fold(events)), [found]), allow_nan=False)


def test_a_note_of_an_own_function_makes_no_line_of_the_table() -> None:
    found = Verdict(claim=ClaimConfig(**claim(check="a.py:f")), outcome="fails",
                    note="so\n| b | holds | 1 |\r| c").to_dict()  # fmt: skip
    lines = claims_markdown([found | {"stated": "before the first trial"}])
    assert [line.count("holds") for line in lines if "fails" in line] == [1]
    assert sum("holds" in line for line in "\n".join(lines).splitlines()) == 1


def test_ranks_follow_friedman_and_nemenyi(tiny: Tiny) -> None:
    check = claim(ranks={"of": "row", "blocks": ["batch_size"], "best": "float32"})
    sizes = list(range(16, 26))
    space = f"space={{batch_size: {{grid: {sizes}}}}}"
    study = tiny(
        "claims", "seeds=[0,1]", space, "search.algorithm=grid", f"claims=[{json.dumps(check)}]"
    )
    events = with_errors(study, {"float32": [2.0, 2.1], "lns matmul": [3.0, 3.0]})
    (found,) = judge(fold(events), study.folder)
    # Demsar 2006, table 5: q(0.05, 2) = 1.960; CD = 1.960 sqrt(2 * 3 / (6 * 10)) = 0.620
    assert found.outcome == "holds"
    assert found.figure == 1.0
    assert found.high == pytest.approx(1.62, abs=0.001)
    assert found.runs == 40


def test_ranks_over_few_blocks_say_that_no_lead_suffices(tiny: Tiny) -> None:
    """For two values the best can lead by at most 1 rank; three blocks can show 1.960 sqrt(6 /
    18)."""
    check = claim(ranks={"of": "row", "blocks": ["batch_size"], "best": "float32"})
    study = tiny(
        "claims", "seeds=[0]", "space={batch_size: {grid: [16, 17, 18]}}", "search.algorithm=grid",
        f"claims=[{json.dumps(check)}]",
    )  # fmt: skip
    events = with_errors(study, {"float32": [2.0], "lns matmul": [3.0]})
    (found,) = judge(fold(events), study.folder)
    assert found.outcome == "undecided"
    assert "3 blocks show 1.13 ranks, and no lead is above 1.0; of 1 data set, so" in found.note
    assert "by 1.00 ranks, of which they show inf" in found.note  # one seed shows nothing


@pytest.mark.parametrize("figure", [None, math.nan, math.inf])
def test_a_value_without_a_finite_test_figure_ranks_nowhere(
    tiny: Tiny, figure: float | None
) -> None:
    check = claim(ranks={"of": "row", "blocks": ["epochs"], "best": "float32"})
    study = tiny("ranks", "seeds=[0,1]", "metric=validation/loss", f"claims=[{json.dumps(check)}]")
    events = made_up_events(study)
    last = [event for event in events if event["event"] == "finished"][-1]["metrics"]
    last |= {"test/loss": figure} if figure else {}
    if not figure:
        del last["test/loss"]
    (found,) = judge(fold(events), study.folder)
    assert found.outcome == "undecided"
    assert "lns matmul has no" in found.note


def test_bounds_decide() -> None:
    assert decide((1.0, 2.0), 1.0, 2.0) == "holds"
    assert decide((1.0, 2.0), 2.1, 3.0) == "fails"
    assert decide((1.0, 2.0), 1.9, 2.1) == "undecided"


# --------------------------------------------------------------------------------------------------


def planned(study: StudyConfig, time: float) -> Event:
    (event, *_) = made_up_events(study)
    return event | {"time": time, "stated": state_claims(study.to_dict())}


def test_what_is_changed_after_the_first_trial_is_told(tiny: Tiny) -> None:
    checks = [claim("kept", value={"row": "float32", "at_most": 9}),
              claim("moved", value={"row": "float32", "at_most": 2})]  # fmt: skip
    study = tiny("claims", FIVE, f"claims={json.dumps(checks)}")
    _, *events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    checks[1]["value"] = {"row": "float32", "at_most": 3}
    new = claim("new", value={"row": "float32", "at_least": 0})
    later = tiny("claims", FIVE, f"claims={json.dumps([*checks, new])}")
    before = planned(study, 0.0)
    same = stated(fold([before, *events, planned(study, 9.0)]))
    assert same is not None
    assert (same.changed, same.claims) == ([], {})
    assert same.digest in same.sentence
    state = fold([before, *events, planned(later, 9.0)])
    found = stated(state)
    assert found is not None
    assert found.digest == same.digest
    rows = by_row(state, summarise(state))
    assert "moved holds (NOT AS STATED)" in rows["float32"]
    assert "kept holds," in rows["float32"]
    assert found.claims == {
        "moved": "changed: value was {'row': 'float32', 'at_most': 2}",
        "new": "added",
    }
    kept, moved, _ = record(state, summarise(state), judge(state, study.folder))["claims"]
    assert kept["stated"] == "before the first trial"
    assert moved["stated"].startswith("changed")


def test_a_statement_before_the_first_trial_may_change(tiny: Tiny) -> None:
    first, second = tiny("claims", FIVE), tiny("claims", FIVE, "trial.epochs=2")
    state = fold([planned(first, 0.0), planned(second, 1.0)])
    found = stated(state)
    assert found is not None
    assert found.changed == []
    assert found.digest == state_claims(second.to_dict())["digest"]


def test_the_digest_is_of_what_decides_figures(tiny: Tiny) -> None:
    def digest(*overrides: str) -> str:
        return str(state_claims(tiny("claims", FIVE, *overrides).to_dict())["digest"])

    assert digest() == digest("cpus=1", "max_failures=9", "trial.gpus=0.5")
    others = [digest("trial.epochs=2"), digest("seeds=[0]"), digest("question=Why?")]
    assert len({digest(), *others}) == 4


def test_tags_say_verdict_and_statement(tmp_path: Path) -> None:
    figures = {
        "claims": [{"name": "a", "outcome": "holds", "shown": "1.00"}],
        "stated": {"digest": "abc"},
    }
    write_record(figures, tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == figures
    assert claim_tags(figures) == {"claim.a": "holds: 1.00", "stated.sha256": "abc"}


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (claim("no name", value={"row": "a", "at_most": 1}), "must be an identifier"),
        (claim(), "has no check: exactly one of"),
        (claim(value={"row": "a", "at_most": 1}, check="a.py:f"), "value and check: exactly one"),
        (claim(value={"row": "a"}), "has no bound: takes exactly one of"),
        (claim(value={"at_most": 1}), "lacks row"),
        (claim(value={"row": "a", "atmost": 1}), "unknown key atmost"),
        (claim(value={"row": "a", "within": [2, 1]}), "within is \\[LOW, HIGH\\]"),
        (claim(value={"row": "a", "at_most": "two"}), "bounds are numbers"),
        (claim(value={"row": "a", "at_most": 1}, at_most=2), "a bound stands beside value"),
        (claim(difference={"rows": ["a"], "at_most": 1}), "takes two rows"),
        (claim(check="no_function.py"), "must be file.py:name"),
        (claim(source=" ", check="a.py:f"), "source is empty"),
    ],
)
def test_a_claim_that_cannot_be_decided_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClaimConfig(**wrong)


def test_claims_are_about_rows_that_there_are(tiny: Tiny) -> None:
    rows = [RowConfig(label="a")]
    about = ClaimConfig(**claim(value={"row": "b", "at_most": 1}))
    with pytest.raises(ValueError, match="names the row 'b', which the study does not have"):
        StudyConfig(rows=rows, claims=[about])
    twice = [ClaimConfig(**claim(value={"row": "a", "at_most": 1}))] * 2
    with pytest.raises(ValueError, match="two have the name c"):
        StudyConfig(rows=rows, claims=twice)
    with pytest.raises(ValueError, match="there is no file"):
        tiny("claims", f"claims={json.dumps([claim(check='gone.py:f')])}")


def test_a_small_form_is_its_changes_under_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nsmall: {epochs: 2, seeds: [0, 1], model: mlp_128}\n")
    small = load(str(path), ["seeds=[7]"], download=False, small=True)
    assert (small.name, small.trial.epochs, small.seeds) == ("mine-small", 2, [7])
    assert small.trial.model.hidden == [128]
    path.write_text("name: mine\n")
    with pytest.raises(ValueError, match="has no small form; add the changes"):
        load(str(path), download=False, small=True)


def test_a_study_that_is_small_has_not_the_small_form_of_another() -> None:
    """Quickstart is the table with a small budget; the table's own small form takes longer."""
    assert load("quickstart", download=False).small == {}
    with pytest.raises(ValueError, match="has no small form"):
        load("quickstart", download=False, small=True)
    assert load("table", download=False, small=True).trial.epochs == 12
