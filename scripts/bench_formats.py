"""Measure the milliseconds of a training step in each number format, with each weight update.

    python scripts/bench_formats.py [--device cuda] [--json FILE]

The networks are an MLP 784-128-10 and a CNN with 8-16 channels, 28 x 28 pixels, batch 64. On a CPU
the result is the process's CPU time with one thread, the median of several steps, so that other
load on the machine has little effect. On a GPU it is the time of a step replayed from a CUDA graph,
as in a study; before it, separated by a slash, is the time if torch's operations round the formats
(and LNS codes). Formats other than float32 and LNS without a scale are simulated, so their time is
that of float32 plus rounding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import lns_ops.cpu
from trainers.config import ModelConfig, OptimizerConfig, PrecisionConfig
from trainers.data import Split
from trainers.models import build
from trainers.models.init import initialize_
from trainers.models.loss import CROSS_ENTROPY
from trainers.models.precision import apply_precision
from trainers.optim.build import make_optimizer
from trainers.training.cuda_graph import GraphedEpochs
from trainers.training.step import train_step

MODELS = {
    "MLP": ModelConfig(hidden=[128]),
    "CNN": ModelConfig(name="cnn", channels=[8, 16], hidden=[]),
}
FORMATS = [
    "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fn/channel", "fixed(16,10)", "fixed(12,8)", "int8", "int8/channel", "mxfp8",
    "lns16", "lns12", "lns8", "lns8/channel",
]  # fmt: skip
UPDATES: dict[str, dict[str, Any]] = {
    "nearest": {},
    "Kahan": {"kahan_sum": True},
    "stochastic": {"stochastic_rounding": True},
}
BATCH, STEPS = 64, 200


def gpu_step_ms(model_config: ModelConfig, precision: PrecisionConfig, repeats: int) -> float:
    """Return the median time of a step replayed from a CUDA graph, in ms, over epochs."""
    model = apply_precision(initialize_(build(model_config, 784, 10), 0).cuda(), precision)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5), precision, BATCH)
    data = Split(torch.rand(STEPS * BATCH, 784), torch.arange(STEPS * BATCH) % 10)
    split = Split(data.x.cuda(), data.y.cuda())
    graphed = GraphedEpochs(model, optimizer, split, BATCH, CROSS_ENTROPY)
    order, times = torch.arange(STEPS * BATCH), []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graphed.train(order)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / STEPS)
    return 1000 * statistics.median(times[1:])


def gpu_cell(model: ModelConfig, precision: PrecisionConfig, repeats: int) -> dict[str, float]:
    """Return the ms of a step in torch's operations, and with kernels."""
    with patch("lns_ops.formats.base._has_cupy", return_value=False):
        without = gpu_step_ms(model, precision, repeats)
    return {"torch_ms": without, "ms": gpu_step_ms(model, precision, repeats)}


def step_ms(model_config: ModelConfig, precision: PrecisionConfig, repeats: int) -> float:
    """Return the median CPU time of a step, in ms."""
    model = apply_precision(initialize_(build(model_config, 784, 10), 0), precision)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5), precision, BATCH)
    batch = Split(
        torch.rand(BATCH, 784, generator=torch.Generator().manual_seed(0)), torch.arange(BATCH) % 10
    )
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        train_step(model, optimizer, batch)
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times[2:])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    lns_ops.cpu.set_num_threads(1)
    print(
        "| ms a step |"
        f" {' | '.join(f'{model}, {update}' for model in MODELS for update in UPDATES)} |"
    )
    print("|---" * (1 + len(MODELS) * len(UPDATES)) + "|")
    for name in FORMATS:
        cells = []
        for label, model in MODELS.items():
            for update, how in UPDATES.items():
                if name == "float32" and update == "stochastic":
                    cells.append("-")
                    continue
                precision = PrecisionConfig(format=name, **how)
                if options.device == "cuda":
                    found = gpu_cell(model, precision, options.repeats)
                    cells.append(f"{found['torch_ms']:.3f} / {found['ms']:.3f}")
                else:
                    found = {"ms": step_ms(model, precision, options.repeats)}
                    cells.append(f"{found['ms']:.1f}")
                results.append({"format": name, "model": label, "update": update, **found})
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
