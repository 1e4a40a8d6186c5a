"""What a plan prints about time and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from study.cli import main
from study.config import StudyConfig
from study.plan import estimate
from study.plan.estimate import describe_cost, describe_plan
from study.plan.plan import confirmation_rounds, make_plan
from tests.study.conftest import made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
SMALL = ("trial.device=cuda", "trial.model.hidden=[16]")
MIXED = "rows=[{label: one}, {label: gang, overrides: {workers: 4}}]"


def lines(study: StudyConfig, start: str) -> list[str]:
    return [line for line in describe_plan(make_plan(study)) if line.startswith(start)]


@pytest.mark.parametrize(
    ("gpus", "changes", "said"),
    [
        # epochs of the made-up ledger take a second: 12 trials of 100 s, four CPUs
        (
            0,
            (MIXED, "cpus=4", "seeds=[0,1,2,3,4,5]"),
            "13 min, at most 4 at a time (20 min of trial time), utilisation of the CPUs at most"
            " 94 %",
        ),
        (
            1,
            ("trial.device=cuda", "trial.gpus=1", "cpus=16", "seeds=[0,1,2,3,4,5]"),
            "20 min, at most 1 at a time (20 min of trial time), utilisation of the GPUs at most"
            " 100 %",
        ),
        (
            2,
            ("trial.device=cuda", "trial.gpus=0.25", "cpus=16", "seeds=[0,1,2,3,4,5]"),
            "3 min, at most 8 at a time (20 min of trial time), utilisation of the GPUs at most"
            " 75 %",
        ),
        (
            0,
            ("trial.device=cuda", "trial.gpus=1", "cpus=16", "seeds=[0]"),
            "3 min, at most 1 at a time (3 min of trial time), utilisation of the GPUs at most"
            " 100 %; as on a machine with 1 GPU, this one has none",
        ),
    ],
)
def test_the_expected_time_is_that_of_trials_packed_into_cpus_and_gpus(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, gpus: int, changes: Sequence[str], said: str
) -> None:
    monkeypatch.setattr(estimate, "visible_gpus", lambda: [str(index) for index in range(gpus)])
    changes = ("baseline=null", "trial.epochs=100", *changes)
    study = tiny("packed", *changes)
    write_ledger(study, made_up_events(study))
    assert lines(study, "Expected time: ") == [f"Expected time: {said}"]


GRID = "space={optimizer.lr: {grid: [0.01, 0.1]}}"
CONFIRMED = ("search.algorithm=grid", "search.confirm=1", "search.confirm_seeds=[7,8,9]")


def test_runs_that_confirm_the_best_take_time_round_by_round(tiny: Tiny) -> None:
    """Four trials of 100 s on four CPUs, then three for each of two rows, all at once. For two
    candidates two seeds run at once, and the third after a test."""
    study = tiny("confirmed", "baseline=null", "trial.epochs=100", "cpus=4", GRID, *CONFIRMED)
    write_ledger(study, made_up_events(study))
    (time,) = lines(study, "Expected time: ")
    assert time.startswith("Expected time: 5 min, at most 4 at a time (17 min of trial time)")
    assert describe_cost(make_plan(study)) == "Cost: about 0 GPU hours and 0.278 CPU hours"
    raced = tiny("race", GRID, *CONFIRMED, "search.confirm=2")
    assert [len(each) for each in confirmation_rounds(make_plan(raced))] == [8, 4]
    (race,) = lines(raced, "Expected time: ")
    assert race.endswith(", less with what a race decides early")


def test_simulated_are_the_runs_that_confirm_too(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny("simulated", "baseline=null", "trial.epochs=100", GRID, *CONFIRMED)
    write_ledger(study, made_up_events(study))
    assert main(["plan", str(study.folder), "--slots", "4", "--seconds", "10"]) == 0
    said, _, four = capsys.readouterr().out.splitlines()
    assert said == "simulated: 10 trials, 6 of which confirm the best"
    assert four.split()[:6] == ["4", "5", "min", "83", "%", "0"]
    assert four.split()[6] == "1000"


def test_a_size_is_a_product_only_where_it_is_one(tiny: Tiny) -> None:
    """A row without one of two points has half of the other row's configurations."""
    momentum = "space={optimizer.momentum: {grid: [0.0, 0.9]}}"
    rows = "rows=[{label: sgd}, {label: rprop, overrides: {optimizer.name: rprop}}]"
    words = ("baseline=null", "seeds=[0,1]", "search.algorithm=grid", momentum, rows)
    assert lines(tiny("unequal", *words), "unequal: ") == [
        "unequal: 6 trials = 3 configurations (grid) of 2 rows (sgd: 2, rprop: 1) x 2 seeds"
    ]


def test_a_gang_takes_as_many_simulated_slots_as_workers(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six trials of one worker and six of four, each three epochs of a second, on four slots."""
    study = tiny("gangs", MIXED, "baseline=null", "seeds=[0,1,2,3,4,5]", "trial.epochs=3")
    write_ledger(study, made_up_events(study))
    words = ["plan", str(study.folder), "--slots", "1", "4", "--seconds", "10"]
    assert main(words) == 0
    _, _, one, four = capsys.readouterr().out.splitlines()
    assert one.split() == ["1", *["6", "trials", "of", "more", "workers"], *["-"] * 5]
    # first four with one worker at once, then six gangs one by one, then the other two: eight times
    # 3 s, with 90 of 96 slot seconds used
    assert four.split()[:5] == ["4", "24", "s", "94", "%"]


DEEP = [16] * 40
DEEPER = f"{{model: {{hidden: {[8] * 1001}}}}}"
BESIDE = "train three times as fast side by side as by turns (784-512-10, an H200)"
GRAPH = "small nets whose step is a CUDA graph"
BITS = "with the same bits; trial.gpus=1 gives each a process and a GPU"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "one each (executor=auto): only small nets on a GPU share processes by themselves"),
        (["executor=packed"], "up to 32 share one (executor=packed)"),
        (
            ["executor=packed", "metrics={mine: {name: 'torchmetrics:MeanMetric'}}"],
            "one each (executor=packed): they run code of yours, which may change its whole"
            " process",
        ),
        (["workers=2"], "a gang of 2 each, a process a worker (trial.workers)"),
        (
            ["device=cuda", "workers=2"],
            "a gang of 2 each, a process and a GPU a worker (trial.workers)",
        ),
        (["device=cuda"], f"up to 12 share one, 1/12 of a GPU a trial: {GRAPH} {BESIDE}, {BITS}"),
        (
            ["device=cuda", "gpus=0.25"],
            f"up to 4 share one, 1/4 of a GPU a trial: {GRAPH} train 1.8 to 3.6 times as fast four"
            f" at a time as by turns (H100, H200), {BITS}",
        ),
        (
            ["device=cuda", "gpus=0.2"],
            f"up to 5 share one, 1/5 of a GPU a trial: {GRAPH}, side by side, {BITS}",
        ),
        (
            ["device=cuda", "gpus=1"],
            "one each (executor=auto), a whole GPU a trial: trial.gpus=1 asks for more than 1/4 of"
            " a GPU",
        ),
        (
            ["device=cuda", "model.hidden=[20000,20000]"],
            "one each (executor=auto), a whole GPU a trial: a step's mean layer takes more than"
            " 1e+09 multiply-accumulates",
        ),
        (
            ["device=cuda", "autocast=float16", "rows=[]"],
            "one each (executor=auto), a whole GPU a trial: their step is no CUDA graph",
        ),
        (
            ["device=cuda", "model={name: gpt, hidden: [512]}", "rows=[]"],
            "one each (executor=auto), a whole GPU a trial: only nets of the kinds mlp and"
            " cnn, and an LSTM's variants in float32, share processes by themselves",
        ),
        (
            ["device=cuda", f"model.hidden={DEEP}"],
            f"up to 4 share one, 1/4 of a GPU a trial: {GRAPH} train 1.8 to 3.6 times as fast four"
            f" at a time as by turns (H100, H200), {BITS}",
        ),
        (
            ["device=cuda", f"rows=[{{label: a, overrides: {DEEPER}}}]"],
            "one each (executor=auto), 1/4 of a GPU a trial: they have more than 1000 layers",
        ),
        (
            ["device=cuda", "telemetry=true"],
            "one each (executor=auto), 1/12 of a GPU a trial: telemetry measures a process's"
            " memory",
        ),
    ],
)
def test_a_plan_says_which_processes_trials_get_and_why(
    tiny: Tiny, changes: list[str], said: str
) -> None:
    study = tiny(
        "processes",
        "baseline=null",
        "rows=[{label: a}]",
        *(change if change[:4] in ("exec", "rows") else f"trial.{change}" for change in changes),
    )
    assert lines(study, "Processes: ") == [f"Processes: 1 trial: {said}"]


def test_a_plan_says_which_processes_proposals_will_get(tiny: Tiny) -> None:
    """A search without proposals yet, over gangs and trials of one worker."""
    study = tiny(
        "proposed",
        "space={optimizer.lr: {loguniform: [0.01, 0.1]}}",
        "search={algorithm: tpe, num_samples: 4}",
        "baseline=null",
        "rows=[{label: one}, {label: gang, overrides: {workers: 2}}]",
    )
    assert sorted(lines(study, "Processes: ")) == [
        "Processes: 50 % of the space (at random): a gang of 2 each, a process a worker"
        " (trial.workers)",
        "Processes: 50 % of the space (at random): one each (executor=auto): only small nets on a"
        " GPU share processes by themselves",
    ]


def test_what_a_space_holds_is_told_with_its_shapes(tiny: Tiny) -> None:
    (study, changes) = "shapes", ["baseline=null", "rows=[]", "search={algorithm: tpe}"]
    found = lines(tiny(study, *changes, "space={workers: {choice: [1, 2]}}"), "Processes: ")
    assert len(found) == 2
    assert any("a gang of 2 each" in line for line in found)
