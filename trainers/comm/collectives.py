"""The collectives of one process group, with every byte that this rank sends counted.

The count is the algorithm's payload in bytes sent by this rank. In a group of N, ``all_to_all``,
``all_gather`` and a ring ``reduce_scatter`` send N - 1 parts, and a ring ``all_reduce`` of B bytes
sends ``2 (N - 1) / N B``, as gloo and NCCL do for large buffers. Transport headers are not counted
(about 0.1 % over loopback; ``tests/trainers/comm/test_wire_counters.py`` compares with the kernel's
own counters).

Payloads of codecs are uint8: neither gloo nor NCCL has collectives for int16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.telemetry.spans import Spans

# torch 2.13 renamed these functions; the old names warn since.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The collectives of ``group`` (the default group if None), which must exist.

    Tensors are on ``device``; ``spans`` times the collectives.

    Attributes:
        size, rank: size of the group, and this process's rank in it.
        sent: bytes that this rank has sent so far.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        spans: Spans | None = None,
    ) -> None:
        self.group, self.device, self.spans = group, torch.device(device), spans or Spans()
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = 0

    def all_to_all(self, parts_NB: Tensor) -> Tensor:
        """Send row ``i`` to rank ``i`` and return the rows received, in rank order.

        uint8 ``[N, B]`` both.
        """
        received = torch.empty_like(parts_NB)
        with self.spans("communication", "all_to_all"):
            dist.all_to_all_single(received, parts_NB, group=self.group)
        self.sent += (self.size - 1) * parts_NB.shape[1]
        return received

    def all_gather(self, part_B: Tensor) -> Tensor:
        """Gather the parts of all ranks in rank order: uint8 ``[B]`` to ``[N, B]``."""
        gathered_NB = part_B.new_empty(self.size, part_B.numel())
        with self.spans("communication", "all_gather"):
            dist.all_gather(list(gathered_NB), part_B, group=self.group)
        self.sent += (self.size - 1) * part_B.numel()
        return gathered_NB

    def all_gather_into(self, whole: Tensor, part: Tensor) -> None:
        """Fill ``whole`` (floats ``[N M]``) with all ranks' parts (``[M]``) in rank order."""
        with self.spans("communication", "all_gather"):
            _all_gather(whole, part, group=self.group)
        self.sent += (self.size - 1) * part.nbytes

    def reduce_scatter_into(self, part: Tensor, whole: Tensor) -> None:
        """Fill ``part`` with this rank's part of the sum of all ranks' ``whole``.

        Floats ``[M]`` and ``[N M]``. On CPUs it is an all-to-all and a sum in rank order, because
        gloo's own reduce-scatter sends as much as an all-reduce.
        """
        with self.spans("communication", "reduce_scatter"):
            if self.device.type == "cpu":
                received = torch.empty_like(whole)
                dist.all_to_all_single(received, whole, group=self.group)
                torch.sum(received.view(self.size, -1), 0, out=part)
            else:
                _reduce_scatter(part, whole, group=self.group)
        self.sent += (self.size - 1) * part.nbytes

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace ``x`` (any float) by its sum over the ranks, the same bits on each; return it."""
        with self.spans("communication", "all_reduce"):
            dist.all_reduce(x, group=self.group)
        self.sent += 2 * (self.size - 1) * x.numel() * x.element_size() // self.size
        return x

    def all_true(self, value: bool) -> bool:
        """Return whether ``value`` is true on every rank; sends one int64 per rank."""
        flag = torch.tensor([int(value)], device=self.device)
        with self.spans("communication", "all_true"):
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        self.sent += 2 * (self.size - 1) * flag.element_size() // self.size
        return bool(flag)
