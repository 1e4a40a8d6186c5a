"""Layout: refusals with their equation; gradient accumulation; positions of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lns_ops import LNSTensor
from trainers.comm.mesh import Place, place
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.data import Split
from trainers.training.step import accumulate
from trainers.training.trainer import Training

DEEP = ModelConfig(hidden=[16, 16, 16])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pp": 0}, "layout.pp=0: must be a whole number of at least 1"),
        ({"dp": 0}, "layout.dp=0: must be a whole number of at least 1"),
        (
            {"schedule": "dualpipe"},
            "layout.schedule='dualpipe': must be one of 1f1b, gpipe, interleaved",
        ),
        (
            {"pp": 4, "micro_batches": 2},
            "layout.micro_batches=2, layout.pp=4: 1f1b needs at least as many",
        ),
        (
            {"pp": 2, "micro_batches": 3, "schedule": "interleaved", "virtual_stages": 2},
            "layout.micro_batches=3, layout.pp=2: interleaved",
        ),
        (
            {"pp": 2, "micro_batches": 2, "virtual_stages": 2},
            "layout.virtual_stages=2 with layout.schedule=1f1b: interleaved needs",
        ),
        (
            {"pp": 2, "micro_batches": 2, "schedule": "interleaved"},
            "layout.virtual_stages=1 with layout.schedule=interleaved",
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 2},
            "layout.schedule=interleaved with layout.pp=1",
        ),
        ({"schedule": "zero_bubble"}, "layout.schedule=zero_bubble with layout.pp=1"),
        (
            {"pp": 2, "micro_batches": 4, "schedule": "zbv"},
            "layout.virtual_stages=1 with layout.schedule=zbv",
        ),
        (
            {"pp": 2, "micro_batches": 3, "schedule": "zero_bubble"},
            "layout.micro_batches=3, layout.pp=2: zero_bubble",
        ),
        (
            {"pp": 2, "micro_batches": 3, "schedule": "dualpipev", "virtual_stages": 2},
            "layout.micro_batches=3, layout.pp=2: dualpipev",
        ),
    ],
)
def test_impossible_layouts_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        Layout(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"workers": 4, "layout": Layout(dp=2, pp=3, micro_batches=3)},
            r"dp 2 \* pp 3 != workers 4",
        ),
        ({"workers": 3, "layout": Layout(pp=2, micro_batches=2)}, r"dp 1 \* pp 2 != workers 3"),
        ({"workers": 1, "layout": Layout(pp=2, micro_batches=2)}, r"dp 0 \* pp 2 != workers 1"),
        ({"workers": 2, "layout": Layout(dp=1)}, r"dp 1 \* pp 1 != workers 2"),
        (
            {"layout": Layout(micro_batches=3)},
            r"batch_size 128 / dp 1 / micro_batches 3 is not a whole number",
        ),
        (
            {"workers": 2, "batch_size": 6, "layout": Layout(micro_batches=2)},
            r"batch_size 6 / dp 2 / micro_batches 2",
        ),
        (
            {"workers": 8, "layout": Layout(pp=8, micro_batches=8), "model": DEEP},
            "8 stages, but the model has 4 layers",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_trial_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        TrialConfig(**values)


def test_the_config_of_before_means_what_it_did() -> None:
    config = TrialConfig(workers=4)
    assert config.layout.replicas(config.workers) == 4
    assert TrialConfig.from_dict({"workers": 4}) == config
    assert place(Layout(), 0, 1) == Place()


def trial(precision: PrecisionConfig, **changes: Any) -> Training:
    base = TrialConfig(
        data=DataConfig(name="digits"),
        model=ModelConfig(hidden=[16]),
        precision=precision,
        batch_size=128,
    )
    return Training(replace(base, **changes))


def gradients(training: Training) -> list[torch.Tensor]:
    grads = [p.grad for p in training.model.parameters()]
    return [g.codes if isinstance(g, LNSTensor) else g for g in grads if g is not None]


def test_accumulated_lns_gradients_of_blocks_of_64_are_those_of_the_whole_batch() -> None:
    """Two micro-batches of 64 are the two blocks in which the contract sums a batch of 128."""
    training = trial(PrecisionConfig(format="lns12"))
    batch = Split(training.data.train.x[:128], training.data.train.y[:128])
    losses, found = [], []
    for parts in (1, 2, 4):
        training.optimizer.zero_grad()
        losses.append(accumulate(training.model, batch, parts))
        found.append([g.clone() for g in gradients(training)])
    assert losses[1].loss == pytest.approx(losses[0].loss, rel=1e-6)
    assert losses[1].wrong == losses[0].wrong
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_accumulation_trains_as_the_whole_batch_does() -> None:
    for precision in (PrecisionConfig(), PrecisionConfig(format="lns12", kahan_sum=True)):
        whole, parts = trial(precision), trial(precision, layout=Layout(micro_batches=2))
        one, two = whole.train_epoch(), parts.train_epoch()
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
        assert two["validation/error"] == one["validation/error"]


def test_stages_lie_in_rounds_or_in_a_v() -> None:
    rounds = Layout(pp=3, schedule="interleaved", micro_batches=3, virtual_stages=2)
    assert [rounds.owner(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    there_and_back = Layout(pp=3, schedule="zbv", micro_batches=6, virtual_stages=2)
    assert [there_and_back.owner(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
