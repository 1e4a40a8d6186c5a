"""convert_ and SGD: scopes, filters, updates equal to the reference, and a training loop of
somebody else."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lns_ops
from lns_ops import LNSFormat, LNSTensor, convert_, lns8, lns12, lns16, reference, summary
from lns_ops.nn import LNSMatmulLinear
from lns_ops.optim import SGD, parameters_by_format


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_scope_matmul_keeps_float_parameters_and_computes_products_in_lns() -> None:
    model = convert_(net(), lns12)
    x = torch.randn(5, 6)
    assert parameters_by_format(model.parameters()) == {"float32": 83}
    first = model[0]
    assert isinstance(first, LNSMatmulLinear)
    x_codes, w_codes = (reference.encode(t.detach().numpy(), lns12) for t in (x, first.weight))
    expected = reference.decode(reference.matmul(x_codes, w_codes.T, lns12), lns12)
    assert torch.equal(first(x), torch.from_numpy(expected) + first.bias)
    assert first(torch.randn(2, 5, 6)).shape == (2, 5, 8)


def test_scope_everywhere_rounds_the_weights_and_returns_lns() -> None:
    original = net()
    model = convert_(net(), lns12, scope="everywhere")
    assert parameters_by_format(model.parameters()) == {"lns12": 83}
    np.testing.assert_array_equal(
        model[0].weight.codes.numpy(), reference.encode(original[0].weight.detach().numpy(), lns12)
    )
    assert isinstance(model(torch.randn(5, 6)), LNSTensor)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
@pytest.mark.parametrize("kept", ["0", "2"])
def test_filter_leaves_layers_in_float(scope: str, kept: str) -> None:
    model = convert_(net(), lns12, scope=scope, filter_fn=lambda module, name: name != kept)
    F.cross_entropy(model(torch.randn(5, 6)), torch.tensor([0, 1, 2, 0, 1])).backward()
    layer = model.get_submodule(kept)
    assert type(layer) is nn.Linear
    assert type(layer.weight.grad) is torch.Tensor
    assert layer.weight.grad.any()


def test_conversion_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), convert_(nn.Linear(4, 4), lns12))
    with pytest.raises(ValueError, match="layer '1': is LNS already"):
        convert_(model, lns12)
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match="layer '0': is LNS already"):
        convert_(convert_(net(), "lns12", scope="everywhere"), lns12, scope="everywhere")
    with pytest.raises(ValueError, match="scope='all': must be one of matmul, everywhere"):
        convert_(net(), lns12, scope="all")


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    convert_(model, lns12, scope="everywhere")
    assert model[1].weight is model[0].weight
    assert model[1].bias is not model[0].bias


@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kahan_sum", [False, True])
def test_sgd_equals_the_reference(fmt: LNSFormat, momentum: float, kahan_sum: bool) -> None:
    rng = np.random.default_rng(0)
    weight = nn.Parameter(LNSTensor.from_float(torch.from_numpy(rng.standard_normal((7, 9))), fmt))
    optimizer = SGD([weight], lr=0.01, momentum=momentum, kahan_sum=kahan_sum)
    codes, buffer = weight.codes.numpy().copy(), np.zeros((7, 9), np.int16) if momentum else None
    compensation = np.zeros((7, 9), np.int16) if kahan_sum else None
    for _ in range(5):
        grad = LNSTensor.from_float(torch.from_numpy(rng.standard_normal((9, 7))), fmt).t()
        weight.grad = grad
        optimizer.step()
        codes, buffer, compensation = reference.sgd_update(
            codes, grad.codes.numpy(), fmt, negative_lr=reference.encode(np.array(-0.01), fmt),
            momentum=reference.encode(np.array(momentum), fmt) if momentum else None, buffer=buffer,
            compensation=compensation,
        )  # fmt: skip
        np.testing.assert_array_equal(weight.codes.numpy(), codes)
    state = optimizer.state[weight]
    for name, expected in (("momentum_buffer", buffer), ("compensation", compensation)):
        if expected is None:
            assert name not in state
        else:
            np.testing.assert_array_equal(state[name].codes.numpy(), expected)


def test_float_parameters_step_like_torch_and_kahan_keeps_what_bfloat16_loses() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    optimizers = SGD([ours], lr=0.1, momentum=0.9), torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for step in range(4):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.full((7,), float(step))
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    low = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = SGD([low], lr=1e-3, kahan_sum=True)
    for _ in range(1000):
        low.grad = -torch.ones_like(low)
        optimizer.step()
    assert low.item() == pytest.approx(2, rel=0.01)


def test_optimizer_state_survives_its_state_dict() -> None:
    weight = nn.Parameter(LNSTensor.from_float(torch.randn(4), lns12))
    optimizer = SGD([weight], lr=0.1, momentum=0.5, kahan_sum=True)
    weight.grad = LNSTensor.from_float(torch.randn(4), lns12)
    optimizer.step()
    saved = optimizer.state_dict()
    other = SGD([weight], lr=0.1, momentum=0.5, kahan_sum=True)
    other.load_state_dict(saved)
    for name, value in optimizer.state[weight].items():
        assert torch.equal(other.state[weight][name].codes, value.codes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lr": -1}, "lr=-1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum=1.0"),
        ({"lr": 1e-9}, "lr=1e-09: underflows"),
    ],
)
def test_sgd_refuses_bad_values(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SGD([nn.Parameter(LNSTensor.from_float(torch.ones(1), lns8))], **arguments)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
@pytest.mark.parametrize("fmt", [lns16, lns12], ids=str)
def test_a_strangers_loop_trains(fmt: LNSFormat, scope: str) -> None:
    """Uses only public names, and a mean loss."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    torch.manual_seed(0)
    model = lns_ops.convert_(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), fmt, scope=scope
    )
    optimizer = lns_ops.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, kahan_sum=True)
    for _ in range(8):
        for rows in torch.randperm(1500).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    wrong = (model(x[1500:]).argmax(1) != y[1500:]).float().mean()
    assert wrong < 0.15


# ------------------------------------------------------------------------------ what would train no

OLD = "was replaced when its module was converted or reverted"


@pytest.mark.parametrize("kind", [SGD, torch.optim.SGD])
def test_an_optimizer_made_before_convert_is_refused_at_its_step(
    kind: type[torch.optim.Optimizer],
) -> None:
    model = net()
    early = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    convert_(model, lns16, scope="everywhere")
    model(torch.randn(5, 6)).sum().backward()
    with pytest.raises(ValueError, match=rf"{OLD}.*create the optimizer after"):
        early.step()
    late = SGD(model.parameters(), lr=0.1)
    late.step()
    lns_ops.revert_(model)
    with pytest.raises(ValueError, match=OLD):
        late.step()


def test_an_optimizer_made_before_convert_of_products_goes_on() -> None:
    model = net()
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model[0].weight.clone()
    convert_(model, lns16)
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_torchs_optimizers_of_lns_parameters_are_refused_with_ours(name: str) -> None:
    model = convert_(net(), lns16, scope="everywhere")
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    model(torch.randn(5, 6)).sum().backward()
    before = [p.codes.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"torch\.optim\.{name}.*lns16.*lns_ops\.optim\.{name}"):
        optimizer.step()
    assert all(torch.equal(p.codes, old) for p, old in zip(model.parameters(), before, strict=True))


def test_strangers_optimizers_of_lns_parameters_are_warned_of() -> None:
    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=self.defaults["lr"])

    model = convert_(net(), lns16, scope="everywhere")
    optimizer, before = Signs(model.parameters(), {"lr": 0.25}), model[0].bias.codes.clone()
    model(torch.randn(5, 6)).sum().backward()
    with pytest.warns(UserWarning, match=r"Signs.*0\.999.*lns_ops\.optim"):
        optimizer.step()
    assert not torch.equal(model[0].bias.codes, before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(8, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 8, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fmt", "filter_fn"),
    [
        ("lns16", lambda module, name: name != "head"),
        ({"embedding": "lns16"}, None),
        ({"embedding": "lns16", "head": "lns12"}, None),
        ("lns16", lambda module, name: "lns12" if name == "head" else True),
    ],
)
def test_ties_that_a_conversion_would_cut_are_refused(fmt: object, filter_fn: object) -> None:
    model = Tied()
    with pytest.raises(
        ValueError, match=r"'embedding' and 'head' share the parameter weight.*same way"
    ):
        convert_(model, fmt, "everywhere", filter_fn)  # type: ignore[arg-type]
    assert model.head.weight is model.embedding.weight
    assert type(model.head.weight.data) is torch.Tensor
    convert_(model, {"embedding": "lns16", "head": "lns16"}, scope="everywhere")
    assert model.head.weight is model.embedding.weight


def test_ties_that_two_conversions_would_cut_are_refused() -> None:
    model = Tied()
    convert_(model.embedding, "lns16", scope="everywhere")
    with pytest.raises(
        ValueError, match=r"'head'.*weight.*converted with another layer before.*one call"
    ):
        convert_(model, "lns16", "everywhere", lambda module, name: name != "embedding")
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"replaced: something kept the old one .*tied"):
        model.head(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=f"{OLD}.*share it"):
        optimizer.step()


def test_ties_do_not_matter_to_products() -> None:
    model = Tied()
    convert_(model, "lns16", "matmul")
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_formats_that_no_layer_would_get_are_refused(scope: str) -> None:
    for fmt, said in (
        ({}, r"fmt={}.*there are '0', '2'"),
        ({"*": "lns16", "0": "lns12"}, r"'0' applies to no layer: '\*' before.*specific.*first"),
        ({"0": "lns8", "2": "lns16", "[02]": "lns12"}, r"'\[02\]' applies to no.*'0', '2' before"),
    ):
        model = net()
        with pytest.raises(ValueError, match=said):
            convert_(model, fmt, scope)  # type: ignore[arg-type]
        assert type(model[0]) is nn.Linear
    by_name = {"0": lns12, "2": lns8}
    model = convert_(net(), {}, scope, lambda module, name: by_name.get(name))
    assert [layer.lns_conversion.fmt for layer in (model[0], model[2])] == [lns12, lns8]
    convert_(net(), {"0": "lns12", "*": "lns16"}, scope)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_filters_that_match_nothing_are_refused_with_the_names(scope: str) -> None:
    for fmt, filter_fn, said in (
        ("lns16", lambda module, name: name == "fc", "filter_fn"),
        ({"fc*": "lns16"}, None, r"'fc\*'"),
        ({"*": "lns16", "layer1": "lns12"}, None, "'layer1'"),
    ):
        model = net()
        with pytest.raises(ValueError, match=f"{said} matches no layer.*there are '0', '2'"):
            convert_(model, fmt, scope, filter_fn)  # type: ignore[arg-type]
        assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"filter_fn matches no layer.*there are '0', '1', '2'"):
        convert_(net(), "bfloat16", "everywhere", lambda module, name: False)


def test_mixed_precision_is_refused_where_it_would_replace_lns() -> None:
    x = torch.randn(3, 6)
    lns = convert_(nn.Sequential(nn.Linear(6, 2)), "lns16", "everywhere")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"autocast.*lns16.*enabled=False"):
            lns(x)
        with torch.autocast("cpu", enabled=False):
            inside = lns(x)
    assert torch.equal(inside.codes, lns(x).codes)


def test_hooks_and_attributes_of_parameters_stay_theirs() -> None:
    model, calls = net(), list[str]()
    first = model[0].weight.register_hook(lambda grad: calls.append("gradient") or grad * 0)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    model[2].weight.rate = 0.1
    for change in (lambda m: convert_(m, lns16, scope="everywhere"), lns_ops.revert_):
        change(model)
        calls.clear()
        model(torch.randn(5, 6)).sum().backward()
        assert calls == ["gradient", "accumulated"]
        assert not lns_ops.tensor.in_float32(model[0].weight.grad).any()
        assert model[2].weight.rate == 0.1
    first.remove()
    calls.clear()
    model(torch.randn(5, 6)).sum().backward()
    assert calls == ["accumulated"]


class Kept(nn.Module):
    """A cell that looks up its parameters in its own dictionary, as liquid networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", nn.Parameter(torch.randn(6, 3)))
        self.kept = {"w": self.w, "more": [(self.w,)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept["w"] + x @ self.kept["more"][0][0]  # type: ignore[index]


def test_parameters_in_lists_and_dictionaries_of_a_module_follow() -> None:
    model = nn.Sequential(Kept())
    for change in (lambda m: convert_(m, lns16, scope="everywhere"), lns_ops.revert_):
        change(model)
        model(torch.randn(5, 6)).sum().backward()
        assert model[0].w.grad is not None
        assert model[0].kept["more"][0][0] is model[0].w


def test_a_gradient_for_a_replaced_parameter_is_refused() -> None:
    model = net()
    old = model[2].bias
    convert_(model, lns16, scope="everywhere")
    with pytest.raises(ValueError, match=r"that convert_ or revert_ replaced: something kept"):
        (model(torch.randn(5, 6)) + old).sum().backward()


def holders(weight: nn.Parameter) -> dict[str, Any]:
    cycle: dict[str, Any] = {"children": [], "weight": weight}
    cycle["children"].append({"parent": cycle})
    return {
        "tuple": (weight,),
        "named tuple": collections.namedtuple("Pair", "weight bias")(weight, None),
        "set": {weight},
        "deque": collections.deque([[weight]]),
        "cycle": cycle,
    }


def held(value: Any) -> Any:
    return value["weight"] if isinstance(value, dict) else next(iter(value))


@pytest.mark.parametrize("kind", ["tuple", "named tuple", "set", "deque", "cycle"])
def test_containers_that_hold_a_parameter_follow(kind: str) -> None:
    model = nn.Linear(3, 3)
    model.kept = holders(model.weight)[kind]  # type: ignore[assignment]
    convert_(model, lns16, scope="everywhere")
    found = held(model.kept)
    assert (found[0] if kind == "deque" else found) is model.weight


class Frozen(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_containers_without_parameters_are_left_alone(scope: str) -> None:
    model = nn.Linear(3, 3)
    kept = {"frozen": Frozen(block=(1, [2])), "numbers": [1, (2, 3)]}
    for name, value in kept.items():
        setattr(model, name, value)
    convert_(model, lns16, scope=scope)
    assert all(getattr(model, name) is value for name, value in kept.items())
    assert model.frozen["block"] is kept["frozen"]["block"]


@pytest.mark.parametrize("bad", [math.inf, 1j], ids=["infinity", "complex"])
def test_a_parameter_without_lns_values_is_named_and_nothing_changes(bad: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(torch.full((2, 2), bad))
    before = list(model.parameters())
    with pytest.raises(ValueError, match=r"parameter weight of layer '1'.*or leave the layer out"):
        convert_(model, lns12, scope="everywhere")
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert "everywhere" not in summary(model)
    model[0](torch.ones(1, 3)).sum().backward()  # no parameter has a successor
    with torch.no_grad():
        model[1].weight = nn.Parameter(torch.ones(2, 2))
    convert_(model, lns12, scope="everywhere")


def test_products_take_what_a_layer_of_the_other_scope_gives() -> None:
    for first, second, shape in (
        (nn.Linear(3, 4), nn.Linear(4, 2), (5, 3)),
        (nn.Conv1d(2, 3, 2), nn.Conv1d(3, 2, 2), (4, 2, 6)),
    ):
        torch.manual_seed(0)
        convert_(second, "lns16")  # separately: neither call knows the other layer
        convert_(first, "lns16", scope="everywhere")
        x = torch.randn(shape)
        out = second(first(x))
        assert torch.equal(out, second(first(x).to_float()))
        out.sum().backward()
        assert isinstance(first.weight.grad, LNSTensor)
        assert type(second.weight.grad) is torch.Tensor


REFUSED: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
    "torch.jit.trace": lambda model, x: torch.jit.trace(model.requires_grad_(False), x),
    "make_fx": lambda model, x: make_fx(model)(x),
    "vmap": lambda model, x: torch.vmap(
        lambda weights: torch.func.functional_call(model, weights, (x,))
    )({name: torch.stack([p.detach()] * 2) for name, p in model.named_parameters()}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_lns_graph_is_refused_in_words(name: str) -> None:
    model = convert_(net(), lns12, scope="everywhere")
    with pytest.raises(NotImplementedError, match=rf"{name}.*convert with scope='matmul'"):
        REFUSED[name](model, torch.randn(2, 6))


def test_products_are_exported() -> None:
    model, x = convert_(net(), lns12), torch.randn(2, 6)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))
    other = torch.randn(2, 6)
    assert torch.equal(torch.jit.trace(model, x)(other), model(other))


class Scaled(nn.Linear):
    """A layer that torch.fx traces; its first operation rounds in LNS."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The linear function of the sigmoid of 1.37 times the input."""
        return super().forward(torch.sigmoid(1.37 * input))


@pytest.mark.parametrize("left_out", ["1", "2"])
def test_encoding_and_decoding_between_layers_are_traced(left_out: str) -> None:
    model = nn.Sequential(Scaled(4, 4), Scaled(4, 4), Scaled(4, 4))
    convert_(model, lns12, "everywhere", lambda _, name: name != left_out)
    x = torch.randn(5, 4)
    got, wanted = (lns_ops.tensor.in_float32(f(x)) for f in (torch.fx.symbolic_trace(model), model))
    assert torch.equal(got, wanted)


def test_a_scripted_layer_is_named_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="layer '1': is scripted"):
        convert_(model, lns16, scope="everywhere")
    assert type(model[0].weight) is nn.Parameter
