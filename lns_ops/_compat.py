"""All private names of other libraries that this package uses, each with the reason and the
version that it was checked with.

Names are bound when this module is imported, so calls do not go through a wrapper of ours.
``tests/lns_ops/test_compat.py`` shows which names a new version has changed. aten operators with a
leading underscore are not listed here but used directly (:mod:`lns_ops.tensor.ops`): dispatch has
no other names for them, and if one is missing the import fails.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from functools import cache
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _mode_utils, _python_dispatch, _pytree
from torch.utils.data._utils import collate

# --- torch: LNSTensor and its dispatch

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Create a wrapper tensor without memory; torch's guide to subclasses uses it, and torch has no
public equivalent (torch 2.13)."""
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
"""Context that disables the torch functions of subclasses; torch's guide to subclasses uses it, and
torch has no public equivalent (torch 2.13)."""
TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
"""Context that intercepts every operator; torch's guide to subclasses imports it from this private
module (torch 2.13)."""
no_dispatch = _mode_utils.no_dispatch
"""Context in which an operator acts on the wrapper alone, for its shape and strides; torch has no
public equivalent (torch 2.13)."""
USE_COUNT = "_use_count"
"""The method by which ``torch.utils.swap_tensors`` reads a parameter's reference count; it is how
``nn.Module.to`` moves subclasses, and a subclass may override it (torch 2.13)."""
use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, USE_COUNT)
"""The reference count of a tensor; torch has no public equivalent (torch 2.13)."""
foreach_add_: Callable[[list[torch.Tensor], float], None] = torch._foreach_add_
"""Add to all tensors of a list in few launches; torch.optim counts steps with it, and torch has no
public equivalent (torch 2.13)."""
tree_leaves = _pytree.tree_leaves
"""List the leaves of nested arguments; torch has no public equivalent (torch 2.13)."""
LEAVES: set[type] = {torch.Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype}
"""The most frequent types of arguments that are not containers."""


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Map the leaves of nested arguments. torch's own function is private (torch 2.13) and takes
    tens of microseconds even for arguments without containers."""
    if type(tree) is tuple and all(type(x) in LEAVES for x in tree):
        return tuple([change(x) for x in tree])
    if type(tree) is dict and not tree:
        return {}
    return _pytree.tree_map(change, tree)


tensor_text: Callable[[torch.Tensor, int], str] = torch._tensor_str._tensor_str
"""Text of a tensor's values, indented; ``repr`` adds a name, a dtype and a device (torch 2.13)."""
weight_norm: Callable[..., torch.Tensor] = torch._weight_norm
"""Function that :mod:`torch.nn.utils` calls for weight normalization (torch 2.13)."""
sample_dirichlet: Callable[..., torch.Tensor] = torch._sample_dirichlet
"""Sample :mod:`torch.distributions.Dirichlet`; torch has no public equivalent (torch 2.13)."""
grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm
"""What ``torch.nn.functional.grouped_mm`` calls, without dispatch to subclasses (torch 2.13)."""
pack_padded_sequence, pad_packed_sequence = (
    torch._pack_padded_sequence,
    torch._pad_packed_sequence,
)
pad_sequence = torch._C._nn.pad_sequence
"""The function that :mod:`torch.nn.utils.rnn` calls, to be replaced for tensor subclasses
(torch 2.13)."""
collate_functions: dict[Any, Any] = collate.default_collate_fn_map
"""DataLoader's collate function for each type of example; torch's docstring of ``collate`` adds
types to this table, but it has no public name (torch 2.13)."""


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` is active; torch has no public check (torch
    2.13). Returns False under tracing, because torch.compile cannot trace this check."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active, in torch.func or outside; only a
    private attribute shows it (torch 2.13). Returns False under tracing."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Return whether something may observe operator calls: the compiler, a transform of
    ``torch.func``, a mode, ``torch.jit.trace``, a profiler. torch has no public check that covers
    all of these (torch 2.13)."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _transforms()
        or _profiling()
        or _tracing() is not None
    )


def is_exporting() -> bool:
    """Return whether ``torch.export`` is running.

    ``torch.compiler.is_exporting`` returns this flag in torch 2.13. In torch 2.11 it also returns
    True while ``torch.compile`` traces.
    """
    return torch.compiler._is_exporting_flag


def is_recorded() -> bool:
    """Return whether ``make_fx`` or ``torch.jit.trace`` records operators. The state of ``make_fx``
    is read from an experimental torch module, which is not imported here (torch 2.13). Returns
    False under tracing, because torch.compile cannot trace this check."""
    if torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


engine_code = torch.autograd.graph._engine_run_backward.__code__
"""The code of the function that calls the engine of backward passes. It is the caller of everything
that the engine calls on the same thread (torch 2.13)."""
dispatching = {"__torch_dispatch__", "__torch_function__", "__call__", "_fn", "inner"}
"""Functions between the engine and ours while modes such as FlopCounterMode are on (torch 2.13)."""
version_of = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""The getter of a tensor's version, the number of writes to it, which autograd compares (torch
2.13)."""
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that this thread works on, or -1; torch has no public equivalent
(torch 2.13)."""


_AddsToGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def next_nodes(shape: torch.Size) -> list[int] | None:
    """Return ids of the autograd nodes to which the current node passes gradients of ``shape``, or
    None if it adds to ``.grad``. torch has no public equivalent (torch 2.13).

    A node that adds to ``.grad`` has no id; its tensor's address is used instead.
    """
    node = torch._C._current_autograd_node()
    if node is None or not node.next_functions:
        return None
    return [
        -id(n.variable) if isinstance(n, _AddsToGrad) else n._sequence_nr()
        for n, _ in node.next_functions
        if n is not None and any(tuple(data.shape) == shape for data in n._input_metadata)
    ]


COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"}
"""The namespaces of torch's collective operators; torch has no public list (torch 2.13)."""


def written_arguments(operator: Any) -> list[Any]:
    """Return the arguments that an aten operator writes to, from its schema (torch 2.13)."""
    return [
        argument
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The active modes that intercept torch functions in this thread; torch lists them only here
(torch 2.13)."""

# --- torch: layers and optimizers

scaled_mm = torch._scaled_mm
"""The product of float8 matrices. For 16 x 32 values on a CPU ``torch.nn.functional.scaled_mm``
took 112 microseconds a call instead of 81; it was not tried on a GPU (torch 2.13)."""
reversed_padding: Callable[[Any], list[int]] = attrgetter("_reversed_padding_repeated_twice")
"""The padding of a convolution in the order of ``torch.nn.functional.pad``, which only the layer
itself stores (torch 2.13)."""


def remove_forward_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove a module's own forward hooks and pre-hooks of these types.

    A public handle for each would have to be kept, copied and pickled with the module (torch 2.13).
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def remove_loading_hooks(module: nn.Module, function: Any) -> None:
    """Remove a function from the hooks that a module calls before it loads a state dict.

    A public handle would have to be kept, copied and pickled with the module (torch 2.13).
    """
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is function]:
        del hooks[key]


def active_replicas() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass is running, if any.

    torch's compiler uses the same private method; torch has no public equivalent (torch 2.13).
    """
    return DistributedDataParallel._active_ddp_module


replicated_parameters: Callable[[DistributedDataParallel], list[torch.Tensor]] = attrgetter(
    "_module_parameters"
)
"""The parameters whose gradients a DistributedDataParallel exchanges, recorded when it wrapped the
module. The module may have other parameters by now, and torch keeps the old ones only here (torch
2.13)."""
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps parameters, buffers and submodules. ``vars`` lists them
among all others, and torch has no public way to separate them (torch 2.13)."""


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return a leaf's gradient hooks; torch has no public equivalent (torch 2.13)."""
    return list((tensor._backward_hooks or {}).values())


def move_tensor_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Move a leaf's gradient hooks to another leaf; handles still remove them.

    torch has no public list of a tensor's hooks (torch 2.13).
    """
    for name in _HOOKS:
        hooks = getattr(old, name)
        if hooks:
            setattr(old, name, None)
            setattr(new, name, hooks)


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a leaf has gradient hooks; torch has no public check (torch 2.13)."""
    return any(getattr(tensor, name) is not None for name in _HOOKS)


def share_tensor_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Call a leaf's gradient hooks for another leaf, too.

    ``torch.utils.swap_tensors`` swaps the caller of the hooks but not the lists of hooks, so
    without this the hooks of ``old`` would be called only if ``new`` already had hooks (torch
    2.13).
    """
    for name in _HOOKS:
        if (hooks := getattr(old, name)) is not None:  # an empty list may get hooks later
            setattr(new, name, hooks)


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that runs in this thread, -1 outside of one; torch's checkpoints use
it, and torch has no public equivalent (torch 2.13)."""


def is_run_anew() -> bool:
    """Return whether the caller runs under ``torch.utils.checkpoint`` with ``use_reentrant=True``,
    so the backward pass will run it again; torch has no public check (torch 2.13)."""
    from torch.utils.checkpoint import CheckpointFunction

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def is_accumulating() -> bool:
    """Return, in the gradient hook of a leaf, whether the gradient is added to ``grad``.

    ``torch.autograd.grad`` returns the gradient instead; then torch's query raises. torch has no
    public way to distinguish the two (torch 2.13).
    """
    try:
        return torch._C._will_engine_execute_node(torch._C._current_autograd_node())
    except RuntimeError:
        return False


def goes_on_after(tensor: torch.Tensor) -> bool:
    """Return whether the running backward pass continues behind ``tensor``, which is not a leaf.

    ``backward`` continues behind every tensor, ``torch.autograd.grad`` only towards its inputs.
    torch raises if asked about a leaf that is such an input; it has no public check (torch 2.13).
    """
    assert tensor.grad_fn is not None
    try:
        return any(
            torch._C._will_engine_execute_node(node)
            for node, _ in tensor.grad_fn.next_functions
            if node is not None
        )
    except RuntimeError:
        return True


COMPILER = "torch._dynamo"
"""The module of torch's compiler, imported by ``torch.compiler.allow_in_graph`` (torch 2.13)."""


def without_compiler(method: Any) -> Any:
    """Return a method of torch's Optimizer without the wrapper that hides it from the compiler, if
    the compiler is not imported.

    The wrapper imports the compiler first, which takes two seconds (torch 2.13).
    """
    if COMPILER in sys.modules:
        return method
    return inspect.unwrap(method.__func__).__get__(method.__self__)


@cache
def openmp_team() -> Callable[[int, Any, int, int], None] | None:
    """Return the function that runs a C function on all threads of an OpenMP team, or None.

    Its arguments are the C function's address, its argument, the number of threads, and 0. GCC
    compiles ``#pragma omp parallel`` to a call of this function. It belongs to the OpenMP library
    that torch has loaded (GNU's; LLVM's and Intel's have it as well), but no header declares it
    (torch 2.13).
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.restype = None
    team: Callable[[int, Any, int, int], None] = found
    return team


# --- torch: information on operators, for the documentation

WRITTEN_IN_CPP = "torch._C._"
"""Prefix of the module names of torch functions that are written in C++; their public names are
elsewhere (torch 2.13)."""
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""The names of all operators; ``torch.ops`` lists only those used so far (torch 2.13)."""
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel for a dispatch key such as ``CUDA``; torch has no public check
(torch 2.13)."""

# --- CUDA: before every launch of a kernel


def _handle_of_current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""``torch.cuda.current_device()`` without its check that CUDA is initialized (torch 2.13)."""
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _handle_of_current_stream
)
"""CUDA's handle of a device's current stream; torch's public function creates an object each time
(torch 2.13)."""


def cupy_driver() -> Any:
    """Import CuPy's binding of CUDA's driver, which launches with prepacked arguments; a public
    ``RawKernel`` packs them one by one at every launch (CuPy 14.2)."""
    from cupy_backends.cuda.api import driver

    return driver


# --- numba: standalone machine code

NO_REFERENCE_COUNTS = {"_nrt": False}
"""Option of numba's decorators. Without it the machine code refers to numba's runtime, and its
object file cannot be loaded on its own (numba 0.68)."""
struct_value: Callable[[Any], Any] = methodcaller("_getvalue")
"""The LLVM value of a structure; numba's guide to intrinsics uses it, and numba has no public
equivalent (numba 0.68)."""
