"""The torch library of the operators on codes, and functions that define operators.

An operator has a schema, a kernel per device, and a fake kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lns_ops import cuda
from lns_ops._compat import is_watched
from lns_ops.spec.format import LNSFormat

LIBRARY = torch.library.Library("lns_ops", "DEF")
FORMAT = "int bits, int fraction_bits"
"""The parameters in every operator's schema that specify the format."""
cached_format = lru_cache(LNSFormat)
OPS = torch.ops.lns_ops
_CPU, _CUDA = SimpleNamespace(), SimpleNamespace()


def define_operator(
    name: str, signature: str, kernel: Any, fake: Any, cuda_kernel: Any = None
) -> None:
    """Define the operator ``name``: schema, CPU kernel, GPU kernel, and shapes and dtypes.

    The GPU kernel defaults to the function with this name in :mod:`lns_ops.cuda`.
    """
    LIBRARY.define(f"{name}{signature}")
    define_kernels(name, kernel, cuda_kernel or getattr(cuda, name))
    LIBRARY.impl(name, getattr(_CPU, name), "CPU")
    LIBRARY.impl(name, getattr(_CUDA, name), "CUDA")
    torch.library.register_fake(f"lns_ops::{name}", fake, lib=LIBRARY)


def define_kernels(name: str, kernel: Callable[..., Any], cuda_kernel: Callable[..., Any]) -> None:
    """Define CPU and GPU kernels that other kernels call as ``name``, without a torch operator."""
    setattr(_CPU, name, kernel)
    setattr(_CUDA, name, cuda_kernel)


def kernels_of(x: Tensor) -> Any:
    """Return the kernels for the device of ``x``, with the names and signatures of operators.

    An operator that is composed of others calls their kernels directly, because dispatching an
    operator in torch takes as long as running several kernels.
    """
    return _CUDA if x.is_cuda else _CPU


_PLAIN = {Tensor, torch.nn.Parameter}


def operators_for(x: Tensor, y: Tensor | None = None) -> Any:
    """Return the functions that operate on ``x`` and ``y``: CPU kernels or torch operators.

    torch operators are used on other devices, and if something observes or traces operators: the
    compiler, transforms, modes, profilers. Otherwise their dispatch, which takes longer than many
    kernels, is skipped.
    """
    plain = type(x) in _PLAIN and x.is_cpu and (y is None or (type(y) is Tensor and y.is_cpu))
    return _CPU if plain and not is_watched() else OPS


def is_distributed(x: object) -> bool:
    """Return whether ``x`` is a DTensor, without importing torch's DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing the module
    return kind is not None and isinstance(x, kind)


def refuse_distributed(x: object) -> None:
    """Reject a DTensor, of which each process has only a part.

    Raises:
        ValueError: ``x`` is a DTensor.
    """
    if is_distributed(x):
        shape = tuple(x.shape)  # type: ignore[attr-defined]
        raise ValueError(
            f"DTensor of shape {shape} in a number format: tensor parallelism would round"
            " each process's part of a sum and add the parts in another order; use whole"
            " layers on every process (lns_ops.distributed_data_parallel, or fully_shard with"
            " scope='matmul'), and call convert_ before modules are distributed"
        )
