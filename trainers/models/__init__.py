"""Models as plain torch modules: they know nothing of precision or parallelism."""

from __future__ import annotations

from torch import nn

from trainers.config import ModelConfig
from trainers.models.mlp import mlp


def build(config: ModelConfig, inputs: int, classes: int) -> nn.Module:
    """The model ``config`` names, for flat inputs ``[B, inputs]`` and logits ``[B, classes]``; weights are not yet drawn."""
    return mlp(inputs, config.hidden, classes)
