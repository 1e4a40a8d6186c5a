"""Products that modules compute themselves: scope matmul converts them, or reports that they are
left out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lns_ops
from lns_ops import _compat
from lns_ops.nn import LNSMatmulLinear
from tests.lns_ops.nn.products import Product


class Adapter(nn.Module):
    """LoRA; its base layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.a = nn.Parameter(torch.randn(2, 8))
        self.b = nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.base.weight, self.base.bias)
        return base + x @ (0.5 * self.a).t() @ self.b.t() * 2


class Merged(Adapter):
    """LoRA that multiplies its matrices first."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


class Wrapper(nn.Module):
    """A module without its own weights that multiplies by a layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.layer.weight * 1.0, self.layer.weight[:0]]).t()


class Rows(nn.Module):
    """A linear layer with a transposed weight, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(x.shape)


class Experts(nn.Module):
    """All experts in one equation, then the matrices of one expert per example."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        every = torch.einsum("bi,eio->beo", x, self.weights).sum(1)
        chosen = self.weights[torch.arange(x.shape[0]) % 3]
        return every + torch.bmm(x[:, None], chosen)[:, 0]


class Grouped(Experts):
    """Experts of groups of rows."""

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([1, 1, x.shape[0]], dtype=torch.int32)
        return F.grouped_mm(x, self.weights, offs=ends)


def scan(states: Tensor, decay: Tensor, inputs: Tensor) -> Tensor:
    """A function outside of the class, with a product of activations."""
    return decay * states + inputs


class StateSpace(nn.Module):
    """A selective state-space model: its state is multiplied by ``C``, which is computed from the
    input."""

    def __init__(self) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.zeros(8, 4))
        self.to_bc = nn.Linear(8, 8, bias=False)
        self.out = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        b, c = F.linear(x, self.to_bc.weight).chunk(2, -1)
        h = x.new_zeros(8, 4)
        steps = []
        for t in range(x.shape[0]):
            h = scan(h, torch.exp(-torch.exp(self.log_decay)), x[t, :, None] * b[t])
            steps.append(h @ c[t])
        return torch.matmul(torch.stack(steps), self.out)


class Attention(nn.Module):
    """Attention by hand: products of activations between products with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))
        self.weight = nn.Parameter(torch.randn(8, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.embedding(torch.arange(x.shape[0]), self.table)
        q, k, v = (x @ self.weight).chunk(3, -1)
        return torch.softmax(q @ k.t(), -1) @ v


class Positions(nn.Module):
    """A module that adds a matrix, and attention without weights: nothing to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 8))
        self.scores = Scores()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scores(x + self.table)
        return y


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.t(), -1) @ x


CASES: dict[str, Callable[[], nn.Module]] = {
    "adapter": Adapter,
    "merged": Merged,
    "wrapper": Wrapper,
    "rows": Rows,
    "experts": Experts,
    "grouped": Grouped,
    "state-space": StateSpace,
    "attention": Attention,
}
LEFT_OUT = {
    "adapter": {"0.base.weight": 1, "0.a": 1, "0.b": 1},
    "merged": {"0.b": 1, "0.a": 1, "0.base.weight": 1},
    "wrapper": {"0.layer.weight": 1},
    "rows": {"0.weight": 1},
    "experts": {"0.weights": 2},
    "grouped": {"0.weights": 1},
    "state-space": {"0.to_bc.weight": 1, "0.out": 1},
    "attention": {"0.weight": 1},
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(CASES[name](), nn.Linear(8, 2))


def moved(model: Callable[[Tensor], Tensor], x: Tensor, of: nn.Module) -> list[Tensor | None]:
    """The result, and the gradients of the sum of its squares."""
    x = x.clone().requires_grad_()
    of.zero_grad()
    result = model(x)
    result.square().sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in of.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_products_of_a_modules_own_are_lns(name: str) -> None:
    exact, x = network(name), torch.randn(4, 8)
    model = lns_ops.convert_(copy.deepcopy(exact), "lns16")
    with lns_ops.float32_products(model) as found:
        close = moved(model, x, model)
    assert not found
    for a, b in zip(close, moved(exact, x, exact), strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).norm() <= 0.05 * b.norm()
        assert not torch.equal(a, b)
    coarse = lns_ops.convert_(copy.deepcopy(exact), "lns8")(x)
    assert (coarse - exact(x)).norm() > (close[0] - exact(x)).norm()  # type: ignore[operator]
    assert "left out" not in lns_ops.summary(model)


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_stays_float32_and_is_named(name: str) -> None:
    exact, x = network(name), torch.randn(4, 8)
    model = lns_ops.convert_(copy.deepcopy(exact), "lns16", filter_fn=lambda _, n: n == "1")
    with lns_ops.float32_products(model) as found:
        y = model[0](x)
    assert torch.equal(y, exact[0](x))
    assert dict(found) == LEFT_OUT[name]
    assert "0 is left out and computes products itself (" in lns_ops.summary(model)


def test_without_weights_there_is_nothing_to_convert() -> None:
    model = lns_ops.convert_(nn.Sequential(Positions(), nn.Linear(8, 2)), "lns16")
    assert type(model[0]) is Positions
    assert type(model[0].scores) is Scores
    assert "computes products" not in lns_ops.summary(model)


def test_the_summary_lists_modules_with_products_of_their_own() -> None:
    model = lns_ops.convert_(network("wrapper"), "lns12")
    model(torch.randn(4, 8))
    lines = lns_ops.summary(model).splitlines()
    assert lines[1].split() == ["0", "LNSMatmulWrapper", "matmul", "lns12", "0"]


COMPILED = [name for name in CASES if name != "grouped"]  # torch compiles it only in bfloat16


@pytest.mark.parametrize("name", COMPILED)
def test_they_are_compiled_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    model, x = lns_ops.convert_(network(name), "lns12"), torch.randn(4, 8)
    wanted = moved(model, x, model)
    got = moved(torch.compile(model, backend="aot_eager", fullgraph=True), x, model)
    for a, b in zip(got, wanted, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_copies_files_and_the_way_back(name: str) -> None:
    exact, x = network(name), torch.randn(4, 8)
    model = lns_ops.convert_(copy.deepcopy(exact), "lns12")
    y = model(x)
    assert list(model.state_dict()) == list(exact.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), y)
    fresh = lns_ops.convert_(copy.deepcopy(exact), "lns12")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), y)
    assert isinstance(model[0], CASES[name])  # type: ignore[arg-type]
    assert type(lns_ops.revert_(model)[0]) is CASES[name]
    assert torch.equal(model(x), exact(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["adapter", "merged", "rows", "attention"])
def test_gradients_of_single_examples_by_torch_func(name: str) -> None:
    model, x = lns_ops.convert_(network(name), "lns16"), torch.randn(3, 2, 8)
    weights = {n: p.detach() for n, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(model, weights, (example,))
        return out.square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for i, example in enumerate(x):
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        single = torch.autograd.grad(loss(leaves, example), list(leaves.values()))
        for grad, one in zip(found.values(), single, strict=True):
            assert torch.equal(grad[i], one)


def test_gradients_of_gradients() -> None:
    exact, x = network("state-space"), torch.randn(4, 8)
    penalties = []
    for model in (exact, lns_ops.convert_(copy.deepcopy(exact), "lns16")):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        penalties.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, c in zip(*penalties, strict=True):
        assert (a - c).norm() <= 0.1 * c.norm() + 1e-4


class Mixed(nn.Module):
    """A module that multiplies by a weight and has layers inside that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows, self.w = nn.Linear(8, 8), Rows(), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.layer(x)) @ self.w


def test_layers_that_are_left_out_of_a_module_with_products_stay_float32() -> None:
    torch.manual_seed(3)
    model, x = Mixed(), torch.randn(4, 8)
    inner = copy.deepcopy(model.rows)(copy.deepcopy(model.layer)(x)).detach()
    lns_ops.convert_(model, "lns12", filter_fn=lambda _, name: name == "")
    alone = lns_ops.convert_(Product(model.w.detach(), torch.matmul), "lns12")
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        assert torch.equal(run(x), alone(inner))
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(4, 5))  # within the layer that is left out
    assert torch.equal(model(x), alone(inner))
    lns_ops.revert_(model)
    assert not model.layer._forward_hooks
    assert torch.equal(model(x), inner @ model.w)


def test_formats_by_name_are_those_of_the_innermost_module() -> None:
    torch.manual_seed(3)
    model, x = Mixed(), torch.randn(4, 8)
    parts = copy.deepcopy(model)
    lns_ops.convert_(model, {"rows": "lns8", "layer": "lns16", "*": "lns12"})
    layer, rows = lns_ops.convert_(parts.layer, "lns16"), lns_ops.convert_(parts.rows, "lns8")
    alone = lns_ops.convert_(Product(model.w.detach(), torch.matmul), "lns12")
    assert torch.equal(model(x), alone(rows(layer(x))))


def test_a_layer_that_is_lns_everywhere_within() -> None:
    torch.manual_seed(3)
    model, x = Mixed(), torch.randn(4, 8)
    lns_ops.convert_(model, "lns12", "everywhere", filter_fn=lambda _, name: name == "layer")
    lns_ops.convert_(model, "lns12", filter_fn=lambda _, name: name != "layer")
    assert model(x).dtype == torch.float32
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_power_iterations_of_torch_stay_float32() -> None:
    torch.manual_seed(3)
    model = Mixed()
    parametrizations.spectral_norm(model.layer)
    model.eval()
    weight = model.layer.weight.detach().clone()
    seen: list[Tensor] = []
    lns_ops.convert_(model, "lns8")
    model.layer.parametrizations.weight.register_forward_hook(lambda *a: seen.append(a[-1]))
    model(torch.randn(4, 8))
    assert torch.equal(seen[0], weight)


@pytest.mark.filterwarnings("error::UserWarning")
def test_torch_fx_keeps_them_whole_or_says_so() -> None:
    model, x = lns_ops.convert_(network("rows"), "lns12"), torch.randn(4, 8)
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes][:2] == ["placeholder", "call_module"]
    assert torch.equal(graph(x), model(x))
    with pytest.warns(UserWarning, match=r"inside of a Wrapper: its products \(@\).*nn.Sequential"):
        torch.fx.symbolic_trace(lns_ops.convert_(Wrapper(), "lns12"))


def test_an_exported_module_has_lns_products() -> None:
    model, x = lns_ops.convert_(network("adapter"), "lns12"), torch.randn(4, 8)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))


class Given(nn.Module):
    """A module that calls a given function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def test_functions_that_a_module_is_given_are_its_code() -> None:
    model, x = Given(lambda module, x: x @ module.w), torch.randn(4, 8)
    exact = model(x)
    assert not torch.equal(lns_ops.convert_(model, "lns12")(x), exact)


class Complex(nn.Module):
    """A module with complex weights; one of its products is real."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(torch.complex(x, x), self.a) @ self.a + torch.einsum("bi,io", x + 0j, self.a)
        return F.linear(z.real, self.w)


def test_complex_products_stay() -> None:
    torch.manual_seed(0)
    exact, x = Complex(), torch.randn(4, 8)
    model = lns_ops.convert_(copy.deepcopy(exact), "lns16")
    error = (model(x) - exact(x)).norm() / exact(x).norm()
    assert 0 < error < 0.02


class Block(nn.Module):
    """Embeddings, a layer, attention with a mask, and a product with a tensor that is not a
    weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(10, 8), nn.Parameter(torch.randn(4, 8))
        self.qkv, self.out = nn.Linear(8, 24), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("adjacency", torch.rand(4, 4))

    def attend(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = x.chunk(3, -1)
        weights = torch.softmax(q @ k.t(), -1) * (x[:, :4] > 0).float()
        h = torch.einsum("ij,jd->id", weights, v)
        h = self.get_buffer("adjacency") @ torch.relu(h)
        return F.one_hot(h.argmax(-1) % 4, 4).float() @ h + F.one_hot(ids % 4, 4).float() @ h

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions[torch.arange(4)]
        return self.attend(self.qkv(F.layer_norm(x, (8,))), ids) @ self.out


@pytest.mark.parametrize("way", ["called", "inferred", "compiled"])
def test_products_of_activations_stay_float32(way: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, ids = Block(), torch.arange(4)
    x = F.layer_norm(model.table(ids) + model.positions, (8,))
    parts = copy.deepcopy(model)
    qkv = lns_ops.convert_(parts.qkv, "lns8")
    alone = lns_ops.convert_(Product(model.out.detach(), torch.matmul), "lns8")
    lns_ops.convert_(model, "lns8")
    run: Any = model
    if way == "compiled":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(way == "inferred"):
        assert torch.equal(run(ids), alone(parts.attend(qkv(x), ids)))


class Subclass(nn.Linear):
    """A layer that multiplies by ``@`` and has layers called ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.t()


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_subclasses_of_layers_that_multiply_by_themselves() -> None:
    layer = lns_ops.convert_(Subclass(8, 8, bias=False), "lns12")
    plain = nn.Linear(8, 8, bias=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(layer(x), lns_ops.convert_(plain, "lns12")(x))


def test_a_layer_called_linear_is_no_product() -> None:
    model = lns_ops.convert_(Calls(), "lns12")
    assert type(model) is Calls
    assert type(model.linear) is LNSMatmulLinear


def test_an_unconverted_layer_counts_too() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Linear(4, 2))
    lns_ops.convert_(model, "lns16", filter_fn=lambda layer, name: name == "1")
    with lns_ops.float32_products(model) as found:
        model(torch.randn(2, 1, 6))
    assert dict(found) == {"0.weight": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_products_have_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    model = lns_ops.convert_(network("attention"), "lns16").to(dtype)
    out = model(torch.randn(4, 8, dtype=dtype))
    assert out.dtype == dtype
    out.sum().backward()
    assert all(p.grad.dtype == dtype for p in model.parameters())


def test_a_context_ends_with_an_error() -> None:
    model = lns_ops.convert_(Wrapper(), "lns12")
    with pytest.raises(lns_ops.NonFiniteError, match="a product in LNS"):
        model(torch.full((2, 8), float("nan")))
    assert not _compat.function_modes()
