"""The partition of a chain of layers into pipeline stages.

Stages are contiguous parts, chosen to minimise the largest cost, because the slowest stage
determines the time of a pipeline. The cost of a layer is its number of multiply-adds per example
and training step: a linear layer with I inputs and O outputs needs I O in forward, I O for its
weight's gradient, and I O for its input's gradient, which the first layer does not need.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


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
    """Return the names of layers in groups, each a layer with parameters and those after it.

    Layers without parameters at the beginning go with the first group.
    """
    found: list[list[str]] = [[]]
    begun = False
    for name, layer in model.named_children():
        if any(True for _ in layer.parameters()):
            if begun:
                found.append([])
            begun = True
        found[-1].append(name)
    return found


class Measured(NamedTuple):
    """Input shape and cost of a group of layers.

    Attributes:
        shape: shape of an example at the input of the first layer.
        cost: number of multiply-adds per example and training step.
    """

    shape: torch.Size
    cost: int


@torch.no_grad()
def measure(model: nn.Sequential, example: Tensor) -> list[Measured]:
    """Return input shape and cost of each of :func:`units`, and the output shape with cost 0.

    Shapes are propagated through a copy of the model without memory (torch's meta device).

    Args:
        model: the chain of layers.
        example: one example, ``[1, ...]``.
    """
    from torch.utils.flop_counter import FlopCounterMode

    skeleton, x = copy.deepcopy(model).to("meta").eval(), example.to("meta")
    found = []
    for place, unit in enumerate(units(model)):
        shape = x.shape[1:]
        with FlopCounterMode(display=False) as counter:
            for name in unit:
                x = skeleton.get_submodule(name)(x)
        found.append(Measured(shape, (2 if place == 0 else 3) * counter.get_total_flops() // 2))
    return [*found, Measured(x.shape[1:], 0)]


class Stages(NamedTuple):
    """A partition into stages.

    Attributes:
        names: names of the layers of every stage, in order.
        shapes: shapes of an example where it enters each stage, and where it leaves the last.
    """

    names: list[list[str]]
    shapes: list[torch.Size]


def split(model: nn.Sequential, stages: int, example: Tensor) -> Stages:
    """Return the partition of ``model`` into ``stages``, balanced by cost.

    Args:
        model: the chain of layers.
        stages: number of stages.
        example: one example, ``[1, ...]``.
    """
    groups, measured = units(model), measure(model, example)
    parts = balanced([each.cost for each in measured[:-1]], stages)
    return Stages(
        [[name for unit in groups[part] for name in unit] for part in parts],
        [*(measured[part.start].shape for part in parts), measured[-1].shape],
    )
