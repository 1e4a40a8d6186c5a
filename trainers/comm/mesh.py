"""A worker's place in a trial's layout: its coordinates and the process groups it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainers.comm import process_group
from trainers.config.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Place:
    """One worker's coordinates and the groups that it belongs to.

    Attributes:
        dp, pp: number of replicas, and of pipeline stages.
        dp_rank: index of this worker's replica, 0 to dp - 1.
        pp_rank: index of its stage in the replica, 0 to pp - 1.
        dp_group: group of the workers with the same stage, by dp_rank; None without other workers.
        pp_group: group of all stages of this replica, by pp_rank; None at pp=1.
        shards: mesh of the replicas that a model is sharded over; None without ``fsdp``.
        tp_rank: index of this worker's part of the layers in the replica.
        parts: mesh of the workers of this replica, by tp_rank; None at tp=1.
    """

    dp: int = 1
    pp: int = 1
    dp_rank: int = 0
    pp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    shards: DeviceMesh | None = None
    tp_rank: int = 0
    parts: DeviceMesh | None = None


def place(layout: Layout, rank: int, workers: int, device_type: str = "cpu") -> Place:
    """Return the place of ``rank`` among ``workers``.

    Creates the process groups, so every rank must call it. With one worker no group is created; at
    pp=1 the default group is used.
    """
    if workers > 1 and layout.tp > 1:
        mesh = process_group.mesh(device_type, dp=layout.replicas(workers), tp=layout.tp)
        return Place(
            dp=layout.replicas(workers),
            dp_rank=mesh.get_local_rank("dp"),
            dp_group=mesh.get_group("dp"),
            tp_rank=mesh.get_local_rank("tp"),
            parts=mesh["tp"],
        )
    if workers == 1 or layout.pp == 1:
        shards = (
            process_group.mesh(device_type, dp=workers) if layout.fsdp and workers > 1 else None
        )
        return Place(
            dp=workers,
            dp_rank=rank,
            dp_group=dist.group.WORLD if workers > 1 else None,
            shards=shards,
        )
    dp = layout.replicas(workers)
    mesh = process_group.mesh(device_type, pp=layout.pp, dp=dp)
    return Place(
        dp=dp,
        pp=layout.pp,
        dp_rank=mesh.get_local_rank("dp"),
        pp_rank=mesh.get_local_rank("pp"),
        dp_group=mesh.get_group("dp"),
        pp_group=mesh.get_group("pp"),
    )
