"""The bits of 32-bit numbers reinterpreted in another dtype, also under transforms of
``torch.func``.

In torch 2.11 ``x.view(dtype)`` does not support ``torch.vmap``, so within a transform an operator
of this package is used, which copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lns_ops._compat import is_transforming
from lns_ops.functional.library import LIBRARY, OPS

_NAME = "lns_ops::bit_view"


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).clone()


def _mapped(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    return OPS.bit_view(x, dtype), in_dims[0]


LIBRARY.define("bit_view(Tensor x, ScalarType dtype) -> Tensor")
LIBRARY.impl("bit_view", _copied, "CompositeExplicitAutograd")
torch.library.register_fake(_NAME, _copied, lib=LIBRARY)
torch.library.register_vmap(_NAME, _mapped, lib=LIBRARY)


def bit_view(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of ``x`` reinterpreted in a dtype of the same width."""
    found: Tensor = OPS.bit_view(x, dtype) if is_transforming() else x.view(dtype)
    return found
