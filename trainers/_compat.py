"""All private names of other libraries that this package uses, each with the reason and the tested
version.

``tests/trainers/test_compat.py`` detects changes in new versions. Names that only a few trials need
are imported on use.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch

Formula = TypeVar("Formula", bound=Callable[..., int])

set_timeout = distributed_c10d._set_pg_timeout
"""Sets the timeout of a group's collectives. The public ``timeout`` argument of a new group also
limits its construction, and ``ProcessGroup.set_timeout`` is untested with NCCL (torch 2.13)."""


TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of modes that see every operator call, including backward; torch's notes on extending
torch use it, but it has no public name (torch 2.13)."""


def choose_cudnn(*, deterministic: bool, benchmark: bool) -> None:
    """Set whether cuDNN only uses deterministic algorithms, and whether it chooses by timing.

    ``torch.backends.cudnn.set_flags`` also reads the TF32 settings, and raises if they differ
    between convolutions and recurrent networks. The plain attributes raise after torch has frozen
    its flags (torch 2.13).
    """
    torch._C._set_cudnn_deterministic(deterministic)
    torch._C._set_cudnn_benchmark(benchmark)


def clear_tensor_caches() -> None:
    """Empty the caches of ``torch.distributed.tensor``, which keep meshes, and thereby groups,
    alive.

    The caches of sharding rules and redistributions have private functions to clear them; the
    others, some in closures, are functools caches. There is no public way (torch 2.13).
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for function in gc.get_objects():
        if type(function) is functools._lru_cache_wrapper and function.__module__.startswith(
            "torch.distributed.tensor"
        ):
            function.cache_clear()


def leave_out_messages_to_itself(stage: Any) -> None:
    """Remove messages to the own process from a pipeline stage's initial messages.

    In a V-shaped schedule, two consecutive stages can be on the same process, and gloo cannot send
    to itself. Needed before torch 2.13, which does not call this (torch 2.11, 2.13).
    """
    made, own = stage._get_init_p2p_neighbors_ops, torch.distributed.get_rank()
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in made() if op.peer != own]


def forget_forward_order(module: Any) -> None:
    """Clear the recorded forward order of a module sharded by ``fully_shard``.

    Needed before torch 2.13, which introduced ``reset_iter_state`` (torch 2.11, 2.13).
    """
    state = module._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    if state._fsdp_param_group is not None:
        state._fsdp_param_group._post_forward_indices.clear()


def transformed() -> bool:
    """Return whether code runs within a transform of torch.func, or is traced.

    ``torch.autograd.Function`` uses the same check to reject transforms (torch 2.11, 2.13).
    """
    return bool(torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def untouched(layer: torch.nn.Module) -> bool:
    """Return whether a call of the nn.Linear ``layer`` computes only the standard product.

    It does not if there are hooks (own or global), a replaced ``forward``, or if ``layer`` is of a
    subclass (torch 2.11, 2.13).
    """
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    plain = type(layer) is torch.nn.Linear and "forward" not in layer.__dict__
    return plain and not any(hooks) and not torch.nn.modules.module._has_any_global_hook()


def google_storage_asked_once() -> type[Any]:
    """Return ``gcsfs.core.GCSFileSystem`` without retries of requests.

    Its six attempts, which can take a minute, are hard-coded (gcsfs 2026.10).
    """
    from gcsfs.core import GCSFileSystem

    once = {"_request": GCSFileSystem._request.__wrapped__}
    return type("GoogleStorage", (GCSFileSystem,), once)


def of_tensors(formula: Formula) -> Formula:
    """Mark a formula of ``FlopCounterMode(custom_mapping=...)`` as one that takes tensors.

    Other formulas get shapes, for a DTensor the global shape. The public
    ``register_flop_formula(get_raw=True)`` would change the count for all tensors in the process
    (torch 2.13).
    """
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def abort_ray_train(controller: Any) -> None:
    """Make Ray Train's controller, an actor, abort its run, as Ctrl-C in a script does.

    It may be called in the controller itself; the run ends after the caller has returned. An error
    raised there would not end the run (Ray 2.60).
    """
    controller.abort.remote()


def latest_ray_train_checkpoint(run: Path) -> Path:
    """Return the folder of the checkpoint that a Ray Train run would continue from.

    ``ray.train.Result.from_path`` raises the same private error for a damaged file and for a file
    of another version (Ray 2.60).

    Raises:
        FileNotFoundError, KeyError, TypeError: the run has no checkpoint yet.
        ValueError: Ray Train's file is damaged.
    """
    snapshot = json.loads((run / "checkpoint_manager_snapshot.json").read_text())
    return run / str(snapshot["latest_checkpoint_result"]["checkpoint_dir_name"])
