"""Data-parallel gradients: after backward, every rank ends with the sum over all ranks.

Float gradients are summed by one all-reduce of a flat float32 buffer. LNS gradients travel as codes, 2 bytes a value: all ranks gather
all codes (as bytes: gloo has no int16) and add them in rank order with the contract's sum. With 64 examples a rank this is
the order in which one process adds its blocks of 64, so the result is the same bits as without data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lns_ops import LNSTensor
from lns_ops import functional as lns


def sum_gradients_(parameters: Iterable[Tensor], finite: bool = True) -> bool:
    """Replace each parameter's gradient by its sum over all ranks; the default process group must exist.

    Args:
        parameters: of the model, the same on every rank.
        finite: False on a rank whose loss is not finite, which may have no gradients.

    Returns:
        Whether all ranks were finite; where one was not, no gradient is touched.
    """
    all_finite = torch.tensor([int(finite)])
    dist.all_reduce(all_finite, op=dist.ReduceOp.MIN)
    if not all_finite:
        return False
    gradients = [p.grad for p in parameters if p.grad is not None]
    codes = [g for g in gradients if isinstance(g, LNSTensor)]
    floats = [g for g in gradients if not isinstance(g, LNSTensor)]
    if codes:
        _sum_codes_(codes)
    if floats:
        _sum_floats_(floats)
    return True


def _sum_floats_(gradients: list[Tensor]) -> None:
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _sum_codes_(gradients: list[LNSTensor]) -> None:
    fmt = gradients[0].fmt
    flat = torch.cat([g.codes.reshape(-1) for g in gradients])
    ranks = dist.get_world_size()
    gathered = torch.empty(ranks * flat.numel(), dtype=torch.int16)
    dist.all_gather_into_tensor(gathered.view(torch.uint8), flat.view(torch.uint8))
    total = lns.sum(gathered.view(ranks, -1), [0], fmt)
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.codes.copy_(part.view_as(gradient.codes))
