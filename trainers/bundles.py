"""What a trial's processes take of a cluster."""

from __future__ import annotations

from trainers.config import TrialConfig


def bundles(config: TrialConfig) -> list[dict[str, float]]:
    """CPUs and GPUs of every rank: its threads and, on device cuda, a GPU, or a trial's share of one where it is alone."""
    bundle = {"CPU": float(config.threads)}
    if config.device == "cuda":
        bundle["GPU"] = config.gpus if config.workers == 1 else 1.0
    return [bundle] * config.workers


def gpus(config: TrialConfig) -> float:
    """GPUs, or the share of one, that all ranks take together."""
    return sum(bundle.get("GPU", 0.0) for bundle in bundles(config))
