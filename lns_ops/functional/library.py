"""The torch library of the operators on codes, and how an operator is defined.

An operator has a schema, a kernel per device, and a fake kernel.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch

from lns_ops import cuda
from lns_ops.spec.format import LNSFormat

LIBRARY = torch.library.Library("lns_ops", "DEF")
FORMAT = "int bits, int fraction_bits"
"""The parameters of every operator's schema that give the format."""
cached_format = lru_cache(LNSFormat)
OPS = torch.ops.lns_ops


def define_operator(
    name: str, signature: str, kernel: Any, fake: Any, cuda_kernel: Any = None
) -> None:
    """Define the operator ``name``: schema, CPU kernel, GPU kernel, and shapes and dtypes.

    The GPU kernel is that of the name in :mod:`lns_ops.cuda` unless given.
    """
    LIBRARY.define(f"{name}{signature}")
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, cuda_kernel or getattr(cuda, name), "CUDA")
    torch.library.register_fake(f"lns_ops::{name}", fake, lib=LIBRARY)


def is_distributed(x: object) -> bool:
    """Return whether ``x`` is a DTensor; in a process without DTensors nothing is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse_distributed(x: object) -> None:
    """Refuse a DTensor, of which each process has a part.

    Raises:
        ValueError: ``x`` is a DTensor.
    """
    if is_distributed(x):
        raise ValueError(
            f"DTensor of shape {tuple(x.shape)} in a number format: tensor parallelism would round"  # type: ignore[attr-defined]
            " each process's part of a sum and add the parts in an order of its own; use whole"
            " layers on every process (lns_ops.distributed_data_parallel, or fully_shard with"
            " scope='matmul'), and call convert_ before modules are distributed"
        )
