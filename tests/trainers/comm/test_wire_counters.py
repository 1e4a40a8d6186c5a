"""The bytes that we count equal the bytes that the kernel counts: two processes in a separate
network namespace, on its loopback."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lns_ops import LNSTensor, lns12
from trainers.comm import process_group
from trainers.comm.collectives import Collectives
from trainers.config import TrialConfig
from trainers.config.sync import SyncConfig
from trainers.config.wire import WireConfig
from trainers.sync.all_reduce import GradientSync
from trainers.sync.weight_averaging import OuterStep

WORLD, VALUES, STEPS, PORT = 2, 1_000_000, 5, 29511
EXPECTED = {
    "float32": 4.0,
    "float16": 2.0,
    "lns16": 2.0,
    "native lns": 2.0,
    "int8": 1.0,
    "local SGD every 5": 0.8,
    "fsdp": 6.0,
}
EXPECTED["tp"] = 4.0
"""Bytes per parameter, rank and step; for tp per activation."""


def loopback_up() -> None:
    """A new namespace has its loopback down; flags 0x1 up, 0x40 running (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x41))


def kernel_bytes() -> int:
    """Bytes sent over the loopback so far, by every process of the namespace, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise AssertionError("no loopback")


def steps_of(name: str, collectives: Collectives) -> tuple[object, ...]:
    """Return a function for one step."""
    parameter = nn.Parameter(
        LNSTensor.from_float(torch.ones(VALUES), lns12)
        if name == "native lns"
        else torch.ones(VALUES)
    )
    if name == "local SGD every 5":
        config = replace(
            TrialConfig(workers=WORLD), sync=SyncConfig(name="local_sgd", period=STEPS)
        )
        model = nn.Module()
        model.weight = parameter
        local = OuterStep(config, model, torch.optim.SGD([parameter]), collectives)
        return (lambda: local.after_step(finite=True),)
    if name == "fsdp":
        from trainers.parallel.fsdp import Sharding

        sharded = nn.Sequential(nn.Linear(1000, VALUES // 1000, bias=False))
        Sharding(sharded, process_group.mesh("cpu", dp=WORLD), collectives)
        return (lambda: sharded(torch.ones(1, 1000)).sum().backward(),)
    if name == "tp":
        from trainers.parallel.tensor_parallel import TensorParallel

        cut = nn.Sequential(nn.Linear(2, WORLD), nn.ReLU(), nn.Linear(WORLD, 1000))
        TensorParallel(cut, process_group.mesh("cpu", dp=1, tp=WORLD)["tp"], collectives)
        return (lambda: cut(torch.ones(VALUES // 1000, 2)).sum().backward(),)
    sync = GradientSync(WireConfig(name="native" if name == "native lns" else name), collectives)

    def step() -> None:
        parameter.grad = parameter.detach().clone()
        sync([parameter])

    return (step,)


def in_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    process_group.join("gloo", f"tcp://127.0.0.1:{PORT}", rank, WORLD)
    collectives, found = Collectives(), {}
    for name in EXPECTED:
        (step,) = steps_of(name, collectives)
        dist.barrier()
        before = kernel_bytes(), collectives.sent
        dist.barrier()
        for _ in range(STEPS):
            step()  # type: ignore[operator]
        dist.barrier()
        shares = VALUES * STEPS
        found[name] = (
            (kernel_bytes() - before[0]) / WORLD / shares,
            (collectives.sent - before[1]) / shares,
        )
        dist.barrier()
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps({"pid": os.getpid(), "found": found}))
    process_group.leave()


def namespace() -> list[str]:
    """Return the prefix that runs a command in a separate network namespace; empty if that is not
    permitted."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if (
            shutil.which("unshare")
            and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
        ):
            return command
    return []


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    command, folder = namespace(), tmp_path_factory.mktemp("counters")
    if not command:
        pytest.skip(
            "a network namespace of our own is not permitted here (unshare -n, unshare -rn)"
        )
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(["", *sys.path]),
    }
    subprocess.run(
        [*command, sys.executable, __file__, str(folder)], env=environment, check=True, timeout=120
    )
    result = json.loads((folder / "found.json").read_text())
    assert result["pid"] != os.getpid()
    found: dict[str, list[float]] = result["found"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPECTED))
def test_the_kernel_counts_what_we_count(measured: dict[str, list[float]], name: str) -> None:
    kernel, ours = measured[name]
    assert ours == pytest.approx(EXPECTED[name], rel=0.005)
    assert kernel == pytest.approx(EXPECTED[name], rel=0.02)


if __name__ == "__main__":
    loopback_up()
    mp.spawn(in_worker, args=(sys.argv[1],), nprocs=WORLD)
