"""CPUs of this machine that trials may use."""

from __future__ import annotations

import os

from study.config import StudyConfig


def local_cpus(study: StudyConfig) -> int:
    """Return the CPUs of a local Ray: those of the config, or all that this process may use."""
    return study.cpus or len(os.sched_getaffinity(0))
