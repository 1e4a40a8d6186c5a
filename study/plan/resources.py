"""What this machine has for trials."""

from __future__ import annotations

import os

from study.config import StudyConfig


def local_cpus(study: StudyConfig) -> int:
    """CPUs of the local Ray: the config's, or those this process may use."""
    return study.cpus or len(os.sched_getaffinity(0))
