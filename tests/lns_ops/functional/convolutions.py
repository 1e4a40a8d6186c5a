"""Convolutions to test: geometry, operands, and the check of float32 sums. The tests of every
device use them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from lns_ops import LNSFormat, reference
from lns_ops.functional import convolution
from lns_ops.functional.convolution import Geometry
from tests.lns_ops.float32_sums import outside_bound


class Case(NamedTuple):
    """A convolution: sizes, and the geometry of torch's argument list."""

    n: int
    channels: int
    outputs: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.stride, self.padding, self.dilation, self.groups)

    @property
    def positions(self) -> list[int]:
        return self.geometry.output_size(self.size, self.kernel)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    each = [
        draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)))
        for _ in range(dims)
    ]
    kernel, stride, padding, dilation = zip(*each, strict=True)
    size = tuple(max(1, d * (k - 1) + 1 - 2 * p) + draw(st.integers(0, 4)) for k, _, p, d in each)
    n, channels, outputs = (
        draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
    )
    return Case(n, channels, outputs, size, kernel, stride, padding, dilation, groups)


def codes(shape: tuple[int, ...], fmt: LNSFormat, seed: int, spread: float = 0) -> np.ndarray:
    """Return codes of normal numbers, some of them 0. Each magnitude is multiplied by 2^z, with z
    normal with that standard deviation."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    values = np.where(np.abs(values) < 0.1, 0, values) * 2.0 ** (
        spread * rng.standard_normal(shape)
    )
    return np.asarray(reference.encode(values, fmt))


def check_float32_sums(
    case: Case, fmt: LNSFormat, seed: int, e: float, u: float, device: str, spread: float = 0
) -> None:
    """All three products keep the bound of lns_ops.accumulation around float64's. Both gradients
    computed together equal each computed alone, bit for bit."""
    geometry, aten = case.geometry, torch.ops.aten
    x = codes((case.n, case.channels, *case.size), fmt, seed, spread)
    w = codes((case.outputs, case.channels // case.groups, *case.kernel), fmt, seed + 1, spread)
    grad = codes((case.n, case.outputs, *case.positions), fmt, seed + 2, spread)
    tx, tw, tg = (torch.from_numpy(v).to(device) for v in (x, w, grad))
    rest = (*geometry[:3], False, [0] * len(case.kernel), case.groups)

    def forward(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return aten.convolution(torch.from_numpy(x), torch.from_numpy(w), None, *rest).numpy()

    def backward(index: int, *operands: np.ndarray) -> np.ndarray:
        masks = [index == 0, index == 1, False]
        every = map(torch.from_numpy, operands)
        return aten.convolution_backward(*every, None, *rest, masks)[index].numpy()

    taps = math.prod(case.kernel)
    inner = case.outputs // case.groups * taps
    results = (
        ("convolution", (tx, tw, geometry), (x, w), forward, w[0].size),
        ("input_gradient", (tg, tw, case.size, geometry), (grad, w),
         lambda g, w: backward(0, g, np.zeros(x.shape), w), inner),
        ("weight_gradient", (tg, tx, case.kernel, geometry), (grad, x),
         lambda g, x: backward(1, g, x, np.zeros(w.shape)), case.n * math.prod(case.positions)),
    )  # fmt: skip
    made = []
    for name, arguments, operands, product, terms in results:
        got = getattr(convolution, name)(*arguments, fmt, accumulation="float32")
        bad = outside_bound(got.cpu().numpy(), *operands, fmt, e, u, product, terms)
        assert not bad.any(), f"{name}: {bad.sum()} of {bad.size}, first at {np.argwhere(bad)[0]}"
        made.append(got)
    both = convolution.gradients(tg, tx, tw, geometry, fmt, accumulation="float32")
    for together, alone in zip(both, made[1:], strict=True):
        assert torch.equal(together, alone)
