"""Convolutions and their gradients equal the sums that their module defines, bit for bit, and agree
with torch's in float64."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lns_ops import (
    LNSFormat,
    LNSTensor,
    convert_,
    lns8,
    lns12,
    lns16,
    matmul_accumulation,
    reference,
)
from lns_ops import functional as lns
from lns_ops.functional import convolution
from lns_ops.functional.convolution import Geometry
from lns_ops.reference import LONG_SUM
from tests.lns_ops.functional.convolutions import Case, cases, check_float32_sums, codes
from tests.lns_ops.lns_formats import half_ulp


def row_times_column(terms: list[tuple[int, int]], fmt: LNSFormat) -> int:
    """A sum of products in the contract's order."""
    left, right = (
        np.array([t[0] for t in terms], np.int16),
        np.array([t[1] for t in terms], np.int16),
    )
    return int(reference.long_matmul(left[None], right[:, None], fmt)[0, 0]) if terms else 0


def meets(case: Case, position: tuple[int, ...], tap: tuple[int, ...]) -> tuple[int, ...] | None:
    """The input position that a tap reads at an output position; None in the padding."""
    at = tuple(
        p * s + t * d - q
        for p, s, t, d, q in zip(
            position, case.stride, tap, case.dilation, case.padding, strict=True
        )
    )
    return at if all(0 <= a < size for a, size in zip(at, case.size, strict=True)) else None


def every(sizes: tuple[int, ...] | list[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


def naive_forward(x: np.ndarray, w: np.ndarray, case: Case, fmt: LNSFormat) -> np.ndarray:
    out = np.zeros((case.n, case.outputs, *case.positions), np.int16)
    C, outputs = case.channels // case.groups, case.outputs // case.groups
    for n, o, p in itertools.product(range(case.n), range(case.outputs), every(case.positions)):
        terms = []
        for c, t in itertools.product(range(C), every(case.kernel)):
            at = meets(case, p, t)
            terms.append((w[(o, c, *t)], 0 if at is None else x[(n, o // outputs * C + c, *at)]))
        out[(n, o, *p)] = row_times_column(terms, fmt)
    return out


def naive_input_gradient(grad: np.ndarray, w: np.ndarray, case: Case, fmt: LNSFormat) -> np.ndarray:
    """Over (output, tap), from the last tap to the first, only taps that a stride reaches; zeros
    outside of the gradient."""
    out = np.zeros((case.n, case.channels, *case.size), np.int16)
    C, outputs = case.channels // case.groups, case.outputs // case.groups
    for n, c, i in itertools.product(range(case.n), range(case.channels), every(case.size)):
        group, terms = c // C, []
        for o, t in itertools.product(range(outputs), every(case.kernel)[::-1]):
            reach = [
                a + p - b * d for a, p, b, d in zip(i, case.padding, t, case.dilation, strict=True)
            ]
            if all(r % s == 0 for r, s in zip(reach, case.stride, strict=True)):
                at = tuple(r // s for r, s in zip(reach, case.stride, strict=True))
                inside = all(0 <= a < size for a, size in zip(at, case.positions, strict=True))
                terms.append(
                    (
                        w[(group * outputs + o, c % C, *t)],
                        grad[(n, group * outputs + o, *at)] if inside else 0,
                    )
                )
        out[(n, c, *i)] = row_times_column(terms, fmt)
    return out


def naive_weight_gradient(
    grad: np.ndarray, x: np.ndarray, case: Case, fmt: LNSFormat
) -> np.ndarray:
    """Over (image, position); these cases are too small to be split."""
    C, outputs = case.channels // case.groups, case.outputs // case.groups
    out = np.zeros((case.outputs, C, *case.kernel), np.int16)
    for o, c, t in itertools.product(range(case.outputs), range(C), every(case.kernel)):
        terms = []
        for n, p in itertools.product(range(case.n), every(case.positions)):
            at = meets(case, p, t)
            terms.append((grad[(n, o, *p)], 0 if at is None else x[(n, o // outputs * C + c, *at)]))
        out[(o, c, *t)] = row_times_column(terms, fmt)
    return out


def check_products(
    case: Case, fmt: LNSFormat, seed: int, which: tuple[str, ...] = ("forward", "input", "weight")
) -> None:
    """They equal the contract's sums."""
    x = codes((case.n, case.channels, *case.size), fmt, seed)
    w = codes((case.outputs, case.channels // case.groups, *case.kernel), fmt, seed + 1)
    grad = codes((case.n, case.outputs, *case.positions), fmt, seed + 2)
    tx, tw, tg = (torch.from_numpy(v) for v in (x, w, grad))
    if "forward" in which:
        np.testing.assert_array_equal(
            convolution.convolution(tx, tw, case.geometry, fmt).numpy(),
            naive_forward(x, w, case, fmt),
        )
    if "input" in which:
        gradient = convolution.input_gradient(tg, tw, case.size, case.geometry, fmt)
        np.testing.assert_array_equal(gradient.numpy(), naive_input_gradient(grad, w, case, fmt))
    if "weight" in which:
        weight = convolution.weight_gradient(tg, tx, case.kernel, case.geometry, fmt)
        np.testing.assert_array_equal(weight.numpy(), naive_weight_gradient(grad, x, case, fmt))


@settings(max_examples=30)
@given(case=cases(), fmt=st.sampled_from([lns8, lns12, lns16]), seed=st.integers(0, 99))
def test_all_three_products_are_the_contracts_sums(case: Case, fmt: LNSFormat, seed: int) -> None:
    check_products(case, fmt, seed)


@pytest.mark.parametrize(
    ("which", "case"),
    [
        ("forward", Case(2, 2 * 1500, 2, (4,), (3,), (1,), (0,), (1,), 2)),
        ("forward", Case(1, 1, 1, (66, 65), (65, 65), (1, 1), (0, 0), (1, 1), 1)),
        ("input", Case(2, 1, 1500, (4,), (3,), (1,), (0,), (1,), 1)),
        ("weight", Case(1, 1, 2, (4500,), (1,), (1,), (0,), (1,), 1)),
    ],
)
def test_sums_of_more_than_4096_products_are_cut(which: str, case: Case) -> None:
    check_products(case, lns12, 5, (which,))


def test_many_taps_do_not_stick() -> None:
    """131,072 ones; a single sequence of block totals would end at a tenth of the sum."""
    ones = torch.full((1, 2048, 8, 8), lns16.bias, dtype=torch.int16)
    geometry = Geometry((1, 1), (0, 0), (1, 1))
    assert lns.decode(
        convolution.convolution(ones, ones, geometry, lns16), lns16
    ).item() == pytest.approx(131072, rel=0.03)


def test_results_do_not_depend_on_how_many_images_are_taken_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(7, 4, 6, (9, 8), (3, 3), (2, 1), (1, 1), (1, 1), 2)
    x, w = (
        torch.from_numpy(codes(s, lns12, i)) for i, s in enumerate([(7, 4, 9, 8), (6, 2, 3, 3)])
    )
    expected = convolution.convolution(x, w, case.geometry, lns12)
    monkeypatch.setitem(convolution._COLUMNS, "cpu", 1)
    assert torch.equal(convolution.convolution(x, w, case.geometry, lns12), expected)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(convolution.convolution(strided, w, case.geometry, lns12), expected)


def test_long_sums_of_the_weight_gradient_are_cut_into_pieces_of_whole_images() -> None:
    side, n = 40, 7  # 1,600 positions: two images per piece, and one piece of one image
    grad, x = (
        torch.from_numpy(codes((n, 2, side, side), lns12, 1)),
        torch.from_numpy(codes((n, 3, side, side), lns12, 2)),
    )
    got = convolution.weight_gradient(
        grad, x, (1, 1), Geometry((1, 1), (0, 0), (1, 1)), lns12
    ).reshape(2, 3)
    step = LONG_SUM // side**2
    pieces = [
        lns.matmul(g.transpose(0, 1).reshape(2, -1), part.transpose(0, 1).reshape(3, -1).t(), lns12)
        for g, part in zip(grad.split(step), x.split(step), strict=True)
    ]
    assert step == 2
    np.testing.assert_array_equal(got.numpy(), reference.sum(torch.stack(pieces).numpy(), 0, lns12))


def test_a_long_weight_gradient_does_not_stick() -> None:
    """Ones over 32 images of 64 x 64; a single sequence of block totals would end at a tenth of the
    sum."""
    ones = torch.full((32, 1, 64, 64), lns12.bias, dtype=torch.int16)
    scaled = torch.full_like(ones, int(reference.encode(np.array(2.0**-10), lns12)))
    total = convolution.weight_gradient(
        scaled, ones, (1, 1), Geometry((1, 1), (0, 0), (1, 1)), lns12
    )
    assert lns.decode(total, lns12).item() == pytest.approx(128, rel=0.05)


LAYERS = [
    nn.Conv1d(4, 6, 3, padding=1),
    nn.Conv1d(4, 6, 2, stride=2, padding_mode="circular", padding=1),
    nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
    nn.Conv2d(4, 8, (2, 3), padding="same", bias=False),
    nn.Conv2d(4, 4, 3, dilation=2, groups=4),
    nn.Conv3d(4, 3, 2),
    nn.ConvTranspose1d(4, 6, 3, stride=2),
    nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
    nn.ConvTranspose3d(4, 3, 2, dilation=2),
]


def exact_gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.double().requires_grad_()
    y = layer.double()(x)
    y.backward(grad.double())
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_layers_agree_with_float64(layer: nn.Module, scope: str) -> None:
    if scope == "matmul" and isinstance(layer, nn.modules.conv._ConvTransposeNd):
        pytest.skip("scope matmul has no transposed convolutions")
    fmt = LNSFormat(16, 10)
    sizes = {"1d": (11,), "2d": (9, 10), "3d": (4, 5, 6)}[type(layer).__name__[-2:]]
    torch.manual_seed(0)
    net, exact = convert_(copy.deepcopy(layer), fmt, scope=scope), copy.deepcopy(layer)
    x = torch.randn(2, 4, *sizes).requires_grad_()
    y = net(x)
    grad = torch.randn(y.shape)
    y.backward(LNSTensor.from_float(grad, fmt) if isinstance(y, LNSTensor) else grad)
    results = [y, x.grad, *(p.grad for p in net.parameters())]
    for got, truth in zip(results, exact_gradients(exact, x.detach(), grad), strict=True):
        value = got.detach().to_float() if isinstance(got, LNSTensor) else got.detach()
        assert value.shape == truth.shape
        # Encoded operands and sums of up to some hundred terms of both signs: twelve half-ulps
        # (eight and a half are seen).
        assert (value - truth).norm() / truth.norm() < 12 * half_ulp(fmt)


@pytest.mark.parametrize(
    ("layer", "scope"),
    [
        (nn.Conv2d(3, 4, 3), "matmul"),
        (nn.Conv2d(3, 4, 3), "everywhere"),
        (nn.ConvTranspose2d(3, 4, 3), "everywhere"),
    ],
)
def test_a_batch_of_no_examples_has_gradients_of_zero(layer: nn.Module, scope: str) -> None:
    layer = convert_(copy.deepcopy(layer), lns12, scope=scope)
    y = layer(torch.zeros(0, 3, 5, 5))
    y.sum().backward()
    assert y.shape[0] == 0
    for parameter in layer.parameters():
        assert (parameter.grad == 0).all()


def test_one_example_without_a_batch() -> None:
    layer = convert_(nn.Conv2d(3, 4, 3), lns12)
    x = torch.randn(3, 8, 8)
    assert torch.equal(layer(x), layer(x[None])[0])


@settings(max_examples=60)
@given(
    case=cases(),
    fmt=st.sampled_from([lns8, lns12, lns16, LNSFormat(16, 10)]),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0, 8, 60]),
)
def test_float32_sums(case: Case, fmt: LNSFormat, seed: int, spread: float) -> None:
    check_float32_sums(case, fmt, seed, 2.0**-24, 2.0**-24, "cpu", spread)


def test_float32_sums_that_leave_float32() -> None:
    """Sums of both signs, with terms up to 2^254, have float64's sign and size."""
    case = Case(2, 4, 6, (5, 6), (3, 2), (2, 1), (1, 0), (1, 2), 2)
    check_float32_sums(case, lns16, 0, 2.0**-24, 2.0**-24, "cpu", 60)
    x, w = (codes(s, lns16, i, 60) for i, s in enumerate([(2, 4, 5, 6), (6, 2, 3, 2)]))
    values = (lns.decode(torch.from_numpy(v), lns16, torch.float32) for v in (x, w))
    assert not nn.functional.conv2d(*values, None, *case.geometry).isfinite().all()


def test_float32_sums_of_tensors() -> None:
    x, w = (
        torch.from_numpy(codes(s, lns12, i)) for i, s in enumerate([(2, 8, 12, 12), (5, 8, 3, 3)])
    )
    geometry = Geometry((1, 1), (1, 1), (1, 1))
    got = convolution.convolution(x, w, geometry, lns12, accumulation="float32")
    with matmul_accumulation("float32"):
        y = nn.functional.conv2d(LNSTensor(x, lns12), LNSTensor(w, lns12), padding=1)
    assert torch.equal(y.codes, got)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    again = convolution.convolution(strided, w, geometry, lns12, accumulation="float32")
    assert torch.equal(again, got)
    none = convolution.convolution(x[:0], w, geometry, lns12, accumulation="float32")
    assert none.shape == (0, 5, 12, 12)
    gradient = convolution.weight_gradient(
        none, x[:0], (3, 3), geometry, lns12, accumulation="float32"
    )
    assert gradient.shape == w.shape
    assert not gradient.any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w = torch.zeros(1, 3, 5, 5, dtype=torch.int16), torch.zeros(4, 2, 3, 3, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"shapes \(1, 3, 5, 5\) and \(4, 2, 3, 3\) in 1 groups"):
        convolution.convolution(x, w, Geometry((1, 1), (0, 0), (1, 1)), lns12)
    with pytest.raises(ValueError, match="kernel does not fit; pad the input more"):
        convolution.convolution(
            x, torch.zeros(4, 3, 7, 7, dtype=torch.int16), Geometry((1, 1), (0, 0), (1, 1)), lns12
        )
    with pytest.raises(ValueError, match="convolution of lns12 and lns16"):
        nn.functional.conv2d(LNSTensor(x, lns12), LNSTensor(x, lns16))


def test_the_operators_pass_torchs_check() -> None:
    ops, rest = torch.ops.lns_ops, ([2, 1], [1, 1], [1, 1], 2, "contract", 12, 6)
    x, w = (
        torch.from_numpy(codes(s, lns12, i)) for i, s in enumerate([(2, 4, 7, 6), (6, 2, 3, 3)])
    )
    y = ops.convolution(x, w, *rest)
    torch.library.opcheck(ops.convolution.default, (x, w, *rest))
    torch.library.opcheck(ops.convolution_input.default, (y, w, [7, 6], *rest))
    torch.library.opcheck(ops.convolution_weight.default, (y, x, [3, 3], *rest))
    options = (*rest[:4], *rest[5:])
    torch.library.opcheck(ops.convolution_gradients_float32.default, (y, x, w, *options))
