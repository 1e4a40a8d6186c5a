"""Random integers for stochastic rounding: computed from a key and a step, the same on all devices.

The definition is :func:`lns_ops.reference.random_bits` (Philox4x32-10). CPUs, and GPUs with CuPy,
compute it with the kernel that LNS updates use. Other devices use about a hundred int64 operations
of torch. A CUDA graph can capture both, after one call outside the capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lns_ops.formats.base import on_gpu

if TYPE_CHECKING:
    from torch import Tensor

_LOW = 0xFFFFFFFF


def random_bits(like: Tensor, key: int, step: Tensor, slot: int = 0) -> Tensor:
    """Return integers uniform in 0 .. 2^16 - 1 (int32), with ``like``'s shape and device.

    >>> import torch
    >>> random_bits(torch.empty(4), key=1, step=torch.tensor(0))
    tensor([ 1648, 58344,  3772, 58634], dtype=torch.int32)

    Args:
        like: tensor with the wanted shape and device.
        key: 64 bits; different for every tensor.
        step: 0-dim integer tensor; different for every use.
        slot: 32 bits; distinguishes several uses within a step.
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
    """Return :func:`lns_ops.reference.random_bits`, with up to seven more values than ``count``.

    Computed with torch operations on ``step``'s device.
    """
    import torch

    block = torch.arange(-(-count // 8), device=step.device)
    a, b = block & _LOW, block >> 32
    c, d = (step.to(torch.int64) & _LOW).expand_as(block), torch.full_like(block, slot)
    low, high = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # all 64 bits, including the sign bit
        a, b, c, d = (
            (second >> 32 & _LOW) ^ b ^ low,
            second & _LOW,
            (first >> 32 & _LOW) ^ d ^ high,
            first & _LOW,
        )
        low, high = low + 0x9E3779B9 & _LOW, high + 0xBB67AE85 & _LOW
    halves = [half for word in (a, b, c, d) for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).to(torch.int32).view(-1)
