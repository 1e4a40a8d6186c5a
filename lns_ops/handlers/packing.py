"""Sequences of several lengths: padded to one, and packed, that is step after step without padding (torch.nn.utils.rnn).

torch's own write values into a new float tensor, which would turn LNS into float32 unasked. Here torch moves places instead of values,
integers whose order is read by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops.tensor import replaces


@replaces(torch._pack_padded_sequence)
def pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """``[T, B, ...]`` (``[B, T, ...]`` if ``batch_first``) of descending lengths to ``[N, ...]`` and the number of sequences a step."""
    places = torch.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)
    packed, sizes = torch._pack_padded_sequence(places, lengths, batch_first)
    return x.flatten(0, 1).index_select(0, packed.reshape(-1).to(x.device)), sizes


@replaces(torch._pad_packed_sequence)
def pad_packed_sequence(
    data: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """What :func:`pack_padded_sequence` undoes, and the lengths."""
    places, lengths = torch._pad_packed_sequence(torch.arange(len(data))[:, None], sizes, batch_first, -1, total_length)
    places = places[..., 0].to(data.device)
    padded = data.index_select(0, places.reshape(-1).clamp_min(0)).unflatten(0, places.shape)
    missing = (places < 0).reshape(*places.shape, *[1] * (data.dim() - 1))
    return padded.masked_fill(missing, padding_value), lengths


@replaces(torch._C._nn.pad_sequence)
def pad_sequence(
    sequences: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Sequences ``[T_i, ...]`` beside each other, filled up to the longest."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r}: must be 'right' or 'left'")
    longest = max(len(s) for s in sequences)
    amounts = [(longest - len(s), 0) if padding_side == "left" else (0, longest - len(s)) for s in sequences]
    padded = [F.pad(s, [0, 0] * (s.dim() - 1) + list(a), value=padding_value) for s, a in zip(sequences, amounts, strict=True)]
    return torch.stack(padded, 0 if batch_first else 1)
