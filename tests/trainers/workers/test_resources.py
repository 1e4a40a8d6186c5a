"""The share of a GPU that a trial takes, and which trials share a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lns_ops import optim
from trainers.config import (
    DataConfig,
    Layout,
    LossConfig,
    LRSchedule,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.config.optimizer import OPTIMIZERS, RATE_OF_HOST
from trainers.workers.resources import TRIALS_PER_PROCESS, choose_share, key_of, trials_per_process

SMALL = TrialConfig(device="cuda")
DEEP = ModelConfig(hidden=[64] * 300)
DEEPER = ModelConfig(hidden=[64] * 10_000)
VARIANT = ModelConfig(name="lstm", args={"variant": "fgr"})
WIDE = ModelConfig(name="lstm", args={"variant": "vanilla", "width": 512})
BFLOAT16 = PrecisionConfig(format="bfloat16")
COSINE = LRSchedule(decay="cosine")
LOADED = DataConfig(name="data.py:make", num_workers=1)


@pytest.mark.parametrize(
    ("trial", "share", "lanes"),
    [
        (SMALL, 1 / 12, TRIALS_PER_PROCESS),
        (replace(SMALL, lr_schedule=COSINE), 1 / 12, TRIALS_PER_PROCESS),
        (replace(SMALL, lr_schedule=COSINE, optimizer=OptimizerConfig(name="madam")), 1 / 12, 1),
        (replace(SMALL, model=ModelConfig(hidden=[1024])), 1 / 4, TRIALS_PER_PROCESS),
        (replace(SMALL, model=ModelConfig(hidden=[8192])), 1.0, 1),
        (replace(SMALL, model=ModelConfig(name="gpt")), 1.0, 1),
        (replace(SMALL, model=DEEP), 1 / 4, TRIALS_PER_PROCESS),
        (replace(SMALL, model=DEEPER), 1 / 4, 1),
        (replace(SMALL, telemetry=True), 1 / 12, 1),
        (replace(SMALL, model=ModelConfig(name="lstm")), 1 / 12, 1),
        (replace(SMALL, model=VARIANT), 1 / 24, 24),
        (replace(SMALL, model=VARIANT, batch_size=512), 1 / 4, TRIALS_PER_PROCESS),
        (replace(SMALL, model=WIDE, batch_size=4), 1 / 12, 1),
        (replace(SMALL, model=VARIANT, telemetry=True), 1 / 12, 1),
        (replace(SMALL, model=VARIANT, precision=PrecisionConfig(format="lns16")), 1 / 12, 1),
        (replace(SMALL, model=ModelConfig(name="lstm"), batch_size=512), 1 / 4, 1),
        (replace(SMALL, model=ModelConfig(name="lstm", args={"dropout": 0.1})), 1.0, 1),
        (replace(SMALL, model=ModelConfig(name="lstm"), precision=BFLOAT16), 1 / 12, 1),
        (replace(SMALL, workers=2), 1.0, 1),
        (replace(SMALL, memory=MemoryConfig(offload_optimizer=True)), 1.0, 1),
        (replace(SMALL, autocast="float16"), 1.0, 1),
        (replace(SMALL, loss=LossConfig(name="loss.py:make")), 1.0, 1),
        (replace(SMALL, layout=Layout(pairwise=True)), 1.0, 1),
        (replace(SMALL, data=LOADED), 1.0, 1),
        (replace(SMALL, model=ModelConfig(name="resnet")), 1.0, 1),
    ],
)
def test_small_trials_share_a_gpu_and_captured_ones_a_process(
    trial: TrialConfig, share: float, lanes: int
) -> None:
    assert choose_share(trial) == share
    assert trials_per_process("auto", replace(trial, gpus=share)) == lanes


def test_no_process_has_both_float32_products_and_what_may_switch_them_to_tf32() -> None:
    """The switch is the whole process's, and float32 sums of LNS products use it."""

    def key(fmt: str, accumulation: str) -> tuple[Any, ...]:
        precision = PrecisionConfig(format=fmt, accumulation=accumulation)
        return key_of(replace(SMALL, precision=precision))

    assert key("float32", "float32") == key("bfloat16", "contract") == key("lns16", "contract")
    assert key("lns16", "float32") != key("float32", "float32")


def test_a_captured_step_varies_the_rates_of_the_optimizers_that_take_a_tensor() -> None:
    kinds = {name.lower(): kind for name, kind in vars(optim).items() if isinstance(kind, type)}
    takes = {name for name in OPTIMIZERS if kinds[name].takes_rate_tensor}
    assert takes == OPTIMIZERS.keys() - {*RATE_OF_HOST}
