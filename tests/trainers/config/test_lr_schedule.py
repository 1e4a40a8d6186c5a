"""Learning-rate schedules: torch's own values, linear scaling, exact resume, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import lns12
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.lr_schedule import LRSchedule
from trainers.config.sync import SyncConfig
from trainers.data import prepare
from trainers.training.trainer import Training, check

KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
BASE = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[16]),
    optimizer=OptimizerConfig(lr=0.3, momentum=0.5),
    batch_size=100,
    epochs=4,
)
STEPS, EPOCHS = 10, 4


def factors(schedule: LRSchedule) -> list[float]:
    return [schedule.factor(step, STEPS, EPOCHS) for step in range(STEPS * EPOCHS)]


def of_torch(scheduler: type, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, values = scheduler(optimizer, **options), []
    for _ in range(STEPS * EPOCHS):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


def test_decays_are_torchs() -> None:
    total = STEPS * EPOCHS
    assert factors(LRSchedule(decay="cosine")) == pytest.approx(
        of_torch(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=total)
    )
    powers = of_torch(torch.optim.lr_scheduler.PolynomialLR, total_iters=total, power=2.0)
    assert factors(LRSchedule(decay="polynomial", power=2.0)) == pytest.approx(powers)
    assert factors(LRSchedule()) == [1.0] * total


@given(st.sampled_from(["constant", "polynomial", "cosine"]), st.floats(0, 3.9), st.floats(0, 1))
def test_warm_up_rises_to_the_full_rate_and_decay_falls_to_its_end(
    decay: str, warmup: float, end: float
) -> None:
    found = factors(
        LRSchedule(decay=decay, warmup_epochs=warmup, end=0.0 if decay == "constant" else end)
    )
    rising = round(warmup * STEPS)
    assert found[:rising] == sorted(found[:rising])
    assert found[rising:] == sorted(found[rising:], reverse=True)
    assert max(found) == pytest.approx(1.0)
    assert all(value >= (end if decay != "constant" else 0) - 1e-12 for value in found[rising:])


def test_linear_scaling_multiplies_the_rate() -> None:
    training = Training(replace(BASE, lr_schedule=LRSchedule(reference_batch=25)))
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * 4 / 100)


@pytest.mark.parametrize("precision", [PrecisionConfig(), KAHAN], ids=["float32", "lns"])
@pytest.mark.parametrize("decay", ["polynomial", "cosine"])
def test_a_trial_with_a_schedule_resumes_bit_for_bit(
    precision: PrecisionConfig, decay: str, tmp_path: Path
) -> None:
    config = replace(
        BASE, precision=precision, lr_schedule=LRSchedule(decay=decay, warmup_epochs=0.5)
    )
    training, rates = Training(config), []
    metrics = []
    for _ in range(4):
        metrics.append(
            {k: v for k, v in training.train_epoch().items() if k != "samples_per_second"}
        )
        rates.append(training.optimizer.param_groups[0]["lr"])
        if len(rates) == 2:
            training.save(tmp_path)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(
        max(0.003 * training._rate._schedule.factor(47, 12, 4), training._rate._smallest)
    )
    assert training._rate._smallest == (0.0 if precision.lns_format is None else lns12.smallest)
    again = Training(config)
    again.restore(tmp_path)
    resumed = [
        {k: v for k, v in again.train_epoch().items() if k != "samples_per_second"}
        for _ in range(2)
    ]
    assert resumed == metrics[2:]
    constant = Training(replace(config, lr_schedule=LRSchedule()))
    assert constant.train_epoch()["train/loss"] != metrics[0]["train/loss"]


def test_a_scaled_rate_that_underflows_is_refused() -> None:
    with pytest.raises(ValueError, match="lr=3e-06: underflows"):
        check(
            replace(BASE, precision=KAHAN, lr_schedule=LRSchedule(reference_batch=100_000)),
            prepare(BASE.data),
        )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decay": "exponential"}, "lr_schedule.decay='exponential': must be one of constant"),
        (
            {"warmup_epochs": -1.0},
            "lr_schedule.warmup_epochs=-1.0: must be a finite number of at least 0",
        ),
        ({"decay": "cosine", "end": 1.5}, "lr_schedule.end=1.5: must be at most 1"),
        (
            {"decay": "cosine", "power": 2.0},
            "lr_schedule.power=2.0 with lr_schedule.decay=cosine: means nothing",
        ),
        ({"end": 0.1}, "lr_schedule.end=0.1 with lr_schedule.decay=constant: means nothing"),
        ({"decay": "polynomial", "power": math.inf}, "lr_schedule.power=inf"),
        ({"reference_batch": 0}, "lr_schedule.reference_batch=0"),
    ],
)
def test_impossible_schedules_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; \w"):
        LRSchedule(**values)


def test_schedules_that_do_not_fit_the_trial_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lr_schedule.warmup_epochs=4 with epochs=4: .*; \w"):
        replace(BASE, lr_schedule=LRSchedule(warmup_epochs=4.0))
    with pytest.raises(
        ValueError, match=r"lr_schedule.decay=cosine.* with sync.name=asynchronous.*; \w"
    ):
        replace(
            BASE,
            workers=2,
            lr_schedule=LRSchedule(decay="cosine"),
            sync=SyncConfig(name="asynchronous"),
        )
