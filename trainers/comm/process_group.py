"""The torch.distributed group of one training's workers: joined before the first trial, left in a
way that lets the process end.

``destroy_process_group`` ends a gloo group's threads only once nothing refers to the group any
more. A thread that is left lets go of the last tensor it sent whenever it gets a processor; if
Python is ending by then, it may not take the GIL any more and the process aborts ("terminate called
without an active exception", https://github.com/pytorch/pytorch/pull/179291). Four things used to
keep a group: meshes, cached here and dropped by :func:`leave`; caches of DTensor's, by mesh, which
it clears; objects in reference cycles, which it collects; and a module of torch's own, below.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

# torch imports this module by itself, late (torch.compile and pipelining do). Its functions take
# the default group of the moment it is imported as the default of an argument, so it must be
# imported while there is none.
import torch.distributed.nn.functional  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainers import _compat

PATIENCE = timedelta(days=7)
"""How long a rank waits for the others in training. Replicas may be an epoch apart; a rank that has
died ends its gang, and a study's ``heartbeat`` one that hangs."""


def join(
    backend: str, where: Any, rank: int, world_size: int, timeout: timedelta | None = None
) -> None:
    """Meet the other ranks, at a URL or a store; every one of them must call it, as
    ``torch.distributed.init_process_group``.

    Args:
        timeout: of the meeting alone.
    """
    met: dict[str, Any] = {"init_method": where} if isinstance(where, str) else {"store": where}
    dist.init_process_group(backend, **met, timeout=timeout, rank=rank, world_size=world_size)
    wait_in_training()


def wait_in_training(group: dist.ProcessGroup | None = None) -> None:
    """Have collectives of ``group``, by default of all ranks, wait for :data:`PATIENCE`; torch's
    own 10 and 30 minutes end training."""
    _compat.set_timeout(PATIENCE, group)


def mesh(device_type: str, **degrees: int) -> DeviceMesh:
    """The ranks in dimensions of these names and sizes, ``pp=2, dp=3``; makes groups where there
    are several, so every rank must call it.

    Made once for all trials that these ranks train with these degrees: groups are not given back
    before :func:`leave`.
    """
    return _mesh(dist.group.WORLD, device_type, tuple(degrees), tuple(degrees.values()))


@lru_cache(maxsize=8)
def _mesh(
    world: dist.ProcessGroup, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]
) -> DeviceMesh:
    made = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for group in made.get_all_groups():
        wait_in_training(group)
    return made


def leave() -> None:
    """End this process's groups and, where the caller keeps nothing that refers to them (a
    ``Training`` does), their threads."""
    _mesh.cache_clear()
    if "torch.distributed.tensor" in sys.modules:  # models in shards or parts load it
        _compat.clear_tensor_caches()
    gc.collect()
    dist.destroy_process_group()
