"""Conversion between a trial's tensors and the named tensors of a checkpoint.

Names: parameters and buffers are ``model/NAME``; optimizer state in the parameter's format is
``optimizer/KEY/NAME``, other optimizer state ``plain/KEY/NAME``; state of a single rank, such as
the residues of error feedback, is ``rank/RANK/NAME``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lns_ops import LNSTensor
from lns_ops.tensor import storage_of


def model_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer state by name, on the CPU; LNS tensors as codes."""
    tensors: dict[str, Tensor] = {}
    tensors |= {f"model/{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            alike = (
                isinstance(value, LNSTensor) == isinstance(parameter, LNSTensor)
                and value.dtype == parameter.dtype
            )
            tensors[f"{'optimizer' if alike else 'plain'}/{key}/{name}"] = value
    return {name: storage_of(tensor).cpu() for name, tensor in tensors.items()}


@torch.no_grad()
def load_model_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Load the tensors that :func:`model_tensors` returned into ``model`` and ``optimizer``.

    Names that the model lacks are ignored.

    Raises:
        ValueError: the checkpoint has LNS codes for a tensor that is float in the model.
    """
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    optimizer.state.clear()
    for path, tensor in tensors.items():
        kind, *keys, name = path.split("/")
        if kind == "rank" or name not in parameters:
            continue
        parameter = parameters[name]
        saved = tensor.to(parameter.device)
        value = (
            LNSTensor(saved, parameter.fmt)
            if isinstance(parameter, LNSTensor) and kind != "plain"
            else saved
        )
        if kind == "model":
            if saved.dtype is torch.int16 and value is saved and parameter.is_floating_point():
                raise ValueError(
                    f"checkpoint: {name} is of LNS codes and of {parameter.dtype} in the model, as"
                    " buffers are since 2026-11-26; train this trial again from its beginning"
                )
            parameter.copy_(value)
        else:
            optimizer.state[parameter][keys[0]] = value


def gather_ranks(own: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Gather the ``own`` tensors of all ranks on rank 0, as ``rank/RANK/NAME``.

    A collective. The other ranks get an empty dict, as does a single rank.
    """
    if world_size == 1:
        return {}
    return gather_stages(
        {f"rank/{rank}/{name}": tensor.cpu() for name, tensor in own.items()}, rank, world_size
    )


def gather_stages(own: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Gather all ranks' ``own`` tensors on rank 0; their names must differ between ranks.

    A collective. The other ranks get an empty dict.
    """
    gathered: list[dict[str, Tensor]] | None = [{}] * world_size if rank == 0 else None
    dist.gather_object(own, gathered)
    return {name: tensor for part in gathered or [] for name, tensor in part.items()}


def of_rank(tensors: dict[str, Tensor], rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors that :func:`gather_ranks` gathered from ``rank``, on ``device``."""
    prefix = f"rank/{rank}/"
    return {
        name.removeprefix(prefix): tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
