"""Matrix products whose running sums are rounded: :func:`product`, its reference, and the layer.

:class:`~lns_ops.formats.Accumulation` says what is computed. :func:`reference` is its definition in
torch's operations, some ten for each of the ``K`` terms. Compiled kernels compute it with the same
bits, on a CPU and, with CuPy, on a GPU.

Backward products and products of second derivatives are summed in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lns_ops import cpu, cuda
from lns_ops.formats import Accumulation
from lns_ops.formats.base import eager_values, on_gpu
from lns_ops.functional.library import LIBRARY, OPS
from lns_ops.nn.products.two_forms import in_two_forms

_NAME = "lns_ops::rounded_product"


def round_float(
    x: Tensor, mantissa_bits: int, min_exponent: int, largest: float, saturates: bool
) -> Tensor:
    """Return float64 values rounded to a binary float, ties to even.

    >>> round_float(torch.tensor([1.3, -9.0], dtype=torch.float64), 2, -6, 7.0, True).tolist()
    [1.25, -7.0]
    """
    field = (x.view(torch.int64) >> 52 & 0x7FF).clamp(min=min_exponent + 1023)
    step = (field - mantissa_bits << 52).view(torch.float64)
    near = torch.where(x.isfinite(), (x / step).round() * step, x)
    beyond = largest if saturates else torch.inf
    return torch.where(near.abs() > largest, near.sign() * beyond, near)


def reference(
    x_MK: Tensor,
    y_KN: Tensor,
    mantissa_bits: int,
    min_exponent: int,
    largest: float,
    saturates: bool,
    block: int,
    promote: bool,
    tree: bool,
) -> Tensor:
    """Return ``x @ y``, float32, term by term: the definition.

    Args:
        x_MK: float32.
        y_KN: float32.
        mantissa_bits: width of the sum's mantissa.
        min_exponent: exponent of the sum's smallest normal number.
        largest: largest magnitude of a sum.
        saturates: whether a larger sum becomes ``largest`` instead of infinity.
        block: number of terms of a block.
        promote: whether block sums are added in float32 instead of the format of sums.
        tree: whether the terms of a block are added in pairs instead of one after the other.
    """
    x, y = x_MK.double(), y_KN.double()
    to_format = (mantissa_bits, min_exponent, largest, saturates)
    total = x.new_zeros(x.shape[0], y.shape[1])
    for first in range(0, x.shape[1], block):
        products = (x[:, k, None] * y[k] for k in range(first, min(first + block, x.shape[1])))
        if tree:
            running = _in_pairs([round_float(each, *to_format) for each in products], to_format)
        else:
            running = torch.zeros_like(total)
            for each in products:
                running = round_float(running + each, *to_format)
        total = total + running
        total = total.float().double() if promote else round_float(total, *to_format)
    return total.float()


def _in_pairs(terms: list[Tensor], to_format: tuple[int, int, float, bool]) -> Tensor:
    """Return the sum of terms by a tree of additions; an odd term is carried to the next level."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        last = terms[-1:] if len(terms) % 2 else []
        terms = [round_float(a + b, *to_format) for a, b in pairs] + last
    return terms[0]


def _computed(x: Tensor, y: Tensor, *sums: Any) -> Tensor:
    """Return :func:`reference`, by a kernel where there is one."""
    names = ("mantissa_bits", "min_exponent", "largest", "saturates", "block", "promote", "tree")
    named = dict(zip(names, sums, strict=True))
    if on_gpu(x) and on_gpu(y):
        return cuda.rounded_product(x, y, **named)
    left, right = eager_values(x), eager_values(y)
    if left is None or right is None:
        return reference(x, y, *sums)
    return torch.from_numpy(cpu.rounded_product(left, right, **named))


def _empty(x: Tensor, y: Tensor, *sums: Any) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


def _mapped(info: Any, in_dims: Any, x: Tensor, y: Tensor, *sums: Any) -> tuple[Tensor, int]:
    pairs = (
        [t] * info.batch_size if dim is None else t.unbind(dim)
        for t, dim in zip((x, y), in_dims, strict=False)
    )
    return torch.stack([OPS.rounded_product(a, b, *sums) for a, b in zip(*pairs, strict=True)]), 0


LIBRARY.define(
    "rounded_product(Tensor x, Tensor y, int mantissa_bits, int min_exponent, float largest,"
    " bool saturates, int block, bool promote, bool tree) -> Tensor"
)
LIBRARY.impl("rounded_product", _computed, "CompositeExplicitAutograd")
torch.library.register_fake(_NAME, _empty, lib=LIBRARY)
torch.library.register_vmap(_NAME, _mapped, lib=LIBRARY)


def rounded_product(x_MK: Tensor, y_KN: Tensor, sums: Accumulation) -> Tensor:
    """Return ``x @ y``, float32, with rounded sums; not differentiable."""
    fmt, terms = sums.number_format, x_MK.shape[1]
    found: Tensor = OPS.rounded_product(
        x_MK, y_KN, fmt.mantissa_bits, fmt.min_exponent, fmt.largest, fmt.saturates,
        sums.block or max(terms, 1), sums.promote is not None,
        sums.order == "tree",
    )  # fmt: skip
    return found


class _Product(torch.autograd.Function):
    """The product of two matrices, and both of its gradients, with rounded sums."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_MK: Tensor, y_KN: Tensor, sums: Accumulation) -> Tensor:
        return rounded_product(x_MK.detach(), y_KN.detach(), sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_MK, y_KN, ctx.sums = inputs
        ctx.save_for_backward(x_MK, y_KN)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MK, y_KN = ctx.saved_tensors
        return (
            _product(grad_MN, y_KN.t(), ctx.sums) if ctx.needs_input_grad[0] else None,
            _product(x_MK.t(), grad_MN, ctx.sums) if ctx.needs_input_grad[1] else None,
            None,
        )


_product = in_two_forms(_Product)


def product(x_MK: Tensor, y_KN: Tensor, sums: Accumulation) -> Tensor:
    """Return ``x @ y``, float32, with sums rounded as in ``sums``; differentiable.

    >>> x, y = torch.ones(1, 300), torch.ones(300, 1)
    >>> product(x, y, Accumulation(format="float(8,7)")).item()  # 257 has 9 bits
    256.0
    >>> product(x, y, Accumulation(format="float(8,7)", block=128)).item()
    300.0
    """
    return _product(x_MK, y_KN, sums)


class RoundedSumsLinear(nn.Linear):
    """An nn.Linear with rounded sums; the bias is added in float32.

    Created by :func:`lns_ops.nn.simulate.simulate_`; do not construct it directly.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight^T + bias``."""
        simulation: Any = self.simulation
        flat = input.reshape(-1, self.in_features)
        out = product(flat, self.weight.t(), simulation.accumulation)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*input.shape[:-1], self.out_features)
