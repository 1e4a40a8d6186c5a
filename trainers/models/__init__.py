"""The models of trials: plain torch modules, independent of precision and parallelism."""

from __future__ import annotations

import math

from torch import nn

from trainers.config import ModelConfig
from trainers.config.model import CHANNELS
from trainers.models.cnn import cnn
from trainers.models.factory import make_own_model
from trainers.models.gpt import gpt
from trainers.models.init import initialize_
from trainers.models.lstm import lstm
from trainers.models.mlp import mlp
from trainers.models.resnet import resnet


def make_model(
    config: ModelConfig,
    shape: tuple[int, ...],
    outputs: int,
    seed: int,
    *,
    tokens: int = 0,
    each_step: bool = False,
) -> nn.Module:
    """Return the model of ``config`` with initial weights.

    Args:
        config: config of the model.
        shape: shape of an example.
        outputs: number of outputs per answer; built-in models return ``[B, outputs]``, or ``[B, T,
            outputs]`` with ``each_step``.
        seed: seed of the weights.
        tokens: number of different tokens if examples are sequences of tokens; else 0.
        each_step: whether the data have a target for each step of a sequence.

    Raises:
        ValueError: the data do not fit a built-in model, or the user's factory fails.
    """
    if config.own:
        return make_own_model(config, shape, outputs, seed)
    model = build(config, shape, outputs, tokens=tokens, each_step=each_step)
    return initialize_(model, seed)


def build(
    config: ModelConfig,
    shape: int | tuple[int, ...],
    classes: int,
    *,
    tokens: int = 0,
    each_step: bool = False,
) -> nn.Sequential:
    """Return the built-in model of ``config``, a chain of layers, without initial weights.

    Arguments and errors as for :func:`make_model`; an integer is the shape of flat examples.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if config.name == "gpt":
        return gpt(config.arguments, shape, classes, tokens, each_step)
    if config.name == "lstm":
        return lstm(config.arguments, shape, classes, tokens, each_step)
    if tokens or each_step:
        raise ValueError(
            f"model.name={config.name} with examples of shape {shape}"
            f"{f' of {tokens} tokens' if tokens else ''}"
            f"{', a target for each step' if each_step else ''}: takes numbers and one target an"
            " example; use model.name=lstm or model.name=gpt"
        )
    if config.name == "mlp":
        return mlp(math.prod(shape), config.hidden, classes, config.arguments)
    image = _image(config.name, shape)
    if config.name == "cnn":
        return cnn(image, config.channels or CHANNELS, config.hidden, classes, config.arguments)
    return resnet(config.arguments, image, classes)


def _image(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, height and width of an example; flat examples count as square grey images.

    Raises:
        ValueError: the examples are not images.
    """
    side = math.isqrt(shape[0])
    if len(shape) == 1 and side * side == shape[0]:
        return 1, side, side
    if len(shape) in (2, 3):
        height, width = shape[-2:]
        return shape[0] if len(shape) == 3 else 1, height, width
    raise ValueError(
        f"model.name={name} with examples of shape {shape}: needs images, (C, H, W), (H, W) or"
        " square ones laid flat; use model.name=mlp"
    )
