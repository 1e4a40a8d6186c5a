"""Models as plain torch modules: they know nothing of precision or parallelism."""

from __future__ import annotations

from torch import nn

from trainers.config import ModelConfig
from trainers.models.cnn import cnn
from trainers.models.mlp import mlp

CHANNELS = [8, 16]
"""Of the cnn's convolutions, unless the config says otherwise."""


def build(config: ModelConfig, inputs: int, classes: int) -> nn.Module:
    """The model ``config`` names, for flat inputs ``[B, inputs]`` and logits ``[B, classes]``;
    weights are not yet drawn."""
    if config.name == "cnn":
        return cnn(inputs, config.channels or CHANNELS, config.hidden, classes)
    return mlp(inputs, config.hidden, classes)
