"""Sums, means, norms and matrix products of codes, in the contract's order of additions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lns_ops import cpu
from lns_ops.cuda.float32_matmul import matmul_cuda
from lns_ops.functional.accumulation import check_accumulation
from lns_ops.functional.elementwise import add, decode, mul, square, sub
from lns_ops.functional.float32_matmul import matmul_cpu
from lns_ops.functional.library import FORMAT, cached_format, define_operator, operators_for
from lns_ops.spec.format import LNSFormat, logarithm
from lns_ops.spec.reference import LONG_SUM

_LONG_SUM_OCTAVES = LONG_SUM.bit_length() - 1


def _matmul_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-1]))


def _terms(x: Tensor, y: Tensor | None, kind: str, fmt: LNSFormat) -> Tensor:
    """Return the terms of a sum, in the format of :func:`format_of`."""
    if kind == "squares":
        return square(x if y is None else sub(x, y, fmt), fmt)
    return x if y is None else mul(x, y, fmt)


def format_of(kind: str, fmt: LNSFormat) -> LNSFormat:
    """Return the format of terms and sums: squares have their own format."""
    return fmt.of_squares if kind == "squares" else fmt


def _sum_flat(x: Tensor, dim: int, fmt: LNSFormat, shift: int) -> Tensor:
    # adjacent terms: the array need not be transposed
    if x.stride(dim) == 1 and not x.is_contiguous():
        x, dim = x.movedim(dim, -1), -1
    return torch.from_numpy(cpu.sum(x.contiguous().numpy(), dim, fmt, shift))


class _Cut(NamedTuple):
    """The sizes before, of and after the terms of sums; and the shape of the sums, if each sum is a
    single piece."""

    sizes: tuple[int, int, int]
    kept: tuple[int, ...]


@lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...], dims: tuple[int, ...]) -> _Cut | None:
    """Return how to split a contiguous tensor for sums over ascending ``dims``. Returns None if the
    terms are not adjacent, or if sums are split into pieces."""
    first, end = dims[0], dims[-1] + 1
    terms = math.prod(shape[first:end])
    if terms > LONG_SUM or end - first != len(dims):
        return None
    sizes = math.prod(shape[:first]), terms, math.prod(shape[end:])
    return _Cut(sizes, (1, *shape[:first], *shape[end:]))


def _sum_cpu(
    x: Tensor, y: Tensor | None, dims: list[int], kind: str, bits: int, fraction_bits: int,
    shift: int = 0,
) -> Tensor:  # fmt: skip
    fmt = cached_format(bits, fraction_bits)
    x, fmt = _terms(x, y, kind, fmt), format_of(kind, fmt)
    if x.is_contiguous() and (cut := _cut(x.shape, tuple(dims))) is not None:
        return torch.from_numpy(cpu.sum(x.numpy().reshape(cut.sizes), 1, fmt, shift)).view(cut.kept)
    kept = [d for d in range(x.dim()) if d not in dims]
    sizes = [x.shape[d] for d in kept]
    flat = x.permute(*dims, *kept).reshape(math.prod(x.shape[d] for d in dims), *sizes)
    if len(flat) <= LONG_SUM:
        return _sum_flat(flat, 0, fmt, shift)[None]
    whole = len(flat) // LONG_SUM * LONG_SUM
    sums = [_sum_flat(flat[:whole].reshape(-1, LONG_SUM, *sizes), 1, fmt, shift)]
    if whole < len(flat):
        sums.append(_sum_flat(flat[whole:], 0, fmt, shift)[None])
    return torch.cat(sums)


def _sum_shape(x: Tensor, y: Tensor | None, dims: list[int], *rest: Any) -> Tensor:
    terms = math.prod(x.shape[d] for d in dims)
    pieces = -(-terms // LONG_SUM) if terms else 1
    return x.new_empty((pieces, *(size for d, size in enumerate(x.shape) if d not in dims)))


def _matmul_cpu(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    fmt = cached_format(bits, fraction_bits)
    kernel = cpu.matmul if x.dim() == 2 else cpu.matmul_batched
    return torch.from_numpy(kernel(x.numpy(), y.numpy(), fmt))


def _linear_cpu(x: Tensor, y: Tensor, bias: Tensor, bits: int, fraction_bits: int) -> Tensor:
    fmt = cached_format(bits, fraction_bits)
    product = cpu.matmul(x.numpy(), y.numpy(), fmt)
    return torch.from_numpy(cpu.add(product, bias.expand(product.shape).contiguous().numpy(), fmt))


define_operator(
    "sum",
    f"(Tensor x, Tensor? y, int[] dims, str kind, {FORMAT}, int shift=0) -> Tensor",
    _sum_cpu,
    _sum_shape,
)
define_operator(
    "matmul",
    f"(Tensor x, Tensor y, {FORMAT}) -> Tensor",
    _matmul_cpu,
    lambda x, y, bits, fraction_bits: _matmul_shape(x, y),
)
define_operator(
    "matmul_float32",
    f"(Tensor x, Tensor y, {FORMAT}) -> Tensor",
    matmul_cpu,
    lambda x, y, bits, fraction_bits: _matmul_shape(x, y),
    matmul_cuda,
)
define_operator(
    "linear",
    f"(Tensor x, Tensor y, Tensor bias, {FORMAT}) -> Tensor",
    _linear_cpu,
    lambda x, y, bias, bits, fraction_bits: _matmul_shape(x, y),
)


def sum(
    x: Tensor,
    dims: Sequence[int],
    fmt: LNSFormat,
    *,
    keepdim: bool = False,
    times: Tensor | None = None,
) -> Tensor:
    """Sum over ``dims``, taken together in row-major order, in the contract's blocks of 64.

    More than ``LONG_SUM = 4096`` terms are split into ascending pieces of 4096, whose sums (codes
    of the format) are summed in the same way. Up to 64 terms a block and 64 blocks a piece,
    sequential addition still keeps most of each term. A single sequence of the block totals of
    131,072 ones would stick at a tenth of the sum at f = 6. :func:`lns_ops.reference.long_sum` is
    the specification.

    Args:
        x: int16 codes.
        dims: dimensions to sum over.
        fmt: the format.
        keepdim: keep summed dimensions with size 1.
        times: if given, sum the products with this tensor, codes with the same shape and format.
    """
    kind = "plain" if times is None else "products"
    return reduced(operators_for(x), x, times, dims, kind, fmt, keepdim, False)


def mean(
    x: Tensor,
    dims: Sequence[int],
    fmt: LNSFormat,
    *,
    keepdim: bool = False,
    times: Tensor | None = None,
    about: Tensor | None = None,
) -> Tensor:
    """Return the mean: :func:`sum` divided by the encoded number of terms, without saturating.

    For example the sum of 1,000 times 100 is beyond lns12, but the mean is not.

    Args:
        x, dims, fmt, keepdim, times: as for :func:`sum`.
        about: if given, return the mean of the squares of ``x - about`` in codes of
            ``fmt.of_squares``; its shape broadcasts to ``x``.

    Raises:
        ValueError: the number of terms is 0.
    """
    y = times if about is None else about
    kind = "squares" if about is not None else "plain" if times is None else "products"
    return reduced(operators_for(x), x, y, dims, kind, fmt, keepdim, True)


class _Reduction(NamedTuple):
    """How a sum or mean is computed.

    Attributes:
        dims: dimensions to sum over, ascending.
        shape: shape of the result.
        shifts: ulps added to the logarithms of the sums of each pass; all passes except the last
            sum pieces.
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    shifts: tuple[int, ...]


def is_long(terms: int) -> bool:
    """Return whether a sum of ``terms`` terms is split into pieces.

    Raises:
        ValueError: in compiled code, if the number of terms depends on values.
    """
    try:
        return bool(terms > LONG_SUM)
    except RuntimeError as error:  # from a torch.SymInt
        raise ValueError(
            f"a sum over {terms} terms in compiled code, where the number depends on a tensor's"
            " values (torch.bincount, nonzero, a mask, tolist): sums of more than 4,096 terms are"
            " split, so the number must be known; compile without fullgraph=True, or compute the"
            " sizes outside the compiled function and pass them as numbers"
        ) from error


def _reduction(
    sizes: Sequence[int], dims: Sequence[int], keepdim: bool, average: bool, fraction_bits: int
) -> _Reduction:
    rank = len(sizes)
    reduced = tuple(sorted({d % rank for d in dims})) if rank else ()
    shape = tuple(
        1 if d in reduced else n for d, n in enumerate(sizes) if keepdim or d not in reduced
    )
    terms = left = math.prod(sizes[d] for d in reduced)
    if average and reduced and terms == 0:
        raise ValueError("a mean of 0 values: LNS has no NaN; leave empty reductions out")
    scale, shifts = 1, []
    while is_long(left):  # every piece of a mean is divided by 4096, which is exact
        shifts.append(-_LONG_SUM_OCTAVES << fraction_bits if average else 0)
        left, scale = -(-left // LONG_SUM), scale * LONG_SUM
    shifts.append(-logarithm(terms / scale, fraction_bits) if average and reduced else 0)
    return _Reduction(reduced, shape, tuple(shifts))


_cached_reduction = lru_cache(maxsize=4096)(_reduction)


def reduced(
    ops: Any, x: Tensor, y: Tensor | None, dims: Sequence[int], kind: str, fmt: LNSFormat,
    keepdim: bool, average: bool,
) -> Tensor:  # fmt: skip
    """Return a sum or mean; ``ops`` are torch's operators or a device's kernels.

    ``kind`` selects the terms: ``plain``, ``products`` with y, or ``squares`` of x (minus y, if
    given). Terms, sums and means of squares are codes of ``fmt.of_squares``.
    """
    key = (x.shape, tuple(dims), keepdim, average, fmt.fraction_bits)
    try:
        plan = _cached_reduction(*key)
    except TypeError:  # symbolic sizes have no hash
        plan = _reduction(*key)
    if not plan.dims:
        return _terms(x, y, kind, fmt).clone()
    over: Sequence[int] = plan.dims
    for shift in plan.shifts:
        x = ops.sum(x, y, over, kind, fmt.bits, fmt.fraction_bits, shift)
        y, over, kind, fmt = None, (0,), "plain", format_of(kind, fmt)
    return x.reshape(plan.shape)


def matmul(x: Tensor, y: Tensor, fmt: LNSFormat, *, accumulation: str = "contract") -> Tensor:
    """Return ``x_MK @ y_KN`` or ``x_BMK @ y_BKN``: exact products; transposed views cost nothing.

    More than ``LONG_SUM = 4096`` products are summed as in :func:`sum`: in ascending pieces of
    4096, whose sums (codes of the format) are summed in the same way;
    :func:`lns_ops.reference.long_matmul` is the specification. Sums in float32 are not split.

    Args:
        x, y: int16 codes.
        fmt: the format.
        accumulation: how sums over k are computed: ``contract``, LNS additions in blocks of 64, or
            ``float32``; see :mod:`lns_ops.functional.accumulation`.

    Raises:
        ValueError: the shapes do not match, or an unknown accumulation.
    """
    if (
        x.dim() != y.dim()
        or x.dim() not in (2, 3)
        or x.shape[-1] != y.shape[-2]
        or x.shape[:-2] != y.shape[:-2]
    ):
        raise ValueError(
            f"matmul of shapes {tuple(x.shape)} and {tuple(y.shape)}: need [M, K] @ [K, N] or [B,"
            " M, K] @ [B, K, N]"
        )
    if check_accumulation(accumulation) != "contract":
        result: Tensor = operators_for(x).matmul_float32(x, y, fmt.bits, fmt.fraction_bits)
        return result
    return product(operators_for(x), x, y, fmt)


def product(ops: Any, x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """Return :func:`matmul`; ``ops`` are torch's operators or a device's kernels."""
    if not is_long(x.shape[-1]):
        return ops.matmul(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]
    cuts = zip(x.split(LONG_SUM, -1), y.split(LONG_SUM, -2), strict=True)
    pieces = torch.stack([ops.matmul(a, b, fmt.bits, fmt.fraction_bits) for a, b in cuts])
    return reduced(ops, pieces, None, [0], "plain", fmt, False, False)


def linear(
    x: Tensor, y: Tensor, bias: Tensor, fmt: LNSFormat, *, accumulation: str = "contract"
) -> Tensor:
    """Return ``x_MK @ y_KN + bias_N``: the product as in :func:`matmul`, then an LNS addition.

    With ``contract`` it is one kernel on a GPU.

    Raises:
        ValueError: the shapes do not match, or an unknown accumulation.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[0] or bias.shape != y.shape[1:]:
        raise ValueError(
            f"linear of shapes {tuple(x.shape)}, {tuple(y.shape)} and bias {tuple(bias.shape)}:"
            " need [M, K] @ [K, N] + [N]"
        )
    if check_accumulation(accumulation) == "contract" and x.shape[1] <= LONG_SUM:
        result: Tensor = operators_for(x).linear(x, y, bias, fmt.bits, fmt.fraction_bits)
        return result
    return add(matmul(x, y, fmt, accumulation=accumulation), bias, fmt)


@lru_cache(maxsize=32)
def _squares(fmt: LNSFormat) -> Tensor:
    """Return the square of the value of every logarithm field, float64."""
    values = decode(
        torch.arange(fmt.field_mask + 1, dtype=torch.int32).to(torch.int16), fmt, torch.float64
    )
    return values * values


def norm(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the Euclidean norm, a float64 0-dim tensor.

    It is the root of the sum of each magnitude's count times its square. Counts are exact in any
    order, so the result depends only on the order of one float64 sum over the format's magnitudes.
    """
    fields = (x & fmt.field_mask).reshape(-1)
    if x.is_cuda:
        counts = torch.zeros(fmt.field_mask + 1, dtype=torch.int64, device=x.device)
        counts.index_add_(
            0,
            fields.long(),
            torch.ones((), dtype=torch.int64, device=x.device).expand(fields.numel()),
        )
    else:
        counts = torch.bincount(fields, minlength=fmt.field_mask + 1)
    return (counts.double() * _on_device(_squares, fmt, x.device)).sum().sqrt()


@lru_cache(maxsize=64)
def _on_device(make: Callable[[LNSFormat], Tensor], fmt: LNSFormat, device: torch.device) -> Tensor:
    return make(fmt).to(device)
