"""Wire formats: how values are written into bytes before they travel, and read back.

A codec writes rows of values into rows of bytes. The length in bytes depends only on the number of
values in a row, so every rank knows what to expect::

    format     bytes for m values         error of a value
    float32    4 m                        none
    bfloat16   2 m                        2^-9 relative
    float16    2 m                        2^-11 relative within 6.1e-5 .. 65504 (saturates above)
    lns16      2 m                        half an ulp: a factor of 2^(2^-8)
    codes      2 m, up to 8 bits m        none: the values are LNS codes already
    lns8       m + 4 ceil(m / 1024)       a factor of 2^(1/16), from 2^-15 of the block's largest
                                          value up
    int8       m + 4 ceil(m / 1024)       1/254 of the block's largest value
    topk       8 ceil(fraction m)         all values but the largest are lost

lns8 and int8 scale each block of 1,024 values by its largest; the scale travels as float32. The
last three lose so much that they are used with error feedback (:mod:`trainers.sync.all_reduce`).
Ties and rounding are deterministic, so a run repeats bit for bit.

Sources: 8-bit quantisation with error feedback: F. Seide et al. 2014 (1-bit SGD), S. P. Karimireddy
et al. 2019 (arXiv:1901.09847); top-k: A. Aji, K. Heafield 2017 (arXiv:1704.05021).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lns_ops import LNSFormat, lns8, lns16
from lns_ops import functional as lns
from trainers.config.wire import WireConfig

BLOCK = 1024
"""The number of values that share a scale."""
INVERSE = 1 / 127
"""The step of int8, as a factor.

Where a CPU divides by a constant, a GPU multiplies by its reciprocal, which may differ in the last
bit; a factor gives the same bits on both.
"""


class Codec(ABC):
    """Writes rows of values into rows of bytes, and reads them back, on any device.

    Values are float32, but :class:`CodesCodec` takes and returns int16 codes.
    """

    @abstractmethod
    def size(self, values: int) -> int:
        """Return the bytes that a row of ``values`` values takes."""

    @abstractmethod
    def encode(self, x_NM: Tensor) -> Tensor:
        """Encode values ``[N, M]``, finite, as uint8 ``[N, size(M)]``."""

    @abstractmethod
    def decode(self, payload_NB: Tensor, values: int) -> Tensor:
        """Decode uint8 ``[N, size(values)]`` to values ``[N, values]``."""

    def sum(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return the encoded sum of encoded rows, uint8 ``[1, size(values)]``.

        Rows are added in their order, in float32; a codec with LNS sums adds in LNS.
        """
        return self.encode(sum_rows(self.decode(payload_NB, values)))


def sum_rows(x_NM: Tensor) -> Tensor:
    """Return the float32 sum of the rows, added in their order, as one row: ``[1, M]``."""
    rows: tuple[Tensor, ...] = x_NM.split(1)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of ``x``."""
    return x.contiguous().view(torch.uint8)


def _values(payload_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as values of ``dtype``, copied, because a view needs them aligned."""
    return payload_NB.clone(memory_format=torch.contiguous_format).view(dtype)


@dataclass(frozen=True)
class FloatCodec(Codec):
    """A float type; float16 saturates, so that a large sum does not become an infinity."""

    dtype: torch.dtype = torch.float32

    def size(self, values: int) -> int:
        """Return ``values`` times the type's size."""
        return values * self.dtype.itemsize

    def encode(self, x_NM: Tensor) -> Tensor:
        """Round to nearest."""
        largest = torch.finfo(self.dtype).max
        return _bytes(
            x_NM.clamp(-largest, largest).to(self.dtype)
            if self.dtype == torch.float16
            else x_NM.to(self.dtype)
        )

    def decode(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return the exact values."""
        return payload_NB.contiguous().view(self.dtype).to(torch.float32)


@dataclass(frozen=True)
class CodesCodec(Codec):
    """Values that are LNS codes, int16, and travel as they are.

    With ``lns_sum`` they are added as the arithmetic contract says, else in float32.
    """

    fmt: LNSFormat
    lns_sum: bool = True

    @property
    def _dtype(self) -> torch.dtype:
        """The narrowest integers that hold a code; a code is sign-extended."""
        return torch.int8 if self.fmt.bits <= 8 else torch.int16

    def size(self, values: int) -> int:
        """Return 2 bytes a value, 1 in formats of up to 8 bits."""
        return values * self._dtype.itemsize

    def encode(self, x_NM: Tensor) -> Tensor:
        """Return the bytes of the codes."""
        return _bytes(x_NM.to(self._dtype))

    def decode(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return the same codes."""
        return payload_NB.contiguous().view(self._dtype).to(torch.int16)

    def sum(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return the bytes of the sum's codes; float32 sums are rounded once, at the end."""
        codes_NM = self.decode(payload_NB, values)
        if self.lns_sum:
            return self.encode(lns.sum(codes_NM, [0], self.fmt, keepdim=True))
        return self.encode(_codes(sum_rows(lns.decode(codes_NM, self.fmt)), self.fmt))


@dataclass(frozen=True)
class LNSCodec(Codec):
    """float32 values that travel as LNS codes, and are added as ``codes`` adds them."""

    codes: CodesCodec

    def size(self, values: int) -> int:
        """Return the size of the codes."""
        return self.codes.size(values)

    def encode(self, x_NM: Tensor) -> Tensor:
        """Round to nearest in the logarithm; sums beyond float32 saturate."""
        return self.codes.encode(_codes(x_NM, self.codes.fmt))

    def decode(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return values that are exact enough to encode back to the same codes."""
        return lns.decode(self.codes.decode(payload_NB, values), self.codes.fmt)

    def sum(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return the sum of the codes."""
        return self.codes.sum(payload_NB, values)


def _codes(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the codes of float32 values; infinities, which sums may be, saturate."""
    largest = torch.finfo(torch.float32).max
    return lns.encode(x.clamp(-largest, largest), fmt)


class ScaledCodec(Codec):
    """One byte per value, and a float32 scale for each block of :data:`BLOCK` values.

    Subclasses define the encoding of values in -1 .. 1 as bytes.
    """

    def size(self, values: int) -> int:
        """Return ``values + 4 ceil(values / 1024)``."""
        return values + 4 * math.ceil(values / BLOCK)

    def encode(self, x_NM: Tensor) -> Tensor:
        """Quantise each block, divided by its largest magnitude; a block of zeros has scale 0."""
        rows, values = x_NM.shape
        blocks = torch.nn.functional.pad(x_NM, (0, -values % BLOCK)).view(rows, -1, BLOCK)
        scale = blocks.abs().amax(2, keepdim=True)
        unit = torch.where(scale > 0, blocks / scale.clamp_min(torch.finfo(torch.float32).tiny), 0)
        codes = self._quantise(unit.view(rows, -1)[:, :values].clamp(-1, 1))
        return torch.cat([_bytes(codes), _bytes(scale.view(rows, -1))], 1)

    def decode(self, payload_NB: Tensor, values: int) -> Tensor:
        """Multiply the value of each byte by its block's scale."""
        unit = self._value(payload_NB[:, :values].contiguous().view(torch.int8))
        scale = _values(payload_NB[:, values:], torch.float32)
        return unit * scale.repeat_interleave(BLOCK, 1)[:, :values]

    @abstractmethod
    def _quantise(self, unit_NM: Tensor) -> Tensor:
        """Return the int8 codes of float32 values in -1 .. 1."""

    @abstractmethod
    def _value(self, codes_NM: Tensor) -> Tensor:
        """Return the float32 values of int8 codes."""


class Int8Codec(ScaledCodec):
    """127 equal steps on either side of zero."""

    def _quantise(self, unit_NM: Tensor) -> Tensor:
        return (unit_NM * 127).round().to(torch.int8)

    def _value(self, codes_NM: Tensor) -> Tensor:
        return codes_NM.to(torch.float32) * INVERSE


class LNS8Codec(ScaledCodec):
    """8-bit logarithms: eight steps an octave, from the block's largest value down.

    An lns8 code is a byte, sign-extended.
    """

    def _quantise(self, unit_NM: Tensor) -> Tensor:
        return lns.encode(unit_NM * lns8.largest, lns8).to(torch.int8)

    def _value(self, codes_NM: Tensor) -> Tensor:
        return lns.decode(codes_NM.to(torch.int16), lns8) * (1 / lns8.largest)


@dataclass(frozen=True)
class TopKCodec(Codec):
    """The largest ``fraction`` of a row's values by magnitude, at least one.

    They travel as float32, with their positions as int32.
    """

    fraction: float = 0.01

    def kept(self, values: int) -> int:
        """Return how many of ``values`` values are sent."""
        return min(values, math.ceil(self.fraction * values))

    def size(self, values: int) -> int:
        """Return 8 bytes for each value sent."""
        return 8 * self.kept(values)

    def encode(self, x_NM: Tensor) -> Tensor:
        """Select the largest values; they are sent exactly."""
        places = x_NM.abs().topk(self.kept(x_NM.shape[1]), 1).indices
        return torch.cat([_bytes(x_NM.gather(1, places)), _bytes(places.to(torch.int32))], 1)

    def decode(self, payload_NB: Tensor, values: int) -> Tensor:
        """Put the values sent into their positions; the others are zero."""
        half = payload_NB.shape[1] // 2
        sent, places = (
            _values(payload_NB[:, :half], torch.float32),
            _values(payload_NB[:, half:], torch.int32),
        )
        return sent.new_zeros(len(sent), values).scatter_(1, places.long(), sent)


def make_codec(wire: WireConfig, fmt: LNSFormat | None) -> Codec | None:
    """Return the codec of ``wire``, or None for a plain float32 all-reduce.

    Gradients in LNS go to a :class:`CodesCodec` as codes where the wire's format is theirs; to any
    other codec they go as float32.

    Args:
        wire: the wire format.
        fmt: LNS format of the gradients; None for float32 gradients.
    """
    if wire.name == "native":
        return None if fmt is None else CodesCodec(fmt, lns_sum=wire.sum != "float32")
    of_lns16 = CodesCodec(lns16, lns_sum=wire.sum == "lns")
    codecs: dict[str, Codec] = {
        "float32": FloatCodec(torch.float32),
        "bfloat16": FloatCodec(torch.bfloat16),
        "float16": FloatCodec(torch.float16),
        "lns16": of_lns16 if fmt == lns16 else LNSCodec(of_lns16),
        "lns8": LNS8Codec(),
        "int8": Int8Codec(),
        "topk": TopKCodec(wire.topk),
    }
    return codecs[wire.name]
