"""Every private name of another library that this package uses, each with its reason and the
version it was seen with.

``tests/trainers/test_compat.py`` says which one a new version has changed. What only a few trials
need is imported when it is called.
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
"""Sets how long a group's collectives wait; the public ``timeout`` of a group that is being made
covers its making too, and ``ProcessGroup.set_timeout`` was never tried with NCCL (torch 2.13)."""


TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of what sees every operator that is called, of backward too; torch's notes on
extending it derive from it, nothing public names it (torch 2.13)."""


def choose_cudnn(*, deterministic: bool, benchmark: bool) -> None:
    """Set how cuDNN chooses its algorithms: whether among deterministic ones, and by timing.

    ``torch.backends.cudnn.set_flags`` also reads the settings of TF32, and raises if they differ
    for convolutions and recurrent networks; the plain attributes are refused once torch has frozen
    its flags (torch 2.13).
    """
    torch._C._set_cudnn_deterministic(deterministic)
    torch._C._set_cudnn_benchmark(benchmark)


def clear_tensor_caches() -> None:
    """Empty the caches of ``torch.distributed.tensor``, which keep meshes and so their groups.

    Those of sharding rules and redistributions have functions that clear them; others, some in
    closures, are functools' own. Nothing public clears any (torch 2.13).
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
    """Have the first messages of a pipeline's stage leave out those to its own process.

    In a schedule in the shape of a V a process's stage is the next of another of its own, and gloo
    sends nothing to itself. For torch before 2.13, which does not call this (torch 2.11, 2.13).
    """
    made, own = stage._get_init_p2p_neighbors_ops, torch.distributed.get_rank()
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in made() if op.peer != own]


def forget_forward_order(module: Any) -> None:
    """Have a module that ``fully_shard`` has sharded forget when it ran forwards.

    For torch before 2.13, which is the first to have ``reset_iter_state`` (torch 2.11, 2.13).
    """
    state = module._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    if state._fsdp_param_group is not None:
        state._fsdp_param_group._post_forward_indices.clear()


def transformed() -> bool:
    """Return whether code runs within a transform of torch.func, or is traced.

    ``torch.autograd.Function`` asks the same where it refuses the transforms (torch 2.11, 2.13).
    """
    return bool(torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def untouched(layer: torch.nn.Module) -> bool:
    """Return whether a call of ``layer``, an nn.Linear, is its product with its weight, alone.

    It is not where it has hooks, or all modules have, or another ``forward``, or is a subclass
    (torch 2.11, 2.13).
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
    """Return ``gcsfs.core.GCSFileSystem`` with requests that are sent once.

    Six times, as much as a minute, is fixed there where a request is defined (gcsfs 2026.10).
    """
    from gcsfs.core import GCSFileSystem

    once = {"_request": GCSFileSystem._request.__wrapped__}
    return type("GoogleStorage", (GCSFileSystem,), once)


def of_tensors(formula: Formula) -> Formula:
    """Mark a formula of ``FlopCounterMode(custom_mapping=...)`` as one that takes tensors.

    Others are given shapes, a DTensor's those of the whole; ``register_flop_formula(get_raw=True)``
    would change the count of every tensor in the process (torch 2.13).
    """
    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def abort_ray_train(controller: Any) -> None:
    """Have Ray Train's controller, an actor, end its run as Ctrl-C in a script does.

    It may be called in the controller itself: the run ends once the caller has returned. An error
    raised there would not end it (Ray 2.60).
    """
    controller.abort.remote()


def latest_ray_train_checkpoint(run: Path) -> Path:
    """Return the folder of the checkpoint that a Ray Train run would continue from.

    ``ray.train.Result.from_path`` raises the same private error for a damaged file and for one of
    another version (Ray 2.60).

    Raises:
        FileNotFoundError, KeyError, TypeError: there is none yet.
        ValueError: Ray Train's file is damaged.
    """
    snapshot = json.loads((run / "checkpoint_manager_snapshot.json").read_text())
    return run / str(snapshot["latest_checkpoint_result"]["checkpoint_dir_name"])
