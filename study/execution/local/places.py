"""Where a trial's ranks fit on leases."""

from __future__ import annotations

from collections import defaultdict

from study.execution.engine import EPSILON
from study.execution.local.leases import Lease
from trainers.workers.resources import WorkerResources

Spot = tuple[Lease, int | None]
"""Place of a rank: the lease, and the index of the GPU among those of the lease."""


def find(shape: WorkerResources, leases: list[Lease]) -> list[Spot] | None:
    """Return free places for all ranks on some machines, or None."""
    cpus = {id(lease): lease.free for lease in leases}
    gpus = {id(lease): list(lease.gpus) for lease in leases}
    spots: list[Spot] = []
    for bundle in shape.bundles:
        found = (_spot(lease, bundle, cpus[id(lease)], gpus[id(lease)]) for lease in leases)
        spot = next(filter(None, found), None)
        if spot is None:
            return None
        spots.append(spot)
        lease, gpu = spot
        cpus[id(lease)] -= bundle["CPU"]
        if gpu is not None:
            gpus[id(lease)][gpu] -= bundle["GPU"]
    return spots


def _spot(lease: Lease, bundle: dict[str, float], cpus: float, gpus: list[float]) -> Spot | None:
    if cpus + EPSILON < bundle["CPU"]:
        return None
    if "GPU" not in bundle:
        return lease, None
    gpu = max(range(len(gpus)), key=lambda index: gpus[index], default=None)
    free = 0.0 if gpu is None else min(gpus[gpu], sum(gpus) - lease.lost)
    return (lease, gpu) if free + EPSILON >= bundle["GPU"] else None


def fits(shape: WorkerResources, spots: list[Spot]) -> bool:
    """Tell whether exactly these places are free, on machines that stay."""
    need: dict[tuple[int, int | None], float] = defaultdict(float)
    for (lease, gpu), bundle in zip(spots, shape.bundles, strict=True):
        need[id(lease), None] += bundle["CPU"]
        if gpu is not None:
            need[id(lease), gpu] += bundle["GPU"]
            need[id(lease), -1] += bundle["GPU"]  # of all
    return all(
        need[id(lease), None] <= lease.free + EPSILON
        and (gpu is None or need[id(lease), gpu] <= lease.gpus[gpu] + EPSILON)
        and (gpu is None or need[id(lease), -1] <= lease.free_gpus + EPSILON)
        and not lease.draining
        for lease, gpu in spots
    )
