"""The models of trials, as plain torch modules that know nothing of precision or parallelism."""

from __future__ import annotations

import math

from torch import nn

from trainers.config import ModelConfig
from trainers.models.cnn import cnn
from trainers.models.factory import make_own_model
from trainers.models.init import initialize_
from trainers.models.mlp import mlp

CHANNELS = [8, 16]
"""The channels of the cnn's convolutions, unless the config names others."""


def make_model(config: ModelConfig, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """Return the model that ``config`` names, its weights drawn.

    Args:
        config: of the model.
        shape: of an example; ours take flat ones, ``[B, inputs]``.
        outputs: number of outputs of an answer; ours have ``[B, outputs]``.
        seed: of the weights.

    Raises:
        ValueError: the data do not fit our model, or the user's factory fails.
    """
    if config.own:
        return make_own_model(config, shape, outputs, seed)
    return initialize_(build(config, math.prod(shape), outputs), seed)


def build(config: ModelConfig, inputs: int, classes: int) -> nn.Module:
    """Return the model that ``config`` names, its weights not yet drawn.

    It maps flat inputs ``[B, inputs]`` to logits ``[B, classes]``.
    """
    if config.name == "cnn":
        return cnn(inputs, config.channels or CHANNELS, config.hidden, classes)
    return mlp(inputs, config.hidden, classes)
