"""Every operation of the table in tests/lns_ops/operations.py on torch's own sample inputs,
compared with float64 on the decoded values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lns_ops import LNSFormat, LNSTensor, NonFiniteError, allow_float_fallback, decode, encode
from lns_ops.tensor.decoded import rounds
from lns_ops.tensor.integers import restored
from tests.lns_ops import operations
from tests.lns_ops.lns_formats import half_ulp

pytest.importorskip("expecttest", reason="torch's operation database needs it")

FMT = LNSFormat(16, 10)
"""Fine steps, and a range (2^+-16) that torch's samples, mostly up to 9 in magnitude, hardly
leave."""
SAMPLES = 16
MORE_SAMPLES = {"nn.functional.embedding_bag": 64}
"""For operations whose variants come late in the samples: modes one after the other."""


@lru_cache(maxsize=1)
def database() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db
    }


def _empty(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.numel()


def encoded(leaf: Any) -> Any:
    return (
        LNSTensor.from_float(leaf, FMT)
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float32
        else leaf
    )


def whole(leaf: Any) -> Any:
    """The values for functions that round: the decoded integers."""
    return restored(leaf.codes, leaf.fmt) if isinstance(leaf, LNSTensor) else leaf


def decoded(leaf: Any, dtype: torch.dtype = torch.float64) -> Any:
    return decode(leaf.codes, leaf.fmt, dtype) if isinstance(leaf, LNSTensor) else leaf


def samples(name: str) -> Iterator[tuple[Any, Any]]:
    """The operation, and the encoded arguments of each sample that LNS can represent."""
    op = database()[name]
    torch.manual_seed(0)
    filled = (
        s
        for s in op.sample_inputs("cpu", torch.float32, requires_grad=False)
        if not _empty(s.input)
    )
    for sample in islice(filled, MORE_SAMPLES.get(name, SAMPLES)):
        try:
            arguments = tree_map(encoded, (sample.input, sample.args, sample.kwargs))
        except NonFiniteError:
            continue
        if any(isinstance(leaf, LNSTensor) for leaf in tree_leaves(arguments)):
            yield op, arguments


def call(op: Any, arguments: Any) -> list[Any]:
    x, args, kwargs = arguments
    return tree_leaves(op(x, *args, **kwargs))


def pairs(name: str, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Any, Tensor, Any, Any]]:
    """Result, float result, operation and arguments for each sample; at least one sample."""
    seen = 0
    for op, arguments in samples(name):
        try:
            results = call(op, arguments)
        # a variant that the message names; empty reductions
        except (NotImplementedError, ValueError):
            continue
        rounding = rounds(op.name) or name.endswith("_rounding")
        truth = call(
            op, tree_map(whole if rounding else lambda leaf: decoded(leaf, dtype), arguments)
        )
        for got, exact in zip(results, truth, strict=True):
            if isinstance(exact, Tensor) and exact.numel():
                seen += 1
                yield got, exact, op, arguments
    assert seen, f"no sample of {name} ran"


def in_range(exact: Tensor) -> Tensor:
    return exact.clamp(-FMT.largest, FMT.largest)


MOVES = operations.EXACT.index("broadcast_to")
"""From here on operations only move values, which is torch's own work; making torch's samples takes
longest there."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (i > MOVES))
        for i, n in enumerate(operations.EXACT)
    ],
)
def test_exact(name: str) -> None:
    for got, exact, _, _ in pairs(name):
        value = decoded(got) if isinstance(got, LNSTensor) else got
        assert value.shape == exact.shape
        if isinstance(got, LNSTensor):  # scalar arguments are encoded
            assert torch.equal(value, decoded(encoded(exact.float())))
        else:
            assert torch.equal(value, exact)


@pytest.mark.parametrize("name", operations.ROUNDED)
def test_rounded_once(name: str) -> None:
    for got, exact, _, (x, args, kwargs) in pairs(name):
        if "alpha" in kwargs and name in ("add", "sub", "rsub"):  # one more product
            continue
        numbers = [leaf for leaf in tree_leaves((x, args, kwargs)) if isinstance(leaf, float)]
        # Numbers are encoded first. An underflow loses less than the smallest magnitude.
        extra = (
            3 if numbers and name in ("nn.functional.softshrink", "nn.functional.leaky_relu") else 1
        )
        error = (decoded(got) - in_range(exact)).abs()
        assert (error <= extra * half_ulp(FMT) * exact.abs() + FMT.smallest).all()


@pytest.mark.parametrize("name", operations.SUMS)
def test_sums(name: str) -> None:
    for got, exact, op, arguments in pairs(name):
        magnitudes = tree_map(
            lambda leaf: decoded(leaf).abs() if isinstance(leaf, LNSTensor) else leaf, arguments
        )
        x, args, kwargs = magnitudes
        kwargs = {k: abs(v) if k in ("alpha", "beta", "value") else v for k, v in kwargs.items()}
        scale = tree_leaves(op(x, *args, **kwargs))[0].abs()
        if name == "lerp":
            scale = scale + 2 * x.expand(exact.shape)
        error = (decoded(got) - in_range(exact)).abs()
        assert (error <= operations.SUM_HALF_ULPS * half_ulp(FMT) * scale + 8 * FMT.smallest).all()


@pytest.mark.parametrize("name", operations.COMPOSED)
def test_composed(name: str) -> None:
    for got, exact, _, arguments in pairs(name):
        if not exact.isfinite().all() or _large(arguments):
            continue
        error = (decoded(got) - exact).norm()
        assert (
            error
            <= operations.COMPOSED_HALF_ULPS * half_ulp(FMT) * exact.norm()
            + 8 * FMT.smallest * exact.numel() ** 0.5
        )


def _large(arguments: Any) -> bool:
    """Return whether squares or exponentials of the arguments leave the format's range, or their
    differences its resolution."""
    return any(
        leaf.abs().max() > 100
        for leaf in tree_leaves(tree_map(decoded, arguments))
        if _filled(leaf)
    )


def _filled(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point and leaf.numel() > 0


@pytest.mark.parametrize("name", operations.IN_FLOAT32)
def test_losses_are_torchs_own(name: str) -> None:
    for got, exact, _, _ in pairs(name, torch.float32):
        assert type(got) is Tensor
        torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", operations.DECODED)
def test_decoded(name: str) -> None:
    """The result equals the float32 result, encoded once, bit for bit."""
    for got, exact, _, _ in pairs(name, torch.float32):
        assert got.shape == exact.shape
        if isinstance(got, LNSTensor):
            assert torch.equal(got.codes, encode(exact.float(), FMT))
        else:
            assert exact.dtype != torch.float32
            assert torch.equal(got, exact)


DECODED_GRADIENTS = [
    "sin", "cos", "tan", "atan", "erf", "sinc", "hypot", "atan2", "logaddexp", "remainder", "round",
    "prod", "cumprod", "cummax", "median", "cdist", "trace", "cross", "linalg.inv", "linalg.det",
    "linalg.solve", "matrix_exp", "nn.functional.pairwise_distance",
    "nn.functional.grid_sample", "nn.functional.interpolate.bicubic", "nn.functional.max_unpool2d",
]  # fmt: skip


@pytest.mark.parametrize("name", DECODED_GRADIENTS)
def test_gradients_of_what_is_decoded_are_rounded_once(name: str) -> None:
    seen = 0
    for op, arguments in islice(samples(name), 4):
        try:
            weight, gradients = differentiated(op, arguments, None)
        except (ValueError, StopIteration):
            continue
        exact_weight = decoded(LNSTensor.from_float(weight, FMT), torch.float32)
        values = tree_map(
            whole if rounds(name) else lambda leaf: decoded(leaf, torch.float32), arguments
        )
        _, truth = differentiated(op, values, exact_weight)
        for got, exact in zip(gradients, truth, strict=True):
            if got is None or exact is None:
                assert got is exact
            else:
                assert torch.equal(got.codes, encode(exact, FMT))
                seen += 1
    assert seen


DIFFERENTIABLE = [
    "add", "sub", "mul", "div.no_rounding_mode", "reciprocal", "square", "sqrt", "rsqrt", "exp",
    "exp2", "expm1", "log", "log1p", "sigmoid", "tanh", "nn.functional.silu", "nn.functional.gelu",
    "nn.functional.mish", "nn.functional.elu", "nn.functional.celu", "nn.functional.softplus",
    "nn.functional.logsigmoid", "nn.functional.hardswish", "nn.functional.hardsigmoid",
    "nn.functional.leaky_relu", "nn.functional.prelu", "nn.functional.relu", "nn.functional.relu6",
    "nn.functional.hardshrink", "nn.functional.softshrink", "maximum", "minimum", "amax",
    "max.reduction_with_dim", "clamp", "where", "masked_fill", "topk", "gather", "take_along_dim",
    "index_select", "__getitem__", "index_add", "scatter_add", "cat", "stack", "split", "unbind",
    "select", "slice", "roll", "flip", "tril", "unfold", "diagonal", "repeat", "expand", "permute",
    "constant_pad_nd", "nn.functional.pad.reflect", "nn.functional.pad.replicate",
    "nn.functional.pad.circular", "nn.functional.pixel_shuffle", "nn.functional.embedding",
    "nn.functional.max_pool1d", "nn.functional.max_pool2d", "nn.functional.max_pool3d",
    "nn.functional.adaptive_max_pool2d", "nn.functional.avg_pool1d", "nn.functional.avg_pool2d",
    "nn.functional.avg_pool3d", "nn.functional.adaptive_avg_pool2d",
    "nn.functional.interpolate.nearest", "nn.functional.interpolate.bilinear", "sum", "mean", "var",
    "std", "mm", "bmm", "addmm", "einsum", "matmul", "nn.functional.linear",
    "nn.functional.bilinear", "logsumexp", "softmax", "nn.functional.glu", "norm",
    "_segment_reduce.lengths", "_segment_reduce.offsets",
]  # fmt: skip


def differentiated(
    op: Any, arguments: Any, weight: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of ``sum(weight * result)`` for the floating-point arguments; with None,
    random weights."""
    leaves = [leaf.detach().requires_grad_() for leaf in tree_leaves(arguments) if _filled(leaf)]
    rest = iter(leaves)
    x, args, kwargs = tree_map(lambda leaf: next(rest) if _filled(leaf) else leaf, arguments)
    result = next(
        r for r in tree_leaves(op(x, *args, **kwargs)) if isinstance(r, Tensor) and r.requires_grad
    )
    if weight is None:
        weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    result.backward(
        LNSTensor.from_float(weight, FMT) if isinstance(result, LNSTensor) else weight.double()
    )
    return weight, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    """Autograd's own formulas in LNS and ours, in the norm: some roundings each, sums as long as
    the samples."""
    seen = 0
    for i, (op, arguments) in enumerate(samples(name)):
        if i == 8:
            break
        if _large(arguments):
            continue
        try:
            weight, gradients = differentiated(op, arguments, None)
        except (NotImplementedError, ValueError, StopIteration):
            continue
        exact_weight = decoded(LNSTensor.from_float(weight, FMT))
        _, truth = differentiated(op, tree_map(decoded, arguments), exact_weight)
        for got, exact in zip(gradients, truth, strict=True):
            if exact is None or got is None:
                assert got is None or not decoded(got).any()
                continue
            if not exact.isfinite().all() or exact.norm() > 1e5:
                continue
            error = (decoded(got) - exact).norm()
            assert (
                error <= 24 * half_ulp(FMT) * exact.norm() + 8 * FMT.smallest * exact.numel() ** 0.5
            ), (i, got, exact)
            seen += 1
    assert seen


def test_the_document_is_the_table() -> None:
    path = Path(__file__).parents[4] / "docs" / "operations.md"
    assert path.read_text() == operations.document(), "run python -m tests.lns_ops.operations"


def test_fallback_counts_what_it_converts() -> None:
    x = LNSTensor.from_float(torch.randn(4), FMT).requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"aten.i0.default has no LNS kernel.*allow_float_fallback"
    ):
        torch.i0(x)
    with allow_float_fallback() as outer, allow_float_fallback() as converted:
        torch.i0(x).sum()
        (x * 2).detach().i0_()
    assert converted.counts == outer.counts == {"aten.i0.default": 1, "aten.i0_.default": 1}
    assert "1  aten.i0.default" in str(converted)
    exact = decoded(x.detach())
    error = (decoded(x.detach().exp()) - exact.exp()).abs()
    assert (error <= half_ulp(FMT) * exact.exp()).all()
    with pytest.raises(NotImplementedError):
        torch.i0(x)


def test_fallback_refuses_views() -> None:
    x = LNSTensor.from_float(torch.randn(4), FMT)
    with allow_float_fallback(), pytest.raises(NotImplementedError, match="returns a view"):
        torch.ops.aten.view_as_real(x)


def test_composite_operations_under_inference_mode() -> None:
    x, w, b = (LNSTensor.from_float(torch.randn(s), FMT) for s in ((2, 3, 5), (4, 5), (4,)))
    expected = torch.nn.functional.linear(x, w, b)
    with torch.inference_mode():
        assert torch.equal(torch.nn.functional.linear(x, w, b).codes, expected.codes)


def test_writing_in_place_keeps_format_and_shape() -> None:
    x, other = (
        LNSTensor.from_float(torch.ones(3), FMT),
        LNSTensor.from_float(torch.ones(3), "lns12"),
    )
    y = x
    y += 1
    assert torch.equal(y.to_float(), torch.full((3,), 2.0))
    assert y is x
    x.relu_().clamp_(max=1.5)
    assert torch.equal(x.to_float(), LNSTensor.from_float(torch.full((3,), 1.5), FMT).to_float())
    with pytest.raises(ValueError, match="both operands need one format"):
        x += other
    with pytest.raises(ValueError, match="writing in place keeps the shape"):
        x += LNSTensor.from_float(torch.ones(2, 3), FMT)
