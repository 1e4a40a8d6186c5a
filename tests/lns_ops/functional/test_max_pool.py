"""Max pooling equals torch's own on the decoded values: values, indices, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from lns_ops import LNSTensor, lns8, lns12, lns16
from lns_ops.functional.max_pool import max_pool2d


@settings(max_examples=60)
@given(st.data())
def test_any_window(data: st.DataObject) -> None:
    """Coarse values, so that many are equal; the first of them counts."""
    kernel, dilation = ([data.draw(st.integers(1, 3)) for _ in range(2)] for _ in range(2))
    stride = [data.draw(st.integers(1, 4)) for _ in range(2)]
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    sizes = [
        data.draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 20))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    ceil_mode, leading = data.draw(st.booleans()), data.draw(st.sampled_from([(2,), (1, 3)]))
    fmt = data.draw(st.sampled_from([lns8, lns12, lns16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = LNSTensor.from_float(
        torch.randint(-2, 3, (*leading, *sizes), generator=generator).float(), fmt
    )
    wanted, at = F.max_pool2d(
        x.to_float(), kernel, stride, padding, dilation, ceil_mode, return_indices=True
    )
    if wanted.isinf().any():
        with pytest.raises(ValueError, match="a window is entirely in the padding"):
            F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
        return
    values, places = F.max_pool2d(
        x, kernel, stride, padding, dilation, ceil_mode, return_indices=True
    )
    assert torch.equal(values.to_float(), wanted)
    assert torch.equal(places, at)


def test_gradients_and_threads() -> None:
    from lns_ops import cpu

    x = LNSTensor.from_float(
        torch.randn(8, 16, 31, 29, generator=torch.Generator().manual_seed(0)), lns12
    )
    exact = x.to_float().requires_grad_()
    x.requires_grad_()
    before = cpu.get_num_threads()
    try:
        cpu.set_num_threads(2)
        F.max_pool2d(x, 3, 2, 1).sum().backward()
    finally:
        cpu.set_num_threads(before)
    F.max_pool2d(exact, 3, 2, 1).sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    # sums of up to four ones
    torch.testing.assert_close(x.grad.to_float(), exact.grad, rtol=0.02, atol=0)


def test_a_proper_operator_and_bad_windows() -> None:
    codes = LNSTensor.from_float(torch.randn(2, 3, 9, 7), lns12).codes
    window = ([3, 2], [2, 2], [1, 0], [1, 1], True)
    torch.library.opcheck(torch.ops.lns_ops.max_pool2d, (codes, *window, 12, 6))
    transposed = codes.transpose(-1, -2)
    for got, wanted in zip(
        max_pool2d(transposed, *window, lns12),
        max_pool2d(transposed.contiguous(), *window, lns12),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    for width, spread in ((1, 2), (3, 4)):
        with pytest.raises(ValueError, match="a window is entirely in the padding"):
            F.max_pool2d(LNSTensor(codes[..., :1, :width], lns12), [1, 2], 1, [0, 1], [1, spread])
    lowest = LNSTensor.from_float(torch.full((1, 1, 40, 40), -lns16.largest), lns16)
    assert F.max_pool2d(lowest, 33, return_indices=True)[1].item() == 0
    with pytest.raises(RuntimeError, match="should be at most half"):
        F.max_pool2d(LNSTensor(codes, lns12), 2, 2, 3)


@pytest.mark.parametrize("length", [4096, 4097, 3_000_000])
def test_rows_longer_than_a_stack_is_deep(length: int) -> None:
    x = LNSTensor.from_float(torch.randn(1, 1, length), lns12)
    wanted, places = F.max_pool1d(x.to_float(), 3, 2, 1, return_indices=True)
    values, found = F.max_pool1d(x, 3, 2, 1, return_indices=True)
    assert torch.equal(values.to_float(), wanted)
    assert torch.equal(found, places)
