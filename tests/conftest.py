"""Shared by all tests: one computing thread, and hypothesis without deadlines (kernels compile at their first call)."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("lns", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lns")
torch.set_num_threads(1)
