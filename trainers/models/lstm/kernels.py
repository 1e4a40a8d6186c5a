"""The steps of an LSTM variant on NVIDIA GPUs: one kernel for all forward steps, one for backward.

The kernels are in ``steps.cu``. A step of a small LSTM is a few microseconds of work; its
operations would take several times as long if they were launched one by one.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lns_ops.cuda.runtime import CudaKernel, compile_function, most_shared_bytes, unavailable
from trainers.models.lstm.equations import Equations

SEQUENCES = 4
"""Number of sequences of a batch per thread block."""
_MOST_THREADS = 1024
_LAYOUT = 8 * "P" + "iii"


def shared_bytes(equations: Equations) -> int:
    """Return a thread block's shared memory in backward, which needs more than forward."""
    blocks, width = 1 + len(equations.gates), equations.width
    recurring = (blocks - 1) if equations.variant == "fgr" else 0
    return 4 * SEQUENCES * width * (3 * blocks + recurring)


def fits(sums: Tensor, equations: Equations) -> bool:
    """Return whether the kernels support a layer: float32 on a GPU with enough shared memory."""
    if not sums.is_cuda or sums.dtype != torch.float32 or not sums.numel() or unavailable():
        return False
    return shared_bytes(equations) <= most_shared_bytes(sums.get_device())


@lru_cache(maxsize=64)
def _function(name: str, variant: str, device: int) -> Any:
    """Return a kernel's function, compiled for a variant."""
    equations = Equations(variant, 1)
    columns = "z" + equations.gates
    macros = {
        "SEQUENCES": SEQUENCES,
        "GATES": len(equations.gates),
        "INPUT": max(0, columns.find("i")),
        "FORGET": max(0, columns.find("f")),
        "OUTPUT": max(0, columns.find("o")),
        "PEEPHOLES": equations.variant != "np",
        "COUPLED": equations.variant == "cifg",
        "RECURRING": equations.variant == "fgr",
        "Z_TANH": equations.variant != "niaf",
        "C_TANH": equations.variant != "noaf",
    }
    source = (resources.files("trainers.models.lstm") / "steps.cu").read_text()
    options = tuple(f"-D{key}={int(value)}" for key, value in macros.items())
    return compile_function(source, name, options, device)


@lru_cache(maxsize=4096)
def _kernel(name: str, equations: Equations, device: int) -> CudaKernel:
    """Return a layer's kernel; all widths of a variant share one function."""
    function = _function(name, equations.variant, device)
    shared, allowed = shared_bytes(equations), most_shared_bytes(device)
    return CudaKernel(function, _LAYOUT, shared, allowed=allowed)


@atexit.register
def _forget() -> None:
    """Release kernels before CuPy is unloaded; see :mod:`lns_ops.cuda.runtime`."""
    _kernel.cache_clear()
    _function.cache_clear()


@torch.library.custom_op(
    "lns_study::lstm_forward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor sums, Tensor R, Tensor? p, Tensor? G, str variant)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    sums_BTK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_JJ: Tensor | None, variant: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    equations, values_BTK = Equations(variant, R_KH.shape[1]), torch.empty_like(sums_BTK)
    y_BTH, before_BTH, c_BTH = (
        sums_BTK.new_empty(*sums_BTK.shape[:2], equations.width) for _ in range(3)
    )
    R_HK, G_transposed = (None if a is None else a.t() for a in (R_KH, G_JJ))
    _run(
        "lstm_forward", equations, sums_BTK,
        R_HK, p_GH, G_transposed, values_BTK, y_BTH, before_BTH, c_BTH,
    )  # fmt: skip
    return y_BTH, values_BTK, before_BTH, c_BTH


@torch.library.custom_op(
    "lns_study::lstm_backward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor values, Tensor c, Tensor R, Tensor? p, Tensor? G, str variant)"
    " -> (Tensor, Tensor)",
)
def _backward(
    grad_BTH: Tensor, values_BTK: Tensor, c_BTH: Tensor, R_KH: Tensor, p_GH: Tensor | None,
    G_JJ: Tensor | None, variant: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ds_BTK = torch.empty_like(values_BTK)
    blocks = -(-len(grad_BTH) // SEQUENCES)
    dp_GH = ds_BTK.new_empty(0 if p_GH is None else (blocks, *p_GH.shape))
    _run(
        "lstm_backward", Equations(variant, R_KH.shape[1]), grad_BTH,
        values_BTK, c_BTH, R_KH, p_GH, G_JJ, ds_BTK, dp_GH,
    )  # fmt: skip
    return ds_BTK, dp_GH


@register_flop_formula([torch.ops.lns_study.lstm_forward, torch.ops.lns_study.lstm_backward])
def _flops(first: Sequence[int], *others: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return two for each weight from outputs or gates, sequence and step."""
    R, _, G, _ = others[-4:]
    return 2 * int(first[0] * first[1] * (math.prod(R) + math.prod(G or (0,))))


def forward(
    equations: Equations, sums_BTK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_JJ: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of all steps, and the saved values for :func:`backward`."""
    y_BTH, *kept = torch.ops.lns_study.lstm_forward(sums_BTK, R_KH, p_GH, G_JJ, equations.variant)
    return y_BTH, tuple(kept)


def backward(
    equations: Equations, grad_BTH: Tensor, kept: tuple[Tensor, ...], R_KH: Tensor,
    p_GH: Tensor | None, G_JJ: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of the sums, R, the peepholes and G."""
    values_BTK, before_BTH, c_BTH = kept
    ds_BTK, parts = torch.ops.lns_study.lstm_backward(
        grad_BTH, values_BTK, c_BTH, R_KH, p_GH, G_JJ, equations.variant
    )
    dR = ds_BTK.flatten(0, 1).t() @ before_BTH.flatten(0, 1)
    dp = None if p_GH is None else parts.sum(0)
    dG = None
    if G_JJ is not None:
        later, gates = (a[..., equations.width :] for a in (ds_BTK[:, 1:], values_BTK[:, :-1]))
        dG = later.flatten(0, 1).t() @ gates.flatten(0, 1)
    return ds_BTK, dR, dp, dG


def _run(name: str, equations: Equations, first: Tensor, *others: Tensor | None) -> None:
    """Launch a kernel; the first array is [B, T, ...], and written arrays must be contiguous."""
    arrays = [None if array is None else array.contiguous() for array in (first, *others)]
    (sequences, steps), device = first.shape[:2], first.get_device()
    columns = (1 + len(equations.gates)) * equations.width
    _kernel(name, equations, device)(
        (-(-sequences // SEQUENCES), 1, 1), min(_MOST_THREADS, -(-columns // 32) * 32), device,
        *(0 if array is None else array.data_ptr() for array in arrays),
        steps, sequences, equations.width,
    )  # fmt: skip
