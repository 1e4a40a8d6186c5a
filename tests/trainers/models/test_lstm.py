"""The nine LSTMs of Greff et al. 2015, compared with their equations unit by unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lns_ops import LNSTensor, convert_, cuda
from trainers.config import ModelConfig
from trainers.config.model import VARIANTS
from trainers.models import make_model
from trainers.models.lstm import kernels
from trainers.models.lstm.variant import VariantLayer

NINE = [variant for variant in VARIANTS if variant != "torch"]
INPUTS, WIDTH, STEPS = 3, 4, 6
needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)
TOLERANCES = {"float32": 1e-5, "lns16": 0.02}
"""Largest distance from float64, as a share of the norm: six steps of some forty roundings each,
2^-24 for float32 and 2^-11 (octaves: 0.03 %) for lns16."""


def blocks(matrix: Tensor, names: str) -> dict[str, Tensor]:
    """The rows of each of the blocks ``names``, in float64."""
    return dict(zip(names, matrix.detach().double().chunk(len(names)), strict=True))


def reference(
    layer: VariantLayer, x: Tensor, changed: str
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """One sequence in float64; returns the outputs and the leaves of W, R, p and b by block."""
    names = "z" + {"nig": "fo", "nfg": "io", "nog": "if", "cifg": "io"}.get(changed, "ifo")
    leaves = {
        "W": blocks(layer.from_input.weight, names),
        "b": blocks(layer.from_input.bias, names),
        "R": blocks(layer.from_output.weight, names),
        "p": blocks(layer.peepholes.flatten(), names[1:]) if changed != "np" else {},
        "G": blocks(layer.from_gates.weight, "ifo") if changed == "fgr" else {},
    }
    W, b, R, p, G = leaves.values()
    for values in leaves.values():
        for value in values.values():
            value.requires_grad_()
    units = range(WIDTH)
    y = c = [torch.zeros((), dtype=torch.float64)] * WIDTH
    before = dict.fromkeys("ifo", y)
    one = torch.ones((), dtype=torch.float64)
    outputs = []
    for x_t in x.double():
        shown = torch.stack(y)
        recurring = torch.stack([unit for gate in "ifo" for unit in before[gate]])

        def total(name: str, u: int, cell: Tensor) -> Tensor:
            s = W[name][u] @ x_t + R[name][u] @ shown + b[name][u]  # noqa: B023
            if name in p:
                s = s + p[name][u] * cell
            return s + G[name][u] @ recurring if name in G else s  # noqa: B023

        def gate(name: str, u: int, cell: Tensor) -> Tensor:
            return torch.sigmoid(total(name, u, cell)) if name in names else one

        z = [total("z", u, one) for u in units]
        z = z if changed == "niaf" else [torch.tanh(unit) for unit in z]
        i = [gate("i", u, c[u]) for u in units]
        f = [1 - unit for unit in i] if changed == "cifg" else [gate("f", u, c[u]) for u in units]
        c = [z[u] * i[u] + c[u] * f[u] for u in units]
        o = [gate("o", u, c[u]) for u in units]
        y = [(c[u] if changed == "noaf" else torch.tanh(c[u])) * o[u] for u in units]
        before = {"i": i, "f": f, "o": o}
        outputs.append(torch.stack(y))
    return torch.stack(outputs), leaves


def made(variant: str) -> tuple[VariantLayer, Tensor]:
    """A layer with weights large enough that every part of the equations counts, and an input."""
    torch.manual_seed(0)
    layer = VariantLayer(INPUTS, WIDTH, 0.0, variant)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    return layer, torch.randn(STEPS, INPUTS)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def floats(x: Tensor) -> Tensor:
    return x.to_float() if isinstance(x, LNSTensor) else x


@pytest.mark.parametrize("fmt", TOLERANCES)
@pytest.mark.parametrize("variant", NINE)
def test_a_variant_has_its_equations_and_their_gradients(variant: str, fmt: str) -> None:
    layer, x = made(variant)
    if fmt != "float32":
        convert_(layer, fmt, scope="everywhere")
        x = LNSTensor.from_float(x, fmt).to_float()
    twin = VariantLayer(INPUTS, WIDTH, 0.0, variant)
    twin.load_state_dict({key: floats(value) for key, value in layer.state_dict().items()})
    expected, leaves = reference(twin, x, variant)
    outputs = layer(x[None])[0]
    assert distance(floats(outputs.detach()), expected.detach()) < TOLERANCES[fmt]
    expected.square().sum().backward()
    (outputs * outputs).sum().backward()
    ours = {
        "W": layer.from_input.weight,
        "b": layer.from_input.bias,
        "R": layer.from_output.weight,
        "p": getattr(layer, "peepholes", None),
        "G": layer.from_gates.weight if variant == "fgr" else None,
    }
    for name, parameter in ours.items():
        if parameter is None:
            assert not leaves[name]
            continue
        grads = [leaf.grad for leaf in leaves[name].values() if leaf.grad is not None]
        found = floats(parameter.grad).reshape(-1)
        assert distance(found, torch.cat([grad.flatten() for grad in grads])) < 2 * TOLERANCES[fmt]


def test_without_peepholes_it_is_the_lstm_of_torch() -> None:
    layer, x = made("np")
    theirs = nn.LSTM(INPUTS, WIDTH, batch_first=True)
    order = "ifzo"
    with torch.no_grad():
        for ours, name in ((layer.from_input, "ih"), (layer.from_output, "hh")):
            rows = dict(zip("zifo", ours.weight.chunk(4), strict=True))
            getattr(theirs, f"weight_{name}_l0").copy_(torch.cat([rows[each] for each in order]))
        rows = dict(zip("zifo", layer.from_input.bias.chunk(4), strict=True))
        theirs.bias_ih_l0.copy_(torch.cat([rows[each] for each in order]))
        theirs.bias_hh_l0.zero_()
    torch.testing.assert_close(layer(x[None]), theirs(x[None])[0])


def test_parameters_are_counted_and_drawn_as_in_the_paper() -> None:
    """Greff et al. 2015, appendix: CIFG and the variants without a gate have one block less, FGR
    has nine matrices more, NP no peepholes."""
    sizes = {}
    for variant in NINE:
        config = ModelConfig(name="lstm", args={"width": 100, "variant": variant})
        layer = make_model(config, (7, 88), 88, seed=0, each_step=True)[0]
        sizes[variant] = sum(p.numel() for p in layer.parameters())
        values = torch.cat([p.detach().flatten() for p in layer.parameters()])
        assert abs(values.std().item() - 0.1) < 0.002
        assert abs(values.mean().item()) < 0.002
    block = 100 * (88 + 100 + 1)
    vanilla = 4 * block + 300
    assert sizes["vanilla"] == sizes["niaf"] == sizes["noaf"] == vanilla
    assert sizes["np"] == vanilla - 300
    assert {sizes[each] for each in ("nig", "nfg", "nog", "cifg")} == {vanilla - block - 100}
    assert sizes["fgr"] == vanilla + 9 * 100 * 100


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.args.variant='gru': must be one of torch, vanilla"
    ):
        ModelConfig(name="lstm", args={"variant": "gru"})
    with pytest.raises(ValueError, match=r"must be a text; use for example model.args.variant=tor"):
        ModelConfig(name="lstm", args={"variant": 3})


def drawn(inputs: int, width: int, variant: str) -> VariantLayer:
    """A layer with random weights, biases and peepholes."""
    torch.manual_seed(1)
    layer = VariantLayer(inputs, width, 0.0, variant)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def training_step(layer: VariantLayer, x: Tensor) -> list[Tensor]:
    """The outputs and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    outputs = layer(x)
    (outputs * torch.linspace(-1, 1, outputs.shape[-1], device=x.device)).sum().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return [outputs.detach(), x.grad, *grads]


@pytest.mark.parametrize("variant", NINE)
def test_one_node_of_all_steps_has_the_gradients_of_autograd(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = drawn(5, 7, variant).double(), torch.randn(3, 9, 5).double()
    ours = training_step(layer, x)
    monkeypatch.setattr(layer, "_plain", lambda sums: False)
    for found, expected in zip(ours, training_step(layer, x), strict=True):
        torch.testing.assert_close(found, expected)


def watched_forward(layer: nn.Linear, seen: list[int]) -> None:
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        seen.append(1)
        return own(x)

    layer.forward = forward  # type: ignore[method-assign]


WATCHES = {
    "forward hook": lambda layer, seen: layer.register_forward_hook(lambda *_: seen.append(1)),
    "pre-hook": lambda layer, seen: layer.register_forward_pre_hook(lambda *_: seen.append(1)),
    "backward hook": lambda layer, seen: layer.register_full_backward_hook(
        lambda *_: seen.append(1)
    ),
    "backward pre-hook": lambda layer, seen: layer.register_full_backward_pre_hook(
        lambda *_: seen.append(1)
    ),
    "forward": watched_forward,
}


@pytest.mark.parametrize("watch", WATCHES)
def test_a_layer_that_something_watches_takes_its_steps_by_modules(watch: str) -> None:
    layer, x = made("vanilla")
    seen: list[int] = []
    WATCHES[watch](layer.from_output, seen)
    layer(x[None]).sum().backward()
    assert len(seen) == STEPS


def test_hooks_of_all_modules_and_a_bias_are_heeded() -> None:
    layer, x = made("vanilla")
    plain, seen = layer(x[None]), []
    with torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(module)
    ):
        torch.testing.assert_close(layer(x[None]), plain)
    assert seen.count(layer.from_output) == STEPS
    layer.from_output.bias = nn.Parameter(torch.ones(4 * WIDTH))
    assert distance(layer(x[None]).detach(), plain.detach().double()) > 0.1


def test_autocast_rounds_its_products() -> None:
    layer, x = made("vanilla")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x[None])
    assert 1e-4 < distance(rounded.detach(), layer(x[None]).detach().double()) < 1e-1


def test_it_runs_under_transforms_and_tracing() -> None:
    layer, x = made("fgr")
    expected = layer(x[None])
    torch.testing.assert_close(torch.vmap(lambda one: layer(one[None])[0])(x[None]), expected)
    ours = torch.func.grad(lambda one: layer(one).sum())(x[None])
    found = training_step(layer, x[None])  # of another sum
    assert ours.shape == found[1].shape
    torch.testing.assert_close(torch.jit.trace(layer, x[None])(x[None]), expected)


def test_outputs_may_be_changed_in_place() -> None:
    layer, x = made("vanilla")
    nn.Sequential(layer, nn.ReLU(inplace=True))(x[None]).sum().backward()
    ours = [p.grad for p in layer.parameters()]
    again, _ = made("vanilla")
    torch.relu(again(x[None])).sum().backward()
    for found, parameter in zip(ours, again.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize("variant", NINE)
def test_second_derivatives_are_those_of_autograd(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = drawn(3, 4, variant).double(), torch.randn(2, 5, 3).double()

    def found() -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        of = [inputs, *layer.parameters()]
        first = torch.autograd.grad(layer(inputs).square().sum(), of, create_graph=True)
        return list(torch.autograd.grad(sum(grad.square().sum() for grad in first), of))

    ours = found()
    monkeypatch.setattr(layer, "_plain", lambda sums: False)
    for value, expected in zip(ours, found(), strict=True):
        torch.testing.assert_close(value, expected)


SHAPES = [(1, 1, 2), (20, 8, 5), (33, 5, 64), (200, 8, 64), (300, 13, 7)]
"""Units, sequences and steps."""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", NINE)
def test_kernels_have_the_equations_of_the_steps(variant: str, shape: tuple[int, int, int]) -> None:
    width, sequences, steps = shape
    layer, x = drawn(3, width, variant), torch.randn(sequences, steps, 3)
    nn.init.normal_(layer.from_output.weight, std=0.3 / width**0.5)
    expected = training_step(layer.double(), x.double())
    layer = layer.float().cuda()
    assert kernels.fits(layer.from_input(x.cuda()), layer.equations)
    ours = training_step(layer, x.cuda())
    for found, value in zip(ours, expected, strict=True):
        assert distance(found.cpu(), value) < 2e-5
    again = training_step(layer, x.cuda())
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_layers_of_two_widths_have_the_shared_memory_that_each_needs() -> None:
    """The tolerance of a function is the same for all layers of a variant."""
    wide, narrow = drawn(3, 1000, "vanilla").cuda(), drawn(3, 300, "vanilla").cuda()
    x = torch.randn(2, 3, 3, device="cuda")
    first = training_step(wide, x)
    training_step(narrow, x)
    assert all(torch.equal(a, b) for a, b in zip(first, training_step(wide, x), strict=True))


@pytest.mark.gpu
@needs_gpu
def test_kernels_take_weights_that_lie_transposed() -> None:
    layer, x = drawn(3, 20, "fgr").cuda(), torch.randn(8, 16, 3, device="cuda")
    expected = training_step(layer, x)
    for holder, name in (
        (layer.from_output, "weight"), (layer.from_gates, "weight"), (layer, "peepholes"),
    ):  # fmt: skip
        value = getattr(holder, name).detach()
        setattr(holder, name, nn.Parameter(value.t().contiguous().t()))
    for found, value in zip(training_step(layer, x), expected, strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_has_the_kernels() -> None:
    layer, x = drawn(3, 20, "vanilla").cuda(), torch.randn(8, 16, 3, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        training_step(layer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = training_step(layer, x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    found = [value.clone() for value in captured]
    for value, expected in zip(found, training_step(layer, x), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.gpu
@needs_gpu
def test_a_layer_too_wide_for_shared_memory_takes_its_steps_one_by_one() -> None:
    layer, x = drawn(3, 4000, "nog").cuda(), torch.randn(2, 3, 3, device="cuda")
    nn.init.normal_(layer.from_output.weight, std=0.01)
    assert not kernels.fits(layer.from_input(x), layer.equations)
    found = layer(x)
    torch.testing.assert_close(found.cpu(), layer.cpu()(x.cpu()), atol=1e-4, rtol=1e-4)
