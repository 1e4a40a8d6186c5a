"""Sums of many gradients, over many uses of a tensor or many backward passes, do not stagnate."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lns_ops
from lns_ops import LNSFormat, LNSTensor, convert_, cuda, decode, lns12, lns16
from lns_ops import functional as lns
from tests.lns_ops.lns_formats import half_ulp

FORMATS = [lns16, lns12]


def values(x: Any) -> Tensor:
    return decode(x.detach().codes, x.fmt, torch.float64)


def leaf(fmt: LNSFormat, *shape: int) -> Any:
    return LNSTensor.from_float(torch.rand(shape) + 0.5, fmt).detach().requires_grad_()


def gradient(x: Any) -> LNSTensor:
    assert isinstance(x.grad, LNSTensor)
    return x.grad


@contextmanager
def added_in_lns() -> Iterator[None]:
    lns_ops.set_gradient_accumulation("contract")
    try:
        yield
    finally:
        lns_ops.set_gradient_accumulation("float32")


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_gradient_of_a_tensor_with_a_thousand_uses_is_their_sum(fmt: LNSFormat) -> None:
    w, terms = leaf(fmt, 5), [leaf(fmt, 5).detach() for _ in range(1000)]
    sum((w * x for x in terms[1:]), w * terms[0]).sum().backward()
    exact = torch.stack([values(x) for x in terms]).sum(0)
    assert torch.equal(gradient(w).codes, lns.encode(exact.float(), fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_gradients_of_many_micro_batches_add_up(fmt: LNSFormat) -> None:
    w, x = leaf(fmt, 5), leaf(fmt, 5).detach()
    for _ in range(512):
        (w * x).sum().backward()
    assert torch.equal(gradient(w).codes, lns.encode(512 * values(x).float(), fmt))


@pytest.mark.parametrize("steps", [500, 1000])
def test_a_cell_over_many_steps_has_the_gradient_of_float64(steps: int) -> None:
    torch.manual_seed(0)
    fmt = LNSFormat(16, 9)
    cell = convert_(nn.GRUCell(3, 4), fmt, scope="everywhere")
    exact = lns_ops.revert_(copy.deepcopy(cell)).double()
    x = LNSTensor.from_float(torch.randn(steps, 2, 3) + 1, fmt)
    for net, inputs in ((cell, x), (exact, values(x))):
        state, total = inputs.new_zeros(2, 4), 0.0
        for step in inputs:
            state = net(step, state)
            total = total + state.sum().to(torch.float64)
        total.backward()  # type: ignore[attr-defined]
    for got, want in zip(cell.parameters(), exact.parameters(), strict=True):
        assert want.grad is not None
        error = (values(gradient(got)) - want.grad).norm() / want.grad.norm()
        assert error < 24 * half_ulp(fmt)


def test_two_terms_are_an_lns_sum_as_ever() -> None:
    w, x, y = leaf(lns12, 50), leaf(lns12, 50).detach(), leaf(lns12, 50).detach()
    (w * x + w * y).sum().backward()
    assert torch.equal(gradient(w).codes, lns.add(x.codes, y.codes, lns12))
    w.grad = None
    for factor in (x, y):
        (w * factor).sum().backward()
    assert torch.equal(gradient(w).codes, lns.add(x.codes, y.codes, lns12))


def test_residual_layers_keep_their_bits() -> None:
    """Each of their tensors has two uses; a gradient that has arrived no longer counts as a sum."""
    x, weights = leaf(lns12, 50), [leaf(lns12, 50).detach() for _ in range(30)]

    def codes() -> Tensor:
        y: Tensor = x
        for w in weights:
            y = y + y * w
        (found,) = torch.autograd.grad(y.sum(), x)
        assert isinstance(found, LNSTensor)
        return found.codes

    with added_in_lns():
        wanted = codes()
    assert torch.equal(codes(), wanted)


@pytest.mark.parametrize("shared", [False, True], ids=["own norms", "one norm"])
def test_residual_layers_with_parameters_keep_their_bits(shared: bool) -> None:
    """A term that is added to the parameters of two layers, or of a reused layer, is not a sum."""
    torch.manual_seed(0)
    norms = [convert_(nn.LayerNorm(8), lns12, scope="everywhere") for _ in range(6)]
    x, factor = leaf(lns12, 5, 8), leaf(lns12, 5, 8).detach()

    def codes() -> Tensor:
        y: Tensor = x
        for norm in norms:
            y = y + (norms[0] if shared else norm)(y) * 0.5
        (found,) = torch.autograd.grad((y * factor).sum(), x)
        assert isinstance(found, LNSTensor)
        return found.codes

    with added_in_lns():
        wanted = codes()
    assert torch.equal(codes(), wanted)


def three_uses(w: Tensor, terms: list[Any]) -> Any:
    return sum((w * x for x in terms[1:]), w * terms[0]).sum()


def test_what_the_sums_do_without() -> None:
    """Graphs of gradients, checkpoints, counters of operations and other sums in between."""
    w, terms = leaf(lns16, 40), [leaf(lns16, 40).detach() for _ in range(9)]
    (wanted,) = torch.autograd.grad(three_uses(w, terms), w)
    found = [torch.autograd.grad(three_uses(w, terms), w, create_graph=True)[0].detach()]
    with FlopCounterMode(display=False):
        found += torch.autograd.grad(three_uses(w, terms), w)
    for reentrant in (False, True):
        parts = checkpoint(lambda w: three_uses(w, terms), w, use_reentrant=reentrant)
        w.grad = None
        parts.backward()
        found.append(gradient(w))
    for each in found:
        assert isinstance(each, LNSTensor)
        assert torch.equal(each.codes, wanted.codes)


def test_compiled_code_has_the_same_bits() -> None:
    w, terms = leaf(lns16, 40), [leaf(lns16, 40).detach() for _ in range(9)]
    compiled = torch.compile(three_uses, fullgraph=True, backend="aot_eager")
    for function in (three_uses, compiled):
        function(w, terms).backward()
    got = gradient(w)
    w.grad = None
    for _ in range(2):
        three_uses(w, terms).backward()
    assert torch.equal(gradient(w).codes, got.codes)


def test_sums_of_user_code_within_a_backward_pass_are_lns_sums() -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + grad + grad

    x = leaf(lns12, 50)
    y = Tripled.apply(x)  # type: ignore[no-untyped-call]
    grad = leaf(lns12, 50).detach()
    y.backward(grad)
    twice = lns.add(grad.codes, grad.codes, lns12)
    assert torch.equal(gradient(x).codes, lns.add(twice, grad.codes, lns12))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda w: w.grad.zero_(),
    "mul_": lambda w: w.grad.mul_(0.5),
    "clip": lambda w: nn.utils.clip_grad_norm_([w], 0.1),
    "codes": lambda w: w.grad.codes.zero_(),
    "other": lambda w: setattr(w, "grad", w.grad * 0.5),
    "detached": lambda w: w.grad.detach().zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_gradient_that_was_written_to_counts_as_it_stands(change: Callable[[Any], Any]) -> None:
    w, x = leaf(lns16, 5), leaf(lns16, 5).detach()
    for _ in range(4):
        (w * x).sum().backward()
    change(w)
    before = gradient(w).codes.clone()
    (w * x).sum().backward()
    assert torch.equal(gradient(w).codes, lns.add(before, x.codes, lns16))


def test_copies_and_files_of_a_gradient_hold_its_codes_alone() -> None:
    w, x = leaf(lns16, 5), leaf(lns16, 5).detach()
    for _ in range(4):
        (w * x).sum().backward()
    for copied in (copy.deepcopy(gradient(w)), pickle.loads(pickle.dumps(gradient(w)))):
        assert torch.equal(copied.codes, gradient(w).codes)
        assert set(copied.__dict__) == {"codes", "fmt"}


def test_gradients_beyond_float32_saturate() -> None:
    w = leaf(lns16, 3)
    for _ in range(4):
        (w * 3e38).sum().backward()
    assert (gradient(w).codes == lns16.field_mask).all()


def test_lns_additions_can_be_had_back() -> None:
    w, x = leaf(lns16, 1), LNSTensor.from_float(torch.ones(1), lns16)
    with added_in_lns():
        for _ in range(512):
            (w * x).sum().backward()
    assert 365 < gradient(w).item() < 375
    with pytest.raises(ValueError, match="accumulation='float64'"):
        lns_ops.set_gradient_accumulation("float64")


def test_a_linear_layer_over_micro_batches_has_the_gradient_of_the_batch() -> None:
    torch.manual_seed(0)
    layer = convert_(nn.Linear(8, 4), lns16, scope="everywhere")
    x = LNSTensor.from_float(torch.rand(2048, 8), lns16)
    F.mse_loss(layer(x), torch.zeros(2048, 4), reduction="sum").backward()
    whole = values(gradient(layer.weight))
    layer.weight.grad = None
    for part in torch.split(x, 4):
        F.mse_loss(layer(part), torch.zeros(4, 4), reduction="sum").backward()
    error = (values(gradient(layer.weight)) - whole).norm() / whole.norm()
    assert error < 8 * half_ulp(lns16)


def moved(x: Any, device: str) -> Any:
    return LNSTensor(x.detach().codes.to(device), x.fmt).requires_grad_()


def gradients_on(device: str, function: Callable[..., Any], terms: list[Any], w: Any) -> Tensor:
    """Codes of the gradients: of several uses, of micro-batches, and of both."""
    there, terms = moved(w, device), [moved(x, device).detach() for x in terms]
    found = []
    for passes in (1, 2, 40):
        there.grad = None
        for _ in range(passes):
            function(there, terms).backward()
        found.append(gradient(there).codes.cpu().clone())
    return torch.stack(found)


@pytest.mark.gpu
@pytest.mark.skipif(cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}")
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_has_the_bits_of_a_cpu(fmt: LNSFormat, compiled: bool) -> None:
    w, terms = leaf(fmt, 1000), [leaf(fmt, 1000).detach() for _ in range(9)]
    function: Any = three_uses
    if compiled:
        torch.compiler.reset()
        function = torch.compile(three_uses, fullgraph=True, backend="aot_eager")
    wanted = gradients_on("cpu", three_uses, terms, w)
    assert torch.equal(gradients_on("cuda", function, terms, w), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}")
def test_a_cell_over_many_steps_has_the_bits_of_a_cpu() -> None:
    torch.manual_seed(0)
    cell = convert_(nn.GRUCell(3, 4), lns16, scope="everywhere")
    x = leaf(lns16, 100, 2, 3).detach()
    found = []
    for device in ("cpu", "cuda"):
        net = copy.deepcopy(cell).to(device)
        state = moved(x.new_zeros(2, 4), device).detach()
        for step in moved(x, device).detach():
            state = net(step, state)
        state.sum().backward()
        found.append([gradient(p).codes.cpu() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
