"""Every differentiable operation on long, large and offset inputs, compared with float64.

Small samples near zero do not show sums that stagnate, saturation or cancellation. Inputs are
encoded first, and float64 gets the decoded values, so only the operation itself is measured. Two
formats are used: with two more fraction bits rounding errors fall to a quarter, and faults stay.

A new operation, or one with a fault on long inputs, gets a row in :data:`CASES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lns_ops import LNSFormat, LNSTensor, decode
from tests.lns_ops import operations
from tests.lns_ops.lns_formats import half_ulp

WIDTHS = [LNSFormat(16, 7), LNSFormat(16, 9)]
"""Two formats whose ranges (2^+-128, 2^+-32) are large enough for the cases."""

LONG = 100_000
"""The number of terms of a long sum."""

Maker = Callable[[], Any]
"""Makes an input: a float tensor, which is encoded, or anything else, which is passed on."""


def positive(*shape: int) -> Maker:
    """Values of one sign, whose sums grow with every term."""
    return lambda: torch.rand(shape) + 0.5


def normal(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> Maker:
    return lambda: mean + deviation * torch.randn(shape)


def exactly(value: Any) -> Maker:
    return lambda: value


@dataclass(frozen=True)
class Case:
    """An operation on inputs of one kind.

    Attributes:
        name: the operation's name in tests/lns_ops/operations.py.
        kind: what the inputs are: long, large or offset.
        function: the operation.
        inputs: makers of its inputs.
        half_ulps: how far results and gradients may be from float64's, in half-ulps of their norm.
        of_gradients: the same for gradients, where it differs.
        weight: makes the incoming gradients: of one sign, so that their sums grow, or not.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    inputs: tuple[Maker, ...]
    half_ulps: float = 16
    of_gradients: float = 0
    weight: Callable[..., Maker] = positive

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_gradients", self.of_gradients or self.half_ulps)


def _places(count: int, rows: int) -> Maker:
    """Indices, nine in ten of which are 0."""

    def made() -> Tensor:
        return torch.randint(rows, (count,)) * (torch.rand(count) < 0.1)

    return made


BY_ROW: dict[str, Callable[..., Tensor]] = {
    "index_add": lambda x, i, y: x.index_add(0, i, y),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[:, None].expand(y.shape), y),
    "index_put": lambda x, i, y: x.index_put((i,), y, accumulate=True),
    "put": lambda x, i, y: x.put(i, y[:, 0], accumulate=True),
    "scatter_reduce.sum": lambda x, i, y: x.scatter_reduce(0, i[:, None].expand(y.shape), y, "sum"),
    "scatter_reduce.mean": lambda x, i, y: x.scatter_reduce(
        0, i[:, None].expand(y.shape), y, "mean"
    ),
}
"""Sums of rows by index."""

TAKEN: dict[str, Callable[..., Tensor]] = {
    "nn.functional.embedding": lambda x, i: F.embedding(i, x),
    "nn.functional.embedding_bag": lambda x, i: F.embedding_bag(i[None], x, mode="sum"),
    "nn.functional.embedding_bag.mean": lambda x, i: F.embedding_bag(i[None], x, mode="mean"),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 2)),
    "take": lambda x, i: x.take(i),
    "index_select": lambda x, i: x.index_select(0, i),
    "__getitem__": lambda x, i: x[i],
    "repeat_interleave": lambda x, i: x.repeat_interleave(len(i) // 3, 0),
    "expand": lambda x, i: x[:, None].expand(-1, len(i), -1),
}
"""Select rows by index; their gradients are sums."""

SEGMENTS: dict[str, Callable[..., Tensor]] = {
    "lengths": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([3, len(x) - 5, 2])),
    "offsets": lambda x: torch.segment_reduce(
        x, "mean", offsets=torch.tensor([0, 3, len(x) - 2, len(x)])
    ),
}
"""Sums of neighbours."""

LARGE, OFFSET = normal(1000, deviation=1000.0), normal(1000, mean=100.0)
"""Values with a magnitude of 1,000, and values that mostly consist of their mean."""
_EXPONENTS = normal(1000, mean=10.0), normal(1000, mean=-10.0)


def around(center: float) -> Maker:
    return lambda: center * (1 + 0.3 * torch.rand(1000))


POINTWISE: dict[str, tuple[Callable[..., Tensor], tuple[Maker, ...]]] = {
    "add": (torch.add, (LARGE, OFFSET)),
    "sub": (torch.sub, (OFFSET, OFFSET)),
    "rsub": (torch.rsub, (OFFSET, OFFSET)),
    "mul": (torch.mul, (LARGE, OFFSET)),
    "div.no_rounding_mode": (torch.div, (LARGE, OFFSET)),
    "__rdiv__": (lambda x: 7 / x, (OFFSET,)),
    "reciprocal": (torch.reciprocal, (OFFSET,)),
    "square": (torch.square, (LARGE,)),
    "sqrt": (torch.sqrt, (around(1000.0),)),
    "rsqrt": (torch.rsqrt, (around(1000.0),)),
    "pow": (lambda x: x**2.5, (OFFSET,)),
    "pow.of_each": (torch.pow, (around(3.0), around(9.0))),
    "__rpow__": (lambda x: 2.0**x, (_EXPONENTS[0],)),
    "exp": (torch.exp, (_EXPONENTS[0],)),
    "exp.negative": (torch.exp, (_EXPONENTS[1],)),
    "exp2": (torch.exp2, (_EXPONENTS[0],)),
    "expm1": (torch.expm1, (_EXPONENTS[0],)),
    "expm1.negative": (torch.expm1, (_EXPONENTS[1],)),
    "log": (torch.log, (around(1000.0),)),
    "log2": (torch.log2, (around(1000.0),)),
    "log10": (torch.log10, (around(1000.0),)),
    "log1p": (torch.log1p, (around(1000.0),)),
    "log1p.near_-1": (torch.log1p, (lambda: -1 + 0.1 * torch.rand(1000).clamp(min=0.1),)),
    "sigmoid": (torch.sigmoid, (_EXPONENTS[0],)),
    "sigmoid.negative": (torch.sigmoid, (_EXPONENTS[1],)),
    "sigmoid.in_place": (lambda x: (x * 1).sigmoid_(), (_EXPONENTS[0],)),
    "tanh": (torch.tanh, (_EXPONENTS[0],)),
    "tanh.in_place": (lambda x: (x * 1).tanh_(), (_EXPONENTS[0],)),
    "nn.functional.silu": (F.silu, (_EXPONENTS[1],)),
    "nn.functional.silu.in_place": (lambda x: F.silu(x * 1, inplace=True), (_EXPONENTS[1],)),
    "nn.functional.gelu": (F.gelu, (lambda: -2 - torch.rand(1000),)),
    "nn.functional.mish": (F.mish, (_EXPONENTS[1],)),
    "nn.functional.elu": (F.elu, (_EXPONENTS[1],)),
    "nn.functional.elu.in_place": (lambda x: F.elu(x * 1, inplace=True), (_EXPONENTS[1],)),
    "nn.functional.celu": (F.celu, (_EXPONENTS[1],)),
    "nn.functional.celu.in_place": (lambda x: F.celu(x * 1, inplace=True), (_EXPONENTS[1],)),
    "nn.functional.selu": (F.selu, (_EXPONENTS[1],)),
    "nn.functional.selu.in_place": (lambda x: F.selu(x * 1, inplace=True), (_EXPONENTS[1],)),
    "nn.functional.softplus": (F.softplus, (_EXPONENTS[1],)),
    "nn.functional.logsigmoid": (F.logsigmoid, (_EXPONENTS[0],)),
    "nn.functional.hardswish": (F.hardswish, (LARGE,)),
    "nn.functional.hardsigmoid": (F.hardsigmoid, (LARGE,)),
    "nn.functional.leaky_relu": (F.leaky_relu, (LARGE,)),
    "nn.functional.prelu": (lambda x: F.prelu(x, x.new_full((1,), 0.25)), (LARGE,)),
    "nn.functional.softshrink": (F.softshrink, (LARGE,)),
    "nn.functional.softsign": (F.softsign, (LARGE,)),
    "nn.functional.tanhshrink": (F.tanhshrink, (LARGE,)),
    "nn.functional.glu": (F.glu, (OFFSET,)),
    "sin": (torch.sin, (normal(1000),)),
    "erf": (torch.erf, (normal(1000, mean=3.0),)),
    "logaddexp": (torch.logaddexp, (OFFSET, OFFSET)),
    "hypot": (torch.hypot, (OFFSET, LARGE)),
    "atan2": (torch.atan2, (OFFSET, LARGE)),
    "lerp": (lambda x, y: x.lerp(y, 0.3), (OFFSET, OFFSET)),
    "addcmul": (torch.addcmul, (LARGE, OFFSET, OFFSET)),
    "addcdiv": (torch.addcdiv, (LARGE, OFFSET, OFFSET)),
}
"""Elementwise functions on large or offset values; results are within some roundings."""

OVER: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm.fro": lambda x: x.norm(),
    "norm.three": lambda x: x.norm(3, -1),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, 1, -1),
    "var": lambda x: x.var(-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std": lambda x: x.std(-1),
    "std_mean": lambda x: torch.std_mean(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp.all": lambda x: torch.logsumexp(x, (0, 1)),
    "nn.functional.layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "nn.functional.group_norm": lambda x: F.group_norm(x[None], len(x)),
    "batch_norm": lambda x: F.batch_norm(x.T, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "nn.functional.normalize": lambda x: F.normalize(x, dim=-1),
    "nn.functional.cosine_similarity": lambda x: F.cosine_similarity(x[:1], x[1:], dim=-1),
    "nn.functional.pairwise_distance": lambda x: F.pairwise_distance(x[:1], x[1:]),
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
}
"""Functions of rows."""

WEIGHED: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "nn.functional.softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
}
"""Functions from rows to rows; the incoming gradients have no mean."""

_ROW, _COLUMN = positive(2, LONG), positive(LONG, 3)
_IMAGES, _SERIES = positive(1, 2, 300, 330), positive(1, 2, LONG // 2)

SUMMED: dict[str, tuple[Callable[..., Any], tuple[Maker, ...]]] = {
    "mm": (torch.mm, (_ROW, _COLUMN)),
    "bmm": (torch.bmm, (positive(1, 2, LONG), positive(1, LONG, 3))),
    "mv": (torch.mv, (_ROW, positive(LONG))),
    "dot": (torch.dot, (positive(LONG), positive(LONG))),
    "vdot": (torch.vdot, (positive(LONG), positive(LONG))),
    "inner": (torch.inner, (_ROW, positive(LONG))),
    "matmul": (torch.matmul, (_ROW, _COLUMN)),
    "__rmatmul__": (lambda x, y: y.__rmatmul__(x), (_ROW, _COLUMN)),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), (_ROW, _COLUMN)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), (_ROW, _COLUMN)),
    "addmm": (torch.addmm, (positive(3), _ROW, _COLUMN)),
    "addmv": (torch.addmv, (positive(2), _ROW, positive(LONG))),
    "addr": (torch.addr, (positive(LONG, 2), positive(LONG), positive(2))),
    "addbmm": (torch.addbmm, (positive(2, 2), positive(3, 2, 9000), positive(3, 9000, 2))),
    "baddbmm": (torch.baddbmm, (positive(3, 2, 2), positive(3, 2, 9000), positive(3, 9000, 2))),
    "linalg.multi_dot": (lambda *x: torch.linalg.multi_dot(x), (_ROW, _COLUMN, positive(3, 2))),
    "linalg.vecdot": (torch.linalg.vecdot, (_ROW, _ROW)),
    "nn.functional.linear": (F.linear, (positive(LONG, 4), positive(2, 4), positive(2))),
    "nn.functional.bilinear": (
        F.bilinear, (positive(LONG, 2), positive(LONG, 2), positive(2, 2, 2), positive(2)),
    ),
    "outer": (torch.outer, (positive(LONG), positive(2))),
    "kron": (torch.kron, (positive(9000), positive(2))),
    "nn.functional.conv1d": (F.conv1d, (_SERIES, positive(2, 2, 3), positive(2))),
    "nn.functional.conv2d": (F.conv2d, (_IMAGES, positive(2, 2, 3, 3), positive(2))),
    "nn.functional.conv3d": (
        F.conv3d, (positive(1, 1, 40, 50, 50), positive(1, 1, 2, 2, 2), positive(1)),
    ),
    "nn.functional.conv_transpose1d": (
        F.conv_transpose1d, (_SERIES, positive(2, 2, 3), positive(2)),
    ),
    "nn.functional.conv_transpose2d": (
        F.conv_transpose2d, (_IMAGES, positive(2, 2, 3, 3), positive(2)),
    ),
    "nn.functional.conv_transpose3d": (
        F.conv_transpose3d, (positive(1, 1, 40, 50, 50), positive(1, 1, 2, 2, 2), positive(1)),
    ),
    "nn.functional.avg_pool1d": (lambda x: F.avg_pool1d(x, 5000), (positive(1, 2, 5000),)),
    "nn.functional.avg_pool2d": (lambda x: F.avg_pool2d(x, 70), (positive(1, 2, 70, 70),)),
    "nn.functional.avg_pool3d": (lambda x: F.avg_pool3d(x, 17), (positive(1, 1, 17, 17, 17),)),
    "nn.functional.adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 1), (_SERIES,)),
    "nn.functional.adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (_IMAGES,)),
    "nn.functional.adaptive_avg_pool3d": (
        lambda x: F.adaptive_avg_pool3d(x, 1), (positive(1, 1, 40, 50, 50),),
    ),
    "nn.functional.interpolate.area": (
        lambda x: F.interpolate(x, size=(1, 2), mode="area"), (_IMAGES,),
    ),
    "nn.functional.interpolate.linear": (
        lambda x: F.interpolate(x, size=LONG, mode="linear"), (positive(1, 1, 3),),
    ),
    "nn.functional.interpolate.bilinear": (
        lambda x: F.interpolate(x, size=(300, 330), mode="bilinear"), (positive(1, 1, 3, 2),),
    ),
    "nn.functional.interpolate.nearest": (
        lambda x: F.interpolate(x, size=(300, 330)), (positive(1, 1, 3, 2),),
    ),
    "nn.functional.unfold": (lambda x: F.unfold(x, 3), (positive(1, 1, 90, 90),)),
    "nn.functional.local_response_norm": (
        lambda x: F.local_response_norm(x, 5), (normal(2, 300, 2, mean=100.0),),
    ),
    "nn.functional.pad.replicate": (
        lambda x: F.pad(x, (9000, 9000), mode="replicate"), (positive(1, 2, 3),),
    ),
    "sum_to_size": (lambda x: x.sum_to_size(1, 3), (_COLUMN,)),
    "broadcast_to": (lambda x: x.broadcast_to(LONG, 3), (positive(3),)),
    "nn.functional.prelu": (F.prelu, (normal(LONG), positive(1))),
    "cumsum": (lambda x: x.cumsum(0), (positive(9000),)),
    "select": (lambda x: torch.stack([x[i % 2] for i in range(500)]), (positive(2, 3),)),
}  # fmt: skip
"""Operations with sums of many terms, in results or gradients, all of the same sign."""

CASES = [
    Case(
        "nn.functional.scaled_dot_product_attention",
        "long",
        F.scaled_dot_product_attention,
        (normal(1, 2, 4), normal(1, 20_000, 4), positive(1, 20_000, 4)),
        32,
    ),
    *(Case(name, "long", function, inputs, 16) for name, (function, inputs) in SUMMED.items()),
    *(
        Case(name, "range", function, inputs, 3, 10)
        for name, (function, inputs) in POINTWISE.items()
    ),
    *(
        Case(name, kind, function, (make,), 24)
        for name, function in OVER.items()
        for kind, make in {
            "long": normal(3, LONG // 3),
            "large": normal(3, 64, deviation=1000.0),
            "offset": normal(3, 64, mean=100.0),
        }.items()
    ),
    *(
        Case(name, kind, function, (make,), 24, weight=normal)
        for name, function in WEIGHED.items()
        for kind, make in {
            "long": normal(3, LONG // 3),
            "large": normal(3, 64, mean=1000.0, deviation=2.0),
            "offset": normal(3, 64, mean=100.0),
        }.items()
    ),
    *(
        Case(name, "long", function, (positive(3, 2), _places(LONG, 3), positive(LONG, 2)))
        for name, function in BY_ROW.items()
    ),
    *(
        Case(name, "long", function, (positive(3, 2), _places(LONG, 3)))
        for name, function in TAKEN.items()
    ),
    *(
        Case(f"_segment_reduce.{kind}", "long", function, (positive(LONG),))
        for kind, function in SEGMENTS.items()
    ),
]


def _values(x: Tensor) -> Tensor:
    x = x.detach()
    return decode(x.codes, x.fmt, torch.float64) if isinstance(x, LNSTensor) else x.double()


def _run(
    case: Case, inputs: list[Any], weights: list[Tensor], create_graph: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and the gradients of all float inputs."""
    leaves = [x.requires_grad_() for x in inputs if _is_real(x)]
    results = [y for y in tree_leaves(case.function(*inputs)) if _is_real(y)]
    made = [y for y in results if y.requires_grad]
    if not weights:
        weights += [_encoded(case.weight(*y.shape)(), y) for y in made]
    given = [
        w if isinstance(y, LNSTensor) else _values(w).to(y.dtype)
        for w, y in zip(weights, made, strict=True)
    ]
    return results, list(torch.autograd.grad(made, leaves, given, create_graph=create_graph))


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _encoded(x: Tensor, like: Tensor) -> Tensor:
    return LNSTensor.from_float(x, like.fmt) if isinstance(like, LNSTensor) else x


@pytest.mark.parametrize("fmt", WIDTHS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.kind}")
def test_results_and_gradients(case: Case, fmt: LNSFormat) -> None:
    torch.manual_seed(0)
    made = [make() for make in case.inputs]
    inputs = [LNSTensor.from_float(x, fmt) if _is_real(x) else x for x in made]
    exact = [_values(x) if isinstance(x, LNSTensor) else x for x in inputs]
    weights: list[Tensor] = []
    results, gradients = _run(case, inputs, weights)
    truths, wanted = _run(case, exact, weights)
    for got, want in zip(results, truths, strict=True):
        _compare(case, "result", got, want, case.half_ulps, fmt)
    for i, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
        _compare(case, f"gradient {i}", got, want, case.of_gradients, fmt)


NEAR_ZERO = [case for case in CASES if case.kind in ("range", "offset")]


@pytest.mark.parametrize("case", NEAR_ZERO, ids=lambda case: f"{case.name}-{case.kind}")
def test_gradients_that_are_to_be_differentiated(case: Case) -> None:
    """With ``create_graph=True`` some gradients are composed of other operations."""
    torch.manual_seed(0)
    inputs = [LNSTensor.from_float(make(), WIDTHS[1]) for make in case.inputs]
    exact = [_values(x) for x in inputs]
    weights: list[Tensor] = []
    _, gradients = _run(case, inputs, weights, create_graph=True)
    _, wanted = _run(case, exact, weights)
    for i, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
        _compare(case, f"gradient {i}", got, want, 2 * case.of_gradients, WIDTHS[1])


LENGTHLESS = {
    "__radd__", "__rsub__", "__rmul__", "true_divide", "norm.inf", "linalg.norm", "var.unbiased",
    "std.unbiased", "interpolate.trilinear", "upsample_bilinear",
}  # fmt: skip
"""Aliases of operations in the table, and sums of few terms."""


def test_every_operation_of_lns_has_a_case() -> None:
    names = {case.name.removeprefix("nn.functional.") for case in CASES}
    listed = operations.ROUNDED + operations.SUMS + operations.COMPOSED
    assert {name.removeprefix("nn.functional.") for name in listed} - names <= LENGTHLESS


def test_marginals_of_a_chain_add_up_to_one() -> None:
    """A conditional random field of 120 steps: the gradient of log Z with respect to a step's
    scores."""
    torch.manual_seed(0)
    scores = LNSTensor.from_float(torch.randn(120, 5) + 2, "lns16").requires_grad_()
    transitions = LNSTensor.from_float(torch.randn(5, 5), "lns16")
    forward = scores[0]
    for step in scores[1:]:
        forward = (forward[:, None] + transitions).logsumexp(0) + step
    forward.logsumexp(0).backward()
    assert scores.grad is not None
    totals = _values(scores.grad).sum(-1)
    assert (totals - 1).abs().max() < 0.05


def _compare(
    case: Case, what: str, got: Tensor, want: Tensor, half_ulps: float, fmt: LNSFormat
) -> None:
    assert got.shape == want.shape
    error, norm = (_values(got) - want.detach()).norm(), want.detach().norm()
    far = float(error / norm) / half_ulp(fmt) if norm else float(error > fmt.smallest)
    assert far <= half_ulps, f"{what} of {case.name}: {far:.1f} half-ulps off, allowed {half_ulps}"
