"""Inputs that torch refuses, or reads as values, and calls that once ended the process or read
other memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

import lns_ops
from lns_ops import LNSTensor, lns12


def lns(values: Any) -> LNSTensor:
    return LNSTensor.from_float(torch.as_tensor(values, dtype=torch.float32))


X = lns([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_with_what_to_do(scope: str, layout: torch.layout) -> None:
    layer = lns_ops.convert_(nn.Linear(3, 2), "lns16", scope=scope)
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(NotImplementedError, match="to_padded_tensor"):
        layer(nested)
    assert layer(torch.nested.to_padded_tensor(nested, 0.0)).shape == (2, 4, 2)


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_sparse_inputs_are_refused_with_what_to_do(scope: str) -> None:
    layer = lns_ops.convert_(nn.Linear(3, 2, bias=False), "lns16", scope=scope)
    x = torch.eye(3).to_sparse()
    with pytest.raises(NotImplementedError, match=r"x\.to_dense\(\), or.*torch\.sparse\.mm"):
        layer(x)
    product = torch.sparse.mm(x, layer.weight.t())
    assert torch.allclose(
        *map(lns_ops.tensor.in_float32, (product, layer(x.to_dense()))), rtol=0.01
    )


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize("other", [torch.tensor([[1, 0, 2], [4, 8, 1]]), torch.ones(2, 3).bool()])
def test_integers_and_truth_values_are_joined_as_values(
    join: Callable[..., Tensor], other: Tensor
) -> None:
    assert torch.equal(join([X, other]).to_float(), join([X.to_float(), other.float()]))
    assert torch.equal(join([other, X]).to_float(), join([other.float(), X.to_float()]))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.sum(5),
        lambda x: x.mean(dim=(2, 3)),
        lambda x: x.var(dim=-4),
        lambda x: x.norm(dim=5),
        lambda x: x.logsumexp(2),
        lambda x: x.sum((1, 1)),
        lambda x: x.sum((0, -2)),
        lambda x: functional.normalize(x[0]),
        lambda x: torch.zeros_like(x).scatter_add(1, torch.tensor([[5]]), x[:1, :1]),
        lambda x: torch.zeros_like(x).scatter_add(3, torch.tensor([[1]]), x[:1, :1]),
        lambda x: x.scatter_add(1, torch.tensor([[1], [1], [1]]), x.reshape(3, 2)[:, :1]),
        lambda x: x.index_add(0, torch.tensor([5]), x[:1]),
        lambda x: x.index_add(0, torch.tensor([-1]), x[:1]),
        lambda x: x.index_put((torch.tensor([7]),), x[:1], accumulate=True),
        lambda x: x.index_put((torch.tensor([-7]),), x[:1], accumulate=True),
        lambda x: functional.embedding_bag(torch.tensor([0, 1]), x, torch.tensor([0, 5])),
        lambda x: x[0, 0].sum(5),
        lambda x: functional.fold(x.reshape(1, 6, 1), (3, 4), (2, 2)),
        lambda x: functional.pad(x, (3, 0), mode="reflect"),
        lambda x: functional.pad(x, (0, 4), mode="reflect"),
        lambda x: functional.scaled_dot_product_attention(x, x, x, torch.zeros(5, 2, 2)),
        lambda x: functional.scaled_dot_product_attention(x, x, x, torch.zeros(3, 2)),
        lambda x: functional.fold(
            torch.ones_like(x).expand(4, 2, 3).reshape(1, 4, 6), (9, 9), (2, 2)
        ),
    ],
)
def test_what_torch_refuses_is_refused(reduce: Callable[[Tensor], Tensor]) -> None:
    refusals = (IndexError, RuntimeError, ValueError)
    with pytest.raises(refusals):
        reduce(X.to_float())
    with pytest.raises(refusals):
        reduce(X)


def test_negative_indices_are_taken_where_torch_takes_them() -> None:
    put = lambda x: x.index_put((torch.tensor([-1, 0]),), x, accumulate=True)  # noqa: E731
    torch.testing.assert_close(put(X).to_float(), put(X.to_float()), rtol=2e-3, atol=0)


def test_a_function_of_python_is_applied_in_place() -> None:
    x = X.clone()
    assert x.apply_(lambda value: value * 2) is x
    assert torch.equal(x.to_float(), X.to_float() * 2)


def test_equal_takes_either_order() -> None:
    assert torch.equal(X, X.clone())
    assert not torch.equal(X.to_float(), X)
    assert not torch.equal(X, X.to_float())


def test_functions_take_torchs_names() -> None:
    for function in (torch.sigmoid, torch.tanh):
        assert torch.equal(function(input=X).to_float(), function(X).to_float())


def test_gradients_of_several_formats_are_clipped_together() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    lns_ops.convert_(net, {"0": "lns16", "1": "lns12"}, scope="everywhere")
    net(torch.ones(2, 4)).to_float().sum().backward()
    before = [p.grad.to_float() for p in net.parameters()]
    norm = torch.stack([grad.norm() for grad in before]).norm()
    found = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert float(found) == pytest.approx(float(norm), rel=0.02)
    for parameter, grad in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad.to_float(), grad / norm, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.BatchNorm1d(3), (torch.ones(2, 1),)),
        (nn.BatchNorm2d(3), (torch.ones(2, 1, 2, 2),)),
        (nn.GRUCell(3, 4), (torch.ones(2, 3), torch.ones(1, 4))),
        (nn.LSTMCell(3, 4), (torch.ones(2, 3), (torch.ones(2, 4), torch.ones(1, 4)))),
    ],
    ids=str,
)
def test_shapes_that_torch_refuses_are_refused(layer: nn.Module, inputs: Any) -> None:
    refusals = (RuntimeError, ValueError)
    with pytest.raises(refusals):
        layer.eval()(*inputs)
    converted = lns_ops.convert_(copy.deepcopy(layer), "lns16", scope="everywhere")
    with pytest.raises(refusals):
        converted(lns(inputs[0]), *inputs[1:])


def test_types_have_torchs_names() -> None:
    assert X.type() == "torch.FloatTensor"
    assert X.type("torch.DoubleTensor").dtype == X.type(torch.float64).dtype == torch.float64
    assert isinstance(X.type(torch.float32), LNSTensor)


def test_a_parameter_in_another_order_is_named() -> None:
    net = lns_ops.convert_(nn.Conv2d(3, 4, 3), "lns16", scope="everywhere")
    net = net.to(memory_format=torch.channels_last)
    optimizer = lns_ops.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    with pytest.raises(ValueError, match=r"channels_last\) before lns_ops.convert_"):
        optimizer.step()


def step(name: str, fmt: str | None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net: nn.Module = nn.Linear(3, 2)
    if fmt:
        net = lns_ops.convert_(net, fmt, scope="everywhere")
    optimizer = getattr(lns_ops.optim, name)(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Lion"])
@pytest.mark.parametrize(
    ("theirs", "ours"), [("lns12", "lns16"), ("lns16", "lns12"), (None, "lns16"), ("lns16", None)]
)
def test_state_of_another_format_is_refused(name: str, theirs: str | None, ours: str) -> None:
    """Its codes would be read in this format."""
    options = {"momentum": 0.5} if name == "SGD" else {}
    _, optimizer = step(name, ours, **options)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="an optimizer's state is of its parameters' format"):
        optimizer.load_state_dict(step(name, theirs, **options)[1].state_dict())
    assert str(optimizer.state_dict()) == str(before)
    optimizer.load_state_dict(step(name, ours, **options)[1].state_dict())


def test_a_group_that_is_added_is_checked_like_the_first() -> None:
    net = lns_ops.convert_(nn.Linear(3, 2), lns12, scope="everywhere")
    optimizer = lns_ops.optim.SGD([net.weight], lr=0.1, momentum=0.5)
    with pytest.raises(ValueError, match=r"momentum=0\.999"):
        optimizer.add_param_group({"params": [net.bias], "momentum": 0.999})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [net.bias], "momentum": 0.25})


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.sum(dtype=torch.float64),
        lambda x: x.sum(1, dtype=torch.float16),
        lambda x: torch.sum(input=x, dim=1, dtype=torch.float64),
        lambda x: x.mean(0, dtype=torch.float64),
        lambda x: x.cumsum(1, dtype=torch.float64),
        lambda x: x.prod(1, dtype=torch.float64),
        lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float64),
    ],
)
def test_a_reduction_in_another_type_is_torchs(reduce: Callable[[Tensor], Tensor]) -> None:
    x = X.clone().requires_grad_()
    found = reduce(x)
    assert type(found) is Tensor
    torch.testing.assert_close(found, reduce(X.to_float()))
    found.sum().backward()
    assert isinstance(x.grad, LNSTensor)


def test_floats_are_normalized_with_lns_weights() -> None:
    x, weight = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True), lns([1.0, 2.0, 0.5])
    found = functional.layer_norm(x, (3,), weight)
    assert torch.equal(
        found.to_float(), functional.layer_norm(lns(x.detach()), (3,), weight).to_float()
    )
    found.to_float()[0, 1].backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_state_of_a_number_is_taken_again() -> None:
    """For a parameter without dimensions, whose state has float64 values of the same shape."""
    parameter = nn.Parameter(lns(2.0))
    for make in (lns_ops.optim.NAdam, lns_ops.optim.SignMul):
        optimizer = make([parameter], lr=0.01)
        parameter.grad = lns(0.5)
        optimizer.step()
        again = make([parameter], lr=0.01)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys() != set()


def test_an_empty_index_adds_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(X.index_add(0, none, X[:0]).to_float(), X.to_float())


def test_bags_that_begin_before_the_one_before_are_refused() -> None:
    with pytest.raises(ValueError, match="must not decrease"):
        functional.embedding_bag(torch.tensor([0, 1]), X, torch.tensor([0, 2, 1]))


def test_a_gradient_scaler_is_told_of_powers_of_two() -> None:
    model = lns_ops.convert_(nn.Linear(3, 2), "lns16", scope="everywhere")
    optimizer, scaler = lns_ops.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, 3)).to_float().sum()).backward()
    with pytest.raises(ValueError, match=r"scale the loss by a power of two.*LossScale\(128\)"):
        scaler.step(optimizer)


@torch.library.custom_op("lns_tests::double_", mutates_args={"tensors"})
def double_(tensors: list[Tensor]) -> None:
    """Another project's operation that writes to a list."""
    for each in tensors:
        each.mul_(2)


def test_the_fallback_writes_to_lists() -> None:
    tensors = [lns([1.0, 2.0]), lns(4.0)]
    with lns_ops.allow_float_fallback() as converted:
        double_(tensors)
    assert [t.to_float().tolist() for t in tensors] == [[2.0, 4.0], 8.0]
    assert converted.counts.total() == 1


def test_segments_are_torchs() -> None:
    """Segments of rows along an axis, also segments that leave out values."""
    x = lns(torch.arange(1.0, 25.0).reshape(2, 4, 3))
    lengths = torch.tensor([[1, 3], [2, 1]])
    offsets = torch.tensor([[1, 2, 4], [0, 3, 3]])
    for reduce in ("sum", "prod", "mean", "max", "min"):
        for given in ({"lengths": lengths, "unsafe": True}, {"offsets": offsets, "initial": 2}):
            found = torch.segment_reduce(x, reduce, axis=1, **given)
            wanted = torch.segment_reduce(x.to_float(), reduce, axis=1, **given)
            torch.testing.assert_close(found.to_float(), wanted, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("reduce", "given", "message"),
    [
        ("sum", {"lengths": torch.tensor([1, 2])}, r"lengths=\[1, 2\].*sum to 2"),
        ("sum", {"lengths": torch.tensor([3, -1])}, "must not be negative"),
        ("sum", {"indices": torch.tensor([0, 1])}, "index_add"),
        ("max", {"lengths": torch.tensor([2, 0])}, "its max is undefined.*pass initial"),
        ("mean", {"lengths": torch.tensor([2, 0])}, "its mean is undefined.*pass initial"),
    ],
)
def test_segments_that_have_no_result_are_refused(
    reduce: str, given: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torch.segment_reduce(X, reduce, **given)


@pytest.mark.parametrize("initial", [None, 0.0, 2.0])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_equal_ends_of_a_segment_share_its_gradient_alone(
    reduce: str, initial: float | None
) -> None:
    """Not with ``initial`` or a start of the search; rows along a negative axis."""
    values = torch.tensor([[2.0, 2.0, 0.0, 0.0], [0.0, -1.0, 2.0, 4.0]])
    x, given = LNSTensor.from_float(values, "lns16").requires_grad_(), values.requires_grad_()
    lengths = torch.tensor([[2, 2], [2, 2]])
    for leaf, axis in ((x, -1), (given, 1)):
        options = {"lengths": lengths, "axis": axis, "initial": initial}
        torch.segment_reduce(leaf, reduce, **options).sum().backward()
    assert x.grad is not None
    assert given.grad is not None
    assert torch.equal(x.grad.to_float(), given.grad)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("way", ["called", "compiled", "inside of compiled code"])
def test_flex_attention_is_refused_with_what_to_use(way: str) -> None:
    torch.compiler.reset()
    x = LNSTensor.from_float(torch.randn(1, 2, 4, 8), "lns16")
    call: Any = {
        "called": flex_attention,
        "compiled": torch.compile(flex_attention, backend="aot_eager"),
        "inside of compiled code": torch.compile(
            lambda q, k, v: flex_attention(q, k, v) * 2, backend="aot_eager"
        ),
    }[way]
    with pytest.raises(NotImplementedError, match=r"flex_attention of LNSTensors.*scaled_dot_prod"):
        call(x, x, x)
    assert not x.is_nested


def test_a_sum_over_as_many_terms_as_values_say_cannot_be_compiled_whole() -> None:
    """``torch.bincount`` has as many counts as the largest value requires."""
    torch.compiler.reset()

    def scaled(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(groups)
        return x.sum(0).expand(counts.shape[0], 3) * counts[:, None]

    groups = torch.tensor([0, 1, 1, 2])
    x: Any = LNSTensor.from_float(torch.rand(4, 3), "lns16").requires_grad_()
    scaled(x, groups).sum().backward()
    wanted, x.grad = x.grad, None
    torch.compile(scaled, backend="aot_eager")(x, groups).sum().backward()
    assert torch.equal(x.grad.codes, wanted.codes)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"sum over u\d+ terms .*bincount.*without fullgraph=True"):
        torch.compile(scaled, backend="aot_eager", fullgraph=True)(x, groups)
