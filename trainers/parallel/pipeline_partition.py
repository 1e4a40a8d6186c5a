"""The partition of a chain of layers into pipeline stages.

Stages are contiguous parts whose largest cost is as small as possible. The time of a pipeline is
that of its slowest stage, so the maximum is what counts. The cost of a layer is the multiply-adds
of a training step an example: a linear layer of I inputs and O outputs takes I O in forward, as
many for its weight's gradient and as many for its input's gradient, which the first layer does not
need.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def balanced(costs: Sequence[int], parts: int) -> list[slice]:
    """Return ``costs`` in ``parts`` contiguous, nonempty parts with the smallest largest sum.

    Of equally good partitions it returns the one whose early parts are shortest.

    Raises:
        ValueError: fewer costs than parts.
    """
    if len(costs) < parts:
        raise ValueError(
            f"{len(costs)} layers, {parts} stages: a stage holds one layer at least; use fewer"
            " stages"
        )
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
        (0, 0): (0, ())
    }  # (parts, layers): (largest sum, starts of the parts)
    for part in range(1, parts + 1):
        for end in range(part, len(costs) + 1):
            choices = (
                (
                    max(best[part - 1, start][0], sum(costs[start:end])),
                    (*best[part - 1, start][1], start),
                )
                for start in range(part - 1, end)
                if (part - 1, start) in best
            )
            best[part, end] = min(choices)
    starts = best[parts, len(costs)][1]
    return [slice(low, high) for low, high in zip(starts, (*starts[1:], len(costs)), strict=True)]


def units(model: nn.Sequential) -> list[list[str]]:
    """Return the names of layers in groups, each a linear layer with what follows it."""
    found: list[list[str]] = []
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear) or not found:
            found.append([])
        found[-1].append(name)
    return found


def costs(model: nn.Sequential) -> list[int]:
    """Return the multiply-adds of a training step an example, for each of :func:`units`."""
    linear = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    return [
        (2 if place == 0 else 3) * layer.in_features * layer.out_features
        for place, layer in enumerate(linear)
    ]


def split(model: nn.Sequential, stages: int) -> list[list[str]]:
    """Return the names of the layers of every stage, in order, balanced by cost."""
    names = units(model)
    return [
        [name for unit in names[part] for name in unit] for part in balanced(costs(model), stages)
    ]
