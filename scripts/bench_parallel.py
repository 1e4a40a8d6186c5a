"""Measure parallel training: bytes and time of wire formats, bubbles of schedules, scaling of GPUs.

    python scripts/bench_parallel.py wire       two processes over gloo on this machine's CPUs
    python scripts/bench_parallel.py codes      two replicas in LNS whose gradients travel as codes,
                                                in turn with the float32 wire
    python scripts/bench_parallel.py overlap    two replicas whose gradients leave after backward,
                                                or in buckets while it runs
    python scripts/bench_parallel.py bubble     pipelines of 2 and 4 stages that sleep instead of
                                                computing, in every schedule
    python scripts/bench_parallel.py gpu        one GPU against two or more over NCCL, replicas and
                                                stages
    python scripts/bench_parallel.py memory     GPUs again: time and memory of replicas, shards, cut
                                                layers, and state kept on the CPU

A slow network for ``overlap``::

    unshare -rn sh -c "ip link set lo up;
                       tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms;
                       GLOO_SOCKET_IFNAME=lo python scripts/bench_parallel.py overlap"

``--json FILE`` keeps the figures. Times are medians over repetitions after warm-up; every figure is
of real processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lns_ops import LNSTensor, cpu, lns12
from trainers.comm import process_group
from trainers.comm.collectives import Collectives
from trainers.comm.mesh import place
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.memory import MemoryConfig
from trainers.config.optimizer import OptimizerConfig
from trainers.config.wire import FORMATS, WireConfig
from trainers.data import Split
from trainers.models import build
from trainers.models.init import initialize_
from trainers.models.precision import apply_precision
from trainers.optim.build import make_optimizer
from trainers.parallel.pipeline import Pipeline
from trainers.parallel.pipeline_zero_bubble import Deferred
from trainers.sync.base import Synchroniser
from trainers.sync.synchronous import Synchronous
from trainers.training.step import train_step
from trainers.training.trainer import Training

MLP = 784 * 512 + 512 + 512 * 10 + 10
"""The number of parameters of 784-512-10."""
FORWARD_SECONDS = INPUT_SECONDS = WEIGHT_SECONDS = 0.1
"""The seconds that a worker sleeps for a micro-batch: forward, for the gradient of its input, and
for the gradients of its weights."""
WIDE = 4096
DEPTH = 6
GPU_BATCH = 4096
PRECISIONS = {
    "float32": PrecisionConfig(),
    "lns12 + kahan": PrecisionConfig(format="lns12", kahan_sum=True),
}


@dataclass(frozen=True)
class Job:
    """The work of every process: ``work(rank, world)``, whose results on rank 0 are kept."""

    work: Callable[[int, int], list[dict[str, Any]]]
    world: int
    backend: str = "gloo"


def in_process(rank: int, job: Job, folder: str) -> None:
    torch.set_num_threads(1)
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
    if job.world > 1:
        process_group.join(job.backend, f"file://{folder}/store", rank, job.world)
    figures = job.work(rank, job.world)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    if job.world > 1:
        process_group.leave()


def run(job: Job) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_process, args=(job, folder), nprocs=job.world)
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(job.world)
        ]
    for row in ranks[0]:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            ),
            flush=True,
        )
    return list(ranks[0])


def median_ms(step: Callable[[], object], repetitions: int, wait: Callable[[], object]) -> float:
    return statistics.median(times_ms(step, repetitions, wait))


def times_ms(
    step: Callable[[], object], repetitions: int, wait: Callable[[], object]
) -> list[float]:
    times = []
    for repetition in range(repetitions + 2):
        wait()
        start = time.perf_counter()
        step()
        wait()
        if repetition >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def wires(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure one sum of 407,050 gradients in every format."""
    rows = []
    for name, kind in [(name, "float32") for name in FORMATS] + [
        ("native", "lns12"),
        ("lns16", "lns12"),
        ("int8", "lns12"),
    ]:
        collectives = Collectives()
        sync = Synchronous(WireConfig(name=name), collectives, 0)
        values = torch.randn(512, MLP // 512, generator=torch.Generator().manual_seed(rank))
        gradient = values if kind == "float32" else LNSTensor.from_float(values, lns12)
        parameter = nn.Parameter(torch.zeros_like(gradient))

        def step() -> None:
            parameter.grad = gradient.clone()
            sync.gradients([parameter], finite=True)

        milliseconds = median_ms(step, 20, dist.barrier)
        before = collectives.sent
        step()
        sent = (collectives.sent - before) / parameter.numel()
        rows.append(
            {
                "gradients": kind,
                "wire": name,
                "bytes a parameter, rank and step": sent,
                "ms": milliseconds,
            }
        )
    return rows


def converted(action: Callable[[], object]) -> int:
    """Return the number of values that ``action`` encodes and decodes on the CPU."""
    with (
        patch.object(cpu, "encode", wraps=cpu.encode) as encode,
        patch.object(cpu, "decode", wraps=cpu.decode) as decode,
    ):
        action()
    return sum(call.args[0].size for call in (*encode.call_args_list, *decode.call_args_list))


def as_codes(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure training steps of 784-512-10 and their exchanges of gradients over two wires in turn.

    Each replica has 64 examples. A turn takes the median of three; ratios are medians of 25 turns.
    """
    batch, rows = examples(rank, 64, "cpu"), []
    for kind in ("lns16", "lns12", "lns8"):
        timed: list[Callable[[], object]] = []
        counted = []
        for wire in ("float32", "native"):
            precision, collectives = PrecisionConfig(format=kind), Collectives()
            model = initialize_(build(ModelConfig(hidden=[512]), 784, 10), 0)
            model = apply_precision(model, precision)
            optimizer = make_optimizer(model, OptimizerConfig(lr=1.0), precision, 64 * world)
            sync = Synchronous(WireConfig(name=wire), collectives, 0)
            exchange = partial(sync.gradients, list(model.parameters()), finite=True)
            step = partial(train_step, model, optimizer, batch, sync)
            timed += [step, exchange]
            step()
            before, values = collectives.sent, converted(exchange)
            counted.append((wire, (collectives.sent - before) / MLP, values / MLP))
        turns = [[median_ms(one, 3, dist.barrier) for one in timed] for _ in range(25)]
        for index, (wire, sent, values) in enumerate(counted):
            row: dict[str, Any] = {"arithmetic": kind, "wire": wire}
            row |= {"bytes a parameter": sent, "conversions of a value": values}
            for what, column in (("step", 0), ("exchange", 1)):
                own, base = 2 * index + column, column
                row[f"ms {what}"] = statistics.median(turn[own] for turn in turns)
                row[f"{what} / float32"] = statistics.median(t[own] / t[base] for t in turns)
            rows.append(row)
    return rows


def overlaps(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure steps of 784-512-512-512-10, 128 examples a replica."""
    rows = []
    batch = examples(rank, 128, "cpu")
    for kind, precision in PRECISIONS.items():
        for cap, overlap in ((None, True), (1.0, False), (1.0, True)):
            model = apply_precision(
                initialize_(build(ModelConfig(hidden=[512] * 3), 784, 10), 0), precision
            )
            optimizer = make_optimizer(model, OptimizerConfig(lr=0.1), precision, 128 * world)
            wire = WireConfig(bucket_cap_mb=cap, overlap=overlap)
            sync = Synchronous(wire, Collectives(), 0, model.parameters())
            milliseconds = median_ms(
                lambda: train_step(model, optimizer, batch, sync), 20, dist.barrier
            )
            how = (
                "at once"
                if cap is None
                else (
                    f"buckets of {cap:g} MB,"
                    f" {'while backward runs' if overlap else 'after backward'}"
                )
            )
            rows.append({"arithmetic": kind, "gradients": how, "ms a step": milliseconds})
        alone = median_ms(
            lambda: train_step(model, optimizer, batch, Synchroniser()), 20, dist.barrier
        )
        rows.append({"arithmetic": kind, "gradients": "stay", "ms a step": alone})
    return rows


class Sleep(torch.autograd.Function):
    """A function that sleeps in both directions.

    Where there is a queue, the weights' share of backward is deferred to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Sleeper) -> Tensor:
        ctx.layer = layer
        time.sleep(FORWARD_SECONDS * layer.share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        time.sleep(INPUT_SECONDS * layer.share)
        if layer.deferred is None:
            time.sleep(WEIGHT_SECONDS * layer.share)
        else:
            layer.deferred.put(lambda: time.sleep(WEIGHT_SECONDS * layer.share))
        return grad, None


class Sleeper(nn.Module):
    """A layer of a fixed duration, ``share`` of a worker's."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self)


BUBBLES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
"""The schedules, each with its stages a worker."""


def bubbles(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure the pipeline bubble of each schedule, as a share of the time of the work itself.

    Rows also have the theoretical share (p - 1) / m of GPipe and 1F1B, divided by v for interleaved
    stages.
    """
    rows = []
    for schedule, virtual in BUBBLES:
        for parts in (4, 8, 16):
            if schedule == "dualpipev" and parts < 2 * world:
                continue
            layout = Layout(
                pp=world, schedule=schedule, micro_batches=parts, virtual_stages=virtual
            )
            layers = [
                layer
                for _ in range(layout.stages)
                for layer in (nn.Linear(4, 4), Sleeper(1 / virtual))
            ]
            pipeline = Pipeline(
                nn.Sequential(*layers),
                layout,
                place(layout, rank, world),
                2 * parts,
                torch.zeros(1, 4),
                None,
                torch.device("cpu"),
            )
            batch = Split(torch.ones(2 * parts, 4), torch.zeros(2 * parts, dtype=torch.int64))
            seconds = (
                min(times_ms(lambda: pipeline._forward_backward(batch), 4, dist.barrier)) / 1e3
            )
            work = parts * (FORWARD_SECONDS + INPUT_SECONDS + WEIGHT_SECONDS)
            theory = (world - 1) / (parts * (virtual if schedule == "interleaved" else 1))
            row: dict[str, Any] = {
                "p": world,
                "m": parts,
                "schedule": schedule,
                "stages a worker": virtual,
            }
            rows.append(row | {"bubble": seconds / work - 1, "theory": theory})
    return rows


def replicas(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure weak scaling: 4,096 examples a GPU and step, whatever their number.

    Buckets are used where the row says so.
    """
    wanted = [(kind, WireConfig()) for kind in PRECISIONS]
    if world > 1:
        wanted += [("float32", WireConfig(name=name)) for name in FORMATS if name != "native"]
        wanted += [("lns12 + kahan", WireConfig(name="int8"))]
        wanted += [
            (kind, WireConfig(bucket_cap_mb=25.0, overlap=overlap))
            for kind in PRECISIONS
            for overlap in (False, True)
        ]
    return [replica(rank, world, kind, wire) for kind, wire in wanted]


def replica(rank: int, world: int, kind: str, wire: WireConfig) -> dict[str, Any]:
    precision = PRECISIONS[kind]
    model = apply_precision(
        initialize_(build(ModelConfig(hidden=[WIDE] * (DEPTH - 1)), 784, 10), 0).cuda(), precision
    )
    optimizer = make_optimizer(model, OptimizerConfig(lr=1.0), precision, GPU_BATCH * world)
    collectives = Collectives(device="cuda") if world > 1 else None
    sync = Synchronous(wire, collectives, 0, model.parameters()) if collectives else Synchroniser()
    batch = examples(rank)
    milliseconds = median_ms(
        lambda: train_step(model, optimizer, batch, sync), 10, torch.cuda.synchronize
    )
    row: dict[str, Any] = {
        "GPUs": world,
        "arithmetic": kind,
        "wire": wire.name,
        "ms a step": milliseconds,
    }
    if wire.bucket_cap_mb is not None:
        row["buckets"] = "while backward runs" if wire.overlap else "after backward"
    if collectives is not None:
        row["ms synchronising"] = median_ms(
            lambda: sync.gradients(model.parameters(), finite=True), 10, torch.cuda.synchronize
        )
        before = collectives.sent
        train_step(model, optimizer, batch, sync)
        row["bytes a parameter"] = (collectives.sent - before) / sum(
            p.numel() for p in model.parameters()
        )
    return row


def examples(rank: int, count: int = GPU_BATCH, device: str = "cuda") -> Split:
    generator = torch.Generator().manual_seed(rank)
    x, y = (
        torch.rand(count, 784, generator=generator),
        torch.randint(10, (count,), generator=generator),
    )
    return Split(x.to(device), y.to(device))


def stages(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure the same step cut into stages, against one GPU that takes the same micro-batches."""
    rows = []
    for kind, precision in PRECISIONS.items():
        for parts in (4, 16):
            model = initialize_(build(ModelConfig(hidden=[WIDE] * (DEPTH - 1)), 784, 10), 0)
            batch = examples(0)
            if world == 1:
                whole = apply_precision(model.cuda(), precision)
                optimizer = make_optimizer(whole, OptimizerConfig(lr=1.0), precision, GPU_BATCH)
                step = lambda: train_step(whole, optimizer, batch, micro_batches=parts)
            else:
                layout = Layout(pp=world, micro_batches=parts)
                here = place(layout, rank, world, "cuda")
                pipeline = Pipeline(
                    model,
                    layout,
                    here,
                    GPU_BATCH,
                    torch.zeros(1, 784),
                    precision.lns_format,
                    torch.device("cuda"),
                )
                own = apply_precision(pipeline.own.cuda(), precision)
                optimizer = make_optimizer(own, OptimizerConfig(lr=1.0), precision, GPU_BATCH)
                step = lambda: pipeline.train_step(optimizer, batch, Synchroniser())
            milliseconds = median_ms(step, 10, torch.cuda.synchronize)
            rows.append(
                {
                    "stages": world,
                    "arithmetic": kind,
                    "micro-batches": parts,
                    "ms a step": milliseconds,
                }
            )
    return rows


def memories(rank: int, world: int) -> list[dict[str, Any]]:
    """Measure Adam's steps on 4,096 examples of MNIST a replica, as trials train.

    Shown are time and memory by where weights and optimizer state are held.
    """
    wide = TrialConfig(
        data=DataConfig(name="mnist"),
        model=ModelConfig(hidden=[WIDE] * (DEPTH - 1)),
        optimizer=OptimizerConfig(name="adam", lr=1e-4),
        batch_size=GPU_BATCH,
        device="cuda",
        workers=world,
        threads=4,
        telemetry=True,
    )
    twice = replace(wide, batch_size=GPU_BATCH * world)
    away = MemoryConfig(offload_optimizer=True)
    wanted = {"whole": wide, "state on the CPU": replace(wide, memory=away)}
    if world > 1:
        wanted = {
            "replicas": twice,
            "replicas, state on the CPU": replace(twice, memory=away),
            "fsdp": replace(twice, layout=Layout(fsdp=True)),
            "fsdp, state on the CPU": replace(twice, layout=Layout(fsdp=True), memory=away),
            "tp": replace(wide, layout=Layout(tp=world)),
        }
    whole = {name: config for name, config in wanted.items() if config.layout == Layout()}
    wanted |= {
        f"lns12 + kahan, {name}": replace(c, precision=PRECISIONS["lns12 + kahan"])
        for name, c in whole.items()
    }
    return [remembered(rank, world, name, config) for name, config in wanted.items()]


def remembered(rank: int, world: int, name: str, config: TrialConfig) -> dict[str, Any]:
    training = Training(config, rank=rank, world_size=world)
    epochs = [training.train_epoch() for _ in range(4)][1:]
    peak = max(epoch["telemetry/peak_memory_bytes"] for epoch in epochs)
    seconds = statistics.median(config.batch_size / epoch["samples_per_second"] for epoch in epochs)
    del training
    gc.collect()
    torch.cuda.empty_cache()
    return {"GPUs": world, "layout": name, "ms a step": 1e3 * seconds, "peak GB a GPU": peak / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("wire", "codes", "overlap", "bubble", "gpu", "memory"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "wire":
        jobs = [Job(wires, 2)]
    elif options.what == "codes":
        jobs = [Job(as_codes, 2)]
    elif options.what == "overlap":
        jobs = [Job(overlaps, 2)]
    elif options.what == "bubble":
        jobs = [Job(bubbles, 2), Job(bubbles, 4)]
    else:
        worlds = [1, *(w for w in (2, 4, 8) if w <= torch.cuda.device_count())]
        works = {"gpu": (replicas, stages), "memory": (memories,)}[options.what]
        jobs = [Job(work, world, "nccl") for work in works for world in worlds]
    figures = [row for job in jobs for row in run(job)]
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
