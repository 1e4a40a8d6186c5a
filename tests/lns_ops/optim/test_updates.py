"""Stochastic rounding, Adam, and their kernels: tables equal exact arithmetic, kernels equal the
reference, optimizers agree with torch."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import LNSFormat, cpu, lns12, lns16, reference
from lns_ops.spec.gaussian_log import decay_table, stochastic_tables
from tests.lns_ops.lns_formats import FORMATS, IDS

KEY = 5 << 32 | 77


def codes_of(rng: np.random.Generator, fmt: LNSFormat, *shape: int) -> np.ndarray:
    return rng.choice(fmt.codes(), shape)


@pytest.mark.parametrize(
    ("key", "step", "slot", "block", "words"),
    [
        (0, 0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            0x299F31D0A4093822,
            0x13198A2E,
            0x03707344,
            0x85A308D3243F6A88,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random_bits_are_philox(
    key: int,
    step: int,
    slot: int,
    block: int,
    words: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    monkeypatch.setattr(np, "arange", lambda *args, **kwargs: np.array([block], np.uint64))
    got = reference.random_bits(8, key, step, slot)
    assert tuple(int(low) | int(high) << 16 for low, high in got.reshape(4, 2)) == words


@given(
    st.integers(1, 100), st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 40), st.integers(0, 3)
)
def test_random_bits_of_the_kernel(count: int, key: int, step: int, slot: int) -> None:
    np.testing.assert_array_equal(
        cpu.random_bits(count, key, step, slot)[:count],
        reference.random_bits(count, key, step, slot),
    )


def test_random_bits_look_uniform_and_streams_differ() -> None:
    streams = [
        reference.random_bits(100_000, *which)
        for which in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0))
    ]
    for i, bits in enumerate(streams):
        counts = np.bincount(bits >> 8, minlength=256)
        # chi squared, 255 degrees: one in 10^5
        assert np.sum((counts - 390.625) ** 2 / 390.625) < 360
        assert all(abs(np.corrcoef(bits, other)[0, 1]) < 0.02 for other in streams[:i])


@pytest.mark.parametrize("fraction_bits", [0, 3, 6, 7, 10])
def test_stochastic_tables_have_the_exact_sum_as_expected_value(fraction_bits: int) -> None:
    plus, minus = stochastic_tables(fraction_bits)
    assert len(plus) == len(minus)
    with mpmath.workdps(30):
        ulp = mpmath.power(2, mpmath.mpf(1) / (1 << fraction_bits))
        for sign, table in ((1, plus), (-1, minus)):
            for distance in range(1, len(table), max(1, len(table) // 300)):
                lower, chance = (
                    int(table[distance]) >> 16,
                    (int(table[distance]) & 0xFFFF) / mpmath.mpf(1 << 16),
                )
                exact = 1 + sign * mpmath.power(ulp, -distance)
                expected = mpmath.power(ulp, lower) * (1 + chance * (ulp - 1))
                assert abs(expected - exact) <= mpmath.power(ulp, lower) * (ulp - 1) * mpmath.mpf(
                    "0.50001"
                ) / (1 << 16)
    assert plus[-1] == minus[-1] == 0
    assert minus[0] == -(1 << 31)


@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("update", [1e-4, -3e-3, 0.7, -0.4])
def test_stochastic_addition_is_unbiased(fmt: LNSFormat, update: float) -> None:
    n = 200_000
    x, y = (reference.encode(np.full(n, value), fmt) for value in (1.3, update))
    total = reference.decode(
        reference.add_stochastic(x, y, fmt, reference.random_bits(n, KEY, 1, 0)), fmt, np.float64
    )
    exact = reference.decode(x[:1], fmt, np.float64) + reference.decode(y[:1], fmt, np.float64)
    assert len(np.unique(total)) <= 2
    assert abs(total.mean() - exact) < 5 * total.std() / np.sqrt(n) + 1e-4 * fmt.epsilon


def test_stochastic_addition_at_the_edges() -> None:
    """Zeros and cancellation are exact for any bits; the range's end saturates."""
    for bits in (0, 65535):
        r = np.array([bits])
        one, zero = np.array([lns12.bias], np.int16), np.zeros(1, np.int16)
        assert reference.add_stochastic(one, zero, lns12, r) == one
        assert reference.add_stochastic(zero, reference.neg(one, lns12), lns12, r) == reference.neg(
            one, lns12
        )
        assert reference.add_stochastic(one, reference.neg(one, lns12), lns12, r) == 0
        top = np.array([lns12.field_mask], np.int16)
        assert reference.add_stochastic(top, top, lns12, r) == top


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("fraction_bits", [0, 6, 7, 10])
def test_decay_table_is_the_root_of_the_average(beta: float, fraction_bits: int) -> None:
    keep, take, first, table = decay_table(beta, fraction_bits)
    scale = 1 << fraction_bits
    k = np.arange(first - 5, first + len(table) + 5)
    exact = 0.5 * np.log2(beta + (1 - beta) * np.exp2(2 * k / scale)) * scale
    correction = table[np.clip(k - first, 0, len(table) - 1)]
    got = (np.maximum(keep, k * 65536 + take) + correction) / 65536
    assert np.abs(got - exact).max() <= 1.01 / 65536
    assert table[0] == table[-1] == 0


def test_the_second_moment_does_not_freeze() -> None:
    """An average with beta 0.999 follows its input up and down to within an ulp and a half of
    float64 (1.6 % at f = 6)."""
    rng = np.random.default_rng(0)
    nearest = at_random = residue = np.zeros(300, np.int16)
    exact = np.zeros(300)
    for step in range(6000):
        x = reference.encode(rng.standard_normal(300) * (3.0 if step < 3000 else 0.3), lns12)
        exact = 0.999 * exact + 0.001 * reference.decode(x, lns12, np.float64) ** 2
        nearest, kept = reference.root_mean_square(nearest, x, lns12, 0.999, residue=residue)
        assert kept is not None
        residue = kept
        at_random, _ = reference.root_mean_square(
            at_random, x, lns12, 0.999, bits=reference.random_bits(300, KEY, step, 1)
        )
        if step in (0, 10, 2999, 5999):
            for root in (nearest, at_random):
                ratio = reference.decode(root, lns12, np.float64) / np.sqrt(exact)
                assert abs(ratio.mean() - 1) < 0.016
    assert np.abs(reference.decode(nearest, lns12, np.float64) / np.sqrt(exact) - 1).max() < 0.012


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("use_momentum", [False, True])
def test_stochastic_sgd_kernel(fmt: LNSFormat, use_momentum: bool) -> None:
    rng = np.random.default_rng(1)
    weight, grad, buffer = (codes_of(rng, fmt, 71, 101) for _ in range(3))
    grad[::5] = reference.neg(weight[::5], fmt)
    rate, momentum = (int(reference.encode(np.array(value), fmt)) for value in (-0.1, 0.3))
    options: Any = {"momentum": momentum, "buffer": buffer} if use_momentum else {}
    expected = reference.sgd_update(
        weight, grad, fmt, negative_lr=np.int16(rate), key=KEY, step=3, **options
    )
    cpu.sgd_update(weight, grad, fmt, negative_lr=rate, key=KEY, step=3, **options)
    np.testing.assert_array_equal(weight, expected[0])
    if use_momentum:
        np.testing.assert_array_equal(buffer, expected[1])


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize("decay", [None, "into the gradient", "decoupled"])
@pytest.mark.parametrize("step", [1, 2, 100_000])
def test_adam_kernels(fmt: LNSFormat, rounding: str, decay: str | None, step: int) -> None:
    rng = np.random.default_rng(2)
    weight, grad, average, compensation = (codes_of(rng, fmt, 3, 1001) for _ in range(4))
    root = reference.absolute(codes_of(rng, fmt, 3, 1001), fmt)
    residue = np.where(root == 0, 0, rng.integers(-(1 << 15), 1 << 15, root.shape)).astype(np.int16)
    rate, decay_code = (int(reference.encode(np.array(value), fmt)) for value in (-0.1, 0.3))
    common: dict[str, Any] = {
        "step": step,
        "exp_avg": average,
        "root": root,
        "beta1": 0.3,
        "beta2": 0.99,
        "eps": 1e-8,
    }
    common |= {"decoupled": decay == "decoupled", "key": KEY if rounding == "stochastic" else None}
    common |= {
        "residue": None if rounding == "stochastic" else residue,
        "compensation": compensation if rounding == "kahan" else None,
    }
    scalars = {"negative_lr": rate, "weight_decay": None if decay is None else decay_code}
    as_codes = {name: None if value is None else np.int16(value) for name, value in scalars.items()}
    expected = reference.adam_update(weight, grad, fmt, **common, **as_codes)
    cpu.adam_update(weight, grad, fmt, **common, **scalars)
    for got, wanted in zip((weight, average, root, residue, compensation), expected, strict=True):
        if wanted is not None:
            np.testing.assert_array_equal(got, wanted)


def test_adam_refuses_what_it_cannot_change() -> None:
    weight = np.ones((4, 6), np.int16)
    options: dict[str, Any] = {
        "step": 1,
        "exp_avg": weight.copy(),
        "root": weight.copy(),
        "negative_lr": 1,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 1e-8,
    }
    with pytest.raises(ValueError, match=r"residue=None: without it or a key"):
        cpu.adam_update(weight, weight.copy(), lns16, **options)
    with pytest.raises(ValueError, match=r"root of dtype int16.*weight's shape"):
        cpu.adam_update(weight, weight.copy(), lns16, **options | {"root": weight[0]})
    with pytest.raises(ValueError, match=r"beta1 <= 0\.98"):
        cpu.adam_update(weight, weight.copy(), lns12, **options | {"beta1": 0.999})


# --------------------------------------------------------------------------------------------- upda


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_stochastic_encoding_equals_the_reference(fmt: LNSFormat) -> None:
    rng = np.random.default_rng(3)
    normal = (rng.standard_normal(5000) * np.exp2(rng.uniform(-20, 20, 5000))).astype(np.float32)
    special = np.array(
        [0.0, -0.0, 1e-45, -3e-39, 1.1754944e-38, 3.4e38, -3.4e38, 1, 2, 1 - 2**-24], np.float32
    )
    x = np.concatenate([normal, special, reference.decode(fmt.codes()[::7], fmt)])
    for bits in (
        np.zeros(x.size, np.int64),
        np.full(x.size, 65535),
        reference.random_bits(x.size, KEY, 1, 0),
    ):
        np.testing.assert_array_equal(
            cpu.encode_stochastic(x, fmt, bits.astype(np.uint16)),
            reference.encode_stochastic(x, fmt, bits),
        )


@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(16, 14)], ids=str)
@pytest.mark.parametrize("value", [1.2345, -0.7, 0.5003])
def test_stochastic_encoding_is_unbiased_and_keeps_codes(fmt: LNSFormat, value: float) -> None:
    n = 200_000
    x = np.full(n, value, np.float32)
    got = reference.decode(
        reference.encode_stochastic(x, fmt, reference.random_bits(n, KEY, 1, 0)), fmt, np.float64
    )
    assert len(np.unique(got)) <= 2
    assert abs(got.mean() - np.float64(x[0])) < 5 * got.std() / np.sqrt(
        n
    ) + 1e-4 * fmt.epsilon * abs(value)
    codes = fmt.codes()[np.abs(reference.decode(fmt.codes(), fmt)) >= 2.0**-125]
    for bits in (0, 65535):
        kept = reference.encode_stochastic(
            reference.decode(codes, fmt), fmt, np.full(codes.shape, bits)
        )
        np.testing.assert_array_equal(kept, codes)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize("use_momentum", [False, True])
def test_sgd_in_float32(fmt: LNSFormat, rounding: str, use_momentum: bool) -> None:
    rng = np.random.default_rng(4)
    weight, grad, buffer, compensation = (codes_of(rng, fmt, 7, 101) for _ in range(4))
    options: dict[str, Any] = {
        "lr": 0.1,
        "momentum": 0.9 if use_momentum else None,
        "key": KEY if rounding == "stochastic" else None,
        "step": 3,
    }
    arrays: dict[str, Any] = {
        "buffer": buffer if use_momentum else None,
        "compensation": compensation if rounding == "kahan" else None,
    }
    expected = reference.sgd_update_float32(weight, grad, fmt, **options, **arrays)
    cpu.sgd_update_float32(weight, grad, fmt, **options, **arrays)
    for got, wanted in zip((weight, *arrays.values()), expected, strict=True):
        if got is not None:
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("rounding", ["nearest", "kahan", "stochastic"])
@pytest.mark.parametrize("decay", [None, "into the gradient", "decoupled"])
def test_adam_in_float32(fmt: LNSFormat, rounding: str, decay: str | None) -> None:
    rng = np.random.default_rng(5)
    weight, grad, average, compensation, residue = (codes_of(rng, fmt, 3, 101) for _ in range(5))
    root = reference.absolute(codes_of(rng, fmt, 3, 101), fmt)
    options: dict[str, Any] = {
        "step": 2,
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "decoupled": decay == "decoupled",
    }
    options |= {
        "weight_decay": None if decay is None else 0.3,
        "key": KEY if rounding == "stochastic" else None,
    }
    arrays: dict[str, Any] = {
        "exp_avg": average,
        "root": root,
        "residue": None if rounding == "stochastic" else residue,
    }
    arrays["compensation"] = compensation if rounding == "kahan" else None
    expected = reference.adam_update_float32(weight, grad, fmt, **options, **arrays)
    cpu.adam_update_float32(weight, grad, fmt, **options, **arrays)
    for got, wanted in zip((weight, *arrays.values()), expected, strict=True):
        if got is not None:
            np.testing.assert_array_equal(got, wanted)


def test_sums_that_leave_float32_saturate() -> None:
    """Compensation and update are finite but their sum is not, and the weight jumps to the other
    end: inf - inf would be NaN."""
    fmt = LNSFormat(9, 0)
    far = np.array([fmt.field_mask, fmt.field_mask | fmt.sign_mask], np.int16)
    zeros = np.zeros_like(far)
    new, *_, kept = reference.adam_update_float32(
        far ^ fmt.sign_mask, zeros, fmt, step=1, lr=3.8, beta1=0.9, beta2=0.99, eps=1e-8,
        decoupled=True, weight_decay=0.5, key=None, compensation=far, exp_avg=zeros, root=zeros,
        residue=zeros,
    )  # fmt: skip
    np.testing.assert_array_equal(new, far)
    assert (np.abs(reference.decode(kept, fmt)) <= fmt.largest).all()


def test_the_update_operators_are_proper_custom_operators() -> None:
    weight, grad, average, root, residue = (
        torch.from_numpy(codes_of(np.random.default_rng(i), lns12, 20)) for i in range(5)
    )
    root &= lns12.field_mask
    step, ops = torch.tensor(3), torch.ops.lns_ops
    moments = (average, root, residue)
    options = (0.9, 0.999, 1e-8, None, False, None, None, 12, 6)
    for sgd, adam, lr in (
        (ops.sgd_update_, ops.adam_update_, -1000),
        (ops.sgd_update_float32_, ops.adam_update_float32_, 0.1),
    ):
        torch.library.opcheck(sgd, (weight, grad, None, None, step, lr, None, KEY, None, 12, 6))
        torch.library.opcheck(adam, (weight, grad, *moments, None, step, lr, *options))
