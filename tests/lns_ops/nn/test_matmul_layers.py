"""Scope ``matmul`` converts subclasses of layers, recurrent layers, attention and transposed
convolutions; other layers stay in float32, with a note."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from lns_ops import convert_, decode, encode, lns8, lns12, lns16, revert_, summary
from lns_ops import functional as lns
from lns_ops.functional import convolution as conv
from lns_ops.nn import LNSMatmulLinear
from lns_ops.tensor import in_float32


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice the linear function."""
        return 2 * super().forward(input)


class SameConv2d(nn.Conv2d):
    """A convolution that pads by itself, as TensorFlow does."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the padded input."""
        return F.conv2d(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


def product(x: Tensor, w: Tensor) -> Tensor:
    """``x w^T`` in lns12, by the operators on codes."""
    return decode(lns.matmul(encode(x, lns12), encode(w, lns12).t(), lns12), lns12)


def test_a_subclass_keeps_its_forward_and_multiplies_in_lns() -> None:
    layer = convert_(Doubled(5, 3), lns12)
    x = torch.randn(4, 5, requires_grad=True)
    y = layer(x)
    weight = layer.weight.detach()
    assert torch.equal(y, 2 * (product(x.detach(), weight) + layer.bias))
    y.backward(grad := torch.randn(4, 3))
    assert x.grad is not None
    assert torch.equal(x.grad, product(2 * grad, weight.t()))
    assert torch.equal(layer.weight.grad, product(2 * grad.t(), x.detach().t()))
    assert isinstance(layer, Doubled)
    assert type(revert_(layer)) is Doubled


def test_a_convolution_that_pads_by_itself() -> None:
    layer = convert_(SameConv2d(2, 3, 2), lns12)
    x = torch.randn(2, 2, 5, 5)
    padded = encode(F.pad(x, (0, 1, 0, 1)), lns12)
    geometry = conv.Geometry.of(2, (1,), (0,), (1,), 1)
    codes = conv.convolution(padded, encode(layer.weight.detach(), lns12), geometry, lns12)
    assert torch.equal(layer(x), decode(codes, lns12) + layer.bias[:, None, None])


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "lstm": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), lambda: (torch.randn(3, 2, 4),)),
    "gru": (lambda: nn.GRU(4, 5, batch_first=True), lambda: (torch.randn(2, 3, 4),)),
    "rnn": (lambda: nn.RNN(4, 5, nonlinearity="relu"), lambda: (torch.randn(3, 2, 4),)),
    "lstm-cell": (lambda: nn.LSTMCell(4, 5), lambda: (torch.randn(2, 4),)),
    "gru-cell": (lambda: nn.GRUCell(4, 5), lambda: (torch.randn(2, 4),)),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        lambda: (torch.randn(2, 3, 4),) * 3,
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True),
        lambda: (torch.randn(2, 3, 4),),
    ),
    "transposed-1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2),
        lambda: (torch.randn(2, 4, 5),),
    ),
    "transposed-2d": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, dilation=2),
        lambda: (torch.randn(2, 2, 4, 5),),
    ),
    "transposed-padded-by-a-stride": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=2, dilation=3),
        lambda: (torch.randn(2, 2, 4, 5, requires_grad=True),),
    ),
    "transposed-3d": (lambda: nn.ConvTranspose3d(1, 2, 2), lambda: (torch.randn(1, 1, 3, 3, 3),)),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3), lambda: (torch.randn(2, 4), torch.randn(2, 5))),
    "weight-norm": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: (torch.randn(2, 4),),
    ),
    "spectral-norm": (
        lambda: parametrizations.spectral_norm(nn.Conv1d(4, 3, 2, padding="same")).eval(),
        lambda: (torch.randn(2, 4, 6),),
    ),
}


def first(output: Any) -> Tensor:
    return first(output[0]) if isinstance(output, tuple) else output


def moved(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor | None]]:
    """The result, and the gradients of the sum of its squares."""
    layer.zero_grad()
    result = first(layer(*inputs))
    result.square().sum().backward()
    return result.detach(), [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_multiply_in_lns_near_float32(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = (LAYERS[name][0](), LAYERS[name][1]())
    exact, gradients = moved(make, inputs)
    layer = convert_(make, lns16)
    close, own = moved(layer, inputs)
    assert not torch.equal(close, exact)
    assert (close - exact).norm() <= 0.05 * exact.norm()
    for a, b in zip(own, gradients, strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).norm() <= 0.1 * b.norm() + 1e-3
    coarse = first(convert_(revert_(copy.deepcopy(layer)), lns8)(*inputs))
    assert (coarse - exact).norm() > (close - exact).norm()
    assert torch.equal(first(copy.deepcopy(layer)(*inputs)), close)
    reverted = moved(revert_(layer), inputs)[0]
    assert torch.equal(reverted, exact)


def test_evaluation_multiplies_in_lns_too() -> None:
    """torch's fused encoder layer, used in evaluation, would compute in float32."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
    net = convert_(nn.TransformerEncoder(layer, 1), lns12)
    x, padding = torch.randn(2, 3, 4), torch.tensor([[False] * 3, [False, False, True]])
    expected = net(x, src_key_padding_mask=padding)
    net.eval()
    with torch.inference_mode():
        result = net(x, src_key_padding_mask=padding)
    assert torch.equal(result, expected)


def test_a_subclass_is_pickled_by_the_class_of_before() -> None:
    layer = convert_(Doubled(5, 3), lns12)
    again = pickle.loads(pickle.dumps(layer))
    x = torch.randn(2, 5)
    assert type(again) is type(layer)
    assert torch.equal(again(x), layer(x))


def test_gradients_are_differentiable() -> None:
    """A penalty of the gradient's norm (I. Gulrajani et al. 2017, arXiv:1704.00028)."""
    net = nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))
    net.insert(0, nn.ConvTranspose1d(1, 1, 1))
    penalties = []
    for model in (net, convert_(copy.deepcopy(net), lns16)):
        torch.manual_seed(1)
        x = torch.randn(2, 1, 6, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        penalties.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*penalties, strict=True):
        assert (a - b).norm() <= 0.1 * b.norm() + 1e-4


class Elementwise(nn.Linear):
    """A subclass that adds elements."""

    def forward(self, input: Tensor) -> Tensor:
        """The product."""
        return (input[:, None] * self.weight).sum(-1)


def test_what_has_no_form_stays_float32_with_a_note() -> None:
    model = convert_(nn.Sequential(nn.Linear(4, 4), Elementwise(4, 4)), lns12)
    assert type(model[0]) is LNSMatmulLinear
    model(torch.randn(2, 4))
    note = "1 stays float32: its forward computes no product with a weight"
    assert summary(model).splitlines()[3:] == [note]


COMPLEX: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **dtype: nn.Linear(4, 4, **dtype),
    "rnn": lambda **dtype: nn.RNN(4, 4, **dtype),
    "conv": lambda **dtype: nn.ConvTranspose1d(4, 4, 1, **dtype),
    "parametrized": lambda **dtype: parametrizations.orthogonal(nn.Linear(4, 4, **dtype)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_layers_stay_with_a_note(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), COMPLEX[name](dtype=torch.complex64))
    kept, x = copy.deepcopy(model[1]), torch.randn(2, 4, 4, dtype=torch.complex64)
    convert_(model, lns12)
    assert type(model[0]) is LNSMatmulLinear
    assert type(model[1]).__bases__ == type(kept).__bases__
    assert summary(model).splitlines()[-1] == "1 stays complex64: LNS values are real"
    assert torch.equal(first(model[1](x)), first(kept(x)))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_quantized_layers_stay_with_a_note() -> None:
    """They get decoded values in scope ``everywhere``."""
    torch.manual_seed(0)
    dynamic = torch.ao.quantization.quantize_dynamic
    model = dynamic(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), {nn.LSTM})
    model = dynamic(nn.Sequential(nn.Linear(4, 4), *model), {"1"})
    x = torch.randn(3, 2, 4)
    exact = first(model(x))
    for scope in ("matmul", "everywhere"):
        convert_(model, lns16, scope)
        got = first(model(x))
        assert type(got) is torch.Tensor
        assert (got - exact).norm() <= 0.1 * exact.norm()  # including steps of 8 bits
        notes = summary(model).splitlines()[4:6]
        reason = "stays integers: its weights are quantized by torch.ao.quantization"
        assert notes == [f"1 {reason}", f"2 {reason}"]
        revert_(model)
        exact = first(model(x))


def test_the_summary_tells_the_dtype_of_what_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, dtype=torch.float64))
    assert summary(convert_(model, lns12)).splitlines()[2].split()[3] == "float64"


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_layers_without_parameters_so_far_are_refused(scope: str) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"LazyLinear without parameters so far: run a batch"):
        convert_(model, lns12, scope=scope)
    model(torch.randn(2, 4))
    convert_(model, lns12, scope=scope)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_attention_with_more_keys(scope: str) -> None:
    """Learned and zero keys, which no mask excludes."""
    layer = nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True)
    q, k = torch.randn(3, 2, 4), torch.randn(5, 2, 4)
    causal = torch.ones(3, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    exact, weights = layer(q, k, k, attn_mask=causal, key_padding_mask=padding)
    convert_(layer, lns16, scope=scope)
    got, own = (in_float32(x) for x in layer(q, k, k, attn_mask=causal, key_padding_mask=padding))
    assert own.shape == weights.shape == (2, 3, 7)
    assert (own[..., 5:] > 0).all()
    assert (own[weights == 0] == 0).all()
    assert (got - exact).norm() <= 0.03 * exact.norm()


TRANSFORMED: dict[str, Any] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), (3, 5)),
    "conv": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2)), (3, 2, 5)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_gradients_of_single_examples_by_torch_func(name: str) -> None:
    make, shape = TRANSFORMED[name]
    model, x = convert_(make(), lns16), torch.randn(shape)
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, weights, (example[None],))
        return out.square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i, example in enumerate(x):
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        single = torch.autograd.grad(loss(leaves, example), list(leaves.values()))
        for n, expected in zip(leaves, single, strict=True):
            torch.testing.assert_close(found[n][i], expected, rtol=1e-5, atol=1e-6)


class DoubledForm(nn.Bilinear):
    """A subclass of a layer that is composed of products."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Twice the bilinear form."""
        return 2 * super().forward(input1, input2)


TRACED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = LAYERS | {
    "linear": (lambda: nn.Linear(4, 3), lambda: (torch.randn(2, 4),)),
    "conv": (lambda: nn.Conv1d(4, 3, 2, padding="same"), lambda: (torch.randn(2, 4, 5),)),
    "subclass": (lambda: Doubled(4, 3), lambda: (torch.randn(2, 4),)),
    "subclass-conv": (lambda: SameConv2d(2, 3, 2), lambda: (torch.randn(2, 2, 4, 4),)),
    "subclass-bilinear": (lambda: DoubledForm(4, 5, 3), LAYERS["bilinear"][1]),
    "embedding": (lambda: nn.Embedding(4, 3), lambda: (torch.arange(3),)),
}


class Calls(nn.Module):
    """A network of one layer; its other inputs are constants."""

    def __init__(self, layer: nn.Module, others: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.layer, self.others = layer, others

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output."""
        return self.layer(x, *self.others)


@pytest.mark.parametrize("name", TRACED)
def test_layers_are_traced_by_fx(name: str) -> None:
    """The graph has the same bits, forward and backward. Layers that torch.fx does not enter stay
    whole, so their hooks are called once a step."""
    make, inputs = TRACED[name]
    x, *others = inputs()
    model = convert_(Calls(make(), tuple(others)), lns12)
    called = []
    model.layer.register_forward_hook(lambda *_: called.append(1))
    wanted, gradients = moved(model, (x,))
    graph = torch.fx.symbolic_trace(model)
    called.clear()
    got, own = moved(graph, (x,))
    assert torch.equal(got, wanted)
    for a, b in zip(own, gradients, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    kept = any(node.op == "call_module" for node in graph.graph.nodes)
    assert len(called) == kept
    assert kept == (name not in ("linear", "conv") and not name.startswith("subclass"))


@pytest.mark.parametrize("name", ["gru", "lstm-cell", "attention", "bilinear", "subclass"])
def test_layers_that_keep_their_forward_are_compiled(name: str) -> None:
    """In one graph, whose products are LNS, too; its bits equal the separate calls'."""
    make, inputs = TRACED[name]
    torch.compiler.reset()
    layer, given = convert_(make(), lns8), inputs()
    wanted, gradients = moved(layer, given)
    with torch._dynamo.config.patch(allow_rnn=True):
        got, own = moved(torch.compile(layer, backend="aot_eager", fullgraph=True), given)
    assert torch.equal(got, wanted)
    for a, b in zip(own, gradients, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_around_which_graphs_break_are_lns(kind: type[nn.RNNBase]) -> None:
    """The compiler runs them unchanged and inspects their calls."""
    torch.compiler.reset()
    layer = convert_(kind(4, 5, num_layers=2), lns8)
    given = (torch.randn(3, 2, 4, requires_grad=True),)
    wanted, gradients = moved(layer, given)
    got, own = moved(torch.compile(layer, backend="aot_eager"), given)
    assert torch.equal(got, wanted)
    assert all(torch.equal(a, b) for a, b in zip(own, gradients, strict=True))


def test_layers_of_real_weights_beside_complex_parameters_are_converted() -> None:
    class Turned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    assert "LNSMatmulTurned" in summary(convert_(nn.Sequential(Turned()), lns12))


@pytest.mark.parametrize("name", ["subclass", "subclass-conv", "bilinear", "subclass-bilinear"])
def test_a_layer_alone_is_traced_by_fx(name: str) -> None:
    """A layer of scope ``matmul`` has the same arguments as the original layer."""
    make, inputs = TRACED[name]
    layer, given = convert_(make(), lns12), inputs()
    assert torch.equal(torch.fx.symbolic_trace(layer)(*given), layer(*given))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_parametrizations_come_off_whenever_they_were_put_on(before: bool) -> None:
    x, made = torch.randn(5, 6), []
    for _ in range(2):  # copies share a class; torch takes it away from both
        torch.manual_seed(0)
        layer = nn.Linear(6, 4)
        steps = (parametrizations.weight_norm, lambda m: convert_(m, lns12))
        for step in steps if before else reversed(steps):
            step(layer)
        made.append(layer)
    layer, other = made
    expected = layer(x)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is LNSMatmulLinear
    assert torch.equal(layer(x), expected)
    assert type(revert_(layer)) is nn.Linear
    assert torch.equal(other(x), expected)
    revert_(other)
    assert torch.equal(other(x), F.linear(x, other.weight, other.bias))
    parametrize.remove_parametrizations(other, "weight")
    assert type(other) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_layer_returns_its_inputs_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.ConvTranspose1d(3, 2, 2), nn.Linear(5, 4), nn.LayerNorm(4)
    ).to(dtype)
    convert_(model, lns16)
    x = torch.randn(3, 2, 5, dtype=dtype, requires_grad=True)
    out = model(x)
    assert out.dtype == dtype
    out.sum().backward()
    assert all(p.grad.dtype == dtype for p in (x, *model.parameters()))


def test_the_summary_knows_a_layer_that_was_parametrized_later() -> None:
    layer = convert_(nn.Sequential(nn.Linear(3, 2)), lns12, scope="everywhere")
    parametrizations.weight_norm(layer[0])
    assert "float32" not in summary(layer)


@pytest.mark.parametrize("dtype", [torch.long, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize(
    "layer",
    [nn.Linear(3, 3), nn.Conv1d(3, 2, 2), nn.ConvTranspose1d(3, 2, 2), Doubled(3, 3)],
    ids=lambda x: type(x).__name__,
)
def test_inputs_of_integers_are_refused_as_by_torch(layer: nn.Module, dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 3, dtype=dtype)
    with pytest.raises((RuntimeError, ValueError)):
        layer(x)
    converted = convert_(copy.deepcopy(layer), lns16)
    with pytest.raises(ValueError, match=rf"{dtype}.*floating dtype.*x\.float\(\)"):
        converted(x)
    converted(x.float())
