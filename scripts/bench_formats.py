"""Measure the milliseconds of a training step in each number format, with each weight update.

    python scripts/bench_formats.py [--device cuda] [--json FILE]
    python scripts/bench_formats.py --sums [--device cuda] [--json FILE]

The networks are an MLP 784-128-10 and a CNN with 8-16 channels, 28 x 28 pixels, batch 64. On a CPU
the result is the process's CPU time with one thread, the median of several steps, so that other
load on the machine has little effect. On a GPU it is the time of a step replayed from a CUDA graph,
as in a study; before it, separated by a slash, is the time if torch's operations round the formats
(and LNS codes). Formats other than float32 and LNS without a scale are simulated, so their time is
that of float32 plus rounding.

``--sums`` measures matrix products whose running sums are rounded, beside torch's in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import lns_ops.cpu
from lns_ops.formats import Accumulation
from lns_ops.nn.products.rounded_sums import product
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
PRODUCTS = {
    "64 x 784 x 128, a layer of an MLP": (64, 784, 128),
    "1,024 x 1,024 x 1,024": (1024, 1024, 1024),
    "131,072 x 576 x 64, a convolution of a ResNet-18": (131072, 576, 64),
    "64 x 131,072 x 576, its weight's gradient": (64, 131072, 576),
}
"""Rows, terms and columns."""
SUMS = [
    Accumulation(format="float(8,13)", block=128),
    Accumulation(format="bfloat16"),
    Accumulation(format="float(4,3)", order="tree"),
]


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


def product_ms(multiply: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median time of a product, in ms; CPU time on a CPU."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        multiply()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return 1000 * statistics.median(times[2:])


def measure_sums(device: str, repeats: int) -> list[dict[str, Any]]:
    """Print a table of products with rounded sums, in ms and as multiples of torch's float32."""
    results: list[dict[str, Any]] = []
    print(f"| rows x terms x columns | torch, ms | {' | '.join(map(str, SUMS))} |")
    print("|---" * (2 + len(SUMS)) + "|")
    for label, (rows, terms, columns) in PRODUCTS.items():
        if device == "cpu" and rows * terms * columns > 1 << 30:
            continue
        x, y = torch.randn(rows, terms, device=device), torch.randn(terms, columns, device=device)
        torch_ms = product_ms(partial(torch.mm, x, y), device, repeats)
        cells = [f"{torch_ms:.3f}"]
        for sums in SUMS:
            ms = product_ms(partial(product, x, y, sums), device, repeats)
            cells.append(f"{ms:.3f} ({ms / torch_ms:.1f})")
            results.append({"product": label, "sums": str(sums), "ms": ms, "torch_ms": torch_ms})
        print(f"| {label} | {' | '.join(cells)} |", flush=True)
    return results


def measure_steps(device: str, repeats: int) -> list[dict[str, Any]]:
    """Print a table of training steps, in ms."""
    results: list[dict[str, Any]] = []
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
                if device == "cuda":
                    found = gpu_cell(model, precision, repeats)
                    cells.append(f"{found['torch_ms']:.3f} / {found['ms']:.3f}")
                else:
                    found = {"ms": step_ms(model, precision, repeats)}
                    cells.append(f"{found['ms']:.1f}")
                results.append({"format": name, "model": label, "update": update, **found})
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return results


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sums", action="store_true", help="products with rounded sums")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lns_ops.cpu.set_num_threads(1)
    measure = measure_sums if options.sums else measure_steps
    results = measure(options.device, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
