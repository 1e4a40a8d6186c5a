"""The models of trials, as plain torch modules that know nothing of precision or parallelism."""

from __future__ import annotations

from torch import nn

from trainers.config import ModelConfig
from trainers.models.cnn import cnn
from trainers.models.mlp import mlp

CHANNELS = [8, 16]
"""The channels of the cnn's convolutions, unless the config names others."""


def build(config: ModelConfig, inputs: int, classes: int) -> nn.Module:
    """Return the model that ``config`` names, its weights not yet drawn.

    It maps flat inputs ``[B, inputs]`` to logits ``[B, classes]``.
    """
    if config.name == "cnn":
        return cnn(inputs, config.channels or CHANNELS, config.hidden, classes)
    return mlp(inputs, config.hidden, classes)
