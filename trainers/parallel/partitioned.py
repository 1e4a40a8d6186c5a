"""Models whose tensors are divided over workers.

This module provides the local parts for the optimizer, and whole tensors for checkpoints.
:mod:`trainers.parallel.fsdp` divides tensors over the replicas,
:mod:`trainers.parallel.tensor_parallel` over the workers of one replica. In both cases the model's
parameters are torch DTensors. The optimizer gets their local tensors as plain tensors that share
the memory, so all optimizers of :mod:`lns_ops.optim` with an elementwise step work. Checkpoints
have whole tensors, as with any other layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainers.comm.collectives import Collectives
from trainers.optim.stepped import stepped_module
from trainers.sync.base import Synchroniser


class PartitionedModel(ABC):
    """One worker's parts of a model.

    Args:
        model: the model after it was partitioned.
        shapes: shapes of its parameters before, by name.
        collectives: collectives of the workers whose parts make the whole.

    Attributes:
        own: module with the parts as its parameters, under the names they have in ``model``; for an
            optimizer, not to be called.
        formulas: formulas, by operation, of operations that torch's FLOP counter would count as
            operations on whole tensors.
    """

    def __init__(
        self, model: nn.Module, shapes: dict[str, torch.Size], collectives: Collectives
    ) -> None:
        self._model, self._shapes, self._collectives = model, shapes, collectives
        self.own = stepped_module(model, _local)
        self.formulas: dict[Any, Callable[..., int]] = {}

    @abstractmethod
    def synchroniser(self) -> Synchroniser:
        """Return the synchroniser that the training loop calls."""

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return, on rank 0, whole tensors of the parts in ``tensors``.

        A collective; the other ranks get an empty dict.

        Args:
            tensors: the tensors of :attr:`own`, from
                :func:`trainers.checkpoint.state.model_tensors`.
        """
        parts = dict(self.own.named_parameters())
        found: dict[str, Tensor] = {}
        for path, tensor in tensors.items():
            name = path.split("/")[-1]
            cut = name in parts and tensor.shape == parts[name].shape
            value = self._gathered(name, tensor) if cut else tensor
            if self._collectives.rank == 0:
                found[path] = value.cpu()
        return found

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this worker's parts of the ``tensors`` of a checkpoint.

        A tensor that does not have the shape of its parameter is returned as it is.
        """
        names = {path: path.split("/")[-1] for path in tensors}
        return {
            path: self._part(names[path], tensor)
            if tensor.shape == self._shapes.get(names[path])
            else tensor
            for path, tensor in tensors.items()
        }

    @abstractmethod
    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """Gather a tensor like parameter ``name`` from the parts of all workers; a collective."""

    @abstractmethod
    def _part(self, name: str, whole: Tensor) -> Tensor:
        """Return this worker's part of ``whole``, in memory of its own."""


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parameters, by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def hand_gradients_(own: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Give the parameters of ``own`` the gradients of ``parameters``, in the same memory."""
    for part, parameter in zip(own.parameters(), parameters, strict=True):
        part.grad = None if parameter.grad is None else _local(parameter.grad)


def _local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; another tensor as it is."""
    from torch.distributed.tensor import DTensor  # loaded only where a model has DTensors

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
