"""The torch.distributed group of one training's workers: how they join it and leave it.

The group is joined before the first trial, and left in a way that lets the process end.
``destroy_process_group`` ends a gloo group's threads only once nothing refers to the group any
more. A thread that remains releases the last tensor that it sent whenever it gets a processor; if
Python is ending by then, it may not take the GIL any more and the process aborts ("terminate called
without an active exception", https://github.com/pytorch/pytorch/pull/179291). Four things would
keep a group alive: meshes, cached here and dropped by :func:`leave`; DTensor's caches, whose keys
hold meshes, which it clears; objects in reference cycles, which it collects; and a module of
torch's own, which is therefore imported below, before there is a group.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

# torch.compile and pipelining import this module late. The default arguments of its functions hold
# the default group that exists at that moment, so it must be imported before a group exists.
import torch.distributed.nn.functional  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainers import _compat

PATIENCE = timedelta(days=7)
"""Timeout of a rank that waits for the others in training.

Replicas may be an epoch apart; a rank that has died ends its gang, and a study's ``heartbeat`` ends
a gang that hangs.
"""


def join(
    backend: str, where: Any, rank: int, world_size: int, timeout: timedelta | None = None
) -> None:
    """Join the other ranks at a URL or a store, by ``torch.distributed.init_process_group``.

    Every rank must call it.

    Args:
        backend: torch's name of the backend.
        where: URL or store.
        rank: this process's rank.
        world_size: number of ranks.
        timeout: time limit for joining only.
    """
    met: dict[str, Any] = {"init_method": where} if isinstance(where, str) else {"store": where}
    dist.init_process_group(backend, **met, timeout=timeout, rank=rank, world_size=world_size)
    wait_in_training()


def wait_in_training(group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a group's collectives, by default of all ranks, to :data:`PATIENCE`;
    torch's defaults of 10 and 30 minutes are too short for training."""
    _compat.set_timeout(PATIENCE, group)


def mesh(device_type: str, **degrees: int) -> DeviceMesh:
    """Return the ranks in dimensions of these names and sizes, for example ``pp=2, dp=3``.

    Several dimensions make groups, so every rank must call it. A mesh is made once for all trials
    that these ranks train with these degrees, because groups are not given back before
    :func:`leave`.
    """
    return _mesh(dist.group.WORLD, device_type, tuple(degrees), tuple(degrees.values()))


@lru_cache(maxsize=8)
def _mesh(
    world: dist.ProcessGroup, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]
) -> DeviceMesh:
    """Make the mesh of :func:`mesh`, with groups whose collectives are patient."""
    made = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for group in made.get_all_groups():
        wait_in_training(group)
    return made


def leave() -> None:
    """End this process's groups.

    Their threads end too, unless the caller keeps an object that refers to a group (a ``Training``
    does).
    """
    _mesh.cache_clear()
    if "torch.distributed.tensor" in sys.modules:  # models in shards or parts load it
        _compat.clear_tensor_caches()
    gc.collect()
    dist.destroy_process_group()


def is_of_peers(error: BaseException) -> bool:
    """Return whether an error comes from a collective, as on all other ranks after one rank died.

    gloo's errors have no class of their own; they begin with their place in its source code.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error).partition("]")[0]
    )
