"""Count the bytes that a training step keeps: weights, gradients, optimizer state, saved tensors.

    python scripts/bench_memory.py [--json FILE]  MLP and CNNs, batch 128, 28 x 28 pixels

Saved tensors are counted where autograd saves them (``torch.autograd.graph.saved_tensors_hooks``),
every storage once, parameters left out; torch's indices of max pooling are int64 in every precision
and have a column of their own. A peer that keeps 8 bytes a value, as xlnstorch does, would keep
twice float32's columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import LNSTensor, convert_
from lns_ops.optim import SGD
from trainers.config import ModelConfig
from trainers.models import build


def of_all_kinds() -> nn.Module:
    """Return a net of two convolutions with batch norms, ReLU, max pool and GELU."""
    body = [
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.BatchNorm2d(32),
        nn.GELU(),
    ]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP 784-512-10": partial(build, ModelConfig(hidden=[512]), 784, 10),
    "CNN 8-16 channels": partial(
        build, ModelConfig(name="cnn", channels=[8, 16], hidden=[]), 784, 10
    ),
    "CNN 16-32 channels, batch norm, GELU": of_all_kinds,
}
PRECISIONS = ("float32", "lns12 matmul", "lns12 everywhere")
PARTS = ("weights", "gradients", "momentum + Kahan", "saved values", "saved indices")


def plain(tensor: Tensor) -> Tensor:
    """Return the stored tensor: the codes of an LNS tensor, or the tensor itself."""
    return tensor.codes if isinstance(tensor, LNSTensor) else tensor


def size(tensors: Any) -> int:
    """Return the bytes of the storages of ``tensors``, each once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(plain, tensors)
    }
    return sum(storages.values())


def saved_by(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return what autograd saves of a forward pass; the backward pass is run with it."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    own = {plain(t).untyped_storage().data_ptr() for t in (*model.parameters(), y)}
    return [t for t in kept if plain(t).untyped_storage().data_ptr() not in own]


def measure(make: Callable[[], nn.Module], precision: str, batch: int) -> dict[str, int]:
    """Return the bytes of each of :data:`PARTS` in a step with momentum and compensation."""
    model = make()
    if precision != "float32":
        fmt, scope = precision.split()
        convert_(model, fmt, scope=scope)
    x, y = (
        torch.rand(batch, 784, generator=torch.Generator().manual_seed(0)),
        torch.arange(batch) % 10,
    )
    optimizer = SGD(model.parameters(), lr=0.001, momentum=0.9, kahan_sum=True)
    saved = saved_by(model, x, y)
    indices = size(t for t in saved if plain(t).dtype == torch.int64)
    gradients = size(p.grad for p in model.parameters())
    optimizer.step()
    state = size(value for entry in optimizer.state.values() for value in entry.values())
    return dict(
        zip(
            PARTS,
            (size(model.parameters()), gradients, state, size(saved) - indices, indices),
            strict=True,
        )
    )


def measure_all(batch: int) -> dict[str, dict[str, int]]:
    """Return the bytes of each of :data:`PARTS`, of every model in every precision."""
    return {
        f"{label}, {precision}": measure(make, precision, batch)
        for label, make in MODELS.items()
        for precision in PRECISIONS
    }


def table(results: dict[str, dict[str, int]], batch: int) -> str:
    """Return a table of kilobytes as Markdown."""
    lines = [f"| kB, batch {batch} | {' | '.join(PARTS)} | all |", "|---" * (len(PARTS) + 2) + "|"]
    for label, found in results.items():
        cells = [f"{value / 1000:,.0f}" for value in (*found.values(), sum(found.values()))]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure_all(options.batch)
    print(table(results, options.batch))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
