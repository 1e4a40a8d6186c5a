"""The accumulation of matrix products: ``contract``, in LNS, or ``float32``, in linear arithmetic.

``contract`` (the default): LNS additions over k in blocks of 64, as :mod:`lns_ops.reference` says;
the same bits on every device.

``float32``: products are exact in the logarithm as values; sums over them are linear, in float32,
and each is then rounded to the format::

    z_mn = encode(fl(sum over k of fl(2^log x_mk) fl(2^log y_kn)))

Both operands are decoded and multiplied as floating-point matrices, on a GPU by its tensor cores.
Of ``K`` terms the number ``s`` that is encoded lies this close to the exact sum of the exact
products, in whatever order they are added (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., section 3.1)::

    |s - sum x_k y_k|  <=  ((1 + e)^2 (1 + K u / (1 - K u)) - 1) sum |x_k y_k|  +  K 2^-124

                     e, the rounding of a decoded operand     u, of one multiplication or addition
    CPU              2^-24                                    2^-24
    GPU  f <= 6      2^-8  (bfloat16 operands)                2^-22
         f = 7..9    2^-11 (tf32 operands)                    2^-22
         f >= 10     2^-24 (float32 operands)                 2^-24

Convolutions have tf32's figures up to f = 9. The bound is of sums term by term: cuDNN takes them so
for tf32 operands; for float32 ones (f >= 10) it could choose an algorithm that does not (Winograd).

On the significands 2^(j / 2^f) that occur, ``e`` is at most 2^-8.3 for bfloat16 and 2^-11.1 for
tf32. Tensor cores do not round every addition to nearest, hence their larger u. What lies below
float32's normal range may be flushed to zero: that is the last term, and ``e`` is 1 for operands
below 2^-126; only formats with that range have any. Each operand encodes back to itself, so a
product with an identity matrix is exact; of single products, all are exact on a CPU, and on a GPU
all but those of 1 % of the pairs of significands of f = 6 and f = 9, which are one ulp off. CPU and
GPU differ within the bound, and so may two processors or library versions; the same product on the
same machine gives the same bits as far as its BLAS library does. The CPU's figures want torch's own
float32 precision (``torch.set_float32_matmul_precision``) at its default.

A sum beyond float32's range is taken again in float64, which no sum of LNS products leaves; it
saturates to the format's largest magnitude with its own sign. So there is neither an infinity nor a
NaN, also where large terms of both signs meet. (Tensor cores may keep a sum of products beyond
float32 that cancel finite; it is then any number within the bound.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lns_ops.spec.reference import ACCUMULATIONS

_accumulation = ACCUMULATIONS[0]
_of_gradients = "float32"


def check_accumulation(name: str) -> str:
    """Return ``name`` if it is an accumulation.

    Raises:
        ValueError: it is none of :data:`ACCUMULATIONS`.
    """
    if name not in ACCUMULATIONS:
        raise ValueError(
            f"accumulation={name!r}: must be one of {', '.join(ACCUMULATIONS)}; use for example"
            f" {ACCUMULATIONS[0]!r}"
        )
    return name


def set_matmul_accumulation(name: str) -> None:
    """Set how the sums of LNS matrix products are taken from now on, in all threads.

    It governs the products of LNSTensors (``@``, mm, bmm, linear) and of the layers of
    :func:`lns_ops.convert_`. A layer of scope ``matmul`` computes its backward products as it
    computed the forward one; the backward products of LNSTensors are products of their own and go
    by the setting when they are computed. Code compiled by ``torch.compile`` may keep the setting
    under which it was compiled: choose first.

    Args:
        name: ``contract`` or ``float32``; see the head of this file.

    Raises:
        ValueError: no such accumulation.
    """
    global _accumulation
    _accumulation = check_accumulation(name)


def get_matmul_accumulation() -> str:
    """Return the current accumulation, ``contract`` unless it was set."""
    return _accumulation


@contextmanager
def matmul_accumulation(name: str) -> Iterator[None]:
    """Set the accumulation for the length of a ``with`` block, in all threads.

    :func:`set_matmul_accumulation` says what it governs.

    Raises:
        ValueError: no such accumulation.
    """
    before = get_matmul_accumulation()
    set_matmul_accumulation(name)
    try:
        yield
    finally:
        set_matmul_accumulation(before)


def set_gradient_accumulation(name: str) -> None:
    """Set how the gradients that reach one tensor are added up from now on, in all threads.

    It governs the gradients of a tensor's uses in a backward pass, where they are more than two,
    and those of several passes that are added to ``p.grad``.

    Args:
        name: ``float32``, where they are added in float32 and the sum is encoded, or ``contract``,
            LNS additions one after the other, of which long sums stick: 512 equal gradients add up
            to 370 times one of them in lns16.

    Raises:
        ValueError: no such accumulation.
    """
    global _of_gradients
    _of_gradients = check_accumulation(name)


def get_gradient_accumulation() -> str:
    """Return how gradients are added up, ``float32`` unless it was set."""
    return _of_gradients
