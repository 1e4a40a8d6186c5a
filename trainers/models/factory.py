"""Models that a user's factory makes: any torch module that turns examples into outputs.

The factory is called as ``factory(**model.args)``. If it has such parameters, it also gets
``inputs`` (an int, or the shape of an example as a tuple if it has several dimensions) and
``classes`` or ``outputs`` (number of outputs per answer). The model returns a tensor, or an object
with a tensor ``logits``, as Hugging Face's models do. While the factory runs, the random numbers of
torch, NumPy and Python are seeded by the trial's seed. Its weights are kept, including pretrained
ones, so they only depend on the seed, not on the layout.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from trainers.config import ModelConfig, TrialConfig
from trainers.user_code import call, load_code, named

KEY = "model.name"
_MADE: WeakSet[nn.Module] = WeakSet()
"""Modules, including submodules, that factories have returned in this process; weak references."""


def make_own_model(
    config: ModelConfig, shape: tuple[int, ...], outputs: int, seed: int
) -> nn.Module:
    """Call the factory and return its model in training mode.

    Args:
        config: config with the factory's name.
        shape: shape of an example.
        outputs: number of outputs per answer.
        seed: seed of the trial.

    Raises:
        ValueError: the factory cannot be loaded or called, or does not return a module with float32
            parameters.
    """
    factory = load_code(KEY, config.name, config.code)
    inputs = shape[0] if len(shape) == 1 else shape
    offered = {"inputs": inputs, "classes": outputs, "outputs": outputs}
    model = call(KEY, config.name, factory, config.args, seed, **offered)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{named(KEY, config.name)}: returned a {type(model).__name__}; return a"
            " torch.nn.Module"
        )
    if any(module in _MADE for module in model.modules()):
        raise ValueError(
            f"{named(KEY, config.name)}: returned a module, or a part of one, that it returned"
            " before, whose weights may have been trained; make a new one in every call"
        )
    _MADE.update(model.modules())
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise ValueError(
            f"{named(KEY, config.name)}: its module has lazy layers, whose weights are not drawn"
            " yet; give them their sizes, or call the module on an example before you return it"
        )
    other = {p.dtype for p in model.parameters()} - {torch.float32}
    if other or next(model.parameters(), None) is None:
        found = ", ".join(sorted(map(str, other))) or "no"
        raise ValueError(
            f"{named(KEY, config.name)}: its module has {found} parameters; return one whose"
            " parameters are float32, trial.precision converts them"
        )
    model.register_forward_hook(_logits)
    return model.train()


def check_chain(config: TrialConfig, model: nn.Module) -> None:
    """Check that the user's network is a chain of layers if the trial partitions it.

    A ``torch.nn.Sequential`` is a chain: each layer gets the previous layer's outputs.

    Raises:
        ValueError: it is not; the message has the key that requires a chain.
    """
    stages = config.layout.stages
    cuts = {
        f"layout.pp={config.layout.pp}": stages > 1,
        "layout.fsdp=true": config.layout.fsdp,
        "memory.activation_checkpoints=true": config.memory.activation_checkpoints,
    }
    asked = next((key for key, needed in cuts.items() if needed), None)
    if asked is None:
        return
    where = f"{asked} with {named(KEY, config.model.name)}"
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"{where}: a {type(model).__name__} is not known to be a chain of layers; return a"
            " torch.nn.Sequential, or leave the key out"
        )
    if (layers := sum(any(True for _ in part.parameters()) for part in model)) < stages:
        raise ValueError(
            f"{where}: {stages} stages, but its torch.nn.Sequential has {layers} layers with"
            " parameters, and a stage holds one at least; use fewer stages"
        )
    if config.memory.activation_checkpoints and next(model.buffers(), None) is not None:
        raise ValueError(
            f"{where}: its buffers would be updated twice a step where layers are computed again;"
            " use memory.activation_checkpoints=false"
        )


def made_by_user(model: nn.Module) -> bool:
    """Return whether a part of ``model`` comes from a user's factory."""
    return any(part in _MADE for part in model.modules())


def _logits(model: nn.Module, inputs: object, outputs: object) -> object:
    """Return an output's ``logits`` if it has them, else the output."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
