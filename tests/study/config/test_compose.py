"""Configs from YAML and overrides: merging, refusals, and their messages."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from study.config import StudyConfig
from study.config.compose import change, load, override_trial
from tests.study.conftest import TINY
from trainers.config import PrecisionConfig, TrialConfig


def test_table_is_the_published_recipe() -> None:
    study = load("table")
    trial = study.trial
    assert (trial.epochs, trial.batch_size, trial.optimizer.lr, trial.model.hidden) == (
        20,
        128,
        0.1,
        [512],
    )
    assert (trial.data.name, trial.data.train_size, trial.data.validation_size) == (
        "mnist",
        None,
        10_000,
    )
    assert [row.published for row in study.rows] == [2.14, 2.12, 3.62, 2.29]
    assert len(study.seeds) >= 3


def test_quickstart_is_the_table_with_a_small_budget() -> None:
    table, quick = load("table"), load("quickstart", ["data=mnist"])
    assert quick.rows == table.rows
    assert quick.seeds == table.seeds
    assert quick.trial.epochs < table.trial.epochs
    assert dataclasses.replace(quick.trial, epochs=20, data=table.trial.data) == table.trial
    assert quick.name != table.name


DIGITS = PrecisionConfig(format="lns(10,4)"), [128], 20, 128
"""The quickstart's own recipe for digits: format, network, epochs, batch."""


def recipe(study: StudyConfig) -> tuple[PrecisionConfig, list[int], int, int]:
    return (
        study.trial.precision,
        study.trial.model.hidden,
        study.trial.epochs,
        study.trial.batch_size,
    )


@pytest.mark.parametrize("chosen", ["data=digits", "trial.data.name=digits"])
def test_digits_by_name_have_their_own_recipe_too(chosen: str) -> None:
    assert recipe(load("quickstart", [chosen])) == DIGITS
    assert recipe(load("table", [chosen])) == recipe(load("table"))


def test_digits_take_five_seeds_and_mnist_three(tmp_path: Path) -> None:
    assert load("quickstart", ["data=mnist"]).seeds == [0, 1, 2]
    assert load("quickstart", ["data=digits"]).seeds == [0, 1, 2, 3, 4]
    assert load("quickstart", ["data=digits", "seeds=[7]"]).seeds == [7]
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + "digits: {epochs: 2, seeds: [4, 5]}\n")
    study = load(str(path), ["trial.data.name=digits"])
    assert (study.seeds, study.trial.epochs) == ([4, 5], 2)
    assert change(study, ["seeds=[4]"]).seeds == [4]
    with pytest.raises(ValueError, match=r"seeds"):
        load(str(path), ["trial.data.name=digits", "digits={seeds: [1, 1]}"])
    with pytest.raises(ValueError, match=r"rows"):
        load(str(path), ["digits={rows: []}"])


def test_the_command_line_wins_over_the_recipe_of_digits() -> None:
    changed = recipe(load("quickstart", ["data=digits", "precision=lns16", "trial.epochs=2"]))
    assert changed == (PrecisionConfig(format="lns16"), [128], 2, 128)
    assert recipe(load("quickstart", ["model=mlp_512", "trial.data.name=digits"])) == (
        DIGITS[0],
        [512],
        *DIGITS[2:],
    )


def test_overrides_win_over_files_and_groups_swap() -> None:
    study = load(
        "table", ["trial.epochs=3", "seeds=[0,1]", "model=mlp_128", "trial.data.train_size=6000"]
    )
    assert (
        study.trial.epochs,
        study.seeds,
        study.trial.model.hidden,
        study.trial.data.train_size,
    ) == (3, [0, 1], [128], 6000)


def test_keys_of_a_trial_are_written_as_in_rows_and_groups_stay_groups() -> None:
    short = load(
        "table",
        [
            "precision.format=lns12",
            "epochs=3",
            "data.train_size=6000",
            "optimizer={name: adam}",
            "search.seed=0",
            "model=mlp_128",
        ],
    )
    names = [
        "trial.precision.format=lns12",
        "trial.epochs=3",
        "trial.data.train_size=6000",
        "trial.optimizer.name=adam",
    ]
    assert short == load("table", [*names, "model=mlp_128"])
    assert load("table", ["precision=lns16"]).trial.precision == PrecisionConfig(format="lns16")
    assert change(short, ["epochs=5"]).trial.epochs == 5


def test_a_group_that_the_study_does_not_list_is_merged_last(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\ntrial: {model: {hidden: [7]}}\n")
    assert load(str(tmp_path / "mine"), ["model=mlp_128"]).trial.model.hidden == [128]


def test_self_places_the_body_among_the_groups(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "groups: [_self_, model/mlp_128]\ntrial: {model: {hidden: [7]}}\n"
    )
    (tmp_path / "b.yaml").write_text("groups: [model/mlp_128]\ntrial: {model: {hidden: [7]}}\n")
    assert load(str(tmp_path / "a.yaml")).trial.model.hidden == [128]
    assert load(str(tmp_path / "b.yaml")).trial.model.hidden == [7]


def test_configs_in_the_working_folder_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf/study").mkdir(parents=True)
    (tmp_path / "conf/study/table.yaml").write_text("name: my-table\n")
    monkeypatch.chdir(tmp_path)
    assert load("table").name == "my-table"


def test_the_name_of_an_example_is_refused_with_its_file() -> None:
    with pytest.raises(ValueError, match=r"'capsules': an example .* examples/capsules/study.yaml"):
        load("capsules")
    assert load("examples/capsules/study.yaml", small=True).name == "capsules-small"


def test_a_study_survives_the_way_to_json_and_back() -> None:
    study = load("table")
    assert StudyConfig.from_dict(study.to_dict()) == study


@pytest.mark.parametrize(
    "overrides",
    [{"precision.scope": "matmul"}, {"precision": {"scope": "matmul"}}, ["precision.scope=matmul"]],
)
def test_row_overrides_nested_dotted_or_listed(overrides: object) -> None:
    assert override_trial(TrialConfig().to_dict(), overrides)["precision"]["scope"] == "matmul"


REFUSED = [
    (
        ["search", "search.objectives={validation/eror: min}"],
        ["search: validation/eror", "a trial reports loss, error", "validation/error"],
    ),
    (["search", "search.objectives={error: min}"], ["search: error", "validation/error"]),
    (
        ["search", "search.constraints={train/r2: '<= 1'}"],
        ["search: train/r2", "of the train examples a trial reports loss, error"],
    ),
    (
        ["search", "search.objectives={seconds: min}", "search.scheduler=asha"],
        ["search.scheduler=asha", "seconds after each epoch", "validation/error"],
    ),
    (["tabel"], ["tabel", "table", "did you mean"]),
    (["table", "foo"], ["'foo'", "key=value"]),
    (["table", "trial.epoch=3"], ["trial.epoch", "unknown key", "trial.epochs"]),
    (["table", "sedes=[0]"], ["sedes", "seeds"]),
    (["table", "trial.epochs=abc"], ["trial.epochs", "abc", "whole number"]),
    (["table", "trial.epochs=0"], ["epochs=0", "at least 1", "epochs=20"]),
    (
        ["table", "trial.data.train_size=x"],
        ["'x'", "whole number or null", "trial.data.train_size=2"],
    ),
    (["table", "trial.model=7"], ["trial.model: 7", "must be a mapping with the keys name, args"]),
    (["table", "seeds=3"], ["seeds: 3", "must be a list", "seeds=[0,1]"]),
    (
        ["table", "seeds=[0,a]"],
        ["seeds[1]: 'a'", "every entry must be a whole number", "seeds=[0,1]"],
    ),
    (["table", "seeds=[[1]]"], ["seeds=[[1]]", "whole number", "seeds=[0]"]),
    (["table", "seeds[0]=1"], ["seeds[0]=1", "cannot be set one by one", "seeds=[0,1]"]),
    (["table", "seeds=[1,1]"], ["seeds", "more than once"]),
    (["table", "seeds=[]"], ["seeds", "at least one"]),
    (["table", "model=mlp_12"], ["mlp_12", "mlp_128, mlp_512"]),
    (["table", "trial.precision.format=lns99"], ["lns99", "lns16"]),
    (["table", "trial.precision.format=lns(8,7)"], ["fraction_bits=7", "at most 6"]),
    (["table", "tracking_uri=file:/x"], ["file:/x", "sqlite:///"]),
    (["table", "trial.batch_size=3", "trial.workers=2"], ["batch_size=3", "workers=2", "multiple"]),
    (["table", "rows=[{label: x, publishd: 3}]", "baseline=null"], ["publishd", "published"]),
    (
        ["table", "rows=[{label: x, published: y}]"],
        ["rows[].published", "'y'", "must be a number or null", "`published: 2.5`"],
    ),
    (
        ["table", "rows=[{label: x, comparable: 3}]"],
        ["rows[].comparable", "must be a mapping", "`comparable: {epochs: 3}`"],
    ),
    (
        ["table", "rows=[{label: x, comparable: {epoch: 3}}]", "baseline=null", "claims=[]"],
        ["row 'x': comparable: epoch", "'epochs'"],
    ),
    (
        ["table", "rows=[{label: x, within: -1}]", "baseline=null"],
        ["row 'x': within=-1.0", "at least 0", "within: 0.2"],
    ),
    (["table", "rows=[{label: x, worse_by: .nan}]", "baseline=null"], ["row 'x': worse_by=nan"]),
    (["table", "rows=[{label: x, published: .inf}]", "baseline=null"], ["row 'x': published=inf"]),
    (
        ["table", "rows=[a]"],
        ["rows[0]: 'a'", "must be a mapping with the keys label, overrides", "{label: a"],
    ),
    (["table", "rows=[{label: x}]", "baseline=null"], ["names the row", "rows are x", "claims=[]"]),
    (["table", "rows=[{label: x}]"], ["baseline", "float32", "baseline=null"]),
    (["table", "rows=[{published: 1.0}]"], ["label"]),
    (["table", "comparable={epoch: 3}"], ["comparable: epoch: unknown key", "'epochs'"]),
    (["table", "comparable_seeds=0"], ["comparable_seeds=0", "at least 1"]),
    (["table", "digits={epoch: 3}"], ["digits: epoch: unknown key", "'epochs'"]),
    (["table", "digits={epochs: many}"], ["digits: epochs: 'many'", "whole number", "epochs=20"]),
    (["table", "name=[a"], ["name=[a", "YAML"]),
    (["table", "trial.model.args=abc"], ["'abc'", "must be a mapping", "args={activation: relu}"]),
    (["table", "name=///"], ["name='///'", "letter of A to Z or a digit"]),
    (["table", "name=αβ"], ["name='αβ'", "letter of A to Z or a digit", "name=table"]),
    (["table", "name=a: b"], ["name: {'a': 'b'}", "must be text", "stands in quotes"]),
    (["table", "name=../mine"], ["name='../mine'", "must not hold", "name=mine"]),
    (["table", "model=../study/table"], ["model=../study/table", "without folders", "mlp_128"]),
    (["table", "trial=null"], ["trial"]),
    (
        ["table", "trial.lerning_rate=1"],
        ["trial.lerning_rate: unknown key (did you mean 'trial.optimizer.lr'?)"],
    ),
    (["table", "trial.optimizer.learning_rate=1"], ["(did you mean 'trial.optimizer.lr'?)"]),
    (["table", "lr=1"], ["(did you mean 'trial.optimizer.lr'?)"]),
    (
        ["table", "precision.fromat=lns12"],
        ["trial.precision.fromat", "(did you mean 'trial.precision.format'?)"],
    ),
    (["table", "trial.optimizer.epochs=1"], ["(did you mean 'trial.epochs'?)"]),
    (
        ["energy", "trial.telemetry=false"],
        ["search: telemetry/modelled_joules", "do not report it; set trial.telemetry=true"],
    ),
    (["table", "limits.joules=5"], ["limits.joules=5", "set trial.telemetry=true"]),
    (["table", "serch.num_samples=1"], ["(did you mean 'search.num_samples'?)"]),
    (["table", "epochs=0"], ["epochs=0", "at least 1"]),
    (["table", "zzzzzz=1"], ["zzzzzz: unknown key; "]),
    (["table", "cpus=0"], ["cpus=0", "at least 1"]),
    (["table", "name=a/b"], ["name='a/b'", "must not hold /", "name=a-b"]),
    (["table", f"name={'x' * 300}"], ["name='xxx", "300 bytes", "at most 250"]),
    (["table", 'name="a\\e[31m"'], ["control characters"]),
    (["table", "name=artifacts"], ["name='artifacts'", "name=my-artifacts"]),
    (["table", "name=mlflow.db"], ["name='mlflow.db'", "name=my-mlflow.db"]),
    (
        ["table", f"rows=[{{label: {'x' * 300}}}]", "baseline=null", "claims=[]"],
        ["label", "300 bytes", "at most 250"],
    ),
    (["table", "trial.epochs=999999999999"], ["epochs=999999999999", "below 2^20"]),
    (["table", "seeds=&a [*a]"], ["alias (*) of itself"]),
    (
        ["table", "rows={a: {epochs: 3}}"],
        ["rows: {'a': {'epochs': 3}}", "must be a list", "rows=[{label: a, overrides"],
    ),
    (["table", "seeds={a: 1}"], ["seeds: {'a': 1}", "must be a list", "seeds=[0,1]"]),
    (
        ["table", "rows.0.label=x"],
        ["'rows.0.label=x'", "the entries of a list cannot be set one by one", "the whole list"],
    ),
    (["table", "seeds.1=7"], ["'seeds.1=7'", "one by one", "seeds=[0,1]"]),
]


@pytest.mark.parametrize(
    ("arguments", "said"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED]
)
def test_refusals_name_value_rule_and_remedy(arguments: list[str], said: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        load(arguments[0], arguments[1:])
    message = str(refusal.value)
    assert all(part in message for part in said), message
    assert "Error" not in message
    assert "; " in message, message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (7, r"overrides=7: must be a mapping or a list of key=value; use"),
        (["epochs"], r"overrides=\['epochs'\]: must be a mapping or a list of key=value; use"),
        ({"epoch": 3}, r"overrides: epoch: unknown key \(did you mean 'epochs'\?\); `lns-study"),
        (
            {"epochs": "x"},
            (
                r"overrides: epochs: 'x' is not possible; it must be a whole number, for example"
                r" epochs=20"
            ),
        ),
    ],
)
def test_bad_row_overrides(overrides: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        override_trial(TrialConfig().to_dict(), overrides)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "must be YAML"),
        ("- a", "mapping"),
        ("groups: 3", "groups=3"),
        ("nmae: x", "nmae"),
        ("# name: x", "holds nothing; start with `name: my-study`"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "${oc.${name}:HOME}",
        "${oc.decode:'${oc.env:HOME}'}",
        "a ${oc.create:{a: 1}} b",
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        "question: {0}",
        "trial: {{data: {{root: {0}}}}}",
        "rows: [{{label: {0}}}]",
        "digits: {{autocast: {0}}}",
    ],
)
def test_a_study_cannot_read_the_environment(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "mine.yaml").write_text(place.format(json.dumps(text)))
    with pytest.raises(ValueError, match=r"may only name another key of the study"):
        load(str(tmp_path / "mine.yaml"))


def test_a_study_may_name_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nquestion: is ${name} ${.trial.epochs} epochs?\ntrial: {epochs: 3}\n"
    )
    assert load(str(tmp_path / "mine.yaml")).question == "is mine 3 epochs?"


def bomb(line: str) -> str:
    """Twelve lines; each contains the line before it eight times."""
    return "".join(
        f"x{b}: &{b} {line.format(', '.join([f'*{a}'] * 8))}\n"
        for a, b in pairwise("abcdefghijklm")
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "name: a\nseeds: [0]\nname: b\n",
            r"mine.yaml: .*key 'name' stands twice, first in line 1; keep one.*line 3",
        ),
        (
            "trial:\n  epochs: 3\n  'epochs': 4\n",
            r"key 'epochs' stands twice, first in line 2; keep one.*line 3",
        ),
        ("seeds: &a [*a]\n", r"alias \(\*\) of itself"),
        ("rows: " + "[" * 5000, r"nested too deeply"),
        ("x: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + bomb("[{}]"), r"its aliases \(\*\) make"),
        ("x: &a {k: 1, l: 2}\n" + bomb("{{<<: [{}]}}"), r"its aliases \(\*\) make"),
    ],
    ids=["twice", "twice within", "itself", "deep", "bomb", "bomb of merges"],
)
def test_yaml_that_means_something_else_than_it_says_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path / "mine.yaml"))


def test_aliases_and_merges_of_a_study_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nrows:\n- &a {label: a, overrides: &o {epochs: 3}}\n- {<<: *a, label: b}\n-"
        " {label: c, overrides: *o}\n"
    )
    assert [
        (row.label, row.overrides["epochs"]) for row in load(str(tmp_path / "mine.yaml")).rows
    ] == [("a", 3), ("b", 3), ("c", 3)]


def test_auto_data_without_mnist_are_digits_with_their_own_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LNS_STUDY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LNS_STUDY_MNIST_URL", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    study = load("quickstart", say=said.append)
    assert len(said) == 1
    assert "MNIST is not found" in said[0]
    assert "http://127.0.0.1:9/train-images" in said[0]
    assert study.trial.data.name == "digits"
    assert recipe(study) == DIGITS
    assert load("quickstart", ["trial.epochs=2"]).trial.epochs == 2
    assert recipe(load("quickstart", ["precision=lns16"])) == (
        PrecisionConfig(format="lns16"),
        *DIGITS[1:],
    )
    with pytest.raises(ValueError, match=r"data.root=.*lacks train-images"):
        load("quickstart", [f"trial.data.root={tmp_path}"])


def test_groups_that_lead_back_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "study"
    folder.mkdir(parents=True)
    (folder / "loop.yaml").write_text("groups: [study/detour]\n")
    (folder / "detour.yaml").write_text("groups: [study/loop]\n")
    with pytest.raises(ValueError, match=r"study/loop -> study/detour -> study/loop"):
        load(str(folder / "loop.yaml"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"does \${trial.epochs} matter?", "does ${trial.epochs} matter?"),
        (r"\${oc.env:HOME}", "${oc.env:HOME}"),
        (r"a \\\${b} c\d \${", "a \\${b} c\\d ${"),
        (r"epochs: ${trial.epochs}, \${name}", "epochs: 3, ${name}"),
    ],
)
def test_an_escaped_reference_is_text_wherever_the_study_goes(
    tmp_path: Path, written: str, read: str
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"question: '{written}'\n")
    study = load(str(path))
    assert study.question == read
    again = StudyConfig.from_dict(json.loads(json.dumps(study.to_dict())))
    assert change(again, ["seeds=[0,1]"]).question == read
    assert change(change(again, []), []) == study


def test_any_text_of_a_study_survives_a_change() -> None:
    study = load("quickstart", ["data=digits"])

    @settings(max_examples=40)
    @given(st.text(alphabet="\\${}a.: ", max_size=12))
    def survives(text: str) -> None:
        assert change(dataclasses.replace(study, question=text), []).question == text

    survives()


def test_text_of_a_row_stays_text_in_its_trials() -> None:
    root = "${oc.env:HOME}"
    for overrides in ({"data.root": root}, [f"data.root={root}"], {"data": {"root": root}}):
        trial = override_trial(TrialConfig().to_dict(), overrides)
        assert trial["data"]["root"] == root
        assert override_trial(trial, None) == trial


@pytest.mark.parametrize("entry", ["../../x", "model/../../x", "./model/mlp_512"])
def test_a_group_that_is_a_path_is_refused_as_it_was_written(tmp_path: Path, entry: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"name: mine\ngroups: [{entry}]\n")
    with pytest.raises(ValueError, match=rf"groups: {re.escape(entry)}: must be GROUP/FILE"):
        load(str(tmp_path / "mine.yaml"))
