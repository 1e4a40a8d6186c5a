"""Every private name of another library that this package uses, each with its reason and the
version it was seen with.

Names are bound when this module is imported, so that no call goes through a function of ours.
``tests/lns_ops/test_compat.py`` says which one a new version has changed. aten operators whose
names begin with an underscore stay where they are handled (:mod:`lns_ops.tensor.ops`): dispatch
has no other names for them, and without one the import fails.
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
"""Maker of tensors without memory; torch's guide to subclasses calls it, nothing public does (torch
2.13)."""
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
"""Context in which torch functions are torch's own; torch's guide to subclasses enters it, nothing
public does (torch 2.13)."""
TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode
"""Context that sees every operator; torch's guide to subclasses names it, in a private module
(torch 2.13)."""
no_dispatch = _mode_utils.no_dispatch
"""Context in which an operator acts on the wrapper alone, for its shape and strides; nothing public
does (torch 2.13)."""
USE_COUNT = "_use_count"
"""The method that ``torch.utils.swap_tensors`` asks a parameter for how many hold it, by which
``nn.Module.to`` moves subclasses; a subclass may have its own (torch 2.13)."""
use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, USE_COUNT)
"""The number of those who hold a tensor, which nothing public tells (torch 2.13)."""
foreach_add_: Callable[[list[torch.Tensor], float], None] = torch._foreach_add_
"""Addition to all tensors of a list in few launches, by which torch.optim counts steps; nothing
public does (torch 2.13)."""
tree_leaves = _pytree.tree_leaves
"""Walk over nested arguments; torch has no public one (torch 2.13)."""
LEAVES: set[type] = {torch.Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype}
"""The types that are most frequent in arguments and are no containers."""


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Map the leaves of nested arguments, as torch's function, which nothing public does (torch
    2.13), and which takes tens of microseconds for arguments without containers too."""
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
"""Draws of :mod:`torch.distributions.Dirichlet`, which nothing public makes (torch 2.13)."""
grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm
"""What ``torch.nn.functional.grouped_mm`` calls without asking tensor subclasses (torch 2.13)."""
pack_padded_sequence, pad_packed_sequence = (
    torch._pack_padded_sequence,
    torch._pad_packed_sequence,
)
pad_sequence = torch._C._nn.pad_sequence
"""What :mod:`torch.nn.utils.rnn` calls with tensor subclasses, so what must be replaced for them
(torch 2.13)."""
collate_functions: dict[Any, Any] = collate.default_collate_fn_map
"""How DataLoader makes batches, by the type of the examples; torch's docstring of ``collate`` adds
types to it, nothing public names it (torch 2.13)."""


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` goes on; only a private function tells (torch
    2.13). Code that is traced is told no: the compiler cannot trace the question."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation goes on, also that of ``torch.func``; only a
    private level tells (torch 2.13). Code that is traced is told no."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_tracing: Callable[[], Any] = torch._C._get_tracing_state
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def is_watched() -> bool:
    """Return whether something sees operators that are called, or may: the compiler, a transform of
    ``torch.func``, a mode, ``torch.jit.trace``, a profiler; only private functions tell all of them
    (torch 2.13)."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _transforms()
        or _profiling()
        or _tracing() is not None
    )


def is_exporting() -> bool:
    """Return whether ``torch.export`` goes on.

    This is the flag that ``torch.compiler.is_exporting`` returns in torch 2.13; in torch 2.11 that
    function says yes while ``torch.compile`` traces, too.
    """
    return torch.compiler._is_exporting_flag


def is_recorded() -> bool:
    """Return whether ``make_fx`` or ``torch.jit.trace`` records operators; the former asked of a
    module that nothing loads for it, whose function is public, but as torch's experiment (torch
    2.13). Code that is traced is told no: the compiler cannot trace the question."""
    if torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


engine_code = torch.autograd.graph._engine_run_backward.__code__
"""The function that the engine of backward passes is called from, and so the caller of what it
calls on the same thread (torch 2.13)."""
dispatching = {"__torch_dispatch__", "__torch_function__", "__call__", "_fn", "inner"}
"""The functions between it and us, where modes such as FlopCounterMode are on (torch 2.13)."""
version_of = torch.Tensor._version.__get__  # type: ignore[attr-defined]
"""The getter of the number of times that a tensor was written to, which autograd compares (torch
2.13)."""
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread works on, or -1; nothing public tells (torch
2.13)."""


_AddsToGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def next_nodes(shape: torch.Size) -> list[int] | None:
    """Return numbers of the nodes that the node at work passes gradients of ``shape`` to; None
    where it adds to ``.grad``. Only private functions tell (torch 2.13).

    A node that adds to ``.grad`` has no number of its own; its tensor's address stands for it.
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
"""The namespaces of torch's operators between processes, which no public name lists (torch
2.13)."""


def written_arguments(operator: Any) -> list[Any]:
    """Return the arguments that an aten operator writes to; only its schema tells (torch 2.13)."""
    return [
        argument
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The contexts that see torch functions in this thread, which nothing public lists (torch 2.13)."""

# --- torch: layers and optimizers

scaled_mm = torch._scaled_mm
"""The product of float8 matrices; ``torch.nn.functional.scaled_mm`` took 112 microseconds a call
instead of 81, of 16 x 32 values on a CPU, and was never tried on a GPU (torch 2.13)."""
reversed_padding: Callable[[Any], list[int]] = attrgetter("_reversed_padding_repeated_twice")
"""The padding of a convolution as ``torch.nn.functional.pad`` wants it; the layer works it out for
itself alone (torch 2.13)."""


def remove_forward_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove a module's own forward hooks and pre-hooks of these types.

    A public handle of each would have to be kept, copied and pickled with the module (torch 2.13).
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def remove_loading_hooks(module: nn.Module, function: Any) -> None:
    """Remove a function from those that a module calls before it loads a state.

    A public handle would have to be kept, copied and pickled with the module (torch 2.13).
    """
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is function]:
        del hooks[key]


def active_replicas() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel within whose forward pass this is called, if any.

    torch's compiler asks its private method; there is no public one (torch 2.13).
    """
    return DistributedDataParallel._active_ddp_module


replicated_parameters: Callable[[DistributedDataParallel], list[torch.Tensor]] = attrgetter(
    "_module_parameters"
)
"""The parameters whose gradients a DistributedDataParallel exchanges, as it found them when it was
made; the module's own may be others by now, and nothing public keeps them (torch 2.13)."""
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps what it has registered: ``vars`` shows them among its own,
and nothing public tells them apart (torch 2.13)."""


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return a leaf's gradient hooks, which no public function tells (torch 2.13)."""
    return list((tensor._backward_hooks or {}).values())


def move_tensor_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Move a leaf's gradient hooks to another leaf; handles that remove them go on to do so.

    No public function tells which hooks a tensor has (torch 2.13).
    """
    for name in _HOOKS:
        hooks = getattr(old, name)
        if hooks:
            setattr(old, name, None)
            setattr(new, name, hooks)


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Tell whether a leaf has gradient hooks, which no public function tells (torch 2.13)."""
    return any(getattr(tensor, name) is not None for name in _HOOKS)


def share_tensor_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Have a leaf's gradient hooks called for another leaf, too.

    ``torch.utils.swap_tensors`` swaps what calls the hooks of two tensors and leaves their lists
    where they are: those of ``old`` are called after it only if ``new`` had them before (torch
    2.13).
    """
    for name in _HOOKS:
        if (hooks := getattr(old, name)) is not None:  # empty ones may get more
            setattr(new, name, hooks)


current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread, -1 outside of any; torch's checkpoints ask
it, nothing public tells (torch 2.13)."""


def is_run_anew() -> bool:
    """Tell whether the caller is run by ``torch.utils.checkpoint`` with ``use_reentrant=True``,
    whose backward pass runs it once more; nothing public tells (torch 2.13)."""
    from torch.utils.checkpoint import CheckpointFunction

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def is_accumulating() -> bool:
    """Tell, in the gradient hook of a leaf, whether the gradient is added to ``grad``.

    ``torch.autograd.grad`` returns it instead, in which case torch raises here. Nothing public
    tells them apart (torch 2.13).
    """
    try:
        return torch._C._will_engine_execute_node(torch._C._current_autograd_node())
    except RuntimeError:
        return False


def goes_on_after(tensor: torch.Tensor) -> bool:
    """Return whether the running backward pass computes gradients of what ``tensor``, which is no
    leaf, was computed from; nothing public tells (torch 2.13).

    ``backward`` does so for all tensors, ``torch.autograd.grad`` only on the way to those it was
    asked for. At a leaf that it was asked for torch raises.
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
"""The module of torch's compiler, which ``torch.compiler.allow_in_graph`` imports (torch 2.13)."""


def without_compiler(method: Any) -> Any:
    """Return a method of torch's Optimizer without the wrapper that keeps the compiler out of it,
    where no compiler is loaded.

    The wrapper loads the compiler first, which takes a process two seconds (torch 2.13).
    """
    if COMPILER in sys.modules:
        return method
    return inspect.unwrap(method.__func__).__get__(method.__self__)


@cache
def openmp_team() -> Callable[[int, Any, int, int], None] | None:
    """Return what has a team of OpenMP's threads call a C function; None where there is none.

    Its arguments are the function's address, what it gets, the threads of the team, and 0. It is
    what GCC compiles ``#pragma omp parallel`` to, of the library that torch has loaded (GNU's;
    LLVM's and Intel's have it as well), and named in no header (torch 2.13).
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.restype = None
    team: Callable[[int, Any, int, int], None] = found
    return team


# --- torch: what it says of operators, for the documentation

WRITTEN_IN_CPP = "torch._C._"
"""Begins the modules of torch functions that are written in C++, whose public names are elsewhere
(torch 2.13)."""
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""The names of all operators; ``torch.ops`` has those that were asked for (torch 2.13)."""
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an operator has a kernel for a key of the dispatcher, such as ``CUDA``; nothing public
tells (torch 2.13)."""

# --- CUDA: before every launch of a kernel


def _handle_of_current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""``torch.cuda.current_device()``, which asks first whether CUDA is there (torch 2.13)."""
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _handle_of_current_stream
)
"""CUDA's handle of a device's current stream, for which torch's public function makes an object
(torch 2.13)."""


def cupy_driver() -> Any:
    """Import CuPy's way to CUDA's driver, which launches with arguments packed already; a public
    ``RawKernel`` packs them one by one at every launch (CuPy 14.2)."""
    from cupy_backends.cuda.api import driver

    return driver


# --- numba: machine code of its own

NO_REFERENCE_COUNTS = {"_nrt": False}
"""Option of numba's decorators: without it code refers to numba's runtime, and no object file of it
can be loaded by itself (numba 0.68)."""
struct_value: Callable[[Any], Any] = methodcaller("_getvalue")
"""The LLVM value of a structure; numba's guide to intrinsics calls it, nothing public does (numba
0.68)."""
