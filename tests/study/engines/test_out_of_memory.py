"""Trials that really run out of memory are retried once with smaller micro-batches or a whole GPU,
and the study reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from study.config import StudyConfig
from study.ledger.state import FAILED, FINISHED, PLANNED, StudyState
from study.lifecycle import run_study
from study.plan.plan import make_plan
from study.report.tables import remarks
from study.results.summary import summarise
from study.search.agenda import Agenda
from tests.study.conftest import SilentView
from tests.study.sleeping import executor
from trainers.config import DataConfig, ModelConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.workers.out_of_memory import is_out_of_memory, relief

Make = Callable[..., StudyConfig]


def test_what_helps() -> None:
    config = TrialConfig(data=DataConfig(name="digits"), batch_size=96)
    assert relief(config) == {"layout.micro_batches": 2}
    assert relief(replace(config, layout=Layout(micro_batches=3))) == {"layout.micro_batches": 6}
    assert relief(replace(config, batch_size=1)) is None
    # batch norm's statistics are over a micro-batch: it would be another function
    normed = replace(config, model=ModelConfig(name="resnet"))
    assert relief(normed) is None
    assert relief(replace(normed, device="cuda", gpus=0.1)) == {"gpus": 1.0}
    assert relief(replace(config, device="cuda", gpus=0.1)) == {"gpus": 1.0}
    assert relief(replace(config, device="cuda", gpus=1.0)) == {"layout.micro_batches": 2}


def test_what_says_that_memory_ran_out() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    )
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_relieved_trial_stays_so_when_the_study_is_continued(tiny: Make) -> None:
    plan = make_plan(tiny("relieved"))
    state, ids = StudyState(), [trial.id for trial in plan.trials]
    planned = {"event": "planned", "time": 0.0, **plan.to_event(), "data": []}
    state.apply(planned)
    agenda = Agenda(plan, state, lambda trial: None)
    assert [trial.id for trial in (agenda.next(), agenda.next()) if trial] == ids
    assert agenda.exhausted
    state.apply({"event": "started", "time": 1.0, "trial": ids[0]})
    state.apply(
        {
            "event": "relieved",
            "time": 2.0,
            "trial": ids[0],
            "error": "no",
            "relief": {"layout.micro_batches": 2},
        }
    )
    agenda.again(ids[0])
    trial = agenda.next()
    assert trial is not None
    assert (trial.id, trial.config.layout.micro_batches) == (ids[0], 2)
    assert state.known[ids[0]].status == PLANNED
    state.apply(planned)
    again = Agenda(plan, state, lambda trial: None).next()
    assert again == trial
    assert state.known[ids[0]].config["layout"]["micro_batches"] == 2


@pytest.mark.slow
def test_a_study_tries_once_more_and_goes_on(tiny: Make, ray_session: None) -> None:
    """The first trial's process may have less memory than its weights need."""
    rows = "rows=[{label: vast, overrides: {model.hidden: [3000000]}}, {label: fine}]"
    view = SilentView()
    with executor("tests.trainers.made_up:Limited"):
        outcome = run_study(
            tiny("vast", rows, "baseline=null", "trial.epochs=1"), view, lambda line: None
        )
    vast, fine = outcome.state.trials
    assert fine.status == FINISHED
    assert (vast.status, vast.relief) == (FAILED, {"layout.micro_batches": 2})
    assert "out of memory" in vast.error
    events = [event["event"] for event in view.events if event.get("trial") == vast.id]
    assert events == ["started", "relieved", "started", "failed"]
    assert any(
        "ran out of memory, and then ran with micro_batches=2" in line
        for line in remarks(outcome.state, summarise(outcome.state))
    )
