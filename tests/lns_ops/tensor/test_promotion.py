"""LNS tensors together with float tensors: encoded out of place, decoded in place, -inf masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import forward_ad, functional

from lns_ops import LNSTensor, NonFiniteError, convert_, lns12, lns16, optim, summary
from lns_ops.tensor import in_float32, promotion


def random(*shape: int, seed: int = 0) -> LNSTensor:
    generator = torch.Generator().manual_seed(seed)
    return LNSTensor.from_float(torch.randn(shape, generator=generator), lns16)


MEETINGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "reversed sub": lambda x, y: y - x,
    "mul": torch.mul,
    "div": lambda x, y: x / y,
    "matmul": lambda x, y: x @ y.t(),
    "reversed matmul": lambda x, y: y @ x.t(),
    "linear": lambda x, y: F.linear(x, y),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "maximum": torch.maximum,
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([y, x]),
    "stacked numbers": lambda x, y: torch.stack([x[0, 0], y[0, 0]]),
    "index_add": lambda x, y: y.index_add(0, torch.tensor([0, 0, 1]), x),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "greater": lambda x, y: x > y,
}


@pytest.mark.parametrize("name", MEETINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_float_tensor_is_encoded_in_the_format_it_meets(name: str, dtype: torch.dtype) -> None:
    x, y = random(3, 4), torch.randn(3, 4).to(dtype)
    met = MEETINGS[name](x, y)
    expected = MEETINGS[name](x, LNSTensor.from_float(y, lns16))
    assert torch.equal(getattr(met, "codes", met), getattr(expected, "codes", expected))


@pytest.mark.parametrize("name", [n for n in MEETINGS if n != "greater"])
def test_gradients_cross_in_both_kinds(name: str) -> None:
    x, y = random(3, 4).requires_grad_(), torch.randn(3, 4, requires_grad=True)
    MEETINGS[name](x, y).sum().backward()
    a, b = x.detach().requires_grad_(), LNSTensor.from_float(y.detach(), lns16).requires_grad_()
    MEETINGS[name](a, b).sum().backward()
    assert isinstance(x.grad, LNSTensor)
    assert type(y.grad) is Tensor
    assert torch.equal(x.grad.codes, a.grad.codes)  # type: ignore[union-attr]
    assert torch.equal(y.grad, b.grad.to_float())  # type: ignore[union-attr]


def test_formats_do_not_mix_and_nan_raises() -> None:
    with pytest.raises(ValueError, match="both operands need one format"):
        random(3) + LNSTensor.from_float(torch.ones(3), lns12)
    with pytest.raises(NonFiniteError):
        random(3) + torch.tensor([0.0, math.nan, 1.0])


@pytest.mark.parametrize("least", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("fmt", [lns16, lns12], ids=str)
def test_masks_that_are_added_mask(least: float, fmt: Any) -> None:
    scores = LNSTensor.from_float(torch.randn(3, 5), fmt)
    mask = torch.zeros(3, 5).masked_fill(torch.ones(3, 5, dtype=torch.bool).triu(3), least)
    weights = torch.softmax(scores + mask, -1)
    kept = mask == 0
    assert not weights.codes[~kept].any()
    for row in range(3):
        alone = torch.softmax(scores[row, kept[row]], -1)
        assert torch.equal(weights[row, kept[row]].codes, alone.codes)
    q, k, v = (LNSTensor.from_float(torch.randn(3, 4), fmt) for _ in range(3))
    square = torch.zeros(3, 3).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), least)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=square)
    assert torch.equal(attended.codes, F.scaled_dot_product_attention(q, k, v, square == 0).codes)


def test_in_place_the_destination_stays_what_it_is() -> None:
    x = random(2, 3).requires_grad_()
    out = torch.zeros(4, 3)
    out[1:3] = x
    out.index_add_(0, torch.tensor([0, 3]), x * 2)
    out += 1
    assert type(out) is Tensor
    expected = torch.zeros(4, 3)
    expected[1:3] = x.to_float().detach()
    expected[[0, 3]] += (x * 2).to_float().detach()
    assert torch.equal(out, expected + 1)
    out.backward(torch.ones(4, 3))
    assert isinstance(x.grad, LNSTensor)
    assert torch.equal(x.grad.to_float(), LNSTensor.from_float(torch.full((2, 3), 3.0)).to_float())
    into = torch.empty(2, 3)
    torch.add(x.detach(), 1, out=into)
    assert torch.equal(into, (x.detach() + 1).to_float())
    encoded = torch.zeros_like(x)
    assert torch.sin(x.detach(), out=encoded) is encoded
    assert torch.equal(encoded.codes, x.detach().sin().codes)
    values, places = torch.empty(2), torch.empty(2, dtype=torch.int64)
    torch.max(x.detach(), 1, out=(values, places))
    assert torch.equal(values, x.detach().amax(1).to_float())
    x = x.detach()
    x += torch.ones(3)
    assert isinstance(x, LNSTensor)


@pytest.mark.parametrize(
    ("leave", "dtype"),
    [
        (lambda x: x.half(), torch.float16),
        (lambda x: x.to(torch.bfloat16), torch.bfloat16),
        (lambda x: x.to("cpu", dtype=torch.float64), torch.float64),
        (lambda x: x.long(), torch.int64),
        (lambda x: x.to(torch.zeros(1, dtype=torch.int32)), torch.int32),
        (lambda x: x.to(torch.zeros(1, dtype=torch.float64, requires_grad=True)), torch.float64),
        (lambda x: 0 * torch.rand_like(x, dtype=torch.float64), torch.float64),
        (lambda x: torch.view_as_complex(x), torch.complex64),
        (lambda x: torch.fft.fft(x) * x, torch.complex64),
        (lambda x: 1j * x, torch.complex64),
        (lambda x: torch.exp(x - 2j), torch.complex64),
    ],
)
def test_other_dtypes_take_the_values_out(
    leave: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = random(4, 2)
    assert leave(x).dtype == dtype
    assert torch.equal(leave(x), leave(x.to_float()))
    assert isinstance(x.float(), LNSTensor)
    assert isinstance(x.to(random(1)), LNSTensor)


SPARSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "spmm": torch.spmm,
    "sparse.mm": torch.sparse.mm,
    "matmul": lambda a, x: a @ x,
    "vector": lambda a, x: a @ x[:, 0],
    "reversed": lambda a, x: x.t() @ a.t(),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_products_with_sparse_matrices_are_those_with_dense_ones(
    name: str, layout: torch.layout
) -> None:
    """A row has few enough terms for one block of the contract's sum."""
    matrix = torch.randn(5, 20).where(torch.rand(5, 20) > 0.6, 0.0)
    x, y = random(20, 4).requires_grad_(), random(20, 4).requires_grad_()
    found = SPARSE[name](matrix.to_sparse(layout=layout), x)
    dense = {"vector": "vector", "reversed": "reversed"}.get(name, "matmul")
    expected = SPARSE[dense](matrix, y)
    assert torch.equal(found.codes, expected.codes)  # type: ignore[attr-defined]
    for result in (found, expected):
        (result * result).sum().backward()
    assert torch.equal(x.grad.codes, y.grad.codes)  # type: ignore[union-attr]


def test_the_entries_of_a_sparse_matrix_learn() -> None:
    at, values = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.randn(3, requires_grad=True)
    x = random(3, 4)
    matrix = torch.sparse_coo_tensor(at, values, (2, 3), check_invariants=True)
    (matrix @ x).sum().backward()
    expected = x.to_float().sum(1)[at[1]]
    assert values.grad is not None
    torch.testing.assert_close(values.grad, expected, rtol=0.02, atol=0.02)


def test_a_sparse_matrix_of_lns_values_is_one_of_float32() -> None:
    at, x = torch.tensor([[0, 1, 1], [2, 0, 2]]), random(3, 4)
    logits, dense = random(3).requires_grad_(), random(2, 3).requires_grad_()
    weights = logits.sigmoid()
    for learned, matrix in (
        (logits, torch.sparse_coo_tensor(at, weights, (2, 3), check_invariants=True)),
        (dense, dense.to_sparse()),
    ):
        assert matrix.layout is torch.sparse_coo
        assert not isinstance(matrix, LNSTensor)
        (matrix @ x).sum().backward()
        assert isinstance(learned.grad, LNSTensor)
    s = weights.to_float()
    expected = x.to_float().sum(1)[at[1]] * s * (1 - s)
    grad: Any = logits.grad
    torch.testing.assert_close(grad.to_float(), expected, rtol=0.02, atol=0.02)


def test_numbers_and_lists_and_texts() -> None:
    x = random(2, 2)
    values = x.to_float()
    assert x.tolist() == values.tolist()
    assert (x.numpy() == values.numpy()).all()
    assert f"{x[0, 0]:.3f}" == f"{values[0, 0]:.3f}"
    x.requires_grad_()
    x.half().sum().backward()
    assert isinstance(x.grad, LNSTensor)


class Rotary(nn.Module):
    """A module that only has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, 8, 2) / 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, turned by its position times a frequency."""
        angles = torch.outer(torch.arange(1000, 1000 + len(x)), self.frequencies)
        return torch.cat([x[:, :4] * angles.cos(), x[:, 4:] * angles.sin()], -1)


def test_modules_that_own_only_buffers_stay_float32_and_the_summary_counts() -> None:
    model = convert_(nn.Sequential(nn.Linear(8, 8), Rotary(), nn.Linear(8, 1)), lns16, "everywhere")
    frequencies = model[1].frequencies
    assert type(frequencies) is Tensor
    assert torch.equal(frequencies, 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    promotion.encoded_by.clear()
    model(torch.randn(5, 8)).sum().backward()
    assert promotion.encoded_by["mul"] >= 2
    counted = f"mul {promotion.encoded_by['mul']}"
    assert summary(model).splitlines()[-1].startswith("float tensors encoded to combine them")
    assert counted in summary(model).splitlines()[-1]


@pytest.mark.parametrize("name", ["clip", "average", "loader"])
def test_tools_around_a_network(name: str) -> None:
    model = convert_(nn.Linear(4, 3), lns16, "everywhere")
    model(torch.randn(5, 4)).sum().backward()
    parameters = list(model.parameters())
    if name == "clip":
        for foreach in (True, False):
            nn.utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)
        norm = torch.linalg.vector_norm(
            torch.cat([p.grad.to_float().flatten() for p in parameters])
        )
        assert norm.item() == pytest.approx(0.1, rel=0.01)
        nn.utils.clip_grad_value_(parameters, 0.01)
        assert max(p.grad.to_float().abs().max() for p in parameters) <= 0.0101
    elif name == "average":
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optim.SGD(parameters, lr=0.1).step()
        average.update_parameters(model)
        average.update_parameters(model)
        assert isinstance(average.module.weight, LNSTensor)
    else:
        data = torch.utils.data.TensorDataset(random(8, 4))
        (batch,) = next(iter(torch.utils.data.DataLoader(data, batch_size=4)))
        assert isinstance(batch, LNSTensor)
        assert isinstance(model(batch), LNSTensor)


class Ones(torch.autograd.Function):
    """A function of another project, whose gradient is a float tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ones(grad.shape)


def hooked(y: Tensor) -> None:
    y = y * 1
    y.register_hook(lambda grad: torch.ones(grad.shape))
    y.sum().backward()


FLOAT_GRADIENTS: dict[str, Callable[[Tensor], None]] = {
    "backward": lambda y: y.backward(torch.ones(y.shape)),
    "torch.autograd.backward": lambda y: torch.autograd.backward([y], [torch.ones(y.shape)]),
    "function": lambda y: Ones.apply(y).sum().backward(),  # type: ignore[no-untyped-call]
    "hook": hooked,
}


@pytest.mark.parametrize("way", FLOAT_GRADIENTS)
@pytest.mark.parametrize("layer", ["linear", "layer_norm", "batch_norm", "embedding"])
def test_float_gradients_are_encoded(layer: str, way: str) -> None:
    torch.manual_seed(0)
    made: nn.Module = {
        "linear": lambda: nn.Linear(4, 4), "layer_norm": lambda: nn.LayerNorm(4),
        "batch_norm": lambda: nn.BatchNorm1d(4), "embedding": lambda: nn.Embedding(9, 4),
    }[layer]()  # fmt: skip
    convert_(made, "lns16", "everywhere")
    x = torch.arange(6) if layer == "embedding" else torch.randn(6, 4)
    made(x).sum().backward()
    expected = [in_float32(p.grad) for p in made.parameters() if p.grad is not None]
    made.zero_grad()
    FLOAT_GRADIENTS[way](made(x))
    found = [in_float32(p.grad) for p in made.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    optim.Adam(made.parameters(), lr=0.1).step()


def test_shapes_of_lns_tensors_encode_nothing() -> None:
    x, like = torch.randn(2, 6, requires_grad=True), random(3, 4)
    assert type(x.view_as(like)) is Tensor
    with torch.inference_mode():
        assert type(torch.randn(2, 6).view_as(like)) is Tensor
        assert type(torch.randn(1, 4).expand_as(like)) is Tensor


def test_batched_gradients_are_those_one_by_one() -> None:
    net = convert_(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "lns16", "everywhere")
    x = torch.randn(2, 3, requires_grad=True)
    y, seeds = net(x), torch.eye(8).reshape(8, 2, 4)
    (found,) = torch.autograd.grad(y, x, seeds, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, x, seed, retain_graph=True)[0] for seed in seeds]
    assert torch.equal(found, torch.stack(single))


def test_transforms_of_torch_func_are_refused() -> None:
    net = convert_(nn.Linear(3, 4), "lns16", "everywhere")
    for transform in (torch.func.jacrev, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"torch\.func.*torch.autograd.grad.*matmul"):
            transform(net)(torch.randn(2, 3))


def with_a_tangent(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


FORWARD: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "hessian": lambda function, x: torch.func.hessian(function)(x),
    "forward_ad": with_a_tangent,
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused_with_what_works(name: str) -> None:
    net = convert_(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "lns16", "everywhere")
    x, y = torch.randn(3), LNSTensor.from_float(torch.randn(3), "lns16")
    for function, given in (
        (lambda x: net(x).sum(), x),
        (lambda x: (1 / (y + x)).sum(), x),
        (lambda y: (1 / y).sum(), y),
    ):
        with pytest.raises(NotImplementedError, match=rf"{name}.*torch\.autograd\.functional"):
            FORWARD[name](function, given)
        for works in (functional.jacobian, functional.hessian):
            assert works(function, given).shape[0] == 3
        assert functional.jvp(function, given, given)[1].shape == ()


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused_of_products_too(name: str) -> None:
    for layer, shape in ((nn.Linear(3, 2), (4, 3)), (nn.ConvTranspose1d(3, 2, 2), (4, 3, 5))):
        net, x = convert_(layer, "lns16", "matmul"), torch.randn(shape)
        with pytest.raises(NotImplementedError, match=rf"{name}.*torch\.autograd\.functional"):
            FORWARD[name](lambda x, net=net: net(x).sum(), x)
        assert torch.func.jacrev(lambda x, net=net: net(x).sum())(x).shape == shape
        with forward_ad.dual_level():
            assert net(x).shape[0] == 4


def test_forward_mode_elsewhere_leaves_lns_alone() -> None:
    y = LNSTensor.from_float(torch.ones(3), "lns16")
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(3), torch.ones(3))
        made = LNSTensor.from_float(torch.ones(3), "lns16") + torch.tanh(y)
    assert torch.equal(made, 1 + torch.tanh(y))


def test_gradients_of_another_format_are_converted() -> None:
    net = convert_(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), lns12, "everywhere")
    x, found = torch.randn(2, 3, requires_grad=True), []
    for hooked in (False, True):
        y = net(x)
        if hooked:
            y.register_hook(lambda grad: LNSTensor.from_float(grad.to_float(), lns16))
        found.append(torch.autograd.grad(y.to_float().square().sum(), x)[0])
    assert torch.equal(*found)


def test_batches_of_gradients_are_as_many_of_each_or_none() -> None:
    net = convert_(nn.Linear(3, 4), "lns16", "everywhere")
    x = torch.randn(2, 3, requires_grad=True)
    y = net(x)
    with pytest.raises(ValueError, match=r"of \[2, 3\] gradients: pass the same number"):
        torch.autograd.grad(
            (y, y * 2), x, (torch.ones(2, 2, 4), torch.ones(3, 2, 4)), is_grads_batched=True
        )
    (none,) = torch.autograd.grad(y, x, torch.ones(0, 2, 4), is_grads_batched=True)
    assert none.shape == (0, 2, 3)
    torch.autograd.grad(y, x, torch.ones(2, 2, 4), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, x, torch.ones(2, 4))


def test_from_float_is_traced() -> None:
    def double(x: Tensor) -> Tensor:
        return LNSTensor.from_float(x, "lns16").to_float() * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
