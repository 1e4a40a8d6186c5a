"""Which tensors of a forward pass are weights: parameters, and tensors computed from them alone.

Scope ``matmul`` computes products of weights in LNS, and products of two activations (attention's
scores) in float32. A module that computes its own products may first transpose, scale, slice, mask
or stack its weights, so the results of each function are tracked. There are three kinds of tensors:

- *weights*: parameters; results of functions with a weight among the tensor arguments and without
  an activation among the float arguments. Boolean masks are allowed.
- *constants*: buffers, results of ``torch.ones`` and similar functions, and results of functions
  with only constants.
- *activations*: everything else. Rows that integers select from a matrix, as in an embedding, are
  activations; matrices that they select from a stack of matrices (experts) are weights. Results of
  integer or boolean activations are activations.

Limits: writing to a view of a constant does not change the kind of the whole constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lns_ops.tensor import LNSTensor, promotion

_STORES = (list, tuple)
_WRITERS = {
    getattr(Tensor, name)
    for name in dir(Tensor)
    if promotion.writes(name) and (name[0] != "_" or name[:2] == "__")
}
"""Functions that write to their first argument."""

_SELECTORS = {
    Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.gather, Tensor.gather,
    torch.take_along_dim, Tensor.take_along_dim,
}  # fmt: skip
"""Functions by which integers select matrices from a stack."""


class Weights:
    """The weights and constants of one forward pass of a module, by identity.

    Tensors are kept alive until the pass ends, so that their memory and ids are not reused.
    """

    def __init__(self, module: nn.Module) -> None:
        self._made: dict[Tensor, bool] = {}
        for buffer in module.buffers():
            self._made[buffer] = False
        for parameter in module.parameters():
            self._made[parameter] = True

    def __contains__(self, x: Any) -> bool:
        """Return whether ``x`` is a weight that is real, dense and not LNS."""
        return is_real(x) and (self._made.get(x, False) or isinstance(x, nn.Parameter))

    def multiply(self, *factors: Any) -> bool:
        """Return whether these are real, dense factors of a product and one is a weight."""
        return all(isinstance(x, LNSTensor) or is_real(x) for x in factors) and any(
            x in self for x in factors
        )

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Record the kind of a function's result."""
        results = result if isinstance(result, _STORES) else (result,)
        found = [x for x in results if isinstance(x, Tensor)]
        if func in _WRITERS and args and isinstance(args[0], Tensor):
            found = [args[0]]
        if not found:
            return
        kind = self._kind(func, args, kwargs)
        for x in found:
            if kind is not None:
                self._made[x] = kind
            elif x in self._made:  # the function wrote to it
                del self._made[x]

    def _kind(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool | None:
        """Return the kind of a function's result: True for a weight, False for a constant, None for
        an activation."""
        weight, unknown, chooses, dims = False, False, False, 0
        for x in _tensors([*args, *kwargs.values()]):
            of_numbers = x.dtype.is_floating_point or x.dtype.is_complex
            made = self._made.get(x)
            if made is None and isinstance(x, nn.Parameter):
                made = True
            if made is None and of_numbers:
                return None
            if made:
                weight, dims = True, max(dims, x.dim())
            unknown = unknown or made is None
            chooses = chooses or (not of_numbers and x.dtype is not torch.bool)
        if not weight:
            return None if unknown else False
        return None if chooses and (dims < 3 or func not in _SELECTORS) else True


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among arguments, including those in lists."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, _STORES):
            found += _tensors(x)
    return found


def is_real(x: Any) -> bool:
    """Return whether ``x`` is a dense float tensor and not LNS."""
    return (
        isinstance(x, Tensor)
        and not isinstance(x, LNSTensor)
        and x.dtype.is_floating_point
        and x.layout is torch.strided
    )
