"""Statements of a study: amendments, the statistic of each claim, its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from study.config.claims import (
    PICTURES,
    STATISTIC,
    STATISTICS,
    AmendmentConfig,
    digest,
    statement,
)  # fmt: skip
from study.config.compose import load
from study.evidence.judge import judge
from study.evidence.reproduction import Reproduced, reproduced, write_page
from study.evidence.statement import differences_of, overrides_of, state_claims, stated
from study.ledger.state import fold
from study.ledger.studies import read
from study.report.pictures import TITLES
from tests.study.conftest import made_up_events, write_ledger
from tests.study.evidence.test_verdicts import BETTER, FIVE, WORSE, Tiny, claim
from tests.study.results.test_answer import with_errors

AMENDED = [{"date": "2026-11-24", "change": "Five seeds in place of two.", "reason": "Too few."}]


def test_the_page_has_the_amendments_of_the_file(tiny: Tiny, tmp_path: Path) -> None:
    """The ledger and its claim are from an earlier version."""
    checks = [claim(value={"row": "float32", "at_most": 2.5})]
    study = tiny("amended", FIVE, f"claims={json.dumps(checks)}")
    write_ledger(study, with_errors(study, {"float32": BETTER, "lns matmul": WORSE}))
    checks[0]["claim"] = "It is otherwise."
    changes = f"claims={json.dumps(checks)}", f"amendments={json.dumps(AMENDED)}"
    part = reproduced(read(study.folder), study.folder, "run", tiny("amended", FIVE, *changes))
    assert "2026-11-24: Five seeds in place of two. Reason: Too few." in part.facts["Amendments"]
    assert part.facts["Its file now"].startswith("differs in c;")
    assert "Amendments: 2026-11-24" in write_page([part], tmp_path).read_text()
    facts = reproduced(read(study.folder), study.folder, "run", study).facts
    assert not {"Amendments", "Its file now"} & facts.keys()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], []),
        (["epochs=4", "cpus=1"], ["cpus=1", "trial.epochs=4"]),
        (
            ["precision.format=lns12", FIVE],
            ["seeds=[0, 1, 2, 3, 4]", "trial.precision.format=lns12"],
        ),
        (["space={optimizer.lr: {grid: [0.1, 0.2]}}"], None),
        (["max_failures=7", "gang=train"], ["gang=train", "max_failures=7"]),
        (["data.validation_size=200"], ["trial.data.validation_size=200"]),
        (["data.validation_size=300"], []),  # as the data have it
        (["metric=validation/loss"], ["metric=validation/loss"]),
        (["name=other"], ["name=other"]),
        (["rows=[]", "baseline=null"], None),
    ],
)
def test_a_command_has_what_a_study_ran_with(
    tiny: Tiny, given: list[str], said: list[str] | None
) -> None:
    ran, file = tiny("changed", *given), tiny("changed")
    found = overrides_of(ran, file)
    assert found == said
    if found is not None:
        assert overrides_of(ran, tiny("changed", *found)) == []


def test_a_command_leaves_out_the_digest_of_data(tiny: Tiny) -> None:
    rolls = "data.name=piano_rolls", "data.validation_size=null"
    ran, file = (tiny("coded", *rolls, *code) for code in (["data.code=ab"], []))
    assert overrides_of(ran, file) == []


def test_a_command_names_code_from_the_working_folder(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.py").write_text("def make(): ...")
    monkeypatch.chdir(tmp_path)
    ran = tiny("own", "loss.name=sub/own.py:make")
    assert overrides_of(ran, tiny("own")) == ["trial.loss.name=sub/own.py:make"]


def test_the_page_has_every_machine_that_started_trials(tiny: Tiny) -> None:
    study = tiny("machines", FIVE)
    events = with_errors(study, {"float32": BETTER, "lns matmul": WORSE})
    planned = next(event for event in events if event["event"] == "planned")
    other = next(index for index, event in enumerate(events) if event.get("trial")) + 3
    machine = {"processor": "A", "cores": 16, "memory": 2**34}
    idle = planned | {"hardware": {"processor": "C", "cores": 1, "gpus": []}}
    planned["hardware"] = machine | {"gpus": ["H100"]}
    events[other:other] = [idle, planned | {"hardware": machine | {"processor": "B"}}]
    write_ledger(study, events)
    assert reproduced(read(study.folder), study.folder, "run", study).facts["Machine"] == (
        "A, 16 cores, H100; B, 16 cores, no GPU"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"date": "yesterday"}, "must be a day"), ({"reason": " "}, "reason is empty")],
)
def test_an_amendment_has_a_day_a_change_and_a_reason(change: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AmendmentConfig(**(AMENDED[0] | change))


def test_every_claim_states_its_own_statistic(tiny: Tiny) -> None:
    checks = [
        claim("a", value={"row": "float32", "at_most": 2.5}),
        claim("b", ranks={"of": "row", "blocks": ["data.name"], "best": "float32"}),
    ]
    study = tiny("statistics", f"claims={json.dumps(checks)}").to_dict()
    found = {each["name"]: each["statistic"] for each in statement(study, {})["claims"]}
    assert found == {"a": STATISTICS["value"], "b": STATISTICS["ranks"]}
    assert "Friedman" in found["b"]
    assert "Student" not in found["b"]


def test_a_ledger_of_an_earlier_version_keeps_its_digest(tiny: Tiny) -> None:
    """It stated one statistic for all claims; only the version has changed since."""
    checks = json.dumps([claim(value={"row": "float32", "at_most": 2.5})])
    study = tiny("earlier", f"claims={checks}")
    events, old = made_up_events(study), statement(study.to_dict(), {}, statistics=False)
    assert old["statistic"] == STATISTIC
    plan = next(event for event in events if event["event"] == "planned")
    plan["stated"] = {"digest": digest(old), "code": {}}
    said = stated(fold(events))
    assert said is not None
    assert said.digest == digest(old) != state_claims(study.to_dict())["digest"]
    assert not said.changed
    assert not said.claims
    assert not differences_of(plan, study.to_dict())


def test_the_nearest_rival_has_its_own_resolution(tiny: Tiny) -> None:
    """The spread of another row is ten times as large."""
    rows = (
        "rows=[{label: a}, {label: b, overrides: {epochs: 4}}, {label: c, overrides: {epochs: 5}}]"
    )
    checks = json.dumps([claim(no_row_beats={"row": "a"})])
    study = tiny("rivals", FIVE, rows, "baseline=null", f"claims={checks}")
    near = [x + y for x, y in zip(BETTER, (0.2, 0.1, 0.3, 0.2, 0.1), strict=True)]
    far = [x + 10 * y for x, y in zip(BETTER, (0.9, -0.1, 0.6, 0.2, 0.7), strict=True)]
    (found,) = judge(fold(with_errors(study, {"a": BETTER, "b": near, "c": far})), study.folder)
    first, second = found.note.split(" from it, of ")
    assert first.startswith("nearest rival: b; 5 seeds show a difference of ")
    assert float(first.split()[-2]) < 1 < float(second.split()[0])
    assert second.endswith("from c")


@pytest.mark.parametrize("length", range(80, 100))
def test_a_picture_s_name_is_in_one_line_of_the_page(length: int, tmp_path: Path) -> None:
    part = Reproduced(
        name="m", slug="memory-small", question="?", claims=[], facts={}, picture=b"x",
        alt=f"Lines: {'x' * (length - 30)}",
    )  # fmt: skip
    assert "](memory-small.png)" in write_page([part], tmp_path).read_text()


def test_pictures_of_the_page_are_pictures_of_the_report() -> None:
    assert set(PICTURES) <= TITLES.keys()
    assert load("examples/gans/study.yaml", download=False).picture == "best_of_k"
    with pytest.raises(ValueError, match="picture"):
        load("examples/gans/study.yaml", ["picture=none_such"], download=False)


def test_a_study_whose_code_lies_elsewhere_states_the_same(tiny: Tiny, tmp_path: Path) -> None:
    def plan(place: str, source: str, time: float) -> dict[str, Any]:
        (tmp_path / place).mkdir()
        (tmp_path / place / "net.py").write_text(f"def make(): {source}\n")
        study = tiny("moved", FIVE, f"trial.loss.name={tmp_path / place}/net.py:make")
        _, *rest = made_up_events(study)
        first = made_up_events(study)[0]
        stated = state_claims(study.to_dict())
        return first | {"study": study.to_dict(), "stated": stated, "time": time, "rest": rest}

    before = plan("here", "return 1", 1.0)
    events = [event for event in before.pop("rest") if event["event"] == "report"]
    for place, source, changed in (("there", "return 1", []), ("elsewhere", "return 2", ["trial"])):
        said = stated(fold([before, *events, plan(place, source, 9e9)]))
        assert said is not None
        assert (said.changed, said.claims) == (changed, {})
