"""The torch library of the operators on codes, and how an operator is defined.

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
"""The parameters of every operator's schema that give the format."""
cached_format = lru_cache(LNSFormat)
OPS = torch.ops.lns_ops
_CPU, _CUDA = SimpleNamespace(), SimpleNamespace()


def define_operator(
    name: str, signature: str, kernel: Any, fake: Any, cuda_kernel: Any = None
) -> None:
    """Define the operator ``name``: schema, CPU kernel, GPU kernel, and shapes and dtypes.

    The GPU kernel is that of the name in :mod:`lns_ops.cuda` unless given.
    """
    LIBRARY.define(f"{name}{signature}")
    define_kernels(name, kernel, cuda_kernel or getattr(cuda, name))
    LIBRARY.impl(name, getattr(_CPU, name), "CPU")
    LIBRARY.impl(name, getattr(_CUDA, name), "CUDA")
    torch.library.register_fake(f"lns_ops::{name}", fake, lib=LIBRARY)


def define_kernels(name: str, kernel: Callable[..., Any], cuda_kernel: Callable[..., Any]) -> None:
    """Define what kernels call ``name``, on a CPU and on a GPU, without an operator of torch."""
    setattr(_CPU, name, kernel)
    setattr(_CUDA, name, cuda_kernel)


def kernels_of(x: Tensor) -> Any:
    """Return the kernels of the device of ``x``, by the names and signatures of operators.

    An operator that is made of others calls their kernels, since torch's dispatch of an operator
    takes as long as several kernels' own code.
    """
    return _CUDA if x.is_cuda else _CPU


_PLAIN = {Tensor, torch.nn.Parameter}


def operators_for(x: Tensor, y: Tensor | None = None) -> Any:
    """Return what operates on ``x``, or on both: the kernels of the CPU, or torch's operators.

    The latter are for other devices, and for whoever watches operators or traces them: the
    compiler, transforms, modes, profilers. Where nobody does, their dispatch is left out, which
    takes longer than many a kernel.
    """
    plain = type(x) in _PLAIN and x.is_cpu and (y is None or (type(y) is Tensor and y.is_cpu))
    return _CPU if plain and not is_watched() else OPS


def is_distributed(x: object) -> bool:
    """Return whether ``x`` is a DTensor; in a process without DTensors nothing is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing the module
    return kind is not None and isinstance(x, kind)


def refuse_distributed(x: object) -> None:
    """Refuse a DTensor, of which each process has a part.

    Raises:
        ValueError: ``x`` is a DTensor.
    """
    if is_distributed(x):
        shape = tuple(x.shape)  # type: ignore[attr-defined]
        raise ValueError(
            f"DTensor of shape {shape} in a number format: tensor parallelism would round"
            " each process's part of a sum and add the parts in an order of its own; use whole"
            " layers on every process (lns_ops.distributed_data_parallel, or fully_shard with"
            " scope='matmul'), and call convert_ before modules are distributed"
        )
