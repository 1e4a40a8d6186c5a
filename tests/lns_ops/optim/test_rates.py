"""Small rates: a schedule ends as expected, and Kahan's compensation moves a weight down to a known
limit."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from lns_ops import LNSFormat, LNSTensor, decode, encode, lns12, lns16, optim
from lns_ops import functional as lns
from lns_ops.spec.format import logarithm

OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Lion",
    "LAMB",
    "Rprop",
    "SignMul",
    "HybridMul",
    "Adamax",
    "NAdam",
    "ASGD",
    "LARS",
]


@pytest.mark.parametrize(
    "options",
    [{}, {"kahan_sum": True}, {"stochastic_rounding": True}, {"arithmetic": "float32"}],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cosine_schedule_ends_in_order(name: str, options: dict[str, object]) -> None:
    parameter = nn.Parameter(LNSTensor.from_float(torch.tensor([0.5, -1.0, 2.0]), lns12))
    more = {"trust_coefficient": 1.0} if name == "LARS" else {}
    optimizer = getattr(optim, name)([parameter], lr=0.01, **options, **more)
    schedule, steps = CosineAnnealingLR(optimizer, 200), 200
    moved = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            parameter.grad = LNSTensor.from_float(torch.tensor([1.0, -2.0, 0.5]), lns12)
            before = parameter.codes.clone()
            optimizer.step()
            moved.append(not torch.equal(parameter.codes, before))
            schedule.step()
    assert any(moved[:150])
    assert schedule.get_last_lr() == [0.0]
    said = {str(w.message) for w in caught if "underflows" in str(w.message)}
    assert len(said) <= 1
    if name == "SGD" and not options.get("arithmetic"):
        assert "lns12" in said.pop()


def test_a_rate_that_underflows_from_the_start_is_refused() -> None:
    parameter = nn.Parameter(LNSTensor.from_float(torch.ones(3), lns12))
    with pytest.raises(ValueError, match="lr=1e-06: underflows to zero in lns12"):
        optim.SGD([parameter], lr=1e-6)


def limit(fmt: LNSFormat) -> float:
    """``(2^(2^-f / 2) - 1)^2``: half an ulp of half an ulp, the limit in the documentation of
    SGD."""
    return float((2 ** (0.5 / 2**fmt.fraction_bits) - 1) ** 2)


def walked(fmt: LNSFormat, update: float, **options: object) -> float:
    """The distance that a weight of 1 moves by equal updates with a sum of 0.3, as a share of
    0.3."""
    steps = round(0.3 / update)
    weight = encode(torch.ones(256), fmt)
    u = encode(torch.full((256,), update), fmt)
    compensation = torch.zeros_like(weight) if options.get("kahan") else None
    for step in range(1, steps + 1):
        lns.sgd_update_(
            weight, u, fmt, negative_lr=fmt.bias, compensation=compensation,
            key=None if compensation is not None else 7,
            step=None if compensation is not None else torch.tensor(step),
        )  # fmt: skip
    return float((decode(weight, fmt).mean() - 1) / (update * steps))


@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(15, 6), LNSFormat(14, 5)], ids=str)
def test_kahan_moves_by_updates_above_its_limit_and_stalls_below(fmt: LNSFormat) -> None:
    assert walked(fmt, 2.5 * limit(fmt), kahan=True) > 0.5
    assert walked(fmt, 0.4 * limit(fmt), kahan=True) == 0


def test_the_limits_are_those_of_the_documentation() -> None:
    assert math.log2(limit(lns16)) == pytest.approx(-17, abs=0.1)
    assert math.log2(limit(lns12)) == pytest.approx(-15, abs=0.1)


def test_stochastic_rounding_moves_where_kahan_stalls() -> None:
    assert walked(lns16, 0.2 * limit(lns16)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("alpha", [1.0, 2.0, -3.0, 0.5, 100.0, 1e5])
@pytest.mark.parametrize("operation", [torch.add, torch.sub])
def test_sums_with_alpha_saturate_once(operation: object, alpha: float) -> None:
    fmt = lns12
    values = torch.tensor([0.0, 1e-4, 3e-4, 0.5, 7.0, 900.0, 50_000.0, 64_000.0])
    values = decode(encode(torch.cat([values, -values]), fmt), fmt, torch.float64)
    x, y = (LNSTensor.from_float(v, fmt) for v in (values[:, None], values[None, :]))
    got = decode(operation(x, y, alpha=alpha).codes, fmt, torch.float64)  # type: ignore[operator]
    ulps = logarithm(abs(alpha), fmt.fraction_bits)
    held = math.copysign(2.0 ** (ulps / 2**fmt.fraction_bits), alpha)
    x, y = values[:, None], values[None, :]
    exact = operation(x, y, alpha=held)  # type: ignore[operator]
    exact = exact.clamp(-fmt.largest, fmt.largest)
    error = (got - exact).abs()
    assert (
        error <= (2 ** (0.5 / 2**fmt.fraction_bits) - 1) * (1 + 1e-9) * exact.abs() + fmt.smallest
    ).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_may_be_a_tensor_without_dimensions(name: str) -> None:
    kind, ends = getattr(optim, name), []
    parameter = nn.Parameter(LNSTensor.from_float(torch.tensor([0.5, -1.0, 2.0]), lns12))
    with pytest.raises(ValueError, match=rf"lr=.* for {name}: must be a number"):
        kind([parameter], lr=torch.tensor([0.01]))
    if not kind.takes_rate_tensor:
        return
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        parameter = nn.Parameter(LNSTensor.from_float(torch.tensor([0.5, -1.0, 2.0]), lns12))
        optimizer = kind([parameter], lr=lr)
        schedule = CosineAnnealingLR(optimizer, 20)
        for _ in range(10):
            parameter.grad = LNSTensor.from_float(torch.tensor([1.0, -2.0, 0.5]), lns12)
            optimizer.step()
            schedule.step()
        ends.append(parameter.codes.clone())
    assert torch.equal(*ends)


DECAYS: list[tuple[str, LNSFormat, dict[str, Any], str | None]] = [
    ("AdamW", lns16, {"lr": 3e-4, "weight_decay": 0.01, "kahan_sum": True}, "7.4e-06"),
    ("AdamW", lns16, {"lr": 1e-3, "weight_decay": 0.01, "kahan_sum": True}, None),
    ("AdamW", lns12, {"kahan_sum": True}, "2.9e-05"),
    ("AdamW", lns16, {}, r"0\.0027.*use kahan_sum=True or stochastic_rounding"),
    ("AdamW", lns12, {"stochastic_rounding": True}, None),
    ("AdamW", lns16, {"lr": 1e-4, "weight_decay": 0.0}, None),
    ("Adam", lns12, {"weight_decay": 0.01, "kahan_sum": True}, None),
    ("NAdam", lns12, {"weight_decay": 0.01, "decoupled_weight_decay": True, "lr": 1e-3,
     "kahan_sum": True}, "2.9e-05"),
    ("NAdam", lns12, {"weight_decay": 0.01, "kahan_sum": True, "lr": 1e-3}, None),
    ("Lion", lns12, {"weight_decay": 0.1, "kahan_sum": True}, "2.9e-05"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fmt", "options", "limit"), DECAYS)
def test_a_weight_decay_that_rounding_loses_warns_as_the_optimizer_is_made(
    name: str, fmt: LNSFormat, options: dict[str, Any], limit: str | None
) -> None:
    parameter = nn.Parameter(LNSTensor.from_float(torch.full((4,), 1.5), fmt))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = getattr(optim, name)([parameter], **options)
    assert len(caught) == (limit is not None)
    if limit is not None:
        assert re.search(rf"{name} with lr=.* in {fmt}: .* below {limit}", str(caught[0].message))
        before = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        for _ in range(50):
            optimizer.step()
        assert torch.equal(parameter.detach().codes, before.codes), "the warning is right"


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    ("beta1", "fmt"), [(0.9, "lns16"), (0.997, "lns16"), (0.99, "lns12"), (0.999, "lns(16,9)")]
)
def test_bias_correction_is_that_of_the_decay_that_the_format_has(
    beta1: float, fmt: str, amsgrad: bool
) -> None:
    """A constant gradient moves a weight by one rate per step, up to rounding."""
    weight = LNSTensor.from_float(torch.ones(1), fmt).requires_grad_()
    optimizer = optim.Adam([weight], 1e-3, (beta1, 0.999), kahan_sum=True, amsgrad=amsgrad)
    for _ in range(100):
        weight.grad = LNSTensor.from_float(torch.ones(1), fmt)
        optimizer.step()
    epsilon = weight.fmt.epsilon  # type: ignore[attr-defined]
    moved = 1 - weight.detach().to_float().item()  # type: ignore[attr-defined]
    assert abs(moved - 0.1) < epsilon


@pytest.mark.parametrize("kind", [optim.Adamax, optim.NAdam, optim.RAdam])
def test_variants_of_adam_correct_by_the_decay_that_the_format_has(kind: Any) -> None:
    moved = []
    for fmt in ("lns16", "lns(16,9)"):
        weight = LNSTensor.from_float(torch.ones(1), fmt).requires_grad_()
        optimizer = kind([weight], 1e-2, (0.997, 0.999), kahan_sum=True)
        for _ in range(60):
            weight.grad = LNSTensor.from_float(torch.ones(1), fmt)
            optimizer.step()
        moved.append(1 - weight.detach().to_float().item())  # type: ignore[attr-defined]
    assert moved[0] == pytest.approx(moved[1], rel=0.05)
