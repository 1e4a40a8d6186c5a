"""The composed optimizers: torch's updates on floats, the reference's bits on codes, refused
values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lns_ops.optim as optim
from lns_ops import LNSFormat, LNSTensor, lns8, lns12, lns16, reference
from lns_ops.functional import reductions
from lns_ops.optim import SGD, Adam, moments
from lns_ops.optim.backend_codes import Codes
from tests.lns_ops.lns_formats import FORMATS, IDS, half_ulp
from tests.lns_ops.optimizers import (
    ALL,
    FLOAT32,
    ROUNDINGS,
    TORCHS,
    gradients,
    make,
    run,
    start_of,
    values,
)


@pytest.mark.parametrize("name", list(TORCHS))
@pytest.mark.parametrize("maximize", [False, True])
def test_floats_step_as_torchs(name: str, maximize: bool) -> None:
    ours, theirs = (nn.Parameter(start_of(50)) for _ in range(2))
    run(make(name, [ours], maximize=maximize), ours, gradients(12, 50))
    run(
        getattr(torch.optim, name)([theirs], maximize=maximize, **TORCHS[name]),
        theirs,
        gradients(12, 50),
    )
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options", [{"centered": True}, {"momentum": 0.8}, {"centered": True, "momentum": 0.8}], ids=str
)
def test_every_rmsprop_is_torchs(options: dict[str, Any]) -> None:
    ours, theirs = (nn.Parameter(start_of(50)) for _ in range(2))
    run(optim.RMSprop([ours], lr=0.01, **options), ours, gradients(12, 50))
    run(torch.optim.RMSprop([theirs], lr=0.01, **options), theirs, gradients(12, 50))
    # (r - m)(r + m) instead of r^2 - m^2
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_asgd_averages_as_torchs() -> None:
    ours, theirs = (nn.Parameter(start_of(50)) for _ in range(2))
    mine, other = make("ASGD", [ours]), torch.optim.ASGD([theirs], **TORCHS["ASGD"])
    run(mine, ours, gradients(12, 50))
    run(other, theirs, gradients(12, 50))
    torch.testing.assert_close(
        mine.state[ours]["ax"], other.state[theirs]["ax"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize(
    "rounding", [r | a for a in ({}, {"arithmetic": "float32"}) for r in ROUNDINGS[1:]], ids=str
)
def test_codes_move_as_floats(name: str, rounding: dict[str, Any]) -> None:
    """Over forty steps an lns16 weight moves as far as a float32 weight, except for roundings that
    average out."""
    start = LNSTensor.from_float(start_of(400), lns16).to_float()
    grads = [LNSTensor.from_float(g, lns16).to_float() for g in gradients(40, 400)]
    exact, weight = nn.Parameter(start.clone()), nn.Parameter(LNSTensor.from_float(start, lns16))
    run(make(name, [exact]), exact, grads)
    run(make(name, [weight], **rounding), weight, grads)
    moved, wanted = weight.detach().to_float() - start, exact.detach() - start
    assert torch.corrcoef(torch.stack([moved, wanted]))[0, 1] > 0.97
    assert abs((moved - wanted).mean()) < 0.05 * wanted.abs().mean()


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("fmt", [lns12, lns16], ids=str)
def test_a_step_in_float32_is_the_rounded_step_of_floats(name: str, fmt: LNSFormat) -> None:
    """Twenty steps, each from the state and weights of the LNS optimizer: it stores what the float
    optimizer computes, rounded."""
    weight = nn.Parameter(LNSTensor.from_float(start_of(200), fmt))
    optimizer, different = make(name, [weight], **FLOAT32), 0
    for grad in gradients(20, 200):
        grad = LNSTensor.from_float(grad, fmt)
        exact = nn.Parameter(weight.detach().to_float())
        theirs = make(name, [exact])
        theirs.state[exact] = {**floats_of(optimizer.state.get(weight, {}))}
        exact.grad, weight.grad = grad.to_float(), grad
        theirs.step()
        optimizer.step()
        for got, want in [(weight, exact), *pairs_of(optimizer.state[weight], theirs.state[exact])]:
            codes = LNSTensor.from_float(want.detach(), fmt).codes
            different += int((codes != got.codes).sum())
            assert (
                (got.to_float() - want).abs()
                <= 1.01 * 2 * half_ulp(fmt) * want.abs() + fmt.smallest
            ).all()
    assert different <= 20  # float32's own rounding is on the other side of a boundary


def floats_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The float optimizer's state that corresponds to the LNS state in float32 arithmetic."""
    found = {}
    for name, value in state.items():
        if not isinstance(value, LNSTensor):
            found.update({} if name.endswith("_residue") else {name: value.clone()})
        elif not name.endswith("_compensation"):
            lost = state.get(f"{name}_residue", state.get(f"{name}_compensation"))
            lost = (
                LNSTensor(lost, value.fmt)
                if lost is not None and not isinstance(lost, LNSTensor)
                else lost
            )
            whole = value.to_float() + (0 if lost is None else lost.to_float())
            root = name.removeprefix("root_")
            found |= {root: whole * whole} if root != name else {name: whole}
    return found


def pairs_of(state: dict[str, Any], floats: dict[str, Any]) -> list[tuple[Any, Tensor]]:
    """LNS states and their float equivalents; ASGD's average is over rounded weights."""
    kept = (n for n, value in state.items() if isinstance(value, LNSTensor))
    names = [n for n in kept if n != "ax" and not n.endswith("_compensation")]
    return [
        (state[n], floats[n.removeprefix("root_")].sqrt() if n.startswith("root_") else floats[n])
        for n in names
    ]


@pytest.mark.parametrize("kahan_sum", [True, False])
def test_float32_updates_have_decays_that_the_format_has_not(kahan_sum: bool) -> None:
    """A beta1 that rounds to 1 in lns12. Kahan keeps steps of a 200th of an ulp, which are lost
    without it."""
    weight = nn.Parameter(LNSTensor.from_float(torch.ones(30), lns12))
    options: dict[str, Any] = {"lr": 2.0**-14, "betas": (0.997, 0.9999), "kahan_sum": kahan_sum}
    with pytest.raises(ValueError, match=r"beta1=0.997: rounds to 1 in lns12"):
        optim.NAdam([weight], **options)
    run(optim.NAdam([weight], **options, **FLOAT32), weight, [torch.ones(30)] * 1000)
    moved = 1 - weight.detach().to_float()
    assert ((moved > 0.04) & (moved < 0.08)).all() if kahan_sum else not moved.any()


def test_what_leaves_float32_saturates() -> None:
    start = torch.tensor([lns16.largest, -lns16.largest, 1.0, 0.0])
    for name in ALL:
        weight = nn.Parameter(LNSTensor.from_float(start, lns16))
        run(make(name, [weight], **FLOAT32), weight, [torch.tensor([-3e38, 3e38, 3e38, 1e-38])] * 3)
        assert weight.detach().to_float().isfinite().all()


# --------------------------------------------------------------------------------------------- agai


def number(value: float, fmt: LNSFormat) -> np.ndarray[Any, np.dtype[np.int16]]:
    return reference.encode(np.array(value), fmt)


def any_codes(fmt: LNSFormat, count: int, seed: int) -> list[LNSTensor]:
    """700 values each; every code is equally likely, including the extremes and zero."""
    rng = np.random.default_rng(seed)
    codes = rng.choice(
        np.concatenate([fmt.codes(), np.zeros(len(fmt.codes()) // 20, np.int16)]), (count, 700)
    )
    return [LNSTensor(torch.from_numpy(each.copy()), fmt) for each in codes]


@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_nesterov_in_reference_operations(
    fmt: LNSFormat, rounding: dict[str, Any], weight_decay: float
) -> None:
    start, *grads = any_codes(fmt, 6, 1)
    weight = nn.Parameter(start)
    w, c, buffer = start.codes.numpy().copy(), np.zeros(700, np.int16), np.zeros(700, np.int16)
    optimizer = SGD(
        [weight], lr=0.05, momentum=0.9, nesterov=True, weight_decay=weight_decay, **rounding
    )
    for step, grad in enumerate(grads, 1):
        weight.grad = grad
        optimizer.step()
        g = reference.add(grad.codes.numpy(), reference.mul(number(weight_decay, fmt), w, fmt), fmt)
        buffer = reference.add(reference.mul(number(0.9, fmt), buffer, fmt), g, fmt)
        direction = reference.add(g, reference.mul(number(0.9, fmt), buffer, fmt), fmt)
        more = (
            {"key": 4 << 32, "step": step}
            if "seed" in rounding
            else {"compensation": c if rounding else None}
        )
        rate, given = number(-0.05, fmt), dict[str, Any](more)
        w, _, lost = reference.sgd_update(w, direction, fmt, negative_lr=rate, **given)
        c = c if lost is None else lost
    np.testing.assert_array_equal(weight.codes.numpy(), w)


FUSED: dict[str, list[dict[str, Any]]] = {
    "RMSprop": [{}, {"weight_decay": 0.0}, {"momentum": 0.8}],
    "Adagrad": [{"lr_decay": 0.0, "initial_accumulator_value": 0.0, "weight_decay": 0.1}],
    "Lion": [{}, {"weight_decay": 0.0}],
    "Madam": [{}, {"p_scale": None, "lr": 2.0}, {"maximize": True}],
    "Mul": [{}, {"use_pow": True}],
    "SignMul": [{}],
}


@pytest.mark.parametrize("name", list(FUSED))
@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_fused_steps_have_the_bits_of_their_operations(
    name: str, fmt: LNSFormat, rounding: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in FUSED[name]:
        ends = []
        for fused in (True, False):
            monkeypatch.setattr(Codes, "fused", fused)
            start, *grads = any_codes(fmt, 6, 2)
            weight = nn.Parameter(start)
            optimizer = make(name, [weight], **(rounding | options))
            for grad in grads:
                weight.grad = grad
                optimizer.step()
            ends.append({"weight": weight.codes, **values(optimizer.state[weight])})
        assert ends[0].keys() == ends[1].keys()
        for key, value in ends[0].items():
            assert torch.equal(value, ends[1][key]), (options, key)


@pytest.mark.parametrize("name", [n for n in FUSED if n not in ("Mul", "SignMul")])
def test_fused_steps_are_taken_where_there_are_any(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("one by one")

    monkeypatch.setattr(getattr(optim, name), "_step", refuse)
    weight = nn.Parameter(any_codes(lns12, 1, 3)[0])
    run(make(name, [weight], **FUSED[name][0]), weight, gradients(2, 700))
    with pytest.raises(AssertionError, match="one by one"):
        run(make(name, [weight], **FUSED[name][0] | FLOAT32), weight, gradients(1, 700))


@pytest.mark.parametrize("fmt", [lns16, lns12], ids=str)
def test_rmsprop_in_reference_operations(fmt: LNSFormat) -> None:
    start, grads = start_of(60), gradients(4, 60)
    weight = nn.Parameter(LNSTensor.from_float(start, fmt))
    run(optim.RMSprop([weight], lr=0.05, momentum=0.9), weight, grads)
    w = reference.encode(start.numpy(), fmt)
    root = residue = buffer = np.zeros(60, np.int16)
    for grad in grads:
        g = reference.encode(grad.numpy(), fmt)
        root, residue = reference.root_mean_square(  # type: ignore[assignment]
            *(root, g, fmt, 0.99), residue=residue
        )
        eps = np.maximum(number(1e-8, fmt), 1).astype(np.int16)
        direction = reference.div(g, reference.add(root, eps, fmt), fmt)
        buffer = reference.add(reference.mul(number(0.9, fmt), buffer, fmt), direction, fmt)
        w, *_ = reference.sgd_update(w, buffer, fmt, negative_lr=number(-0.05, fmt))
    np.testing.assert_array_equal(weight.codes.numpy(), w)


@pytest.mark.parametrize("fmt", [lns16, lns12], ids=str)
def test_lion_in_reference_operations(fmt: LNSFormat) -> None:
    start, grads = start_of(60), gradients(4, 60)
    weight = nn.Parameter(LNSTensor.from_float(start, fmt))
    run(optim.Lion([weight], lr=0.05, stochastic_rounding=True, seed=3), weight, grads)
    w, m = reference.encode(start.numpy(), fmt), np.zeros(60, np.int16)

    def blend(beta: float, g: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int16]]:
        held = number(beta, fmt)
        rest = number(1 - float(reference.decode(held, fmt, np.float64)), fmt)
        return reference.add(reference.mul(held, m, fmt), reference.mul(rest, g, fmt), fmt)

    for step, grad in enumerate(grads, 1):
        g = reference.encode(grad.numpy(), fmt)
        direction = np.sign(blend(0.9, g)) * fmt.bias
        codes = np.where(direction < 0, fmt.bias | fmt.sign_mask, direction).astype(np.int16)
        m = blend(0.99, g)
        w, *_ = reference.sgd_update(
            w, codes, fmt, negative_lr=number(-0.05, fmt), key=3 << 32, step=step
        )
    np.testing.assert_array_equal(weight.codes.numpy(), w)


@pytest.mark.parametrize("fmt", [lns16, lns12, lns8], ids=str)
def test_signmul_adds_to_the_logarithm(fmt: LNSFormat) -> None:
    """A factor of n ulps moves every code by n; half an ulp, kept in the residue, moves it every
    second step."""
    start = start_of(60)
    for ulps, steps in ((2.0, 3), (0.5, 6)):
        weight = nn.Parameter(LNSTensor.from_float(start, fmt))
        before = weight.codes.clone()
        optimizer = optim.SignMul(
            [weight], lr=ulps * 2.0**-fmt.fraction_bits, use_pow=True, p_scale=None, kahan_sum=True
        )
        run(optimizer, weight, [torch.full((60,), -1.0)] * steps)
        moved = (weight.codes & fmt.field_mask) - (before & fmt.field_mask)
        assert torch.equal(moved, torch.where(before < 0, -1, 1) * round(ulps * steps))


def test_multiplied_weights_stay_in_range_and_keep_their_signs() -> None:
    start = torch.tensor([lns8.largest, -lns8.largest, lns8.smallest, -lns8.smallest, 0.0, 1.0])
    weight = nn.Parameter(LNSTensor.from_float(start, lns8))
    before = weight.codes.clone()
    run(
        optim.Mul([weight], lr=1.0, kahan_sum=True),
        weight,
        [torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0, 1.0])],
    )
    assert torch.equal(weight.codes[:5], before[:5])
    assert weight.detach().to_float()[5] == pytest.approx(0.5)


@pytest.mark.parametrize("p_scale", [1.0, 0.5])
def test_madam_bounds_weights(p_scale: float) -> None:
    start = torch.ones(40)
    for weight in (nn.Parameter(start.clone()), nn.Parameter(LNSTensor.from_float(start, lns16))):
        run(optim.Madam([weight], lr=0.1, p_scale=p_scale), weight, [-torch.ones(40)] * 5)
        value = weight.detach().to_float() if isinstance(weight, LNSTensor) else weight.detach()
        assert value.max().item() == pytest.approx(p_scale, rel=0.003)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("kind", ["square", "sum", "maximum"])
def test_averages_equal_the_reference_on_every_device(fmt: LNSFormat, kind: str) -> None:
    """The compiled kernel and the torch integers that a GPU uses equal the reference."""
    f = fmt.fraction_bits
    table = {
        "square": moments.mean_square(0.999, f),
        "sum": moments.sum_square(f),
        "maximum": moments.maximum(0.99, f),
    }[kind]
    rng = np.random.default_rng(0)
    root, x = (rng.choice(fmt.codes(), (7, 301)) for _ in range(2))
    root = reference.absolute(root, fmt)
    residue = np.where(root == 0, 0, rng.integers(-(1 << 15), 1 << 15, root.shape)).astype(np.int16)
    expected = reference.followed(root, x, fmt, table, residue=residue)
    tensors = [torch.from_numpy(a.copy()) for a in (root, residue, x)]
    for got, wanted in zip(moments.followed(*tensors, table, fmt), expected, strict=True):
        np.testing.assert_array_equal(got.numpy(), wanted)
    moments.follow_(*tensors, table, fmt)
    for got, wanted in zip(tensors, expected, strict=False):
        np.testing.assert_array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("fraction_bits", [0, 6, 7, 10])
def test_a_sum_of_squares_is_its_hypotenuse(fraction_bits: int) -> None:
    """The fine logarithm of sqrt(r^2 + x^2) is within 1.01 units of the exact value."""
    table = moments.sum_square(fraction_bits)
    k = np.arange(table.first - 3, table.first + len(table.table) + 3)
    exact = 0.5 * np.log2(1 + np.exp2(2 * k / 2**fraction_bits)) * 2 ** (fraction_bits + 16)
    got = np.maximum(0, k * 65536) + table.table[np.clip(k - table.first, 0, len(table.table) - 1)]
    assert np.abs(got - exact).max() <= 1.01


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_norms_are_float64s(fmt: LNSFormat) -> None:
    codes = np.random.default_rng(0).choice(fmt.codes(), 3000)
    exact = np.linalg.norm(reference.decode(codes, fmt, np.float64))
    assert float(reductions.norm(torch.from_numpy(codes), fmt)) == pytest.approx(exact, rel=1e-12)


# --------------------------------------------------------------------------------------------- what


def test_groups_of_lars_and_lamb_need_not_adapt() -> None:
    for kind in (optim.LARS, optim.LAMB):
        adapted, plain = (
            nn.Parameter(LNSTensor.from_float(100 * start_of(50), lns16)) for _ in range(2)
        )
        optimizer = kind([{"params": [adapted]}, {"params": [plain], "adapt": False}], lr=1.0)
        for parameter in (adapted, plain):
            parameter.grad = LNSTensor.from_float(torch.ones(50), lns16)
        before = plain.detach().to_float()
        optimizer.step()
        moved = [(p.detach().to_float() - before).norm() for p in (adapted, plain)]
        assert not torch.isclose(moved[0], moved[1], rtol=0.1)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("RMSprop", {"alpha": 1.0}, "alpha=1.0: must be at least 1e-06 and below 1"),
        ("RMSprop", {"momentum": 0.999}, "momentum=0.999: rounds to 1 in lns8"),
        ("RMSprop", {"eps": 0.0}, "eps=0.0: must be positive"),
        ("Lion", {"lr": 0.1}, "beta2=0.99: rounds to 1 in lns8"),
        ("Lion", {"lr": 0.1, "betas": (0.9, 0.9, 0.9)}, "betas"),
        ("LARS", {"lr": 0.1, "momentum": 0.5, "trust_coefficient": 0.0}, "trust_coefficient=0.0"),
        ("LARS", {"lr": 0.1, "momentum": 0.0, "nesterov": True}, "momentum needs a momentum"),
        (
            "LARS",
            {"lr": 0.1, "momentum": 0.5, "weight_decay": 1e-9},
            "weight_decay=1e-09: underflows",
        ),
        ("Madam", {"g_bound": -1.0}, "g_bound=-1.0"),
        ("Madam", {"p_scale": 0.0}, "p_scale=0.0"),
        ("Rprop", {"etas": (1.5, 1.2)}, r"etas=\(1.5, 1.2\)"),
        ("Rprop", {"step_sizes": (1.0, 0.5)}, "must be positive and ascending"),
        ("NAdam", {"momentum_decay": -1.0}, "momentum_decay=-1.0"),
        ("Adagrad", {"lr_decay": -1.0}, "lr_decay=-1.0"),
        ("ASGD", {"lambd": -1.0}, "lambd=-1.0"),
        ("Adadelta", {"weight_decay": -1.0}, "weight_decay=-1.0"),
        ("Adamax", {"lr": 1e-9}, "lr=1e-09: underflows"),
        ("SGD", {"lr": 0.1, "nesterov": True}, "momentum needs a momentum"),
        ("Lion", {"arithmetic": "float64"}, "arithmetic='float64': must be one of lns, float32"),
        ("Adamax", {"kahan_sum": True, "stochastic_rounding": True}, "one is enough; choose one"),
    ],
)
def test_bad_values_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    kind: Any = getattr(optim, name)
    with pytest.raises(ValueError, match=said):
        kind([nn.Parameter(LNSTensor.from_float(torch.ones(1), lns8))], **options)


def test_an_option_that_no_optimizer_has() -> None:
    with pytest.raises(
        TypeError,
        match="unexpected arguments kahan: optimizers here also take arithmetic, kahan_sum",
    ):
        optim.RMSprop([nn.Parameter(torch.ones(1))], kahan=True)  # type: ignore[call-arg]


def test_adam_is_the_composition_of_its_parts() -> None:
    """Composed amsgrad equals the fused kernel if the largest root is the current root."""
    # growing, so every root is the largest
    grads = [torch.linspace(0.1, 2.0, 50) * (k + 1) for k in range(5)]
    weights = [nn.Parameter(LNSTensor.from_float(start_of(50), lns16)) for _ in range(2)]
    for weight, amsgrad in zip(weights, (False, True), strict=True):
        run(Adam([weight], lr=0.05, amsgrad=amsgrad, kahan_sum=True), weight, grads)
    assert torch.equal(*(w.codes for w in weights))
