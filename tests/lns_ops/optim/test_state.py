"""The state of optimizers: second moments that do not freeze, state dicts, and the start of
compensation."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lns_ops.optim as optim
from lns_ops import LNSTensor, convert_, lns12
from lns_ops.optim import SGD, AdamW
from tests.lns_ops.copies import through_pickle, through_torch
from tests.lns_ops.optimizers import ALL, FLOAT32, ROUNDINGS, gradients, make, run, start_of, values

ROOTS = {
    "RMSprop": ("alpha", "square_avg"),
    "NAdam": ("betas", "exp_avg_sq"),
    "RAdam": ("betas", "exp_avg_sq"),
    "LAMB": ("betas", "exp_avg_sq"),
    "Madam": ("beta", "exp_avg_sq"),
    "Adadelta": ("rho", "square_avg"),
}


@pytest.mark.parametrize("name", list(ROOTS))
@pytest.mark.parametrize("arithmetic", optim.ARITHMETICS)
def test_second_moments_do_not_freeze(name: str, arithmetic: str) -> None:
    """With a decay of 0.999 the moment follows gradients that shrink by ten, although lns12's steps
    are 1.1 %."""
    option, state = ROOTS[name]
    weight = nn.Parameter(LNSTensor.from_float(torch.ones(20), lns12))
    optimizer = make(
        name,
        [weight],
        **{option: (0.9, 0.999) if option == "betas" else 0.999, "lr": 1e-3},
        arithmetic=arithmetic,
    )
    exact, generator = torch.zeros(20, dtype=torch.float64), torch.Generator().manual_seed(0)
    for step in range(1000):
        grad = LNSTensor.from_float(
            torch.randn(20, generator=generator) * (3.0 if step < 300 else 0.3), lns12
        )
        exact = 0.999 * exact + 0.001 * grad.to_float().double() ** 2
        weight.grad = grad
        optimizer.step()
        if step in (50, 299, 999):
            root = optimizer.state[weight][f"root_{state}"].to_float().double()
            assert abs((root / exact.sqrt()).mean() - 1) < 0.016


def test_the_largest_gradient_decays_by_less_than_an_ulp_a_step() -> None:
    weight = nn.Parameter(LNSTensor.from_float(torch.ones(8), lns12))
    optimizer = optim.Adamax([weight], lr=1e-3)
    run(optimizer, weight, [torch.full((8,), 2.0)] + [torch.zeros(8)] * 1000)
    assert optimizer.state[weight]["exp_inf"].to_float()[0].item() == pytest.approx(
        2 * 0.999**1000, rel=0.01
    )


def test_adagrads_sum_goes_on_growing() -> None:
    weight = nn.Parameter(LNSTensor.from_float(torch.ones(8), lns12))
    optimizer = optim.Adagrad([weight], lr=1e-3)
    run(optimizer, weight, [torch.ones(8)] * 2000)
    assert optimizer.state[weight]["root_sum"].to_float()[0].item() == pytest.approx(
        2000**0.5, rel=0.01
    )


@pytest.mark.parametrize("arithmetic", optim.ARITHMETICS)
def test_asgds_average_follows_by_less_than_an_ulp(arithmetic: str) -> None:
    """A thousandth of the distance per step, over a thousand steps, with a constant weight."""
    weight = nn.Parameter(LNSTensor.from_float(torch.full((8,), 2.0), lns12))
    optimizer = optim.ASGD([weight], lr=1.0, lambd=0.0, t0=0, arithmetic=arithmetic)
    run(optimizer, weight, [torch.full((8,), 1.0)] + [torch.zeros(8)] * 3000)
    assert optimizer.state[weight]["ax"].to_float()[0].item() == pytest.approx(1.0, rel=0.012)


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize(
    "kind", ["lns", "lns kahan", "lns random", "lns float32", "float32", "bfloat16"]
)
def test_state_survives_its_state_dict(name: str, kind: str) -> None:
    """Six steps; and three, a state dict, and three more in a new optimizer: the same bits, the
    same dtypes."""
    rounding = {
        "lns kahan": ROUNDINGS[1], "lns random": ROUNDINGS[2],
        "lns float32": ROUNDINGS[1] | FLOAT32, "bfloat16": ROUNDINGS[1]
    }.get(kind, {})  # fmt: skip
    start = start_of(30)
    initial = (
        LNSTensor.from_float(start, lns12) if "lns" in kind else start.to(getattr(torch, kind))
    )
    grads, weight = gradients(6, 30), nn.Parameter(initial.clone())
    optimizer = make(name, [weight], **rounding)
    run(optimizer, weight, grads[:3])
    twin = nn.Parameter(weight.detach().clone())
    other = make(name, [twin], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, parameter in ((optimizer, weight), (other, twin)):
        run(each, parameter, grads[3:])
    states = values(optimizer.state[weight]), values(other.state[twin])
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert states[1][key].dtype == value.dtype
        assert torch.equal(states[1][key], value), key
    assert torch.equal(*(p.codes if isinstance(p, LNSTensor) else p for p in (weight, twin)))
    residues = [key for key in states[0] if key.endswith("_residue")]
    assert all(states[0][key].dtype == torch.int16 for key in residues)
    assert states[0].get("step", torch.zeros(1, dtype=torch.int64)).dtype == torch.int64


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("arithmetic", optim.ARITHMETICS)
def test_fresh_state_is_zero(name: str, arithmetic: str) -> None:
    """A captured CUDA graph needs this: with zeroed state a step equals the first step."""
    weights = [nn.Parameter(LNSTensor.from_float(start_of(30), lns12)) for _ in range(2)]
    first, again = (make(name, [w], kahan_sum=True, arithmetic=arithmetic) for w in weights)
    run(first, weights[0], gradients(1, 30))
    run(again, weights[1], gradients(1, 30, seed=9))
    weights[1].codes.copy_(LNSTensor.from_float(start_of(30), lns12).codes)
    for value in values(again.state[weights[1]]).values():
        value.zero_()
    run(again, weights[1], gradients(1, 30))
    assert torch.equal(*(w.codes for w in weights))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, through_pickle, partial(through_torch, weights_only=False)]
)
@pytest.mark.parametrize("name", list(ALL))
def test_copies_of_model_and_optimizer_go_on_with_the_same_bits(name: str, copied: Any) -> None:
    for scope, rounding in [
        *(("everywhere", {**rounding}) for rounding in ROUNDINGS),
        ("everywhere", ROUNDINGS[1] | FLOAT32),
        (None, {}),
    ]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        if scope is not None:
            convert_(model, lns12, scope=scope)
        optimizer = make(name, model.parameters(), **rounding)
        trained(model, optimizer)
        twin, other = copied((model, optimizer))
        ends = trained(model, optimizer), trained(twin, other)
        assert ends[0].keys() == ends[1].keys()
        for key, value in ends[0].items():
            assert torch.equal(ends[1][key], value), (scope, rounding, key)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """Return weights and state after two steps, by parameter and name."""
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3) + step).square().sum().backward()
        optimizer.step()
    return {
        (index, key): value
        for index, p in enumerate(model.parameters())
        for key, value in values({"weight": p.detach(), **optimizer.state[p]}).items()
    }


def test_a_copy_steps_at_a_rate_tensor_of_its_own() -> None:
    weight = nn.Parameter(LNSTensor.from_float(torch.ones(3), lns12))
    optimizer = SGD([weight], lr=torch.tensor(0.25))  # type: ignore[arg-type]
    twin, other = copy.deepcopy((weight, optimizer))
    other.param_groups[0]["lr"].fill_(0.5)
    for each, parameter in ((optimizer, weight), (other, twin)):
        run(each, parameter, [torch.ones(3)])
    assert twin.detach().to_float().tolist() == [0.5] * 3
    assert weight.detach().to_float()[0].item() == pytest.approx(0.75, rel=0.01)


def test_options_that_a_checkpoint_is_older_than_take_their_defaults() -> None:
    weight = nn.Parameter(torch.ones(3))
    saved = SGD([weight], lr=0.1).state_dict()
    for name in ("nesterov", "weight_decay", "maximize"):
        del saved["param_groups"][0][name]
    optimizer = SGD([weight], lr=0.2)
    optimizer.load_state_dict(saved)
    run(optimizer, weight, [torch.ones(3)])
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("kind", [SGD, AdamW, optim.Lion])
def test_compensation_begins_with_what_conversion_lost(kind: Any) -> None:
    """Weight and compensation together equal the float32 weights up to the square of a half
    step."""
    model = nn.Linear(20, 30)
    exact = [p.detach().clone() for p in model.parameters()]
    convert_(model, lns12, scope="everywhere")
    optimizer = kind(model.parameters(), lr=1e-3, kahan_sum=True)
    optimizer.init_compensation(exact)
    for parameter, value in zip(model.parameters(), exact, strict=True):
        whole = parameter.to_float() + optimizer.state[parameter]["compensation"].to_float()
        assert ((parameter.to_float() - value).abs() / value.abs()).max() > 0.004
        assert ((whole - value).abs() <= 0.0055**2 * value.abs() + lns12.smallest).all()
    named = kind(model.named_parameters(), lr=1e-3, kahan_sum=True)
    named.init_compensation({"weight": exact[0], "bias": exact[1], "unused": exact[0]})
    for parameter in model.parameters():
        assert torch.equal(*(o.state[parameter]["compensation"].codes for o in (optimizer, named)))


def test_compensation_of_logarithms_and_of_bfloat16() -> None:
    exact = start_of(200)
    weight = nn.Parameter(LNSTensor.from_float(exact, lns12))
    optimizer = optim.Madam([weight], kahan_sum=True)
    optimizer.init_compensation([exact])
    log = (
        (weight.codes & lns12.field_mask)
        - lns12.bias
        + optimizer.state[weight]["weight_residue"] / 65536
    )
    torch.testing.assert_close(
        torch.exp2(log.double() / 64), exact.abs().double(), rtol=1e-6, atol=0
    )
    low = nn.Parameter(torch.zeros(200, dtype=torch.bfloat16))
    optimizer = SGD([low], lr=0.1, kahan_sum=True)
    optimizer.init_compensation([exact])
    torch.testing.assert_close(
        low.detach().float() + optimizer.state[low]["compensation"].float(),
        exact,
        rtol=2e-5,
        atol=0,
    )


def test_compensation_cannot_begin_without_what_it_needs() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="kahan_sum=False: it keeps none"):
        SGD([weight], lr=0.1).init_compensation([torch.ones(3)])
    optimizer = SGD([weight], lr=0.1, kahan_sum=True)
    with pytest.raises(
        ValueError, match=r"shapes \[\(4,\)\]: must match the parameters' shapes, \[\(3,\)\]"
    ):
        optimizer.init_compensation([torch.ones(4)])
    with pytest.raises(ValueError, match="without parameter names"):
        optimizer.init_compensation({"weight": torch.ones(3)})
