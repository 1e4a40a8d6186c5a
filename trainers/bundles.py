"""What a trial's processes take of a cluster. Loads no torch: who starts processes need not wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainers.config import TrialConfig


class Shape(NamedTuple):
    """What two trials must share to run in the same processes: the keys of :class:`~trainers.config.TrialConfig` of these names."""

    workers: int
    threads: int
    device: str
    gpus: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Shape:
        """From ``TrialConfig.to_dict()``."""
        return cls(*(values[name] for name in cls._fields))

    @property
    def bundles(self) -> list[dict[str, float]]:
        """CPUs and GPUs of every rank: its threads and, on device cuda, a GPU, or a trial's share of one where it is alone."""
        bundle = {"CPU": float(self.threads)}
        if self.device == "cuda":
            bundle["GPU"] = self.gpus if self.workers == 1 else 1.0
        return [bundle] * self.workers


def bundles(config: TrialConfig) -> list[dict[str, float]]:
    """See :attr:`Shape.bundles`."""
    return Shape(config.workers, config.threads, config.device, config.gpus).bundles


def gpus(config: TrialConfig) -> float:
    """GPUs, or the share of one, that all ranks take together."""
    return sum(bundle.get("GPU", 0.0) for bundle in bundles(config))
