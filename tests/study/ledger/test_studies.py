"""Existing studies: listed, shown, exported, extended, imported; made-up ledgers, the real command
line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest

from study.api import Study
from study.cli import main
from study.config import LimitsConfig, StudyConfig
from study.engines.control import FILE as CONTROL
from study.engines.control import Control, Wish, ask, reached
from study.errors import UserError
from study.evidence.rerun import differences
from study.evidence.verify import verify
from study.ledger.lock import is_locked
from study.ledger.log import FILE, Ledger, read_ledger
from study.ledger.state import FAILED, FINISHED, StudyState, fold
from study.ledger.studies import find_trial, read
from study.lifecycle import _opened, report_study
from study.plan.estimate import describe_cost, describe_plan
from study.plan.plan import make_plan
from study.report.export import export, write_csv
from study.report.tables import render_csv
from study.results.statistics import costs
from tests.mounts import read_only
from tests.study.conftest import TINY, Tiny, made_up_events, write_ledger
from tests.study.made_up_slots import with_slots


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_list_and_status_and_show(local: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    study = local("first", "seeds=[0,1]")
    events = made_up_events(study)
    write_ledger(study, events)
    write_ledger(local("second"), made_up_events(local("second"))[:4])
    storage = ["--storage", study.storage]
    assert main(["list", *storage]) == 0
    listed = lines(capsys)
    assert listed[0].split() == ["study", "condition", "trials", "best", "last", "heard", "of"]
    assert any(
        line.startswith("first")
        and "finished" in line
        and "4/4" in line
        and "validation/error 6.67 %" in line
        for line in listed
    )
    assert any(
        line.startswith("second") and "interrupted" in line and "0/2" in line for line in listed
    )
    assert main(["status", "first", *storage]) == 0
    shown = "\n".join(lines(capsys))
    trial = fold(events).trials[0]
    assert "4 finished" in shown
    assert trial.id in shown
    assert main(["show", "first", trial.id[:6], *storage]) == 0
    shown = "\n".join(lines(capsys))
    assert "test error: 2.00 %" in shown
    assert "format: float32" in shown
    assert shown.splitlines()[-1].split()[0] == "3"


def test_status_tells_slots(local: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    study = local("slots")
    events = with_slots(made_up_events(study))
    arguments = ["status", "slots", "--storage", study.storage]
    folder = write_ledger(study, events)
    assert main(arguments) == 0
    shown = lines(capsys)
    assert "last run: utilisation 2 % of the CPUs, 0.316 epochs/s" in shown
    # of 500 s, 8.3 each, trials held one of two slots for the first 9 and from the 10th to the 19th
    assert f"slots over time: [{'▄▄▂':60}]" in shown
    (folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:4]))
    with Ledger(folder):
        assert main(arguments) == 0
    (shown,) = (line for line in lines(capsys) if "slots in use" in line)
    # of the 1000 s since it started
    assert shown.startswith("1 of 2 slots in use, utilisation 50 % of the CPUs, 0.00")


def test_a_spreadsheet_computes_nothing_of_what_is_exported(local: Tiny, tmp_path: Path) -> None:
    labels = [
        "=1+1",
        "+cmd|' /C calc'!A0",
        "-2+3",
        "@SUM(A1)",
        "-1.5e-3",
        "plain - text",
        "'quoted",
    ]
    rows = json.dumps(
        [
            {"label": label, "overrides": {"epochs": number + 1}}
            for number, label in enumerate(labels)
        ]
    )
    study = local("formulas", f"rows={rows}", "baseline=null")
    write_ledger(study, made_up_events(study))
    export(read(study.folder), tmp_path / "out.csv", "csv")
    found = [row["row"] for row in csv.DictReader((tmp_path / "out.csv").open())]
    assert found == [
        "'=1+1",
        "'+cmd|' /C calc'!A0",
        "'-2+3",
        "'@SUM(A1)",
        "-1.5e-3",
        "plain - text",
        "'quoted",
    ]
    buffer = io.StringIO()
    write_csv(buffer, ["@a"], [{"@a": "\t=1"}, {"@a": "\r=1"}, {"@a": -2}, {}])
    assert [*csv.reader(io.StringIO(buffer.getvalue(), newline=""))] == [
        ["'@a"],
        ["'\t=1"],
        ["' =1"],
        ["-2"],
        [""],
    ]


def test_nor_of_the_list_of_configurations(local: Tiny) -> None:
    study = local(
        "formulas", 'rows=[{label: "=1+1"}]', "baseline=null", "space={epochs: {grid: [1, 2]}}"
    )
    listed = csv.DictReader(io.StringIO(render_csv(fold(made_up_events(study)))))
    assert [line["row"] for line in listed] == ["'=1+1"] * 2


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_export(local: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str) -> None:
    study = local("exported", "seeds=[0,1]")
    write_ledger(study, made_up_events(study, {"lns matmul": 3.0}))
    path = tmp_path / f"out.{form}"
    assert main(["export", "exported", "--storage", study.storage, "-o", str(path)]) == 0
    assert lines(capsys) == [f"4 trials in {path}"]
    readers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "csv": lambda: list(csv.DictReader(path.open())),
        "json": lambda: json.loads(path.read_text()),
        "parquet": lambda: pandas.read_parquet(path).to_dict("records"),
    }
    rows = readers[form]()
    assert [row["row"] for row in rows] == ["float32", "lns matmul"] * 2
    assert [float(row["test/error"]) for row in rows] == pytest.approx([0.02, 0.03, 0.0201, 0.0301])
    assert [float(row["bits"]) for row in rows] == [32, 12, 32, 12]
    assert all(
        str(row["config.optimizer.lr"]) == "0.1" and row["status"] == "finished" for row in rows
    )
    assert (
        main(["export", "exported", "--storage", study.storage, "-o", str(path), "--epochs"]) == 0
    )
    assert lines(capsys) == [f"12 epochs in {path}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "nowhere"], "no such study"),
        (["status", "thre"], "study 'thre': no such study (did you mean 'there'?) in "),
        (["show", "there", "zzz"], "no trials match"),
        (["pause", "there"], "is not running; to continue it: lns-study run --resume there"),
        (["run", "--extend", "there"], "as it is: `lns-study run --resume there"),
        (["run", "--extend", "there", "name=other"], "would be another study"),
        (["run", "--extend", "there", "trial.epoch=3"], "(did you mean 'trial.epochs'?)"),
        (["run", "--extend", "there", "model=mlp_128"], "set its keys instead"),
        (["run", "--resume", "there", "--small"], "name there-small"),
        (
            ["run", "there", "seeds=[0,1]"],
            "to change it: `lns-study run --extend there 'seeds=[0,1]'",
        ),
        (["run", "--retry-failed", "there", "trial.epochs=9"], "only address, insecure, cpus"),
        (["run", "--resume", "nowhere"], "no such study"),
        (["import", "there", "nowhere"], "no such study"),
        (["export", "there", "-o", "x.xlsx"], "must be one of csv, json, jsonl, parquet"),
        (["export", "there", "-o", "/nowhere/x.csv"], "cannot be written"),
        (["run", "there", "--verify", "zzz"], "no trials match"),
    ],
)
def test_what_cannot_be_done_says_why(
    local: Tiny, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    study = local("there")
    write_ledger(study, made_up_events(study))
    assert main([*arguments, "--storage", study.storage]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["run --resume", "run", "run --extend seeds=[0,1]", "mlflow verify --repair", "mlflow sync"],
)
def test_a_renamed_folder_is_refused_by_what_would_write_to_another(
    local: Tiny, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    study = local("before", f"tracking_uri=sqlite:///{Path(local('x').storage).parent}/m.db")
    copy = write_ledger(study, made_up_events(study)).rename(study.folder.with_name("after"))
    lines_before = (copy / "ledger.jsonl").read_bytes()
    changes = [word for word in words.split() if "=" in word]
    verb = [word for word in words.split() if "=" not in word]
    assert main([*verb, "after", *changes, "--storage", study.storage]) == 2
    assert "renamed folder, or a copy, of the study 'before'" in capsys.readouterr().err
    assert [path.name for path in Path(study.storage).iterdir()] == ["after"]
    assert (copy / "ledger.jsonl").read_bytes() == lines_before
    with pytest.raises(UserError, match="name it before"):
        Study(copy).resume()
    with pytest.raises(UserError, match="name it before"):
        Study(copy).run(seeds=[0, 1])
    with pytest.raises(UserError, match="name it before"):
        Study(copy).ask()
    said: list[str] = []
    report_study(copy, said.append)
    assert "MLflow: nothing was sent" in said[-1]
    assert not Path(study.tracking.removeprefix("sqlite:///")).exists()
    assert main(["status", "after", "--storage", study.storage]) == 0


def test_a_report_of_a_moved_storage_feeds_the_mlflow_beside_it(
    local: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = local("moved", "storage=studies", "tracking_uri=null")
    study = dataclasses.replace(study, storage="studies")
    events = made_up_events(study)
    monkeypatch.chdir(tmp_path)
    write_ledger(study, events)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = (tmp_path / "studies").rename(tmp_path / "archive") / "moved"
    monkeypatch.chdir(elsewhere)
    outcome = report_study(folder, lambda line: None)
    assert outcome.tracking == f"sqlite:///{tmp_path}/archive/mlflow.db"
    assert not list(elsewhere.iterdir())
    assert list(verify(folder, None)) == []


def test_a_list_shows_studies_of_other_versions_as_unreadable(
    local: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study, later = local("ours"), local("later")
    write_ledger(study, made_up_events(study))
    events = made_up_events(later)
    events[0]["study"] = events[0]["study"] | {"telepathy": True}
    write_ledger(later, events)
    assert main(["list", "--storage", study.storage]) == 0
    listed = {line.split()[0]: line.split()[1] for line in lines(capsys)[1:]}
    assert listed["ours"] == "finished"
    assert listed["later"] == "unreadable:"
    assert main(["status", "later", "--storage", study.storage]) == 2
    assert "its config is of another version" in capsys.readouterr().err


def test_a_running_study_is_told_not_touched(
    local: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = local("busy")
    folder = write_ledger(study, made_up_events(study)[:3])
    storage = ["--storage", study.storage]
    assert not is_locked(folder)
    with Ledger(folder) as ledger:
        assert is_locked(folder)
        edited: list[dict[str, Any]] = []
        control = Control(folder, fold(ledger.history), LimitsConfig(), edited.append)
        assert control.decide(fresh=True).wish == Wish.RUN
        asked = {"pause": Wish.PAUSE, "stop": Wish.STOP, "stop --now": Wish.CANCEL}
        for words, wish in asked.items():
            assert main([*words.split(), "busy", *storage]) == 0
            assert control.decide(fresh=True).wish == wish
        assert main(["run", "--resume", "busy", *storage]) == 0
        assert control.decide(fresh=True).wish == Wish.RUN
        extend = ["run", "--extend", "busy", *storage]
        assert main([*extend, "limits.trials=7", "limits.hours=2.5"]) == 0
        control.decide(fresh=True)
        assert edited == [
            {"trials": 7, "hours": 2.5, "gpu_hours": None, "joules": None, "failures": None}
        ]
        assert main(["run", "--retry-failed", "busy", *storage]) == 2
        assert main(["run", "--resume", "busy", *storage, "address=null"]) == 2
        assert capsys.readouterr().err.count("is running; wait for it, or stop it with") == 2
        assert main([*extend, "seeds=[1]"]) == 2
        assert "only limits can be changed" in capsys.readouterr().err
    assert (folder / CONTROL).exists()


def test_a_running_study_of_a_folder_that_cannot_be_written_is_not_steered(
    local: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a study of another user of the machine."""
    study = local("others")
    folder = write_ledger(study, made_up_events(study)[:3])
    with Ledger(folder), read_only(folder):
        extend = ["run", "--extend", "limits.trials=7"]
        for words in (["pause"], ["stop"], ["stop", "--now"], ["run", "--resume"], extend):
            verb, changes = words[:2], words[2:]
            assert main([*verb, "others", "--storage", study.storage, *changes]) == 2
            assert f"study={str(folder)!r}: must be a folder that can be written" in (
                capsys.readouterr().err
            )


def test_a_study_of_a_cluster_goes_on_without_it(
    local: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = local("launched", "address=192.0.2.1:6379", "trial.epochs=1")
    folder = write_ledger(study, made_up_events(study)[:1])
    words = ["run", "--resume", "launched", "--plain", "--storage", study.storage]
    assert main([*words, "address=null", "cpus=2"]) == 0, capsys.readouterr()
    state = fold(read_ledger(folder))
    assert [trial.status for trial in state.trials] == [FINISHED] * len(state.trials)
    assert state.config.address is None


@pytest.mark.parametrize(
    ("mode", "ran", "code"),
    [
        ([], ["failed", "finished"], 1),
        (["--resume"], ["failed", "finished"], 1),
        (["--retry-failed"], ["finished", "planned"], 3),
        (["--extend"], ["finished", "finished"], 0),
    ],
)
def test_a_stored_study_runs_what_an_option_selects(
    local: Tiny, capsys: pytest.CaptureFixture[str], mode: list[str], ran: list[str], code: int
) -> None:
    """One trial has failed, the other has not begun. ``run NAME`` finds no config of this name."""
    study = local("selected", "trial.epochs=1")
    events = made_up_events(study)[:1]
    lost = events[0]["trials"][0]["id"]
    events.append({"event": "failed", "time": 2.0, "trial": lost, "error": "boom"})
    folder = write_ledger(study, events)
    words = [*mode, "selected", *(["limits.hours=1"] if mode == ["--extend"] else [])]
    assert main(["run", *words, "--plain", "--storage", study.storage]) == code, capsys.readouterr()
    assert [trial.status for trial in fold(read_ledger(folder)).trials] == ran


def test_wishes_of_an_earlier_run_are_forgotten_and_those_of_a_start_are_not(local: Tiny) -> None:
    study = local("wishes")
    study.folder.mkdir(parents=True)
    ask(study.folder, wish=Wish.CANCEL)
    with _opened(study, lambda line: None):
        control = Control(study.folder, StudyState(), LimitsConfig())
        assert control.decide(fresh=True).wish == Wish.RUN
        ask(study.folder, wish=Wish.PAUSE)
        control = Control(study.folder, StudyState(), LimitsConfig())
        assert control.decide(fresh=True).wish == Wish.PAUSE


@pytest.mark.parametrize(
    ("limits", "seconds", "said"),
    [
        ({"trials": 4}, 0, "limits.trials=4 reached"),
        ({"trials": 5}, 0, ""),
        ({"hours": 0.5}, 1799, ""),
        ({"hours": 0.5}, 1800, "limits.hours=0.5 reached"),
        ({"failures": 1}, 0, "limits.failures=1 reached"),
        ({"gpu_hours": 0.001}, 0, "limits.gpu_hours=0.001 reached"),
        ({"gpu_hours": 1.0}, 0, ""),
    ],
)
def test_limits(local: Tiny, limits: dict[str, Any], seconds: float, said: str) -> None:
    state = fold(made_up_events(local("limits", "seeds=[0,1]")))
    state.trials[0].status = FAILED
    for trial in state.trials:
        # 3 s each, so 6 s times a share of one half
        trial.config = trial.config | {"device": "cuda", "gpus": 0.5}
    assert reached(LimitsConfig(**limits), state, seconds) == said


@pytest.mark.parametrize(
    ("workers", "share", "gpus"), [(8, None, 8.0), (1, 0.25, 0.25), (1, 1.0, 1.0)]
)
def test_gpu_hours_of_gangs_are_of_whole_gpus(
    local: Tiny, workers: int, share: float | None, gpus: float
) -> None:
    """In the trial's planned config, the limit, the report and the forecast."""
    study = local(
        "gangs", "trial.device=cuda", f"trial.workers={workers}", "trial.epochs=2",
        f"trial.gpus={'null' if share is None else share}",
    )  # fmt: skip
    events = [
        {**event, "seconds": 1800.0} if event["event"] == "report" else event
        for event in made_up_events(study)
    ]
    state = fold(events)
    assert [trial.config["workers"] for trial in state.trials] == [workers] * 2
    assert costs(state)["trial seconds"] == 2 * 3600  # two trials of two epochs of half an hour
    assert costs(state)["GPU hours"] == 2 * gpus
    limit = 2 * gpus
    assert reached(LimitsConfig(gpu_hours=limit), state, 0) == f"limits.gpu_hours={limit:g} reached"
    assert reached(LimitsConfig(gpu_hours=1.01 * limit), state, 0) == ""
    write_ledger(study, events)
    assert describe_cost(make_plan(study)).startswith(f"Cost: about {2 * gpus:g} GPU hours")


def test_differences_are_of_figures_not_of_times(local: Tiny) -> None:
    state = fold(made_up_events(local("same")))
    trial = state.trials[0]
    again = dataclasses.replace(
        trial,
        reports={
            k: {**e, "metrics": {**e["metrics"], "samples_per_second": 1.0}}
            for k, e in trial.reports.items()
        },
    )
    assert differences(trial, again) == []
    again.reports[2] = {
        **again.reports[2],
        "metrics": {**again.reports[2]["metrics"], "train/loss": 0.4999},
    }
    assert differences(trial, again) == ["epoch 2: train/loss: 0.5 and 0.4999"]
    lost = dataclasses.replace(trial, status=FAILED, error="boom")
    assert differences(trial, lost) == ["the repetition failed: boom"]


def test_find_trial(local: Tiny) -> None:
    state = fold(made_up_events(local("find", "seeds=[0,1]")))
    assert find_trial(state, "float32, seed 1").seed == 1
    with pytest.raises(ValueError, match="4 trials match"):
        find_trial(state, "")


def test_a_plan_says_what_it_knows_of_time(local: Tiny) -> None:
    study = local("timed")
    text = "\n".join(describe_plan(make_plan(study)))
    assert "2 trials = 2 rows (float32, lns matmul) x 1 configuration x 1 seed" in text
    assert "Expected time: unknown" in text
    write_ledger(study, made_up_events(study))
    longer = make_plan(local("timed", "trial.epochs=200", "trial.optimizer.lr=0.3", "seeds=[5]"))
    text = "\n".join(describe_plan(longer))
    assert "about 3 min" in text  # 200 epochs of one second, the made-up epochs' distance
    assert (
        "Expected time: 3 min, at most 2 at a time (7 min of trial time), utilisation of the CPUs"
        " at most 100 %" in text
    )
    alone = make_plan(
        local(
            "timed", "trial.epochs=200", "trial.optimizer.lr=0.3", "seeds=[5]", "max_concurrent=1"
        )
    )
    assert (
        "Expected time: 7 min, at most 1 at a time (7 min of trial time), utilisation of the CPUs"
        " at most 50 %" in "\n".join(describe_plan(alone))
    )


@pytest.mark.parametrize("slots", [[], ["--slots"]])
def test_what_is_planned_of_a_damaged_study_names_the_damage_first(
    local: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], slots: list[str]
) -> None:
    study = local("damaged")
    folder = write_ledger(study, made_up_events(study))
    text = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text(text.replace('"started"', '"star', 1))
    config = tmp_path / "tiny.yaml"
    words = [str(config), "name=damaged", f"storage={study.storage}", "tracking_uri=none"]
    assert main(["plan", *words, *slots]) == 0
    said = capsys.readouterr()
    assert "damaged: the ledger is damaged: line 2" in said.err
    assert "doctor damaged --repair" in said.err
    assert ("`lns-study run` would refuse" in said.err) == (not slots)
    assert "2 trials" in said.out
    assert main(["plan", "damaged", "--storage", study.storage, *slots]) == 0
    assert "damaged: the ledger is damaged: line 2" in capsys.readouterr().err


def test_a_plan_of_a_study_whose_ledger_is_whole_says_nothing_of_damage(
    local: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = local("undamaged")
    write_ledger(study, made_up_events(study))
    words = ["name=undamaged", f"storage={study.storage}", "tracking_uri=none"]
    assert main(["plan", str(tmp_path / "tiny.yaml"), *words]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cut", [None, -2])
def test_a_retry_of_nothing_says_so_and_runs_nothing(
    local: Tiny, capsys: pytest.CaptureFixture[str], cut: int | None
) -> None:
    study = local("retried")
    folder = write_ledger(study, made_up_events(study)[:cut])
    before = (folder / "ledger.jsonl").read_bytes()
    assert main(["run", "--retry-failed", "retried", "--storage", study.storage]) == 0
    said = capsys.readouterr().out
    assert said.startswith("retried: no trial has failed, so there is nothing to retry")
    assert ("; 1 are left, run them with: lns-study run --resume retried" in said) == (
        cut is not None
    )
    assert (folder / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "link loop"])
def test_a_ledger_that_is_no_file_is_named_and_breaks_no_other_study(
    tiny: Callable[..., StudyConfig], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny("beside", f"storage={tmp_path}")
    write_ledger(study, made_up_events(study))
    ledger = tmp_path / "odd" / FILE
    if kind == "folder":
        ledger.mkdir(parents=True)
    else:
        ledger.parent.mkdir()
        ledger.symlink_to(FILE)
    there = ["--storage", str(tmp_path)]
    assert main(["list", *there]) == 0
    assert "beside" in capsys.readouterr().out
    assert main(["status", "odd", *there]) == 2
    assert "odd" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "tiny.yaml"), f"storage={tmp_path}"]) == 0


@pytest.mark.parametrize("storage", ["loop", "a\0b"])
def test_a_storage_that_can_be_no_folder_is_named(
    tmp_path: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "tiny.yaml").write_text(TINY)
    place = str(tmp_path / storage)
    words = [str(tmp_path / "tiny.yaml"), "tracking_uri=none", f"storage={json.dumps(place)}"]
    assert main(["run", *words]) == 2
    assert repr(place) in capsys.readouterr().err


@pytest.mark.filterwarnings("error:Report:RuntimeWarning")  # of figures that could not be made
def test_a_study_whose_table_of_values_has_gone_is_shown_all_the_same(
    local: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a colleague's study, whose ``table(path.npy)`` is not on this machine."""
    table = tmp_path / "values.npy"
    numpy.save(table, numpy.arange(-8.0, 8.0, dtype=numpy.float32))
    rows = [
        {"label": name, "overrides": {"precision": {"format": name, "kahan_sum": kahan}}}
        for name, kahan in (("float32", False), (f"table({table})", True))
    ]
    study = local("tabulated", f"rows={json.dumps(rows)}", "seeds=[0,1]")
    write_ledger(study, made_up_events(study))
    table.unlink()
    storage = ["--storage", study.storage]
    output = tmp_path / "trials.csv"
    assert main(["report", "tabulated", *storage]) == 0
    assert main(["status", "tabulated", *storage]) == 0
    assert main(["export", "tabulated", *storage, "-o", str(output)]) == 0
    frame = pandas.read_csv(output)
    assert set(frame["bits"].dropna()) == {32.0}
    assert len(frame) == 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of pictures whose axes end before
def test_a_finite_figure_is_not_called_diverged_however_large(
    tiny: Callable[..., StudyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds whose sum overflows, and errors whose percentage does."""
    study = tiny("large figures", "seeds=[0,1]")
    events = made_up_events(study)
    for event in events:
        if event["event"] in ("report", "finished"):
            event["metrics"] = dict.fromkeys(event["metrics"], 1.2e308)
    folder = write_ledger(study, events)
    assert main(["report", study.slug, "--storage", study.storage]) == 0
    assert "DIVERGED" not in (folder / "report" / "report.md").read_text()
