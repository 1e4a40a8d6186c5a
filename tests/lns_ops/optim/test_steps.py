"""Steps of SGD and Adam compared with the reference, torch and float32; their state and
refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn

import lns_ops
from lns_ops import LNSFormat, LNSTensor, lns8, lns12, lns16, reference
from lns_ops.optim import SGD, Adam, AdamW
from tests.lns_ops.optimizers import ROUNDINGS, make

KINDS = sorted(set(lns_ops.optim.__all__) - {"ARITHMETICS", "LNSOptimizer", "parameters_by_format"})


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("options", [{"kahan_sum": True}, {"stochastic_rounding": True}], ids=str)
def test_float32_updates_of_lns_weights_stay_near_float32(
    kind: type[SGD], options: dict[str, bool]
) -> None:
    torch.manual_seed(2)
    start = LNSTensor.from_float(torch.randn(500), lns16).to_float()
    grads = [LNSTensor.from_float(torch.randn(500) + 0.5, lns16).to_float() for _ in range(50)]
    exact = nn.Parameter(start.clone())
    steps(getattr(torch.optim, kind.__name__)([exact], lr=0.02), exact, grads)
    weight = nn.Parameter(LNSTensor.from_float(start, lns16))
    made = kind([weight], lr=0.02, arithmetic="float32", **options)  # type: ignore[arg-type]
    steps(made, weight, grads)
    moved, wanted = weight.detach().to_float() - start, exact.detach() - start
    assert torch.corrcoef(torch.stack([moved, wanted]))[0, 1] > 0.99
    assert abs((moved - wanted).mean()) < 0.01 * wanted.abs().mean()


def steps(
    optimizer: torch.optim.Optimizer, weight: nn.Parameter, grads: list[torch.Tensor]
) -> None:
    for grad in grads:
        weight.grad = (
            LNSTensor.from_float(grad, weight.fmt)
            if isinstance(weight, LNSTensor)
            else grad.clone()
        )
        optimizer.step()


@pytest.mark.parametrize("fmt", [lns16, lns12], ids=str)
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"kahan_sum": True}, {"stochastic_rounding": True, "seed": 5}], ids=str
)
def test_adam_equals_the_reference(
    fmt: LNSFormat, kind: type[Adam], options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    unused = nn.Parameter(LNSTensor.from_float(torch.ones(3), fmt))
    weight = nn.Parameter(LNSTensor.from_float(torch.randn(7, 9), fmt))
    given: Any = {"lr": 0.01, "weight_decay": 0.1, **options}
    optimizer = kind([unused, weight], **given)
    grads = [torch.randn(7, 9) for _ in range(4)]
    codes, key = weight.codes.numpy().copy(), 5 << 32 | 1 if "seed" in options else None
    average = root = residue = np.zeros((7, 9), np.int16)
    compensation = np.zeros((7, 9), np.int16) if "kahan_sum" in options else None
    steps(optimizer, weight, grads)
    for step, grad in enumerate(grads, 1):
        found: Any = reference.adam_update(
            codes, reference.encode(grad.numpy(), fmt), fmt, step=step, exp_avg=average, root=root,
            residue=None if key else residue, compensation=compensation,
            negative_lr=reference.encode(np.array(-0.01), fmt), beta1=0.9, beta2=0.999, eps=1e-8,
            weight_decay=reference.encode(np.array(0.1), fmt), decoupled=kind is AdamW, key=key,
        )  # fmt: skip
        codes, average, root, residue, compensation = found
    state = optimizer.state[weight]
    np.testing.assert_array_equal(weight.codes.numpy(), codes)
    np.testing.assert_array_equal(state["exp_avg"].codes.numpy(), average)
    np.testing.assert_array_equal(state["root_exp_avg_sq"].codes.numpy(), root)
    assert ("compensation" in state, "root_residue" in state) == (
        "kahan_sum" in options,
        key is None,
    )
    assert unused not in optimizer.state or not optimizer.state[unused]


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_on_floats_is_torchs(kind: str, weight_decay: float) -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    torch.manual_seed(1)
    grads = [torch.randn(7) for _ in range(10)]
    steps(getattr(lns_ops.optim, kind)([ours], lr=0.05, weight_decay=weight_decay), ours, grads)
    steps(getattr(torch.optim, kind)([theirs], lr=0.05, weight_decay=weight_decay), theirs, grads)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adam_in_lns16_stays_near_float32() -> None:
    """Over fifty steps the LNS weights differ from float32's by a few ulps (0.54 % each)."""
    torch.manual_seed(2)
    start, grads = torch.randn(500), [torch.randn(500) + 0.5 for _ in range(50)]
    exact = nn.Parameter(start.clone())
    steps(torch.optim.Adam([exact], lr=0.02), exact, grads)
    for options in ({"kahan_sum": True}, {"stochastic_rounding": True}):
        weight = nn.Parameter(LNSTensor.from_float(start, lns16))
        steps(Adam([weight], lr=0.02, **options), weight, grads)  # type: ignore[arg-type]
        moved, wanted = weight.detach().to_float() - start, exact.detach() - start
        assert torch.corrcoef(torch.stack([moved, wanted]))[0, 1] > 0.97
        assert abs((moved - wanted).mean()) < 0.02 * wanted.abs().mean()


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_small_updates_are_lost_to_nearest_and_kept_otherwise(kind: type[SGD]) -> None:
    """A hundred updates of 10^-3 of the weight: half of them are below half an ulp of lns12."""
    ended = {}
    for options in ({}, {"kahan_sum": True}, {"stochastic_rounding": True}):
        weight = nn.Parameter(LNSTensor.from_float(torch.ones(2000), lns12))
        made = kind([weight], lr=1e-3, **options)  # type: ignore[arg-type]
        steps(made, weight, [torch.ones(2000)] * 100)
        ended[next(iter(options), "nearest")] = weight.detach().to_float().mean().item()
    assert ended["nearest"] == 1
    assert ended["kahan_sum"] == pytest.approx(0.9, abs=0.012)
    assert ended["stochastic_rounding"] == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize(
    "options", [{}, {"kahan_sum": True}, {"stochastic_rounding": True, "seed": 4}], ids=str
)
def test_adam_state_survives_its_state_dict(options: dict[str, bool]) -> None:
    torch.manual_seed(3)
    grads = [torch.randn(40) for _ in range(6)]
    weight = nn.Parameter(LNSTensor.from_float(torch.randn(40), lns12))
    optimizer = Adam([weight], lr=0.1, **options)  # type: ignore[arg-type]
    steps(optimizer, weight, grads[:3])
    twin = nn.Parameter(LNSTensor(weight.codes.clone(), lns12))
    other = Adam([twin], lr=0.3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, parameter in ((optimizer, weight), (other, twin)):
        steps(each, parameter, grads[3:])
        assert int(each.state[parameter]["step"]) == 6
    assert torch.equal(weight.codes, twin.codes)
    assert optimizer.state[weight].keys() == other.state[twin].keys()
    for name, value in optimizer.state[weight].items():
        loaded = other.state[twin][name]
        assert type(loaded) is type(value)
        assert torch.equal(*(t.codes if isinstance(t, LNSTensor) else t for t in (loaded, value)))
        assert loaded.dtype == value.dtype


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        (SGD, {"lr": 0.1, "momentum": 0.999}, "momentum=0.999: rounds to 1 in lns8"),
        (
            SGD,
            {"lr": 0.1, "kahan_sum": True, "stochastic_rounding": True},
            "one is enough; choose one",
        ),
        (
            SGD,
            {"lr": 0.1, "stochastic_rounding": True, "seed": -1},
            "seed=-1: must be a whole number",
        ),
        (Adam, {"betas": (0.999, 0.999), "lr": 0.1}, "beta1=0.999: rounds to 1 in lns8"),
        (Adam, {"betas": (1.0, 0.999)}, "beta1=1.0"),
        (Adam, {"betas": (0.9, 1.0)}, "beta2=1.0"),
        (Adam, {"eps": 0.0}, "eps=0.0"),
        (Adam, {"arithmetic": "float64"}, "arithmetic='float64': must be one of lns, float32"),
        (Adam, {"weight_decay": -1}, "weight_decay=-1"),
        (Adam, {"lr": 1e-9}, "lr=1e-09: underflows"),
        (AdamW, {"lr": 0.1, "weight_decay": 1e-9}, "weight_decay=1e-09: underflows"),
    ],
)
def test_bad_values_are_refused(kind: type[SGD], arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind([nn.Parameter(LNSTensor.from_float(torch.ones(1), lns8))], **arguments)


def test_stochastic_rounding_is_for_lns_parameters() -> None:
    with pytest.raises(
        ValueError,
        match=r"stochastic_rounding=True for a torch.float32 parameter: LNS parameters only",
    ):
        SGD([nn.Parameter(torch.ones(1))], lr=0.1, stochastic_rounding=True)


@pytest.mark.parametrize("options", [{"kahan_sum": True}, {"stochastic_rounding": True}], ids=str)
def test_a_strangers_loop_trains_with_adam(options: dict[str, bool]) -> None:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    torch.manual_seed(0)
    model = lns_ops.convert_(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), lns12, scope="everywhere"
    )
    parameters = model.parameters()
    optimizer = lns_ops.optim.AdamW(parameters, lr=0.005, **options)  # type: ignore[arg-type]
    for _ in range(8):
        for rows in torch.randperm(1500).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows], reduction="sum").backward()
            optimizer.step()
    wrong = (model(x[1500:]).argmax(1) != y[1500:]).float().mean()
    assert wrong < 0.12


def small_net(scope: str | None = "everywhere") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    if scope is not None:
        lns_ops.convert_(model, lns16, scope=scope)
    return model


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("scope", "options"),
    [
        *(("everywhere", {**rounding}) for rounding in ROUNDINGS),
        ("everywhere", {"arithmetic": "float32", "kahan_sum": True}),
        ("matmul", {}),
        (None, {}),
    ],
    ids=str,
)
def test_a_step_between_forward_and_backward_is_refused(
    name: str, scope: str | None, options: dict[str, Any]
) -> None:
    """With a step of torch.optim in between, the gradients would belong to other weights, or to a
    mixture."""
    model = small_net(scope)
    optimizer = make(name, model.parameters(), **options)
    model(torch.ones(2, 3)).sum().backward()
    early = model(torch.ones(2, 3)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_steps_in_a_closure_and_new_weights_are_changes_too() -> None:
    model = small_net()
    exact = [p.detach().to_float() for p in model.parameters()]  # type: ignore[operator]
    optimizer = SGD(model.parameters(), lr=0.1, kahan_sum=True)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return float(loss.detach())

    for change in (lambda: optimizer.step(closure), lambda: optimizer.init_compensation(exact)):
        early = model(torch.ones(2, 3)).sum()
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()


def test_a_step_after_a_compiled_forward_is_a_change_too() -> None:
    """A compiled forward saves codes instead of LNSTensors."""
    torch.compiler.reset()
    model = small_net()
    optimizer = SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(2, 3)).sum().backward()
    early = compiled(torch.ones(2, 3)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize("name", KINDS)
def test_backward_passes_without_a_step_between_add_up(name: str) -> None:
    """Accumulation, retain_graph and parameters without a gradient, which stay unchanged."""
    model, unused = small_net(), nn.Parameter(LNSTensor.from_float(torch.ones(2, 2), lns16))
    optimizer = make(name, [*model.parameters(), unused])
    first, second = model(torch.ones(2, 3)).sum(), model(torch.ones(2, 3)).sum()
    for _ in range(3):
        first.backward(retain_graph=True)
    second.backward()
    product = unused @ unused
    optimizer.step()
    product.sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
