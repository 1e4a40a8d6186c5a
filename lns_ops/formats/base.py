"""The interface of number formats: name, width, encoding, decoding, rounding, error model.

A format maps float32 values to *codes* (and a scale, if values share one) and back.
:meth:`NumberFormat.quantize` does both: it returns the nearest values of the format, as float32,
which represents all values of all formats here exactly. Training in a simulated format
(:mod:`lns_ops.nn.simulate`) is based on it, so the tests check it for all formats: it is
idempotent, monotone, within the error model, and gives the same bits on every device.

Only operations on tensors need torch. Programs that check a name or compare widths import these
modules without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lns_ops.spec.format import LNSFormat


@dataclass(frozen=True, kw_only=True)
class ErrorModel:
    """The error of rounding to nearest: ``|q(x) - x| <= max(relative |x|, absolute)``.

    It holds for ``|x| <= largest``.

    Attributes:
        relative: unit roundoff, for values well inside the range; 0 for formats with constant
            steps.
        absolute: half the smallest step, or the smallest magnitude if smaller values become zero.
        smallest: smallest positive magnitude.
        largest: largest magnitude; larger values saturate (or become infinite, if the format has
            infinities).
        scaled: whether ``absolute``, ``smallest`` and ``largest`` are in units of the largest
            magnitude of a group, that is, of the values that share a scale.
    """

    relative: float
    absolute: float
    smallest: float
    largest: float
    scaled: bool = False

    def bound(self, x: Tensor, group: Tensor | float = 1.0) -> Tensor:
        """Return the largest possible error of each value in ``x``, within the range.

        ``group`` is the largest magnitude of the value's group (if scaled).
        """
        import torch

        unit = torch.as_tensor(group if self.scaled else 1.0, dtype=torch.float64, device=x.device)
        return torch.maximum(self.relative * x.double().abs(), self.absolute * unit)


@dataclass(frozen=True)
class Encoded:
    """The codes of a tensor, as a device would store them.

    Attributes:
        codes: in the format's :attr:`NumberFormat.storage`.
        scale: float32, broadcasts over the codes and multiplies their values; None for formats
            without a scale. For MX and NVFP4, one scale a block.
        tensor_scale: float32 without dimensions, the factor of the whole tensor in formats with two
            scales (NVFP4); None for other formats.
        shape: shape of the values, if codes are padded or packed (MX).
    """

    codes: Tensor
    scale: Tensor | None = None
    shape: tuple[int, ...] | None = None
    tensor_scale: Tensor | None = None


class NumberFormat(ABC):
    """A number format: immutable, compared by value, safe to share.

    :func:`lns_ops.formats.parse` creates one from its name.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that :func:`~lns_ops.formats.parse` accepts."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """The bits per value, including its share of a block's scale.

        A scale per tensor or channel is not counted.
        """

    @property
    @abstractmethod
    def storage(self) -> torch.dtype:
        """The dtype of codes; wider than ``bits`` if torch has no narrower dtype."""

    @property
    @abstractmethod
    def error(self) -> ErrorModel:
        """The error of rounding to nearest."""

    @abstractmethod
    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the codes of ``x``, rounded to nearest or at random.

        Args:
            x: float tensor of any shape.
            random: integers uniform in 0 .. 2^16 - 1, of ``x``'s shape
                (:func:`lns_ops.formats.random_bits`). If given, each value is rounded to one of its
                two neighbours, with the expected value ``x`` up to 2^-16 of a step; None rounds to
                nearest.

        Raises:
            NonFiniteError: on a CPU, if ``x`` contains a NaN (or, in LNS, an infinity) for which
                the format has no code.
            ValueError: ``x`` is not a float tensor.
        """

    @abstractmethod
    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes, float32, exact."""

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``decode(encode(x))`` as a new float32 tensor; NaNs stay NaN."""
        return self.decode(self.encode(x, random))

    def quantize_(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Quantize ``x`` in place, without autograd, as :meth:`quantize` does; return ``x``."""
        import torch

        with torch.no_grad():
            return x.copy_(self.quantize(x, random))

    @property
    def kernel(self) -> LNSFormat | tuple[int, int] | None:
        """The format's parameters for the kernels of :mod:`lns_ops.cpu` and :mod:`lns_ops.cuda`;
        None if they do not support it."""
        return None

    @property
    def compensation(self) -> NumberFormat:
        """The format of Kahan compensations for weights in this format; it has the same width."""
        return self

    @property
    def full_scale(self) -> float:
        """The magnitude to which a scale maps a group's largest magnitude, or a little less."""
        return self.error.largest

    @property
    def overflows(self) -> bool:
        """Whether gradients need loss scaling: the range is narrow and ends with infinities."""
        return False

    def __str__(self) -> str:
        return self.name


def as_float32(x: Tensor) -> Tensor:
    """Return ``x`` as float32, detached from any graph.

    Rounding has no derivative; :mod:`lns_ops.nn.simulate` gives it one.

    Raises:
        ValueError: not a float tensor.
    """
    if not x.is_floating_point():
        raise ValueError(
            f"x has dtype {str(x.dtype).removeprefix('torch.')}: must be a float tensor; use"
            " x.float()"
        )
    return x.detach().float().resolve_neg()


def randomly_up(steps: Tensor, random: Tensor) -> Tensor:
    """Round ``steps`` to whole numbers, up with probability ``steps - floor(steps)``.

    ``steps`` are values in units of their step size.
    """
    low = steps.floor()
    return low + (((steps - low) * 65536).floor() + random >= 65536)


def is_plain(x: Tensor) -> bool:
    """Return whether a kernel can use the memory of ``x``: no subclass, no functorch wrapper, no
    negating view, and torch does not trace or record."""
    import torch

    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    from lns_ops._compat import is_recorded

    if is_recorded() or x.is_neg():
        return False
    try:
        return x.data_ptr() != 0 or x.numel() == 0  # 0 in torch.func.functionalize
    except RuntimeError:  # in torch.vmap and torch.func.grad
        return False


def eager_values(x: Tensor) -> Any:
    """Return float32 values as an array for a CPU kernel, sharing memory if possible; None on
    another device, or if torch traces."""
    if x.device.type != "cpu" or not is_plain(x):
        return None
    from lns_ops.functional.elementwise import values_of

    return values_of(x.contiguous())


def on_gpu(x: Tensor) -> bool:
    """Return whether a kernel of :mod:`lns_ops.cuda` accepts ``x``."""
    return x.is_cuda and is_plain(x) and _has_cupy()


@lru_cache(maxsize=1)
def _has_cupy() -> bool:
    import torch

    from lns_ops import cuda

    return torch.version.cuda is not None and cuda.unavailable() is None
