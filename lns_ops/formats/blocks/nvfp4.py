"""NVFP4: 4-bit floats, an 8-bit float scale for each block of 16, and one scale a tensor.

A value is ``element x block scale x tensor scale``. The element is an e2m1 number (0, 0.5, 1, 1.5,
2, 3, 4, 6 and their negatives), the block scale is an e4m3 number for 16 values along the last
dimension, and the tensor scale is a float32 number. With ``t`` the largest magnitude of the tensor
and ``b`` the largest of a block::

    tensor scale  s = t / (6 x 448)
    block scale   d = e4m3(b / (6 s))
    element       q = e2m1(x / (d s))

Rounding is to nearest, ties to even; elements beyond 6 become 6. The largest magnitude of a block
always becomes 6 block scales.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (arXiv:2509.25149), appendix on
quantization. There are three differences, which make rounding idempotent:

- The tensor scale is rounded to 18 significant bits. So the product of the three factors is exact
  in float32, in any order. The tensor scale is at least 2^-100.
- A block scale is at least 2^-6, the smallest normal e4m3 number, as in torchao. NVIDIA's kernels
  also use subnormal scales. These have fewer bits, so a block's largest value could become 3 or 4.
  The difference affects blocks whose largest magnitude is below 2^-14.8 of the tensor's.
- Stochastic rounding leaves the largest magnitude of a block at 6 block scales, because it defines
  the scale. All other values within 6 block scales are rounded without bias.

Limits: weights have blocks of 1 x 16 values instead of the published recipe's 16 x 16; there is no
random Hadamard transform; and an operand is rounded once, along its last dimension, for the forward
and the backward products, while a device would round it along each product's inner dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats.base import Encoded, ErrorModel, NumberFormat, as_float32
from lns_ops.formats.floating_point import float8_e4m3fn
from lns_ops.formats.scaling import BLOCK, SCALE_BITS, group_largest, spread
from lns_ops.formats.sized_float import FINITE, SizedFloat
from lns_ops.spec.format import NonFiniteError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ELEMENT = SizedFloat.of(2, 1, FINITE)
"""The format of an element, e2m1."""
BLOCK_LENGTH = 16
"""Number of values of a block."""
SMALLEST_BLOCK_SCALE = 2.0**float8_e4m3fn.min_exponent
"""Smallest block scale: the smallest normal e4m3 number."""
SMALLEST_TENSOR_SCALE = 2.0**-100
"""Smallest tensor scale; with it, products with the other two factors are normal in float32."""
_DROPPED = 6
"""Number of mantissa bits of float32 that the tensor scale leaves to the other two factors."""


@dataclass(frozen=True)
class NVFP4(NumberFormat):
    """The format ``nvfp4``.

    >>> import torch
    >>> NVFP4().quantize(torch.tensor([5.9, 2.4, -0.3, 0.1]))
    tensor([ 5.9000,  1.9667, -0.4917,  0.0000])
    """

    @property
    def name(self) -> str:
        """The name, ``nvfp4``."""
        return "nvfp4"

    @property
    def bits(self) -> float:
        """The width of an element plus its share of the block scale: 4.5."""
        return ELEMENT.bits + SCALE_BITS / BLOCK_LENGTH

    @property
    def storage(self) -> torch.dtype:
        """A byte for each element, in its four low bits."""
        return ELEMENT.storage

    @property
    def error(self) -> ErrorModel:
        """The element's error model in units of the largest magnitude.

        It applies to the tensor's largest magnitude, and to a block's largest if the block scale is
        above the smallest.
        """
        unit = (1 + 2.0**-4) / ELEMENT.largest  # largest scale of a block whose largest is 1
        return ErrorModel(
            relative=ELEMENT.error.relative,
            absolute=ELEMENT.error.absolute * unit,
            smallest=ELEMENT.error.smallest * unit,
            largest=1.0,
            scaled=True,
        )

    def encode(self, x: Tensor, random: Tensor | None = None) -> Encoded:
        """Return the codes of the elements, the block scales and the tensor scale.

        ``scale`` is float8_e4m3fn of shape ``[..., blocks]``, and ``tensor_scale`` float32 without
        dimensions.
        """
        import torch

        x = as_float32(x)
        if x.device.type == "cpu" and bool(x.isnan().any()):
            raise NonFiniteError(
                f"NaN to encode in {self.name}, which has no code for it; clean the input first"
            )
        elements, block_scale, tensor_scale = self._factors(x, random)
        codes = ELEMENT.encode(elements).codes
        return Encoded(codes, block_scale.to(torch.float8_e4m3fn), tensor_scale=tensor_scale)

    def decode(self, encoded: Encoded) -> Tensor:
        """Return the elements times both scales."""
        assert encoded.scale is not None
        assert encoded.tensor_scale is not None
        values = ELEMENT.decode(Encoded(encoded.codes))
        return self._product(values, encoded.scale.float(), encoded.tensor_scale)

    def quantize(self, x: Tensor, random: Tensor | None = None) -> Tensor:
        """Return ``x`` rounded to the format, without computing codes; NaNs stay NaN."""
        return self._product(*self._factors(as_float32(x), random))

    def _product(self, elements: Tensor, block_scale: Tensor, tensor_scale: Tensor) -> Tensor:
        factor = block_scale * tensor_scale
        return elements * spread(factor, elements.shape, BLOCK, BLOCK_LENGTH)

    def _factors(self, x: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return elements, block scales and the tensor scale, all float32."""
        import torch

        largest = group_largest(x, BLOCK, BLOCK_LENGTH)
        tensor_scale = self._tensor_scale(largest)
        wanted = (largest / (tensor_scale * ELEMENT.largest)).nan_to_num(1.0, float8_e4m3fn.largest)
        block_scale = float8_e4m3fn.quantize(
            wanted.clamp(SMALLEST_BLOCK_SCALE, float8_e4m3fn.largest)
        )
        steps = x / spread(block_scale * tensor_scale, x.shape, BLOCK, BLOCK_LENGTH)
        elements = ELEMENT.quantize(steps, random)
        if random is not None:
            defining = torch.where(wanted > SMALLEST_BLOCK_SCALE, largest, torch.inf)
            fixed = x.abs() == spread(defining, x.shape, BLOCK, BLOCK_LENGTH)
            elements = torch.where(fixed, ELEMENT.quantize(steps), elements)
        return elements, block_scale, tensor_scale

    def _tensor_scale(self, largest: Tensor) -> Tensor:
        """Return the tensor scale for the largest magnitudes of all blocks."""
        import torch

        from lns_ops.formats.bit_views import bit_view

        if largest.numel() == 0:
            return largest.new_ones(())
        of_tensor = largest.amax()
        # The divisor is a tensor: GPUs replace division by a constant by multiplication.
        ratio = of_tensor / torch.full_like(of_tensor, ELEMENT.largest * float8_e4m3fn.largest)
        word = bit_view(ratio, torch.int32) + (1 << _DROPPED - 1) & -(1 << _DROPPED)
        rounded = bit_view(word, torch.float32).clamp(min=SMALLEST_TENSOR_SCALE)
        return torch.where(ratio.isfinite(), rounded, 1.0)
