"""Random integers for stochastic rounding: the same on every device, from a key and a step alone.

The definition is :func:`lns_ops.reference.random_bits` (Philox4x32-10). CPUs compute it by the
kernel that LNS updates use, and so do GPUs with CuPy; elsewhere it is written in torch's int64
operations, some hundred of them. A CUDA graph captures either, after one call outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lns_ops.formats.base import on_gpu

if TYPE_CHECKING:
    from torch import Tensor

_LOW = 0xFFFFFFFF


def random_bits(like: Tensor, key: int, step: Tensor, slot: int = 0) -> Tensor:
    """Return integers uniform in 0 .. 2^16 - 1 (int32), of ``like``'s shape and on its device.

    Args:
        key: 64 bits; another one for every tensor.
        step: 0-dim integer tensor; another one for every use.
        slot: 32 bits; tells several uses within a step apart.
    """
    import torch

    from lns_ops import cpu

    count = like.numel()
    if on_gpu(like.detach()):
        from lns_ops import cuda

        bits = cuda.random_bits(count, key, step.to(like.device), slot)
    elif like.device.type == "cpu":
        bits = torch.from_numpy(cpu.random_bits(count, key, int(step), slot).astype("int32"))
    else:
        bits = _philox(count, key, step.to(like.device), slot)
    return bits[:count].view(like.shape)


def _philox(count: int, key: int, step: Tensor, slot: int) -> Tensor:
    """Return :func:`lns_ops.reference.random_bits`, up to seven more than ``count``.

    It takes torch operations of ``step``'s device.
    """
    import torch

    block = torch.arange(-(-count // 8), device=step.device)
    a, b = block & _LOW, block >> 32
    c, d = (step.to(torch.int64) & _LOW).expand_as(block), torch.full_like(block, slot)
    low, high = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # their 64 bits; the sign bit is one of them
        a, b, c, d = (
            (second >> 32 & _LOW) ^ b ^ low,
            second & _LOW,
            (first >> 32 & _LOW) ^ d ^ high,
            first & _LOW,
        )
        low, high = low + 0x9E3779B9 & _LOW, high + 0xBB67AE85 & _LOW
    halves = [half for word in (a, b, c, d) for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).to(torch.int32).view(-1)
