"""Models that a user's factory makes: any torch module that turns examples into outputs.

The factory is called as ``factory(**model.args)``, and with ``inputs`` (an int, or the shape of an
example as a tuple where it has several dimensions) and ``classes`` or ``outputs`` (how many outputs
an answer needs) where it has such parameters. What it makes returns a tensor, or an object whose
``logits`` are one, as those of Hugging Face do.
Torch's, NumPy's and Python's random numbers are seeded by the trial's seed while it runs, and its
weights stay as it made them: so they depend on the seed alone, whatever the layout, and pretrained
ones are kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from trainers.config import ModelConfig
from trainers.user_code import call, load_code

KEY = "model.name"


def make_own_model(
    config: ModelConfig, shape: tuple[int, ...], outputs: int, seed: int
) -> nn.Module:
    """Return what the factory makes, in training mode.

    Args:
        config: names the factory.
        shape: of an example.
        outputs: number of outputs of an answer.
        seed: of the trial.

    Raises:
        ValueError: the factory cannot be loaded or called, or returns no module with float32
            parameters.
    """
    factory = load_code(KEY, config.name, config.code)
    with seeded(seed):
        inputs = shape[0] if len(shape) == 1 else shape
        model = call(
            KEY, config.name, factory, config.args, inputs=inputs, classes=outputs, outputs=outputs
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{KEY}={config.name!r}: returned a {type(model).__name__}; return a torch.nn.Module"
        )
    other = {p.dtype for p in model.parameters()} - {torch.float32}
    if other or next(model.parameters(), None) is None:
        found = ", ".join(sorted(map(str, other))) or "no"
        raise ValueError(
            f"{KEY}={config.name!r}: its module has {found} parameters; return one whose parameters"
            " are float32, trial.precision converts them"
        )
    model.register_forward_hook(_logits)
    return model.train()


def _logits(model: nn.Module, inputs: object, outputs: object) -> object:
    """Return the logits of an object that has some."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch, NumPy and Python, and put them back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
