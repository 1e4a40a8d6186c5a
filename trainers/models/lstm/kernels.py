"""The steps of an LSTM's variant on NVIDIA GPUs: a kernel for all of them, and one for all back.

The kernels are those of ``steps.cu``. A step of a small LSTM is some microseconds of work:
launched one by one, its operations take thirty times as long.
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
"""Sequences of a batch that a thread block takes."""
_MOST_THREADS = 1024
_LAYOUTS = {"lstm_forward": 7 * "P" + "iii", "lstm_backward": 7 * "P" + "iii"}


def shared_bytes(equations: Equations) -> int:
    """Return the shared memory of a thread block going back, which takes more than forward."""
    blocks, width = 1 + len(equations.gates), equations.width
    recurring = (blocks - 1) if equations.variant == "fgr" else 0
    return 4 * SEQUENCES * width * (2 * blocks + 1 + recurring)


def takes(sums: Tensor, equations: Equations) -> bool:
    """Return whether the kernels take a layer: float32 on a GPU whose shared memory holds it."""
    if not sums.is_cuda or sums.dtype != torch.float32 or not sums.numel() or unavailable():
        return False
    return shared_bytes(equations) <= most_shared_bytes(sums.get_device())


@lru_cache(maxsize=64)
def _kernel(name: str, equations: Equations, device: int) -> CudaKernel:
    """Return a kernel, compiled for a variant."""
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
    function = compile_function(source, name, options, device)
    return CudaKernel(function, _LAYOUTS[name], shared_bytes(equations))


atexit.register(_kernel.cache_clear)


@torch.library.custom_op(
    "lns_study::lstm_forward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor sums, Tensor R, Tensor? p, Tensor? G, str variant) -> (Tensor, Tensor, Tensor)",
)
def _forward(
    sums_TBK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_KK: Tensor | None, variant: str
) -> tuple[Tensor, Tensor, Tensor]:
    steps, sequences, _ = sums_TBK.shape
    width = R_KH.shape[1]
    values_TBK = torch.empty_like(sums_TBK)
    y_SBH, c_SBH = (sums_TBK.new_zeros(steps + 1, sequences, width) for _ in range(2))
    turned = None if G_KK is None else G_KK.t().contiguous()
    _run(
        "lstm_forward", Equations(variant, width), steps, sequences,
        sums_TBK, R_KH.t().contiguous(), p_GH, turned, values_TBK, y_SBH, c_SBH,
    )  # fmt: skip
    return values_TBK, y_SBH, c_SBH


@torch.library.custom_op(
    "lns_study::lstm_backward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor values, Tensor c, Tensor R, Tensor? p, Tensor? G, str variant)"
    " -> Tensor",
)
def _backward(
    grad_TBH: Tensor, values_TBK: Tensor, c_SBH: Tensor, R_KH: Tensor, p_GH: Tensor | None,
    G_KK: Tensor | None, variant: str,
) -> Tensor:  # fmt: skip
    steps, sequences, _ = values_TBK.shape
    ds_TBK = torch.empty_like(values_TBK)
    _run(
        "lstm_backward", Equations(variant, R_KH.shape[1]), steps, sequences,
        grad_TBH.contiguous(), values_TBK, c_SBH, R_KH, p_GH, G_KK, ds_TBK,
    )  # fmt: skip
    return ds_TBK


@register_flop_formula([torch.ops.lns_study.lstm_forward, torch.ops.lns_study.lstm_backward])
def _flops(first: Sequence[int], *others: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return two for each weight from outputs or gates, sequence and step."""
    R, _, G, _ = others[-4:]
    return 2 * int(first[0] * first[1] * (math.prod(R) + math.prod(G or (0,))))


def forward(
    equations: Equations, sums_TBK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_KK: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z and the gates of all steps, and outputs and cells, which begin with zeros."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.lns_study.lstm_forward(
        sums_TBK, R_KH, p_GH, G_KK, equations.variant
    )
    return found


def backward(
    equations: Equations, grad_TBH: Tensor, values_TBK: Tensor, c_SBH: Tensor, R_KH: Tensor,
    p_GH: Tensor | None, G_KK: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradients of the sums of all steps."""
    ds_TBK: Tensor = torch.ops.lns_study.lstm_backward(
        grad_TBH, values_TBK, c_SBH, R_KH, p_GH, G_KK, equations.variant
    )
    return ds_TBK


def _run(
    name: str, equations: Equations, steps: int, sequences: int, *arrays: Tensor | None
) -> None:
    device = next(array.get_device() for array in arrays if array is not None)
    columns = (1 + len(equations.gates)) * equations.width
    _kernel(name, equations, device)(
        (-(-sequences // SEQUENCES), 1, 1), min(_MOST_THREADS, -(-columns // 32) * 32), device,
        *(0 if array is None else array.data_ptr() for array in arrays),
        steps, sequences, equations.width,
    )  # fmt: skip
