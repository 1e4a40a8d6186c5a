"""The interface of number formats: name, width, encoding, decoding, rounding, error model.

A format maps float32 values to *codes* (and a scale, where values share one) and back.
:meth:`NumberFormat.quantize` is both in one: the values of a tensor on the format's grid, as
float32, which carries every value of every format here exactly. It is what training in a simulated
format (:mod:`lns_ops.nn.simulate`) is made of, so its contract is tested for all formats alike:
idempotent, monotone, within the error model, the same bits on every device.

What a format is needs no torch, only what it does to a tensor: programs that check a name or
compare widths import these modules without it.
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
        relative: unit roundoff, of values that are neither tiny nor too large; 0 for formats with
            even steps.
        absolute: half the smallest step, or the smallest magnitude where what is below it becomes
            zero.
        smallest: smallest positive magnitude.
        largest: largest magnitude; what is above saturates (or is infinite, where the format has
            infinities).
        scaled: ``absolute``, ``smallest`` and ``largest`` are in units of the largest magnitude
            among the values that share a scale.
    """

    relative: float
    absolute: float
    smallest: float
    largest: float
    scaled: bool = False

    def bound(self, x: Tensor, group: Tensor | float = 1.0) -> Tensor:
        """Return the largest error of each of ``x`` within the range.

        ``group`` is the largest magnitude that shares its scale (if scaled).
        """
        import torch

        unit = torch.as_tensor(group if self.scaled else 1.0, dtype=torch.float64, device=x.device)
        return torch.maximum(self.relative * x.double().abs(), self.absolute * unit)


@dataclass(frozen=True)
class Encoded:
    """The codes of a tensor: what a device would store.

    Attributes:
        codes: in the format's :attr:`NumberFormat.storage`.
        scale: float32, broadcasts over the codes: a value is the code's times it; None for formats
            without one. Of MX and NVFP4, one number a block.
        tensor_scale: float32 without dimensions, the factor of the whole tensor in formats with two
            scales (NVFP4); None for others.
        shape: shape of the values, where codes are padded or packed (MX).
    """

    codes: Tensor
    scale: Tensor | None = None
    shape: tuple[int, ...] | None = None
    tensor_scale: Tensor | None = None


class NumberFormat(ABC):
    """A number format, immutable, equal by value, safe to share.

    :func:`lns_ops.formats.parse` makes one from its name.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that :func:`~lns_ops.formats.parse` reads back."""

    @property
    @abstractmethod
    def bits(self) -> float:
        """The bits that a value takes, its share of a scale per block included.

        A scale per tensor or channel is not counted.
        """

    @property
    @abstractmethod
    def storage(self) -> torch.dtype:
        """The dtype of codes; wider than ``bits`` where torch has no narrower one."""

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
                (:func:`lns_ops.formats.random_bits`): round to one of the two neighbours, so that
                the expected value is ``x`` to 2^-16 of a step; None rounds to nearest.

        Raises:
            NonFiniteError: a NaN (everywhere) or an infinity (in LNS), where the format has no code
                for it; on a CPU.
            ValueError: ``x`` is not a float tensor.
        """

    @abstractmethod
    def decode(self, encoded: Encoded) -> Tensor:
        """Return the values of codes, float32, exact."""

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``decode(encode(x))`` as a new float32 tensor; a NaN stays one."""
        return self.decode(self.encode(x, random))

    def quantize_(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Quantize ``x`` in place, outside of any graph, as :meth:`quantize` does; return ``x``."""
        import torch

        with torch.no_grad():
            return x.copy_(self.quantize(x, random))

    @property
    def kernel(self) -> LNSFormat | tuple[int, int] | None:
        """What the kernels of :mod:`lns_ops.cpu` and :mod:`lns_ops.cuda` take for the format; None
        if it has none."""
        return None

    @property
    def compensation(self) -> NumberFormat:
        """The format of Kahan compensations beside weights of this one, of the same width."""
        return self

    @property
    def full_scale(self) -> float:
        """The magnitude to which a scale takes the largest of a group, or a little less."""
        return self.error.largest

    @property
    def overflows(self) -> bool:
        """Whether gradients need loss scaling: a narrow range with infinities at its end."""
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
    """Round ``steps`` to whole numbers, up with the chance ``steps - floor(steps)``.

    ``steps`` are values in units of their own step.
    """
    low = steps.floor()
    return low + (((steps - low) * 65536).floor() + random >= 65536)


def is_plain(x: Tensor) -> bool:
    """Return whether a kernel can take the memory of ``x``: no subclass, none of the tensors that
    torch.func's transforms pass, no view that negates, and not where torch traces or records."""
    import torch

    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    from lns_ops._compat import is_recorded

    if is_recorded() or x.is_neg():
        return False
    try:
        return x.data_ptr() != 0 or x.numel() == 0  # 0 of torch.func.functionalize
    except RuntimeError:  # of torch.vmap and torch.func.grad
        return False


def eager_values(x: Tensor) -> Any:
    """Return float32 as an array that a CPU kernel takes, which shares its memory if it can; None
    elsewhere than on a CPU, or where torch traces."""
    if x.device.type != "cpu" or not is_plain(x):
        return None
    from lns_ops.functional.elementwise import values_of

    return values_of(x.contiguous())


def on_gpu(x: Tensor) -> bool:
    """Return whether a kernel of :mod:`lns_ops.cuda` can take ``x``."""
    return x.is_cuda and is_plain(x) and _has_cupy()


@lru_cache(maxsize=1)
def _has_cupy() -> bool:
    import torch

    from lns_ops import cuda

    return torch.version.cuda is not None and cuda.unavailable() is None
