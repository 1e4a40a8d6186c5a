"""What a study does to Ray's processes when it starts them."""

from __future__ import annotations

import subprocess
import sys

from study.ray_session import _own_process_groups

LEADS_A_GROUP = [sys.executable, "-c", "import os; print(os.getpgid(0) == os.getpid())"]


def leads_a_group() -> bool:
    """Whether a process started as Ray starts its own is out of reach of signals to our group."""
    return subprocess.run(LEADS_A_GROUP, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: None).stdout == "True\n"


def test_only_rays_own_processes_leave_our_group() -> None:
    assert not leads_a_group()
    with _own_process_groups():
        assert leads_a_group()
    assert not leads_a_group()
