"""What a trial's processes take of a cluster. Loads no torch: who starts processes need not wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainers.config import TrialConfig

MOST = 32
"""Trials at once in a process: CUDA streams that torch gives one."""


class Shape(NamedTuple):
    """What two trials must share to run in the same processes: the keys of :class:`~trainers.config.TrialConfig` of these names, and
    where several share one process at the same time, the settings that are a process's (``packed``; "" where a process is a trial's alone).
    """

    workers: int
    threads: int
    device: str
    gpus: float
    packed: str = ""

    @classmethod
    def of(cls, config: TrialConfig, *, packed: bool = False) -> Shape:
        """Of a trial; ``packed`` where it may share a process with others."""
        together = str(key_of(config)) if packed and config.workers == 1 else ""
        return cls(config.workers, config.threads, config.device, config.gpus, together)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """CPUs and GPUs of every rank: its threads and, on device cuda, a GPU, or a trial's share of one where it is alone."""
        bundle = {"CPU": float(self.threads)}
        if self.device == "cuda":
            bundle["GPU"] = self.gpus if self.workers == 1 else 1.0
        return [bundle] * self.workers

    @property
    def cpus(self) -> float:
        """CPUs that all ranks take together."""
        return sum(bundle["CPU"] for bundle in self.bundles)

    @property
    def gpus_in_all(self) -> float:
        """GPUs, or the share of one, that all ranks take together."""
        return sum(bundle.get("GPU", 0.0) for bundle in self.bundles)

    @property
    def lanes(self) -> int:
        """Trials at once in a process."""
        return MOST if self.packed else 1


def key_of(config: TrialConfig) -> tuple[Any, ...]:
    """What trials must share to run in one process at the same time: settings that are the process's."""
    return (config.device, config.threads, config.precision.accumulation)


def gpus_of(values: Mapping[str, Any]) -> float:
    """GPUs, or the share of one, that all ranks of a trial take together; ``values`` as of ``TrialConfig.to_dict()``."""
    if values["device"] != "cuda":
        return 0.0
    return float(values["gpus"]) if values["workers"] == 1 else float(values["workers"])


def cpus_of(values: Mapping[str, Any]) -> int:
    """CPUs that all ranks take together."""
    return int(values["workers"]) * int(values["threads"])
