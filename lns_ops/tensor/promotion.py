"""What happens where an LNSTensor meets a float tensor: masks, noise, buffers, targets.

One rule, like torch's type promotion, where LNS stands above every float dtype:

- Out of place, float tensors are encoded in the format of the LNSTensor they meet (two formats
  raise, as nothing says which to take). An infinity becomes the largest magnitude of its sign, so a
  mask of ``-inf``, or of the dtype's most negative finite value, still masks: behind a softmax its
  weight is exactly 0. A NaN raises. A float tensor that requires a gradient gets a float32 one.
- The entries of a sparse matrix multiplied with LNS are encoded; the product is dense.
- In place, and with ``out=``, the destination stays what it is: a float tensor takes the decoded
  values.
- ``x.to(dtype)`` of another dtype (``half``, ``long``, ...) and what only float32 has (complex
  numbers, numpy arrays) take the values out; they come back where they meet LNS again.

What is encoded is counted by the name of the operation (:data:`encoded_by`), and
:func:`lns_ops.summary` says it: nothing happens silently.
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
"""How many float tensors met LNS in this process and were encoded, by operation."""
KEPT: set[Any] = set()
"""The torch functions that take float tensors beside LNS ones as they are."""
CONVERTED = {
    "sum", "nansum", "mean", "prod", "cumsum", "cumprod", "norm", "linalg_norm",
    "linalg_vector_norm", "linalg_matrix_norm",
}  # fmt: skip
"""The torch functions that convert their terms to ``dtype`` first."""


def takes_floats(*functions: Any) -> None:
    """Leave the float arguments of torch ``functions`` alone."""
    KEPT.update(functions)


def refuse_transforms(x: Tensor | None = None) -> None:
    """Refuse to encode ``x`` within a transform of ``torch.func``, or with a forward-mode tangent.

    The transform may wrap the values or not.

    Raises:
        NotImplementedError: such a transform goes on, or ``x`` has a tangent.
    """
    refuse_tangents("from_float", x)
    if is_transforming():
        raise NotImplementedError(
            "torch.func.grad, vmap and the like around LNS layers: LNS functions have no rules"
            " for them; use torch.autograd.grad, one call for each gradient (jacobian without"
            " vectorize), or convert with scope='matmul', for which they work"
        )


def refuse_layout(x: Any) -> None:
    """Refuse an input of a layer that is nested or sparse, for which there are no kernels.

    Raises:
        NotImplementedError: it is.
    """
    if isinstance(x, Tensor) and x.is_nested:
        raise NotImplementedError(
            "a nested tensor in an LNS layer: there are none in LNS; pad it"
            " (torch.nested.to_padded_tensor(x, 0.0)), or give the layer its parts one by one"
        )
    if isinstance(x, Tensor) and x.layout is not torch.strided:
        raise NotImplementedError(
            f"a tensor of layout {x.layout} in an LNS layer: it takes dense ones; give it"
            " x.to_dense(), or multiply by torch.sparse.mm(x, layer.weight.t())"
        )


def refuse_tangents(name: str, *inputs: Any) -> None:
    """Refuse an operation on inputs of which one has a forward-mode tangent.

    Within transforms of ``torch.func``, where only an outer one may know of it, any may have one.

    Raises:
        NotImplementedError: one has.
    """
    if is_forward_mode() and (
        is_transforming()
        or any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in inputs)
    ):
        refuse_forward_mode(name)


def refuse_forward_mode(name: str) -> None:
    """Refuse what an operation of this name cannot do in forward mode.

    Raises:
        NotImplementedError: forward-mode differentiation goes on.
    """
    if is_forward_mode():
        raise NotImplementedError(
            f"{name} in forward mode (torch.func.jvp, jacfwd, hessian, linearize;"
            " torch.autograd.forward_ad): LNS functions have no forward-mode derivatives; use"
            " reverse mode: jvp, vjp, jacobian, hessian or hvp of torch.autograd.functional as they"
            " are by default, or in scope='matmul' torch.func.vjp and jacrev, for a Hessian twice"
        )


def encoded(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the codes of a real tensor, an infinity as the largest magnitude of its sign.

    Raises:
        NonFiniteError: a NaN (a ValueError).
    """
    narrow = x.dtype.is_floating_point and x.dtype != torch.float64
    wide = x.float() if narrow else x.double()
    return lns.encode(wide.clamp(-fmt.largest, fmt.largest), fmt)


class named:  # noqa: N801
    """Context in which errors of encoding name the operation whose values are encoded."""

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
    """Note in the graph that values were decoded for the function ``name``."""
    if torch.compiler.is_compiling():
        return
    for x in tree_leaves(args):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            node: Any = x.grad_fn
            node.metadata[_NOTE] = name


def noted(node: Any) -> str:
    """Return whose gradient arrives at a node of the graph, as far as :func:`note` knows."""
    if torch.compiler.is_compiling():
        return "a gradient"
    name = node.metadata.get(_NOTE)
    return "a gradient that float32 code returns" if name is None else f"the gradient of {name}"


def any_leaf(holds: Callable[[Any], bool], args: Any) -> bool:
    """Return whether a leaf of arguments, or of sequences among them, has a property.

    Numbers, names, LNSTensors and the like have none.
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
"""The types of arguments that are no floats to encode, the most frequent ones."""


def writes(name: str) -> bool:
    """Return whether a torch function of this name writes to its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITERS)
    return name.endswith("_")


_NO_WRITERS = {"__init__", "__index__", "__int__", "__invert__", "__init_subclass__", "__iter__"}


def count(name: str, number: int = 1) -> None:
    """Count float tensors that the operation ``name`` met."""
    if not torch.compiler.is_compiling():
        encoded_by[name.strip("_")] += number


def lines() -> list[str]:
    """Return what :func:`lns_ops.summary` says of the tensors encoded so far."""
    if not encoded_by:
        return []
    counts = ", ".join(f"{name} {count:,}" for name, count in encoded_by.most_common())
    return [f"float tensors encoded where they met LNS, in this process: {counts}"]


def written_to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy a function's results into what ``out=`` names, in its kind, and return it."""
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
    """Refuse ``torch.nn.attention.flex_attention`` of LNSTensors.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "flex_attention of LNSTensors: its kernels are compiled for floats; use"
        " torch.nn.functional.scaled_dot_product_attention (masks and biases go into attn_mask), or"
        " call it on x.to_float()"
    )
