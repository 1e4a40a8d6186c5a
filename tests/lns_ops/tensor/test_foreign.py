"""Calls in networks from other projects: weight normalization, groups of products, lists of
tensors, initializers, clipping; and networks of the zoo that need one rule each."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import LNSTensor, convert_, lns8, lns16, revert_, summary
from lns_ops.tensor.decoded import is_decoded
from tests.lns_ops.lns_formats import half_ulp

SCRIPTS = Path(__file__).parents[3] / "scripts"


def random(*shape: int, seed: int = 0) -> LNSTensor:
    generator = torch.Generator().manual_seed(seed)
    return LNSTensor.from_float(torch.randn(shape, generator=generator), lns16)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_weight_normalization_is_a_product_a_norm_and_a_quotient(dim: int) -> None:
    v, g = random(3, 4).requires_grad_(), random(3, 1, seed=1) if dim == 0 else random(1, 4, seed=1)
    g = (random(1, seed=1)[0] if dim == -1 else g).detach().requires_grad_()
    w = torch._weight_norm(v, g, dim)  # torch.nn.utils calls this
    others = [0, 1] if dim == -1 else [1 - dim]
    a, b = (x.detach().requires_grad_() for x in (v, g))
    expected = a * (b / torch.linalg.vector_norm(a, dim=others, keepdim=dim != -1))
    assert torch.equal(w.codes, expected.codes)
    seed = random(3, 4, seed=2)
    w.backward(seed)
    expected.backward(seed)
    assert torch.equal(v.grad.codes, a.grad.codes)
    assert torch.equal(g.grad.codes, b.grad.codes)
    values = v.detach().to_float().double()
    exact = values * g.detach().to_float().double() / values.norm(dim=others, keepdim=dim != -1)
    assert ((w.detach().to_float() - exact).abs() <= 3 * half_ulp(lns16) * exact.abs()).all()


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="new in torch 2.13")
def test_linear_cross_entropy_is_an_lns_product_and_a_loss() -> None:
    x, w, bias = random(5, 4), random(3, 2, 4, seed=1), random(3, 2, seed=2)
    target = torch.tensor([[0, 1], [2, 0], [1, 1], [-100, 2], [0, 0]])
    found = []
    for fused in (True, False):
        leaves = [v.detach().requires_grad_() for v in (x, w, bias)]
        a, b, c = leaves
        if fused:
            loss = F.linear_cross_entropy(a, b, target, linear_bias=c, label_smoothing=0.1)
        else:
            scores = F.linear(a, b.reshape(6, 4), c.reshape(6)).reshape(5, 3, 2)
            loss = F.cross_entropy(scores, target, label_smoothing=0.1)
        loss.backward()
        found.append([loss.detach(), *(leaf.grad.codes for leaf in leaves)])
    assert type(found[0][0]) is Tensor
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_linear_cross_entropy_as_a_layer_trains() -> None:
    if not hasattr(nn, "LinearCrossEntropyLoss"):
        pytest.skip("new in torch 2.13")
    torch.manual_seed(0)
    layer = nn.LinearCrossEntropyLoss(4, 3)
    x, target = torch.randn(5, 4), torch.arange(5) % 3
    exact = layer(x, target)
    loss = convert_(layer, lns16, scope="everywhere")(x, target)
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    assert all(isinstance(p.grad, LNSTensor) for p in layer.parameters())


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="new in torch 2.13")
def test_linear_cross_entropy_as_a_layer_has_its_product_in_lns_in_scope_matmul() -> None:
    torch.manual_seed(0)
    fused = convert_(nn.LinearCrossEntropyLoss(4, 3, bias=True), lns8, scope="matmul")
    layer = convert_(nn.Linear(4, 3), lns8, scope="matmul")
    layer.load_state_dict(fused.linear.state_dict())
    x, target = torch.randn(5, 4), torch.arange(5) % 3
    losses = [fused(x, target), F.cross_entropy(layer(x), target)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for ours, other in zip(fused.parameters(), layer.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)
    assert "stays" not in summary(fused)
    back = revert_(copy.deepcopy(fused))
    assert type(back) is nn.LinearCrossEntropyLoss
    assert not torch.equal(back(x, target), losses[0])


def test_comparisons_in_place_write_ones_and_zeros() -> None:
    x, other = random(4, 5), random(4, 5, seed=1)
    for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_"):
        for y in (0.0, other, x):
            found, values = x.clone(), x.to_float()
            assert getattr(found, name)(y) is found
            getattr(values, name)(y.to_float() if isinstance(y, LNSTensor) else y)
            assert torch.equal(found.to_float(), values)
    positive = x.relu()
    assert torch.equal(positive.clone().logical_not_().to_float(), (x <= 0).float())
    kept = torch.tensor([True, False, True, False, True])
    assert torch.equal(positive.clone().logical_and_(kept).to_float(), ((x > 0) & kept).float())


def test_weight_normalization_of_a_vector_takes_each_entry_alone() -> None:
    """As torch's with dimension 0: the direction of a single number is its sign."""
    v, g = random(5).requires_grad_(), random(5, seed=1)
    assert torch.equal(torch.norm_except_dim(v, 2, 0).codes, v.abs().codes)
    w = torch._weight_norm(v, g, 0)
    assert torch.equal(w.codes, (g * v.sign()).codes)
    w.backward(random(5, seed=2))
    assert not v.grad.to_float().any()


def test_integers_meet_lns_limits_and_comparisons() -> None:
    limits, numbers = random(6, seed=4) * 2, torch.arange(6)
    values = limits.to_float()
    encoded = LNSTensor.from_float(numbers, lns16).to_float()
    assert torch.equal(numbers.clamp(max=limits).to_float(), encoded.clamp(max=values))
    assert torch.equal(torch.clamp_min(numbers, limits).to_float(), encoded.clamp_min(values))
    assert torch.equal(numbers.clone().gt_(limits), (encoded > values).long())


def test_numbers_powers_and_random_slopes_in_place() -> None:
    x, exponents = random(4, 5).abs() + 0.5, random(4, 5, seed=1)
    powers = x.clone().pow_(exponents)
    assert torch.equal(powers.codes, x.pow(exponents).codes)
    assert torch.equal(x.clone().copy_(2).to_float(), torch.full((4, 5), 2.0))
    layer = nn.RReLU(inplace=True)
    torch.manual_seed(0)
    found = layer(exponents.clone())
    torch.manual_seed(0)
    assert torch.equal(found.codes, nn.RReLU()(exponents).codes)
    assert not torch.equal(found.codes, exponents.codes)


def test_spaced_numbers_between_lns_ones() -> None:
    first, last = random(2, seed=3).abs()
    a, b = first.to_float(), last.to_float()
    for spaced in (torch.linspace, torch.logspace):
        expected = LNSTensor.from_float(spaced(a, b, 5), lns16)
        assert torch.equal(spaced(first, last, 5).codes, expected.codes)


def test_shares_of_a_dirichlet_distribution_add_up_to_one() -> None:
    torch.manual_seed(0)
    concentration = (random(64, 7).abs() + 0.5).detach().requires_grad_()
    distribution = torch.distributions.Dirichlet(concentration)
    torch.manual_seed(1)
    shares = distribution.rsample()
    torch.manual_seed(1)
    exact = torch.distributions.Dirichlet(concentration.detach().to_float()).rsample()
    assert torch.equal(shares.sum(-1).to_float(), torch.ones(64))
    assert ((shares.to_float() - exact).abs() <= 4 * half_ulp(lns16) * exact).all()
    distribution.log_prob(shares).sum().backward()  # it checks that they do
    assert concentration.grad is not None


def test_one_dimension_of_margins_is_one_example() -> None:
    scores = random(5).requires_grad_()
    loss = F.multi_margin_loss(scores, torch.tensor(1))
    assert torch.equal(loss, F.multi_margin_loss(scores.to_float(), torch.tensor(1)))


def test_groups_of_rows_are_products_each() -> None:
    x, w = random(7, 4).requires_grad_(), random(3, 4, 2, seed=1).requires_grad_()
    y = F.grouped_mm(x, w, offs=torch.tensor([2, 2, 5], dtype=torch.int32))
    a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
    parts = [a[:2] @ b[0], a[2:5] @ b[2]]
    assert torch.equal(y[:5].codes, torch.cat(parts).codes)
    assert not y[5:].codes.any()
    y.backward(seed := random(7, 2, seed=2))
    torch.cat(parts).backward(seed[:5])
    assert torch.equal(x.grad.codes, a.grad.codes)
    assert torch.equal(w.grad.codes, b.grad.codes)
    assert not w.grad[1].codes.any()
    batches = F.grouped_mm(random(3, 5, 4), w)
    assert torch.equal(batches.codes, (random(3, 5, 4) @ w).codes)


LISTS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: torch._foreach_add(x, y, alpha=2.0),
    "add in place": lambda x, y: torch._foreach_add_(x, 1.5),
    "lerp in place": lambda x, y: torch._foreach_lerp_(x, y, 0.25),
    "mul by each": lambda x, y: torch._foreach_mul(x, [2.0, 0.5]),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, y, [v.abs() + 1 for v in y], 0.1),
    "sqrt of squares": lambda x, y: torch._foreach_sqrt(torch._foreach_mul(x, x)),
    "clamp in place": lambda x, y: torch._foreach_clamp_max_(x, 0.5),
    "copy": lambda x, y: torch._foreach_copy_(x, y),
}
SINGLY: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "add": lambda x, y, i: torch.add(x, y, alpha=2.0),
    "add in place": lambda x, y, i: x + 1.5,
    "lerp in place": lambda x, y, i: torch.lerp(x, y, 0.25),
    "mul by each": lambda x, y, i: x * (2.0, 0.5)[i],
    "addcdiv": lambda x, y, i: torch.addcdiv(x, y, y.abs() + 1, value=0.1),
    "sqrt of squares": lambda x, y, i: (x * x).sqrt(),
    "clamp in place": lambda x, y, i: x.clamp_max(0.5),
    "copy": lambda x, y, i: y,
}


@pytest.mark.parametrize("name", LISTS)
def test_operations_on_lists_are_those_on_each(name: str) -> None:
    x, y = [random(3), random(2, 2)], [random(3, seed=1), random(2, 2, seed=1)]
    expected = [SINGLY[name](a.clone(), b, i) for i, (a, b) in enumerate(zip(x, y, strict=True))]
    got = LISTS[name](x, y)
    for a, b in zip(got if got is not None else x, expected, strict=True):
        assert torch.equal(a.codes, b.codes)


@pytest.mark.parametrize(
    "written",
    [
        lambda x, y: torch._foreach_mul_([x], 2.0),
        lambda x, y: torch._foreach_add_([y.float(), x], [x, y]),
        lambda x, y: torch._foreach_copy_([x], [y]),
        lambda x, y: torch._foreach_zero_([x]),
        lambda x, y: torch._foreach_addcmul_([x], [y], [y], 0.5),
        lambda x, y: torch._foreach_lerp_([x], [y], 0.5),
        lambda x, y: nn.utils.clip_grads_with_norm_([with_gradient(y, x)], 0.1, torch.tensor(1.0)),
    ],
)
@pytest.mark.parametrize("made", [lambda n: random(3, seed=n), lambda n: torch.randn(3)])
def test_operations_on_lists_in_place_are_changes_to_autograd(written: Any, made: Any) -> None:
    """A product is not differentiated with another value of a factor, in LNS as in float32."""
    x, factor = made(0).requires_grad_(), made(1).detach()
    (x * factor).sum().backward()
    late = (x * factor).sum()
    with torch.no_grad():
        written(factor, made(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def with_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    parameter = nn.Parameter(x)
    parameter.grad = gradient
    return parameter


def test_images_take_the_places_of_words() -> None:
    """As in networks for words and images: ``masked_scatter``, whose gradient is a selection."""
    words, image = random(2, 3, 4).requires_grad_(), random(3, 4, seed=1).requires_grad_()
    here = torch.zeros(2, 3, 1, dtype=torch.bool)
    here[0] = True
    mixed = words.masked_scatter(here.expand(2, 3, 4), image)
    assert torch.equal(mixed[0].codes, image.codes)
    mixed.backward(seed := random(2, 3, 4, seed=2))
    assert torch.equal(image.grad.codes, seed[0].codes)
    assert torch.equal(words.grad.codes, seed.masked_fill(here, 0).codes)


def test_elements_taken_by_flat_positions() -> None:
    x = random(2, 3).requires_grad_()
    taken = x.take(torch.tensor([0, 4, 4, -1]))
    assert torch.equal(taken.codes, x.codes.reshape(-1)[[0, 4, 4, 5]])
    taken.sum().backward()
    assert x.grad.tolist() == [[1, 0, 0], [0, 2, 1]]
    put = x.detach().put(torch.tensor([1, -1]), random(2, seed=1))
    assert torch.equal(put.codes.reshape(-1)[[1, 5]], random(2, seed=1).codes)


def test_blocks_on_a_diagonal_and_signs() -> None:
    blocks = random(2, 2), random(1, 3, seed=1)
    wanted = torch.block_diag(*(x.codes for x in blocks))
    assert torch.equal(torch.block_diag(*blocks).codes, wanted)
    x = random(5).requires_grad_()
    (x * x.sgn()).sum().backward()
    assert torch.equal(x.grad.codes, x.detach().sign().codes)


@pytest.mark.parametrize("name", ["nms", "roi_align", "deform_conv2d"])
def test_operators_of_torchvision_are_computed_in_float32(name: str) -> None:
    """torchvision's operators, or operators with their names if it is not installed."""
    assert is_decoded(name)
    with torch.library._scoped_library("seen", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
        library.impl(name, lambda x, y: x.to(torch.float64).sin().float() + y, "CPU")
        x, y = random(3), random(3, seed=1)
        got = getattr(torch.ops.seen, name)(x, y)
    wanted = x.to_float().double().sin().float() + y.to_float()
    assert torch.equal(got.codes, LNSTensor.from_float(wanted, lns16).codes)


def test_orthogonal_initialization() -> None:
    weight = nn.Parameter(random(4, 6))
    nn.init.orthogonal_(weight)
    values = weight.detach().to_float()
    assert (values @ values.t() - torch.eye(4)).abs().max() <= 8 * half_ulp(lns16)


def test_embeddings_with_a_largest_norm() -> None:
    layer = convert_(nn.Embedding(5, 4, max_norm=0.5), lns16, "everywhere")
    rows = layer(torch.tensor([0, 3])).to_float().detach()
    assert (rows.norm(dim=-1) <= 0.5 * (1 + half_ulp(lns16))).all()
    assert isinstance(layer.weight, LNSTensor)


def test_random_tensors_like_others_are_those_of_float32_encoded() -> None:
    x = random(3, 4)
    for draw in (torch.randn_like, torch.rand_like, lambda v: torch.bernoulli(torch.sigmoid(v))):
        torch.manual_seed(3)
        got = draw(x)
        torch.manual_seed(3)
        expected = draw(x.to_float())
        assert torch.equal(got.codes, LNSTensor.from_float(expected, lns16).codes)
    torch.manual_seed(3)
    drawn = torch.multinomial(x.abs(), 2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.multinomial(x.abs().to_float(), 2))
    torch.manual_seed(3)
    slopes = F.rrelu(x, training=True)
    torch.manual_seed(3)
    expected = F.rrelu(x.to_float(), training=True)
    assert torch.equal(slopes.codes, LNSTensor.from_float(expected, lns16).codes)
    assert torch.allclose(x, x.to_float())
    assert not torch.allclose(x, x + 1)


def test_fake_quantization_is_that_of_the_values() -> None:
    x = random(3, 4).requires_grad_()
    y = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -8, 7)
    values = x.detach().to_float().requires_grad_()
    expected = torch.fake_quantize_per_tensor_affine(values, 0.05, 0, -8, 7)
    assert torch.equal(y.codes, LNSTensor.from_float(expected.detach(), lns16).codes)
    y.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad.to_float(), values.grad)


QUICK = {"siren", "graph-convolution", "deep-sets", "rotary-llama", "mixture-of-experts-top-k"}
NAMES = sorted(
    QUICK | {"spectral-norm", "spatial-transformer", "fourier-operator", "physics-informed"}
)


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in NAMES]
)
def test_networks_of_the_zoo_train(name: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    zoo = importlib.import_module("model_zoo")
    (network,) = [n for n in zoo.NETWORKS if n.name == name]
    copied = name != "physics-informed"  # inference mode has no gradients
    found = zoo.attempt(network, scope, copied)
    in_part = scope == "matmul" and name == "spectral-norm"  # its power iterations are float32
    assert found["trains"] == ("in part" if in_part else "yes")
    assert found["copies"] == ("yes" if copied else "-")


def test_single_networks_of_the_zoo_leave_a_page_of_all_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    zoo = importlib.import_module("model_zoo")
    rows, page = tmp_path / "rows.json", tmp_path / "models.md"
    page.write_text("all networks")
    monkeypatch.setattr(zoo, "PAGE", page)
    monkeypatch.setattr(zoo, "LIBRARIES", ())
    found = {"trains": "yes", "copies": "yes", "note": "", "off": 0.01, "bfloat16": 0.01}
    monkeypatch.setattr(zoo, "run", lambda network, limit: dict.fromkeys(zoo.SCOPES, found))
    monkeypatch.setattr("sys.argv", ["model_zoo.py", "siren", "--results", str(rows)])
    zoo.main()
    assert page.read_text() == "all networks"
    assert "models.md is left as it is" in capsys.readouterr().out
    assert list(json.loads(rows.read_text())) == ["siren"]
    every = {n.name: dict.fromkeys(zoo.SCOPES, found) for n in zoo.NETWORKS}
    rows.write_text(json.dumps(every))
    zoo.main()
    assert all(f"| {n.name} |" in page.read_text() for n in zoo.NETWORKS)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("addmm", [(3, 5), (3, 4), (4, 5)]),
        ("baddbmm", [(2, 3, 5), (2, 3, 4), (2, 4, 5)]),
        ("addbmm", [(3, 5), (2, 3, 4), (2, 4, 5)]),
        ("addmv", [(3,), (3, 4), (4,)]),
        ("addr", [(3, 4), (3,), (4,)]),
    ],
)
def test_what_a_product_is_added_to_is_not_read_at_beta_0(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
    unwritten = torch.full(shapes[0], float("nan"))
    x, y = random(*shapes[1]).requires_grad_(), random(*shapes[2], seed=1)
    added = getattr(torch, name)(unwritten, x, y, beta=0, alpha=0.5)
    expected = getattr(random(*shapes[0]), name)(x, y, beta=0, alpha=0.5)
    assert torch.equal(added.codes, expected.codes)
    exact = getattr(torch, name)(
        unwritten.double(), *(t.detach().to_float().double() for t in (x, y)), beta=0, alpha=0.5
    )
    assert (added.detach().to_float() - exact).norm() <= 12 * half_ulp(lns16) * exact.norm()
    added.sum().backward()
    assert x.grad is not None
    with pytest.raises(ValueError, match="NaN"):
        getattr(torch, name)(unwritten, x, y, beta=0.5)
