"""Operations that combine an LNSTensor with float tensors: masks, noise, buffers, targets.

There is one rule, like torch's type promotion with LNS above every float dtype:

- Out of place, float tensors are encoded in the format of the LNSTensor. Two different LNS formats
  raise, because the result's format would be ambiguous. An infinity becomes the largest magnitude
  with its sign. So a mask of ``-inf``, or of the dtype's most negative finite value, still masks: a
  softmax gives it a weight of exactly 0. A NaN raises. If a float tensor requires a gradient, its
  gradient is float32.
- The entries of a sparse matrix multiplied with LNS are encoded; the product is dense.
- In place, and with ``out=``, the destination keeps its type: a float tensor gets the decoded
  values.
- ``x.to(dtype)`` with another dtype (``half``, ``long``, ...), and features of float32 alone
  (complex numbers, numpy arrays), decode the values. They are encoded again when an operation
  combines them with LNS.

Encoded tensors are counted by operation name (:data:`encoded_by`), and :func:`lns_ops.summary`
prints the counts, so no conversion is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from lns_ops import functional as lns
from lns_ops._compat import is_forward_mode, is_transforming, tree_leaves, tree_map
from lns_ops.spec.format import LNSFormat, NonFiniteError

encoded_by: Counter[str] = Counter()
"""Number of float tensors that were combined with LNS and encoded in this process, by operation."""
KEPT: set[Any] = set()
"""Torch functions whose float arguments are not encoded."""
CONVERTED = {
    "sum", "nansum", "mean", "prod", "cumsum", "cumprod", "norm", "linalg_norm",
    "linalg_vector_norm", "linalg_matrix_norm",
}  # fmt: skip
"""Torch functions that convert their terms to ``dtype`` first."""


def takes_floats(*functions: Any) -> None:
    """Do not encode the float arguments of these torch functions."""
    KEPT.update(functions)


def refuse_transforms(x: Tensor | None = None) -> None:
    """Reject the encoding of ``x`` within a transform of ``torch.func``, or with a forward tangent.

    It raises whether or not the transform wraps the values.

    Raises:
        NotImplementedError: a transform is active, or ``x`` has a tangent.
    """
    refuse_tangents("from_float", x)
    if is_transforming():
        raise NotImplementedError(
            "torch.func.grad, vmap and the like around LNS layers: LNS functions have no rules"
            " for them; use torch.autograd.grad, one call for each gradient (jacobian without"
            " vectorize), or convert with scope='matmul', for which they work"
        )


def refuse_layout(x: Any) -> None:
    """Reject a nested or sparse input of a layer, because LNS has no kernels for these.

    Raises:
        NotImplementedError: the input is nested or sparse.
    """
    if isinstance(x, Tensor) and x.is_nested:
        raise NotImplementedError(
            "a nested tensor in an LNS layer: LNS has no nested tensors; pad it"
            " (torch.nested.to_padded_tensor(x, 0.0)), or pass its parts to the layer one by one"
        )
    if isinstance(x, Tensor) and x.layout is not torch.strided:
        raise NotImplementedError(
            f"a tensor of layout {x.layout} in an LNS layer: it needs a dense one; pass"
            " x.to_dense(), or multiply by torch.sparse.mm(x, layer.weight.t())"
        )


def refuse_tangents(name: str, *inputs: Any) -> None:
    """Reject an operation if one of its inputs has a forward-mode tangent.

    Within transforms of ``torch.func`` any input may have one, known only to an outer transform.

    Raises:
        NotImplementedError: an input has a tangent.
    """
    if is_forward_mode() and (
        is_transforming()
        or any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in inputs)
    ):
        refuse_forward_mode(name)


def refuse_forward_mode(name: str) -> None:
    """Reject an operation in forward mode.

    Raises:
        NotImplementedError: forward-mode differentiation is active.
    """
    if is_forward_mode():
        raise NotImplementedError(
            f"{name} in forward mode (torch.func.jvp, jacfwd, hessian, linearize;"
            " torch.autograd.forward_ad): LNS functions have no forward-mode derivatives; use"
            " reverse mode: jvp, vjp, jacobian, hessian or hvp of torch.autograd.functional with"
            " their defaults, or in scope='matmul' torch.func.vjp and jacrev (twice for a Hessian)"
        )


def encoded(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the codes of a real tensor; an infinity becomes the largest magnitude with its sign.

    Raises:
        NonFiniteError: ``x`` contains a NaN (a ValueError).
    """
    narrow = x.dtype.is_floating_point and x.dtype != torch.float64
    wide = x.float() if narrow else x.double()
    return lns.encode(wide.clamp(-fmt.largest, fmt.largest), fmt)


class named:  # noqa: N801
    """Context in which encoding errors name the operation whose values are encoded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is NonFiniteError and not hasattr(error, "operation"):
            error.operation = self.name
            error.args = (f"{self.name}: {error}",)


_NOTE = "lns_ops"


def note(name: str, args: Any) -> None:
    """Record in the graph that values were decoded for the function ``name``."""
    if torch.compiler.is_compiling():
        return
    for x in tree_leaves(args):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            node: Any = x.grad_fn
            node.metadata[_NOTE] = name


def noted(node: Any) -> str:
    """Describe the origin of a gradient at a graph node, as far as :func:`note` recorded it."""
    if torch.compiler.is_compiling():
        return "a gradient"
    name = node.metadata.get(_NOTE)
    return "a gradient that float32 code returns" if name is None else f"the gradient of {name}"


def any_leaf(holds: Callable[[Any], bool], args: Any) -> bool:
    """Return whether a leaf of the arguments, or of sequences among them, has a property.

    Numbers, names, LNSTensors and similar values do not count.
    """
    for a in args:
        kind = type(a)
        if kind in WITHOUT:
            continue
        if isinstance(a, (list, tuple)):
            if any_leaf(holds, a):
                return True
        elif holds(a):
            return True
    return False


WITHOUT: set[type] = {int, float, bool, NoneType, str, torch.dtype, torch.device, torch.Size}
"""The most frequent types of arguments that do not need encoding."""


def writes(name: str) -> bool:
    """Return whether the torch function with this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITERS)
    return name.endswith("_")


_NO_WRITERS = {"__init__", "__index__", "__int__", "__invert__", "__init_subclass__", "__iter__"}


def count(name: str, number: int = 1) -> None:
    """Count float tensors that were encoded for the operation ``name``."""
    if not torch.compiler.is_compiling():
        encoded_by[name.strip("_")] += number


def lines() -> list[str]:
    """Return the lines of :func:`lns_ops.summary` on the tensors encoded so far."""
    if not encoded_by:
        return []
    counts = ", ".join(f"{name} {count:,}" for name, count in encoded_by.most_common())
    return [f"float tensors encoded to combine them with LNS, in this process: {counts}"]


def written_to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy a function's results to ``out=``, converted to its kind, and return it."""
    out = kwargs["out"]
    results = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    for destination, result in zip(tree_leaves(out), tree_leaves(results), strict=True):
        destination.copy_(result)
    return out


def mapped(change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Apply a function to all leaves of arguments."""
    both: tuple[Any, Any] = tree_map(change, (args, kwargs))
    return both


def refuse_flex_attention() -> NoReturn:
    """Reject ``torch.nn.attention.flex_attention`` of LNSTensors.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "flex_attention of LNSTensors: its kernels are compiled for floats; use"
        " torch.nn.functional.scaled_dot_product_attention (masks and biases go into attn_mask), or"
        " call it on x.to_float()"
    )
