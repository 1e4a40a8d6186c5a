"""This machine: the CPUs and GPUs that a study may use, and what of them is free."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

from study.engines.engine import EPSILON
from trainers.workers.resources import WorkerResources

Place = int | None
"""Place of a rank: the index of its GPU on the machine; None without a GPU."""


class Machine:
    """CPUs and GPUs of this machine.

    Args:
        cpus: number of CPUs that may be used.
        names: names of the GPUs for CUDA_VISIBLE_DEVICES.

    Attributes:
        host: name of the machine.
        cpus, names: as given.
        free: CPUs that are not in use.
        gpus: free share of each GPU.
    """

    def __init__(self, cpus: float, names: Sequence[str] = ()) -> None:
        self.host = os.uname().nodename
        self.cpus, self.names = cpus, list(names)
        self.free, self.gpus = cpus, [1.0] * len(names)

    def environment(self, place: Place) -> dict[str, str]:
        """Return the environment variables of a process that computes at ``place``."""
        if not self.names:
            return {}
        return {"CUDA_VISIBLE_DEVICES": "" if place is None else self.names[place]}

    def find(self, shape: WorkerResources) -> list[Place] | None:
        """Return free places for all ranks of a trial, on the emptiest GPUs; None without room."""
        cpus, gpus = self.free, list(self.gpus)
        places: list[Place] = []
        for bundle in shape.bundles:
            cpus -= bundle["CPU"]
            if cpus < -EPSILON:
                return None
            if "GPU" not in bundle:
                places.append(None)
                continue
            gpu = max(range(len(gpus)), key=lambda index: gpus[index], default=None)
            if gpu is None or gpus[gpu] + EPSILON < bundle["GPU"]:
                return None
            gpus[gpu] -= bundle["GPU"]
            places.append(gpu)
        return places

    def fits(self, shape: WorkerResources, places: Sequence[Place]) -> bool:
        """Tell whether exactly these places are free."""
        need: dict[Place, float] = defaultdict(float)
        for place, bundle in zip(places, shape.bundles, strict=True):
            need[place] += bundle.get("GPU", 0.0)
        return shape.cpus <= self.free + EPSILON and all(
            place is None or share <= self.gpus[place] + EPSILON for place, share in need.items()
        )

    def take(self, shape: WorkerResources, places: Sequence[Place]) -> None:
        """Note that a trial holds these places."""
        self._change(shape, places, -1.0)

    def give_back(self, shape: WorkerResources, places: Sequence[Place]) -> None:
        """Note that a trial holds these places no more."""
        self._change(shape, places, 1.0)

    def _change(self, shape: WorkerResources, places: Sequence[Place], sign: float) -> None:
        for place, bundle in zip(places, shape.bundles, strict=True):
            self.free += sign * bundle["CPU"]
            if place is not None:
                self.gpus[place] += sign * bundle["GPU"]
