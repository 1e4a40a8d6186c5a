"""Ways to write a product: in scope matmul each equals a linear layer bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import lns_ops
from tests.lns_ops.nn.products import Product

b = torch.arange(3.0)
WAYS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "linear": (F.linear, 0),
    "@": (lambda x, w: x @ w.t(), 0),
    "reflected": (lambda x, w: (w @ x.mT).mT, 0),
    "matmul": (lambda x, w: torch.matmul(x, w.T), 0),
    "method": (lambda x, w: x.matmul(other=w.mT), 0),
    "linalg": (lambda x, w: torch.linalg.matmul(x, w.t()), 0),
    "mm": (lambda x, w: torch.mm(x, mat2=w.t()), 0),
    "bmm": (lambda x, w: x[None].bmm(w.t()[None])[0], 0),
    "broadcast": (lambda x, w: (x[None, None] @ w.t().expand(2, 1, 5, 3))[1, 0], 0),
    "addmm": (lambda x, w: torch.addmm(b, x, w.t()), 1),
    "scaled addmm": (lambda x, w: b.addmm(mat1=x, mat2=w.t(), beta=2, alpha=0.5), 1),
    "unread": (lambda x, w: torch.addmm(b / 0, x, w.t(), beta=0), 0),
    "in place": (lambda x, w: x.new_ones(4, 3).addmm_(x, w.t()), 1),
    "baddbmm": (lambda x, w: torch.baddbmm(b, x[None], w.t()[None])[0], 1),
    "addbmm": (lambda x, w: torch.addbmm(b, x[:, None].mT.mT.transpose(0, 1), w.t()[None]), 1),
    "mv": (lambda x, w: torch.stack([torch.mv(w, row) for row in x]), 0),
    "addmv": (lambda x, w: torch.stack([torch.addmv(b, w, row) for row in x]), 1),
    "dot": (lambda x, w: torch.stack([torch.stack([w[i].dot(r) for i in range(3)]) for r in x]), 0),
    "vectors": (lambda x, w: torch.stack([row @ w.t() for row in x]), 0),
    "inner": (torch.inner, 0),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1], [1])), 0),
    "tensordot by number": (lambda x, w: torch.tensordot(x, w.t(), 1), 0),
    "einsum": (lambda x, w: torch.einsum("bi,oi->bo", x, w), 0),
    "einsum by sublists": (lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]), 0),
    "einsum of a list": (lambda x, w: torch.einsum("...i, o i -> ... o", [x, w]), 0),
    "einsum implicit": (lambda x, w: torch.einsum("ij,kj", x, w), 0),
    "grouped": (lambda x, w: F.grouped_mm(x, w.t()[None], offs=torch.tensor([4]).int()), 0),
    "masked": (lambda x, w: x @ torch.where(w > 9, torch.zeros(3, 5), w).t(), 0),
    "of rows": (lambda x, w: torch.cat([x @ row[:, None] for row in w.unbind()], 1), 0),
}


@pytest.mark.parametrize("sums", ["contract", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_a_product_has_the_bits_of_a_linear_layer(way: str, sums: str) -> None:
    torch.manual_seed(1)
    function, added = WAYS[way]
    if added and way not in ("addmm", "addmv", "baddbmm", "addbmm"):
        expected_of: Callable[[Tensor], Tensor] = {
            "scaled addmm": lambda y: 2 * b + 0.5 * y,
            "in place": lambda y: 1 + y,
        }[way]
    else:
        expected_of = (lambda y: b + y) if added else (lambda y: y)
    layer = nn.Linear(5, 3, bias=False)
    model = Product(layer.weight.detach(), function)
    lns_ops.convert_(layer, "lns12"), lns_ops.convert_(model, "lns12")
    x = torch.randn(4, 5)
    with lns_ops.matmul_accumulation(sums):
        xs = [x.clone().requires_grad_() for _ in range(2)]
        expected, got = expected_of(layer(xs[0])), model(xs[1])
        assert torch.equal(got, expected)
        seed = torch.randn(4, 3)
        expected.backward(seed)
        got.backward(seed)
    one_sum = way not in ("mv", "addmv", "dot", "vectors", "of rows", "broadcast")
    for a, c in ((xs[1].grad, xs[0].grad), (model.w.grad, layer.weight.grad)):
        assert a is not None
        assert c is not None
        assert torch.equal(a, c) if one_sum else (a - c).norm() <= 0.05 * c.norm()


EQUATIONS = {
    "batch": ("bni,bio->bno", (2, 3, 4), (2, 4, 5)),
    "batch last": ("nib,iob->bno", (3, 4, 2), (4, 5, 2)),
    "two sums": ("bij,oij->bo", (2, 3, 4), (5, 3, 4)),
    "diagonal": ("bii,io->bo", (2, 3, 3), (3, 5)),
    "summed alone": ("bik,io->bo", (2, 3, 4), (3, 5)),
    "ellipsis": ("...i,io", (2, 3, 4), (4, 5)),
    "ellipses": ("...i,...io->...o", (2, 1, 4), (3, 4, 5)),
    "size one": ("bi,io->bo", (2, 1), (4, 5)),
    "no sum": ("bi,i->bi", (2, 3), (3,)),
    "outer": ("b,o->ob", (2,), (3,)),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_of_einsum(name: str) -> None:
    equation, of_x, of_w = EQUATIONS[name]
    torch.manual_seed(2)
    x, w = torch.randn(of_x), torch.randn(of_w)
    model = lns_ops.convert_(Product(w, lambda x, w: torch.einsum(equation, x, w)), "lns16")
    got, expected = model(x), torch.einsum(equation, x, w)
    assert got.shape == expected.shape
    assert (got - expected).norm() <= 0.01 * expected.norm()
    assert torch.equal(got, expected) == (name in ("no sum", "outer"))


def test_three_factors_of_which_two_are_activations() -> None:
    torch.manual_seed(2)
    x, y, w = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 5)
    model = lns_ops.convert_(
        Product(w, lambda x, w: torch.einsum("bi,ij,jo->bo", x, y, w)), "lns16"
    )
    layer = lns_ops.convert_(Product(w, torch.matmul), "lns16")
    assert torch.equal(model(x), layer(x @ y))  # activations in float32, then LNS


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.mm(x, w),
        lambda x, w: torch.bmm(x, w.t()),
        lambda x, w: torch.einsum("ab,cd,e->ad", x, w),
        lambda x, w: torch.einsum("abc,cd->ad", x, w),
    ],
)
def test_products_that_do_not_fit_raise(function: Callable[..., Tensor]) -> None:
    model = lns_ops.convert_(Product(torch.randn(3, 5), function), "lns12")
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(4, 5))
