"""Shared by all tests: one computing thread, and hypothesis without deadlines (kernels compile at their first call)."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LNS_STUDY_COMMAND"] = "lns-study"  # what messages call it, whichever way the tests were started

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("lns", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lns")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One local Ray cluster for the whole session: two CPUs, no dashboard, its own temporary folder."""
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
