"""The torch library of the operators on codes, and how an operator is defined.

An operator has a schema, a kernel per device, and a fake kernel.
"""

from __future__ import annotations

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
