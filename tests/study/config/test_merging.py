"""How later files and overrides change a mapping: merged, emptied by ``{}``, one key removed by
null."""

from __future__ import annotations

from pathlib import Path

import pytest

from study.config import StudyConfig
from study.config.compose import as_overrides, load, override_trial
from study.plan.plan import make_plan
from tests.study.conftest import TINY

pytestmark = pytest.mark.unit

SEARCHED = """
space: {optimizer.lr: {choice: [0.1, 0.2]}, batch_size: {choice: [32, 64]}}
search: {algorithm: tpe, num_samples: 3, constraints: {bits: '<= 32'}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "searched.yaml"
    path.write_text(TINY + SEARCHED)
    return str(path)


def test_a_search_is_run_at_one_point(file: str) -> None:
    study = load(file, ["space={}", "search={}", "optimizer.lr=0.3"])
    assert study.space == {}
    assert study.search == StudyConfig(trial=study.trial).search
    assert [trial.params for trial in make_plan(study).trials] == [{}, {}]
    assert {trial.config.optimizer.lr for trial in make_plan(study).trials} == {0.3}


def test_a_space_without_a_search_says_how_to_leave_it_out(file: str) -> None:
    with pytest.raises(ValueError, match=r"no space to search.*search=\{\}"):
        load(file, ["space={}"])


def test_an_empty_mapping_empties_and_what_follows_replaces(file: str) -> None:
    new = "space.optimizer.momentum={choice: [0.1, 0.2]}"
    assert list(load(file, [new]).space) == ["optimizer.lr", "batch_size", "optimizer.momentum"]
    assert list(load(file, ["space={}", new]).space) == ["optimizer.momentum"]
    assert load(file, ["search.constraints={}"]).search.constraints == {}
    assert load(file, ["search.constraints={}"]).search.algorithm == "tpe"
    changes = {"space": {}, "space.optimizer.momentum": {"choice": [0.1, 0.2]}}
    assert list(load(file, as_overrides(changes)).space) == ["optimizer.momentum"]


def test_null_takes_one_key_out_of_the_space(file: str, tmp_path: Path) -> None:
    assert list(load(file, ["space.batch_size=null"]).space) == ["optimizer.lr"]
    assert list(load(file, ["space={batch_size: null}"]).space) == ["optimizer.lr"]
    with pytest.raises(ValueError, match=r"space\.epochs: null is not a domain"):
        load(file, ["space.epochs=null"])


def test_a_later_file_empties_too(tmp_path: Path) -> None:
    for folder in ("model", "study"):
        (tmp_path / "conf" / folder).mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text(
        "trial: {model: {name: net.py:make, args: {width: 3, deep: {a: 1}}}}"
    )
    path = tmp_path / "conf/study/mine.yaml"
    for args, wanted in [
        ("{height: 2}", {"width": 3, "deep": {"a": 1}, "height": 2}),
        ("{deep: {b: 2}}", {"width": 3, "deep": {"a": 1, "b": 2}}),
        ("{deep: {}}", {"width": 3, "deep": {}}),
        ("{}", {}),
    ]:
        path.write_text(f"groups: [model/mine]\ntrial: {{model: {{args: {args}}}}}\n")
        assert load(str(path)).trial.model.args == wanted
    path.write_text("groups: [model/mine]\ntrial: {model: {}}\n")
    assert load(str(path)).trial.model.name == "mlp"


@pytest.mark.parametrize(
    ("overrides", "args"),
    [
        ({"model.args.height": 2}, {"width": 3, "height": 2}),
        ({"model": {"args": {"height": 2}}}, {"width": 3, "height": 2}),
        ({"model.args": {}}, {}),
        ({"model": {"args": {}}}, {}),
        ({"model.args": {}, "model.args.height": 2}, {"height": 2}),
        (["model.args={}", "model.args.height=2"], {"height": 2}),
        ({}, {"width": 3}),
        ([], {"width": 3}),
    ],
)
def test_a_row_merges_and_empties_as_a_file_does(
    file: str, overrides: object, args: dict[str, int]
) -> None:
    study = load(file, ["trial.model={}", "model.name=net.py:make", "model.args={width: 3}"])
    base = study.trial.to_dict()
    assert override_trial(base, overrides)["model"]["args"] == args
    assert override_trial(base, overrides)["data"]["name"] == "digits"


def test_rows_are_replaced_as_a_whole(file: str) -> None:
    study = load(file, ["baseline=null", "rows=[{label: other}]"])
    assert [row.label for row in study.rows] == ["other"]
