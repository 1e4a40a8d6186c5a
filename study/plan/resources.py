"""CPUs and GPUs of this machine that trials may use."""

from __future__ import annotations

import os

from study.config import StudyConfig
from trainers.training.device import gpu_models


def local_cpus(study: StudyConfig) -> int:
    """Return the CPUs that a study may use here: the config's ``cpus``, or all of this process."""
    return study.cpus or len(os.sched_getaffinity(0))


def visible_gpus() -> list[str]:
    """Return the names of this machine's GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(index) for index in range(len(gpu_models()))]
