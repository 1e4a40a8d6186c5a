"""Matrix products of codes with float32 sums; :mod:`lns_ops.functional.accumulation` has the error
bounds.

Codes are decoded, multiplied and encoded. Operands are decoded in memory order and passed on with
their strides, so a transposed operand costs nothing. On a GPU one kernel decodes both operands into
the narrowest type in which every value encodes back to its code. cuBLAS multiplies through torch
with float32 results. Then one kernel encodes them, and recomputes sums outside float32's range.

Shape suffixes: M, K, N of a product; B a batch, which may be absent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lns_ops import cpu
from lns_ops.cuda.float32_matmul import in_memory_order, without_autocast
from lns_ops.spec.format import LNSFormat, NonFiniteError

_LARGEST = torch.finfo(torch.float32).max


def _values(codes: Tensor, fmt: LNSFormat, dtype: type[np.floating[Any]]) -> Tensor:
    stored, turned = in_memory_order(codes)
    values = torch.from_numpy(cpu.decode(stored.numpy(), fmt, dtype))
    return values.mT if turned else values


def matmul_cpu(x_BMK: Tensor, y_BKN: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x @ y`` with float32 sums.

    Shapes: int16 codes ``[B, M, K]`` and ``[B, K, N]`` in, ``[B, M, N]`` out.
    """
    fmt = LNSFormat(bits, fraction_bits)
    with without_autocast(x_BMK):
        sums = torch.matmul(_values(x_BMK, fmt, np.float32), _values(y_BKN, fmt, np.float32))
    try:
        return torch.from_numpy(cpu.encode(sums.numpy(), fmt))
    except NonFiniteError:
        wide = torch.matmul(_values(x_BMK, fmt, np.float64), _values(y_BKN, fmt, np.float64))
        repaired = torch.where(
            sums.isfinite(), sums, wide.clamp(-_LARGEST, _LARGEST).to(torch.float32)
        )
        return torch.from_numpy(cpu.encode(repaired.numpy(), fmt))
