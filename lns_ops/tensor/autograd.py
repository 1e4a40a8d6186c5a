"""Backward passes that start at an LNSTensor.

torch runs a torch function of a tensor subclass with ``__torch_function__`` disabled. If a backward
pass is started as ``x.backward()``, this holds for all of it, and operations that an activation
checkpoint recomputes would bypass their replacements (:func:`lns_ops.tensor.replaces`). So the
functions here start the pass from graph edges instead of tensors, which torch does not treat as a
torch function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lns_ops.tensor.lns_tensor import LNSTensor, in_float32, in_format
from lns_ops.tensor.promotion import refuse_forward_mode, takes_floats
from lns_ops.tensor.registry import aten, handles, replaces_untraced

takes_floats(torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward)


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, (Tensor, GradientEdge)) else tuple(x)


def _edges(tensors: Sequence[Any]) -> tuple[GradientEdge, ...]:
    return tuple(get_gradient_edge(t) if isinstance(t, Tensor) else t for t in tensors)


def _seeds(tensors: Sequence[Any], grads: Any) -> tuple[Any, ...]:
    """Return the initial gradients: the given ones, converted to each tensor's kind, or ones."""
    given = (None,) * len(tensors) if grads is None else _tuple(grads)
    for t, g in zip(tensors, given, strict=True):
        if g is None and isinstance(t, Tensor) and t.numel() != 1:
            raise RuntimeError(
                f"gradient of an LNSTensor of shape {tuple(t.shape)}: it defaults to 1 only for a"
                " scalar; pass the gradient"
            )
    return tuple(_seed(t, g) for t, g in zip(tensors, given, strict=True))


def _seed(t: Any, grad: Any) -> Any:
    if not isinstance(t, Tensor):
        return grad
    if grad is None:
        return torch.ones_like(t)
    if isinstance(t, LNSTensor):
        return in_format(grad, t.fmt.bits, t.fmt.fraction_bits)
    return in_float32(grad)


@handles(aten._has_same_storage_numel.default)
def _tangent(func: Any, x: Tensor, tangent: Tensor) -> bool:
    """Reject the assignment of a tangent, which only forward mode needs."""
    refuse_forward_mode("the tangent of an LNSTensor")
    return x.numel() == tangent.numel()


@replaces_untraced(torch.autograd.backward)
def backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """Run ``torch.autograd.backward`` from the edges of the graph."""
    roots = _tuple(tensors)
    given = None if inputs is None else _edges(_tuple(inputs))
    torch.autograd.backward(
        _edges(roots), _seeds(roots, grad_tensors), retain_graph, create_graph, inputs=given
    )


@replaces_untraced(torch.Tensor.backward)
def tensor_backward(
    self: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run ``Tensor.backward`` from the edges of the graph."""
    backward(self, gradient, retain_graph, create_graph, inputs=inputs)


@replaces_untraced(torch.autograd.grad)
def grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return ``torch.autograd.grad``, run from the edges of the graph.

    Raises:
        ValueError: ``grad_outputs`` are batches of different sizes.
    """
    if is_grads_batched:
        retain = create_graph if retain_graph is None else retain_graph
        return _one_by_one(
            outputs, inputs, grad_outputs, retain, create_graph=create_graph,
            allow_unused=allow_unused, materialize_grads=materialize_grads,
        )  # fmt: skip
    roots, leaves = _tuple(outputs), _tuple(inputs)
    unused = materialize_grads if allow_unused is None else allow_unused
    found = torch.autograd.grad(
        _edges(roots),
        _edges(leaves),
        _seeds(roots, grad_outputs),
        retain_graph,
        create_graph,
        allow_unused=unused,
    )
    if materialize_grads:
        return tuple(
            torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)
        )
    return tuple(found)


def _one_by_one(
    outputs: Any, inputs: Any, batched: Any, retain: bool, **options: Any
) -> tuple[Any, ...]:
    """Return the stacked gradients for batches of ``grad_outputs``, computed one by one."""
    seeds = _tuple(batched)
    sizes = {len(s) for s in seeds if s is not None}
    if len(sizes) != 1:
        raise ValueError(
            f"is_grads_batched=True with grad_outputs of {sorted(sizes)} gradients: pass the same"
            " number of gradients for every output"
        )
    (size,) = sizes
    if not size:
        return tuple(x.new_zeros(0, *x.shape) for x in _tuple(inputs))
    found = [
        grad(
            outputs,
            inputs,
            tuple(s if s is None else s[i] for s in seeds),
            retain or i < size - 1,
            **options,
        )
        for i in range(size)
    ]
    return tuple(None if g[0] is None else torch.stack(g) for g in zip(*found, strict=True))
