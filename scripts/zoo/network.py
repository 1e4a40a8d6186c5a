"""What a network of the zoo is: a maker of a module and its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network.

    Attributes:
        name: its name, unique in the zoo.
        library: the library that it comes from.
        make: the function that returns a module, its positional and its keyword arguments.
    """

    name: str
    library: str
    make: Callable[[], Made]


def floats(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of nested results, in their order."""
    if isinstance(output, Tensor):
        if output.dtype.is_floating_point:
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from floats(value)


def loss_of(output: Any) -> Tensor:
    """Return the network's own loss, or the squared distance of its first result from a ramp."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    result = next(x for x in floats(output) if x.requires_grad)
    if not result.dim():
        return result.square()
    ramp = torch.linspace(-1, 1, result.shape[-1]).expand(result.shape)
    return F.mse_loss(result, ramp)
