"""Models of which a worker has parts: what its optimizer gets of them, and whole tensors for
checkpoints.

:mod:`trainers.parallel.fsdp` cuts tensors over the replicas,
:mod:`trainers.parallel.tensor_parallel` over the workers of one replica. Both leave a model whose
parameters are torch's DTensors. An optimizer gets the local tensors beneath, plain ones over the
same memory, so each of :mod:`lns_ops.optim` serves whose step takes elements one by one.
Checkpoints have whole tensors, the same as of any other layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainers.comm.collectives import Collectives
from trainers.sync.base import Synchroniser


class PartitionedModel(ABC):
    """One worker's parts of a model.

    Args:
        model: that has been cut.
        shapes: of its parameters before, by name.
        collectives: of the workers whose parts make the whole.

    Attributes:
        own: a module with the parts as its parameters, under the names they have in ``model``; for
            an optimizer, not to be called.
        formulas: of operations that torch's FLOP counter would take for those of whole tensors, by
            operation.
    """

    def __init__(
        self, model: nn.Module, shapes: dict[str, torch.Size], collectives: Collectives
    ) -> None:
        self._model, self._shapes, self._collectives = model, shapes, collectives
        self.own = _own(model)
        self.formulas: dict[Any, Callable[..., int]] = {}

    @abstractmethod
    def synchroniser(self) -> Synchroniser:
        """What the training loop calls."""

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What :func:`trainers.checkpoint.state.model_tensors` has of :attr:`own`, made whole, on
        rank 0; collective, and empty on the others."""
        own = dict(self.own.named_parameters())
        found: dict[str, Tensor] = {}
        for path, tensor in tensors.items():
            name = path.split("/")[-1]
            value = self._gathered(name, tensor) if tensor.shape == own[name].shape else tensor
            if self._collectives.rank == 0:
                found[path] = value.cpu()
        return found

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This worker's parts of the ``tensors`` of a checkpoint; those without the shape of a
        parameter as they are."""
        names = {path: path.split("/")[-1] for path in tensors}
        return {
            path: self._part(names[path], tensor)
            if tensor.shape == self._shapes.get(names[path])
            else tensor
            for path, tensor in tensors.items()
        }

    @abstractmethod
    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """The whole of what all workers have of a tensor like parameter ``name``; collective."""

    @abstractmethod
    def _part(self, name: str, whole: Tensor) -> Tensor:
        """This worker's part of it, in memory of its own."""


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Of the parameters, by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def hand_gradients_(own: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Give ``own`` the gradients that the model's ``parameters`` have, the same memory."""
    for part, parameter in zip(own.parameters(), parameters, strict=True):
        part.grad = None if parameter.grad is None else _local(parameter.grad)


def _own(module: nn.Module) -> nn.Module:
    """A module like ``module`` without its code, with the local part of each parameter."""
    own = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        own.register_parameter(name, nn.Parameter(_local(parameter.detach())))
    for name, child in module.named_children():
        own.add_module(name, _own(child))
    return own


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # loaded where there are any

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
