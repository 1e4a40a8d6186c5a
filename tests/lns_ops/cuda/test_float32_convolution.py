"""Convolutions with float32 sums on a GPU keep the stated bound, give the same bits every time, and
run in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lns_ops import LNSFormat, cuda, lns8, lns12, lns16
from lns_ops.cuda.float32_matmul import operand_type
from lns_ops.functional import convolution
from tests.lns_ops.functional.convolutions import Case, cases, check_float32_sums, codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]

WIDE = LNSFormat(16, 10)
LAYERS = [
    Case(4, 64, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    Case(4, 64, 128, (32, 32), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    Case(4, 3, 64, (64, 64), (7, 7), (2, 2), (3, 3), (1, 1), 1),
    Case(4, 64, 128, (32, 32), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    Case(4, 64, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1), 64),
    Case(2, 32, 32, (8, 16, 16), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 2),
    Case(4, 64, 64, (500,), (5,), (1,), (2,), (1,), 1),
]
"""Layers large enough that cuDNN chooses its usual algorithms."""


def check(case: Case, fmt: LNSFormat, seed: int, spread: float) -> None:
    wide = operand_type(fmt.fraction_bits) == "float32"
    e, u = (2.0**-24, 2.0**-24) if wide else (2.0**-11, 2.0**-22)
    check_float32_sums(case, fmt, seed, e, u, "cuda", spread)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(),
    fmt=st.sampled_from([lns8, lns12, lns16, WIDE]),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0, 8, 60]),
)
def test_sums_keep_the_bound(case: Case, fmt: LNSFormat, seed: int, spread: float) -> None:
    check(case, fmt, seed, spread)


@pytest.mark.parametrize("spread", [0, 8])
@pytest.mark.parametrize("fmt", [lns12, lns16, WIDE], ids=str)
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: f"{case.kernel}x{case.groups}")
def test_layers_of_networks_keep_the_bound(case: Case, fmt: LNSFormat, spread: float) -> None:
    check(case, fmt, 0, spread)


@pytest.mark.parametrize("fmt", [lns12, WIDE], ids=str)
def test_bits_are_the_same_every_time_and_in_a_graph(fmt: LNSFormat) -> None:
    case, how = LAYERS[0], {"accumulation": "float32"}
    x, w, grad = (
        torch.from_numpy(codes(s, fmt, i)).cuda()
        for i, s in enumerate([(4, 64, 32, 32), (64, 64, 3, 3), (4, 64, 32, 32)])
    )

    def every() -> list[torch.Tensor]:
        return [
            convolution.convolution(x, w, case.geometry, fmt, **how),
            convolution.input_gradient(grad, w, case.size, case.geometry, fmt, **how),
            convolution.weight_gradient(grad, x, case.kernel, case.geometry, fmt, **how),
        ]

    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.conv.fp32_precision
    first = every()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.conv.fp32_precision) == before
    for _ in range(3):
        assert all(map(torch.equal, every(), first))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = every()
    for result in captured:
        result.zero_()
    graph.replay()
    assert all(map(torch.equal, captured, first))


def test_autocast_leaves_them_alone() -> None:
    case, how = LAYERS[0], {"accumulation": "float32"}
    x, w = (
        torch.from_numpy(codes(s, lns12, i)).cuda()
        for i, s in enumerate([(2, 64, 9, 9), (5, 64, 3, 3)])
    )
    wanted = convolution.convolution(x, w, case.geometry, lns12, **how)
    with torch.autocast("cuda"):
        assert torch.equal(convolution.convolution(x, w, case.geometry, lns12, **how), wanted)
