"""Trial ids: stable, computed from content, and refused if two rows have the same trials."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.io import savemat

from study.config import RowConfig, StudyConfig
from study.engines.preflight import check_elastic
from study.errors import UserError
from study.ledger.state import StudyState, fold
from study.plan.identity import trial_id
from study.plan.plan import make_plan
from study.plan.trials import PlannedTrial
from study.search.agenda import Agenda
from trainers.config import DataConfig, LossConfig, ModelConfig, PrecisionConfig, TrialConfig

Tiny = Callable[..., StudyConfig]


def test_rows_times_seeds_seeds_slowest(tiny: Tiny) -> None:
    plan = make_plan(tiny("plan", "seeds=[0,1]"))
    assert [(trial.seed, trial.row) for trial in plan.trials] == [
        (0, "float32"),
        (0, "lns matmul"),
        (1, "float32"),
        (1, "lns matmul"),
    ]
    assert all(trial.config.seed == trial.seed for trial in plan.trials)


def test_more_seeds_keep_the_ids_there_were(tiny: Tiny) -> None:
    few, many = make_plan(tiny("plan")), make_plan(tiny("plan", "seeds=[0,1,2]"))
    assert {trial.id for trial in few.trials} < {trial.id for trial in many.trials}
    assert few.key != many.key
    assert make_plan(tiny("plan")).key == few.key


def test_the_id_ignores_the_folder_of_the_data_and_nothing_else() -> None:
    base = TrialConfig(data=DataConfig(name="mnist", root="/a"))
    assert trial_id(base) == trial_id(
        dataclasses.replace(base, data=DataConfig(name="mnist", root="/b"))
    )
    others = [
        dataclasses.replace(base, **change)
        for change in ({"seed": 1}, {"epochs": 1}, {"workers": 2}, {"threads": 2})
    ]
    assert len({trial_id(config) for config in [base, *others]}) == 5


def test_the_id_is_pinned() -> None:
    """Changing how ids are computed would make every finished study run again."""
    config = TrialConfig(data=DataConfig(name="digits", validation_size=300))
    assert trial_id(config) == trial_id(TrialConfig.from_dict(config.to_dict())) == "3f8d88803dfd"
    lns = dataclasses.replace(
        config, precision=PrecisionConfig(format="lns12", kahan_sum=True), seed=3
    )
    assert trial_id(lns) == "c07f3e0f13e6"


def test_only_ray_train_changes_the_number_of_workers(tiny: Tiny) -> None:
    elastic = ("trial.workers=2", "trial.min_workers=1")
    check_elastic(make_plan(tiny("plan", *elastic, "gang=train")))
    with pytest.raises(ValueError, match=r"row 'float32': min_workers=1: .*; use gang=train"):
        check_elastic(make_plan(tiny("plan", *elastic)))


def test_twins_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="same trial"):
        make_plan(tiny("plan", "rows=[{label: a}, {label: b}]", "baseline=null"))


COINCIDING = "rows=[{label: base}, {label: adam, overrides: {optimizer: {name: adam}}}]"


@pytest.mark.parametrize(
    "search", ["{algorithm: grid}", "{algorithm: tpe}", "{scheduler: pbt, num_samples: 4}"]
)
@pytest.mark.parametrize(
    "domain",
    [
        "optimizer.name: {choice: [sgd, adam]}",
        "optimizer: {choice: [{name: sgd, momentum: 0.1}, {name: adam}]}",
    ],
)
def test_a_key_that_a_row_and_the_space_set_is_refused(
    tiny: Tiny, search: str, domain: str
) -> None:
    grid = domain.replace("choice", "grid")
    space = (
        f"space={{{grid if 'pbt' in search else domain}, optimizer.lr: {{choice: [0.01, 0.02]}}}}"
    )
    if "pbt" in search:
        space = space.replace("{choice: [0.01, 0.02]}", "{uniform: [0.01, 0.02]}")
    with pytest.raises(
        ValueError, match=r"row 'adam': optimizer\.name: .* space.* take it out of one of them"
    ):
        make_plan(tiny("plan", COINCIDING, "baseline=null", space, f"search={search}"))


def test_a_key_that_two_domains_set_is_refused(tiny: Tiny) -> None:
    space = (
        "space={precision.format: {choice: [lns12, lns16]}, precision: {choice: [{format: float32},"
        " {scope: matmul}]}}"
    )
    with pytest.raises(
        ValueError,
        match=r"space\.precision\.format and space\.precision: both set precision\.format",
    ):
        make_plan(tiny("plan", "rows=[]", "baseline=null", space))


def test_keys_beside_those_of_the_space_are_a_rows_own(tiny: Tiny) -> None:
    space = (
        "space={optimizer: {choice: [{lr: 0.01}, {lr: 0.02}]}, precision: {choice: [{format:"
        " lns12}, {format: float32}]}}"
    )
    rows = COINCIDING.replace(
        "{label: base}", "{label: base, overrides: {precision.accumulation: float32}}"
    )
    plan = make_plan(tiny("plan", rows, "baseline=null", space, "search={algorithm: grid}"))
    assert len({trial.id for trial in plan.trials}) == len(plan.trials) == 8


@pytest.mark.parametrize(
    "search",
    [
        "{algorithm: random, num_samples: 3}",
        "{algorithm: tpe}",
        "{scheduler: halving}",
        "{scheduler: pbt}",
    ],
)
def test_searched_rows_that_are_the_same_are_refused(tiny: Tiny, search: str) -> None:
    rows = "rows=[{label: a}, {label: b, overrides: {optimizer.name: sgd}}]"
    with pytest.raises(ValueError, match="rows 'a' and 'b' with seed 0: both are the same trial"):
        make_plan(
            tiny(
                "plan",
                rows,
                "baseline=null",
                "space={optimizer.lr: {loguniform: [0.01, 0.1]}}",
                f"search={search}",
            )
        )


def test_a_trial_enters_a_plan_and_an_agenda_once(tiny: Tiny) -> None:
    plan = make_plan(tiny("plan"))
    with pytest.raises(ValueError, match="both are the same trial"):
        dataclasses.replace(
            plan, trials=(*plan.trials, dataclasses.replace(plan.trials[0], row="again"))
        )
    state = fold([{"event": "planned", "time": 0.0, **plan.to_event()}])
    agenda = Agenda(plan, state, lambda trial: None)
    agenda._confirmations = [Twin(plan.trials[0])]  # type: ignore[list-item]
    assert [agenda.next(), agenda.next()] == list(plan.trials)
    with pytest.raises(
        UserError, match="rows 'float32' and 'again' with seed 0: both are the same trial"
    ):
        agenda.next()


class Twin:
    """Request a trial again, under another label."""

    exhausted = False

    def __init__(self, trial: PlannedTrial) -> None:
        self._trial = dataclasses.replace(trial, row="again")

    def next(self, state: StudyState) -> list[PlannedTrial]:
        """Return the same trial every time."""
        return [self._trial]


def test_a_ledger_with_twins_counts_a_seed_once(tiny: Tiny) -> None:
    """Earlier versions wrote such ledgers."""
    planned = make_plan(tiny("plan")).to_event()
    planned["trials"].append(planned["trials"][0] | {"row": "again"})
    state = fold([{"event": "planned", "time": 0.0, **planned}])
    assert {row: len(trials) for row, trials in state.rows().items()} == {
        "float32": 0,
        "again": 1,
        "lns matmul": 1,
    }


def test_a_row_with_an_impossible_format_names_the_row(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"row 'bad'.*lns99"):
        make_plan(
            tiny(
                "plan", "rows=[{label: bad, overrides: {precision.format: lns99}}]", "baseline=null"
            )
        )


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())


def test_rows_read_the_collection_of_music_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LNS_STUDY_DATA", str(tmp_path))
    folder = tmp_path / "piano_rolls"
    folder.mkdir()
    for seed, name in enumerate(("JSB_Chorales", "Nottingham")):
        pieces = np.empty((1, 1), object)
        pieces[0, 0] = (np.random.default_rng(seed).random((20, 88)) < 0.1).astype(np.uint8)
        parts = dict.fromkeys(("traindata", "validdata", "testdata"), pieces)
        savemat(folder / f"{name}.mat", parts)
    study = StudyConfig(
        trial=TrialConfig(
            data=DataConfig(name="piano_rolls", args={"context": 4}),
            model=ModelConfig(name="lstm"),
            loss=LossConfig(name="binary_cross_entropy"),
            batch_size=2,
        ),
        rows=[
            RowConfig(label="chorales"),
            RowConfig(label="folk", overrides={"data.args.collection": "Nottingham"}),
            RowConfig(label="own", overrides={"data.root": str(folder / "Nottingham.mat")}),
        ],
    )
    chorales, folk, own = (trial.config.data for trial in make_plan(study).trials)
    assert chorales.root == str(folder / "JSB_Chorales.mat")
    assert folk.root == own.root == str(folder / "Nottingham.mat")
    assert chorales.code != folk.code


def test_rows_of_another_set_read_its_files_though_the_names_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LNS_STUDY_DATA", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 255, (40, 28, 28), np.uint8)
    for name in ("fashion_mnist", "kmnist"):
        (tmp_path / name).mkdir()
        for part in ("train", "t10k"):
            write_idx(tmp_path / name / f"{part}-images-idx3-ubyte", images)
            write_idx(tmp_path / name / f"{part}-labels-idx1-ubyte", images[:, 0, 0] % 10)
    study = StudyConfig(
        trial=TrialConfig(data=DataConfig(name="fashion_mnist", validation_size=5), batch_size=2),
        rows=[
            RowConfig(label="clothes"),
            RowConfig(label="kana", overrides={"data.name": "kmnist"}),
        ],
    )
    roots = [trial.config.data.root for trial in make_plan(study).trials]
    assert roots == [str(tmp_path / name) for name in ("fashion_mnist", "kmnist")]


def test_a_study_without_rows_is_one_row(tiny: Tiny) -> None:
    plan = make_plan(tiny("plan", "rows=[]", "baseline=null"))
    assert [trial.row for trial in plan.trials] == ["plan"]


@pytest.mark.parametrize("override", ["trial.seed=7", "rows=[{label: a, overrides: {seed: 7}}]"])
def test_a_seed_where_it_would_be_ignored_is_refused(tiny: Tiny, override: str) -> None:
    with pytest.raises(ValueError, match=r"seed=7: .*use seeds=\[7\]"):
        make_plan(tiny("plan", override, "baseline=null"))


SPACE = "space={optimizer.lr: {loguniform: [0.001, 1]}}"
GRID = ", ".join(
    f"{key}: {{grid: {[*range(1, 31)]}}}"
    for key in ("epochs", "batch_size", "threads", "workers", "analysis_every", "layout.pp")
)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["trial.model.hidden=[100000000]"],
            r"row 'float32': model.hidden=\[100000000\], 7.4e\+09 parameters: needs 55 GiB",
        ),
        (
            ["trial.model={name: cnn, channels: [10000000, 10000000]}"],
            r"9e\+14 parameters: needs [0-9,]+ GiB at the least, and this",
        ),
        (
            [f"seeds={[*range(100)]}", SPACE, "search.num_samples=1000000"],
            r"2e\+08 trials: needs [0-9,]+ GiB at the least.*num_samples",
        ),
        (
            [f"space={{{GRID}}}", "search.algorithm=grid"],
            r"space: 7.29e\+08 points: needs 174 GiB at the least",
        ),
    ],
)
def test_what_this_machine_cannot_hold_is_refused_with_figures(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    monkeypatch.setattr("trainers.config.validation.memory", lambda: 16 * 2**30)
    with pytest.raises(ValueError, match=said):
        make_plan(tiny("plan", *overrides))


def test_a_cluster_may_hold_more_than_this_machine(tiny: Tiny) -> None:
    plan = make_plan(tiny("plan", "trial.model.hidden=[100000000]", "address=10.0.0.1:6379"))
    assert len(plan.trials) == 2


def test_a_sampled_net_that_is_too_large_is_left_out(tiny: Tiny) -> None:
    space = "space={model.hidden: {grid: [[16], [1000000000000]]}}"
    excluded, *_ = make_plan(tiny("plan", space)).excluded
    assert "GiB at the least" in excluded.reason
