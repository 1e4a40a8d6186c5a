"""The accumulation of matrix products: ``contract``, in LNS, or ``float32``, in linear arithmetic.

``contract`` (the default): LNS additions over k in blocks of 64, as specified in
:mod:`lns_ops.reference`, with the same bits on every device.

``float32``: products are exact in the logarithm. Their sums are linear, in float32, and each sum is
then rounded to the format::

    z_mn = encode(fl(sum over k of fl(2^log x_mk) fl(2^log y_kn)))

Both operands are decoded and multiplied as floating-point matrices, on a GPU by its tensor cores.
For a sum of ``K`` terms, the number ``s`` that is encoded differs from the exact sum of the exact
products by at most the following, in any order of addition (Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., section 3.1)::

    |s - sum x_k y_k|  <=  ((1 + e)^2 (1 + K u / (1 - K u)) - 1) sum |x_k y_k|  +  K 2^-124

                     e, the rounding of a decoded operand     u, of one multiplication or addition
    CPU              2^-24                                    2^-24
    GPU  f <= 6      2^-8  (bfloat16 operands)                2^-22
         f = 7..9    2^-11 (tf32 operands)                    2^-22
         f >= 10     2^-24 (float32 operands)                 2^-24

Convolutions use tf32 up to f = 9. The bound holds for sums that are added term by term. cuDNN does
so with tf32 operands; with float32 operands (f >= 10) it could choose another algorithm (Winograd).

For the significands 2^(j / 2^f) that occur, ``e`` is at most 2^-8.3 for bfloat16 and 2^-11.1 for
tf32. Tensor cores do not round every addition to nearest, so their u is larger. Values below
float32's normal range may be flushed to zero. This is the last term of the bound, and ``e`` is 1
for operands below 2^-126, which only formats with that range have. Each operand encodes back to
itself, so a product with an identity matrix is exact. Single products are exact on a CPU. On a GPU
they are exact except for 1 % of the pairs of significands at f = 6 and f = 9, which are off by one
ulp.

CPU and GPU differ within the bound, and so may two processors or library versions. On one machine
the same product gives the same bits if its BLAS library does. The figures for CPUs assume torch's
default float32 precision (``torch.set_float32_matmul_precision``).

A sum beyond float32's range is computed again in float64, which has room for all sums of LNS
products; it saturates to the format's largest magnitude with its sign. So infinities and NaNs do
not occur, even if large terms of both signs cancel. (Tensor cores may return a finite sum although
products beyond float32's range cancel; it is then any number within the bound.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lns_ops.spec.reference import ACCUMULATIONS

_accumulation = ACCUMULATIONS[0]
_of_gradients = "float32"


def check_accumulation(name: str) -> str:
    """Return ``name`` if it is a known accumulation.

    Raises:
        ValueError: it is not one of :data:`ACCUMULATIONS`.
    """
    if name not in ACCUMULATIONS:
        raise ValueError(
            f"accumulation={name!r}: must be one of {', '.join(ACCUMULATIONS)}; use for example"
            f" {ACCUMULATIONS[0]!r}"
        )
    return name


def set_matmul_accumulation(name: str) -> None:
    """Set how LNS matrix products are summed from now on, in all threads.

    It applies to products of LNSTensors (``@``, mm, bmm, linear) and of the layers of
    :func:`lns_ops.convert_`. A layer of scope ``matmul`` uses the accumulation of its forward
    product for the backward products, too. The backward products of LNSTensors use the setting at
    the time when they are computed. Code compiled by ``torch.compile`` may keep the setting under
    which it was compiled, so set it before compiling.

    >>> set_matmul_accumulation("float32")
    >>> get_matmul_accumulation()
    'float32'
    >>> set_matmul_accumulation("contract")

    Args:
        name: ``contract`` or ``float32``; see :mod:`lns_ops.functional.accumulation`.

    Raises:
        ValueError: unknown accumulation.
    """
    global _accumulation
    _accumulation = check_accumulation(name)


def get_matmul_accumulation() -> str:
    """Return the current accumulation, ``contract`` by default."""
    return _accumulation


@contextmanager
def matmul_accumulation(name: str) -> Iterator[None]:
    """Set the accumulation within a ``with`` block, in all threads.

    :func:`set_matmul_accumulation` describes what it applies to.

    >>> with matmul_accumulation("float32"):
    ...     get_matmul_accumulation()
    'float32'

    Raises:
        ValueError: unknown accumulation.
    """
    before = get_matmul_accumulation()
    set_matmul_accumulation(name)
    try:
        yield
    finally:
        set_matmul_accumulation(before)


def set_gradient_accumulation(name: str) -> None:
    """Set how the gradients that reach one tensor are added from now on, in all threads.

    It applies to sums of more than two gradients: within a backward pass if a tensor is used more
    than twice, and in ``p.grad`` over several backward passes.

    >>> set_gradient_accumulation("contract")
    >>> get_gradient_accumulation()
    'contract'
    >>> set_gradient_accumulation("float32")

    Args:
        name: ``float32`` adds in float32 and encodes the sum. ``contract`` makes one LNS addition
            after the other, so long sums stick: 512 equal gradients add up to 370 times one of them
            in lns16.

    Raises:
        ValueError: unknown accumulation.
    """
    global _of_gradients
    _of_gradients = check_accumulation(name)


def get_gradient_accumulation() -> str:
    """Return how gradients are added, ``float32`` by default."""
    return _of_gradients
