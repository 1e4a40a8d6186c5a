"""Convolutions with rounded sums: each term equals the definition; gradients, and networks."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lns_ops
from lns_ops import quantize_updates_, simulate_
from lns_ops.formats import Accumulation, parse
from lns_ops.nn.products.rounded_convolutions import RoundedSumsConv2d, convolution
from lns_ops.nn.products.rounded_sums import product

SUMS = Accumulation(format="float(4,3)", block=4)
WIDE = Accumulation(format="float32")


class Case(NamedTuple):
    """A convolution of images ``[N, I, *size]`` by ``[O, I / groups, *kernel]``."""

    channels: tuple[int, int]
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        inputs, outputs = self.channels
        x = torch.randn(2, inputs, *self.size, generator=generator)
        w = torch.randn(outputs, inputs // self.groups, *self.kernel, generator=generator)
        y = self.torchs(x, w)
        return x, w, torch.randn(y.shape, generator=generator)

    def torchs(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        call: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(self.size)]
        found: torch.Tensor = call(
            x, w, stride=self.stride, dilation=self.dilation, groups=self.groups
        )
        return found


CASES = [
    Case((3, 2), (9,), (3,), (1,), (1,)),
    Case((4, 6), (10,), (3,), (2,), (2,), 2),
    Case((2, 3), (6, 5), (3, 2), (1, 1), (1, 1)),
    Case((4, 4), (7, 8), (2, 3), (2, 3), (2, 1), 4),
    Case((2, 2), (5, 4, 4), (2, 2, 3), (1, 2, 1), (1, 1, 1)),
    Case((1, 1), (8, 8), (1, 1), (3, 3), (1, 1)),
]


def total(terms: list[torch.Tensor], others: list[torch.Tensor], sums: Accumulation) -> float:
    """Return the dot product of two lists."""
    return product(torch.stack(terms)[None], torch.stack(others)[:, None], sums).item()


def places(size: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, size)))


def window(case: Case, position: tuple[int, ...], tap: tuple[int, ...]) -> tuple[int, ...]:
    """The input position that a tap reads at an output position."""
    return tuple(
        s * p + d * t for p, t, s, d in zip(position, tap, case.stride, case.dilation, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_output_is_the_sum_of_its_definition(case: Case) -> None:
    x, w, grad = case.tensors()
    found = convolution(x, w, case.stride, case.dilation, case.groups, SUMS)
    assert found.shape == grad.shape
    outputs, inputs = w.shape[0] // case.groups, w.shape[1]
    for n, o, *position in places(tuple(grad.shape)):
        first = o // outputs * inputs
        pairs = [
            (w[(o, c, *tap)], x[(n, first + c, *window(case, tuple(position), tap))])
            for c in range(inputs)
            for tap in places(case.kernel)
        ]
        terms, others = zip(*pairs, strict=True)
        assert found[(n, o, *position)] == total(list(others), list(terms), SUMS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_gradients_are_the_sums_of_their_definitions(case: Case) -> None:
    x, w, grad = (t.requires_grad_() for t in case.tensors())
    out = convolution(x, w, case.stride, case.dilation, case.groups, SUMS)
    of_x, of_w = torch.autograd.grad(out, (x, w), grad)
    with torch.no_grad():
        outputs, inputs = w.shape[0] // case.groups, w.shape[1]
        positions = {
            tuple(s * p for s, p in zip(case.stride, position, strict=True)): position
            for position in places(tuple(grad.shape[2:]))
        }
        for n, i, *place in places(tuple(x.shape)):
            group, c = divmod(i, inputs)
            pairs = []
            for o in range(group * outputs, (group + 1) * outputs):
                for tap in reversed(places(case.kernel)):
                    start = tuple(
                        j - d * t for j, d, t in zip(place, case.dilation, tap, strict=True)
                    )
                    at = positions.get(start)
                    value = torch.zeros(()) if at is None else grad[(n, o, *at)]
                    pairs.append((value, w[(o, c, *tap)]))
            terms, others = zip(*pairs, strict=True)
            assert of_x[(n, i, *place)] == total(list(terms), list(others), SUMS)
        for o, c, *tap in places(tuple(w.shape)):
            first = o // outputs * inputs
            pairs = [
                (grad[(n, o, *at)], x[(n, first + c, *window(case, at, tuple(tap)))])
                for n in range(len(x))
                for at in places(tuple(grad.shape[2:]))
            ]
            terms, others = zip(*pairs, strict=True)
            assert of_w[(o, c, *tap)] == total(list(terms), list(others), SUMS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wide_sums_are_torchs_also_in_gradients_of_gradients(case: Case) -> None:
    tensors = [t.double().float().requires_grad_() for t in case.tensors()]
    x, w, grad = tensors
    results = []
    for out in (
        convolution(x, w, case.stride, case.dilation, case.groups, WIDE),
        case.torchs(x, w),
    ):
        firsts = torch.autograd.grad(out, (x, w), grad, create_graph=True)
        seconds = torch.autograd.grad(firsts, tensors, [t.cos() for t in firsts])
        results.append([out, *firsts, *seconds])
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, padding=2, stride=2),
        nn.Conv2d(4, 6, 3, padding="same", dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4, bias=False),
        nn.Conv3d(4, 2, 2, padding=1, padding_mode="replicate"),
    ],
    ids=str,
)
def test_layers_pad_and_add_their_bias_as_torchs(layer: nn.Module) -> None:
    x = torch.randn(2, 4, *(7,) * (layer.weight.dim() - 2))
    expected, single = layer(x).detach(), layer(x[0]).detach()
    simulate_(layer, "float32", accumulation=WIDE)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x[0]).detach(), single, rtol=1e-5, atol=1e-5)
    lns_ops.revert_(layer)
    assert torch.equal(layer(x), expected)


def test_a_step_of_a_layer_is_its_definition() -> None:
    torch.manual_seed(1)
    model, q = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1)), parse("bfloat16").quantize
    w, b = (p.detach().clone() for p in model[0].parameters())
    x, g = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(2, 5, 6, 6)
    simulate_(model, "bfloat16", accumulation=SUMS)
    model(x).backward(g)
    leaf, weight = F.pad(q(x), (1, 1, 1, 1)).requires_grad_(), q(w).requires_grad_()
    out = convolution(leaf, weight, (1, 1), (1, 1), 1, SUMS)
    out.backward(q(g))
    assert torch.equal(model(x), q(out + q(b)[:, None, None]))
    assert x.grad is not None
    assert leaf.grad is not None
    assert torch.equal(model[0].weight.grad, weight.grad)
    assert torch.equal(x.grad, q(leaf.grad[:, :, 1:-1, 1:-1]))


def test_long_sums_stagnate_and_blocks_help() -> None:
    """The gradient of a weight sums over 4 images of 32 x 32 positions."""
    x, w = torch.ones(4, 1, 32, 32), torch.ones(1, 1, 1, 1, requires_grad=True)
    for block, expected in ((None, 256.0), (128, 4096.0)):
        sums = Accumulation(format="bfloat16", block=block)
        out = convolution(x, w, (1, 1), (1, 1), 1, sums)
        assert torch.autograd.grad(out.sum(), w)[0].item() == expected


def test_transforms_and_compilers_take_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 2, 5, 5, generator=generator)
    w = torch.randn(4, 2, 3, 3, generator=generator)

    def convolve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return convolution(a, b, (1, 1), (1, 1), 1, SUMS)

    expected = torch.stack([convolve(part, w) for part in x])
    assert torch.equal(torch.vmap(convolve, (0, None))(x, w), expected)
    gradient = torch.func.grad(lambda b, a: convolve(a, b).sum())
    mapped = torch.vmap(gradient, (None, 0))(w, x)
    assert torch.equal(mapped, torch.stack([gradient(w, part) for part in x]))
    compiled = torch.compile(convolve, backend="aot_eager")
    assert torch.equal(compiled(x[0], w), expected[0])


def test_a_network_of_convolutions_learns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    simulate_(model, "float8_e4m3fn", accumulation=Accumulation(format="float(8,13)", block=128))
    assert [type(model[at]) for at in (0, 4)] == [RoundedSumsConv2d] * 2
    assert "RoundedSumsConv2d" in lns_ops.summary(model)
    optimizer = quantize_updates_(
        lns_ops.optim.SGD(model.parameters(), lr=0.002), model, kahan_sum=True
    )
    x = torch.randn(24, 1, 8, 8)
    y = x.reshape(24, 4, 16).sum(2).argmax(1)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    lns_ops.revert_(model)
    assert type(model[0]) is nn.Conv2d


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_same_bits() -> None:
    for case in CASES[:4]:
        x, w, grad = case.tensors()
        found = []
        for device in ("cpu", "cuda"):
            a, b = (t.to(device).requires_grad_() for t in (x, w))
            out = convolution(a, b, case.stride, case.dilation, case.groups, SUMS)
            found.append([out, *torch.autograd.grad(out, (a, b), grad.to(device))])
        for on_cpu, on_gpu in zip(*found, strict=True):
            assert torch.equal(on_cpu, on_gpu.cpu())
