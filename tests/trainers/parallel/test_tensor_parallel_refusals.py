"""Settings that tensor parallelism cannot cut are refused, with the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainers.config import ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.optimizer import WHOLE_TENSORS, OptimizerConfig
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig

CUT = TrialConfig(model=ModelConfig(hidden=[32]), workers=2, layout=Layout(tp=2))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"precision": PrecisionConfig(format="lns12")},
            "layout.tp=2 with precision.format=lns12: torch cuts",
        ),
        (
            {"precision": PrecisionConfig(format="bfloat16")},
            "layout.tp=2 with precision.format=bfloat16: torch cuts",
        ),
        ({"model": ModelConfig(name="cnn")}, "layout.tp=2 with model.name=cnn"),
        (
            {"model": ModelConfig(hidden=[])},
            r"layout.tp=2 with model.name=mlp, model.hidden=\[\]: linear layers are cut in pairs",
        ),
        (
            {"model": ModelConfig(hidden=[32, 16, 33])},
            r"layout.tp=2 with model.hidden=\[32, 16, 33\]: .* 2 equal parts",
        ),
        (
            {"workers": 4, "layout": Layout(tp=2, pp=2, micro_batches=2)},
            "layout.tp=2 with layout.pp=2, layout.fsdp=false",
        ),
        (
            {"workers": 4, "layout": Layout(tp=2, fsdp=True)},
            "layout.tp=2 with layout.pp=1, layout.fsdp=true",
        ),
        ({"min_workers": 2}, "layout.tp=2 with min_workers=2"),
        (
            {"workers": 4, "sync": SyncConfig(name="local_sgd", period=2)},
            "layout.tp=2 with sync.name=local_sgd",
        ),
        (
            {"workers": 4, "sync": SyncConfig(name="asynchronous")},
            "layout.tp=2 with sync.name=asynchronous",
        ),
        (
            {"workers": 4, "wire": WireConfig(bucket_cap_mb=1.0)},
            "layout.tp=2 .* wire.bucket_cap_mb=1: the workers",
        ),
        ({"autocast": "float16", "device": "cuda"}, "layout.tp=2 with autocast=float16: a worker"),
        *(
            (
                {"optimizer": OptimizerConfig(name=name)},
                f"layout.tp=2 with optimizer.name={name}: its step needs norms",
            )
            for name in WHOLE_TENSORS
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*; .*use .*layout.tp=1$"):
        replace(CUT, **values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 1}, r"dp 0 \* pp 1 \* tp 2 != workers 1.*; use workers=2"),
        ({"workers": 3}, r"dp 1 \* pp 1 \* tp 2 != workers 3.*; use workers=2"),
        (
            {"wire": WireConfig(name="int8")},
            "wire.name=int8 with workers=2, layout.pp=1, layout.tp=2: no gradient travels",
        ),
        ({"layout": Layout(dp=2, tp=2)}, r"dp 2 \* pp 1 \* tp 2 != workers 2.*; use workers=4"),
    ],
)
def test_layouts_in_parts_that_do_not_come_out_even_are_refused(
    values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        replace(CUT, **values)
