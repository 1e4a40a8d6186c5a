"""What reaches for a tensor's memory: it lies in the codes, and the float32 memory that torch takes an LNSTensor to have does not exist.

Sharing it between processes and replacing it (``x.data = y``, ``x.set_(y)``, ``vector_to_parameters``) are done to the codes. Its storage,
which safetensors' ``save_model`` and Accelerate's ``save_state`` ask for, is refused: 4 bytes a value would be read where there are 2.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from lns_ops.tensor import LNSTensor, aten, handles, replaces_untraced


@replaces_untraced(torch.Tensor.share_memory_)
def share_memory_(self: LNSTensor) -> LNSTensor:
    """``Tensor.share_memory_``."""
    self.codes.share_memory_()
    return self


@replaces_untraced(torch.Tensor.is_shared)
def is_shared(self: LNSTensor) -> bool:
    """``Tensor.is_shared``."""
    shared: bool = self.codes.is_shared()
    return shared


def _source(name: str, x: Any, source: Any) -> LNSTensor:
    """``source`` if ``x`` may take its memory.

    Raises:
        ValueError: it is no LNSTensor of the format of ``x``.
    """
    if isinstance(x, LNSTensor) and isinstance(source, LNSTensor) and source.fmt == x.fmt:
        return source
    target, kind = (f"an LNSTensor in {t.fmt}" if isinstance(t, LNSTensor) else f"a {t.dtype} tensor" for t in (x, source))
    raise ValueError(
        f"{name} of {target} to {kind}: memory changes hands between tensors of one format; convert first "
        "(LNSTensor.from_float(value, x.fmt), x.to_float()), or write values with x.copy_(value)"
    )


@replaces_untraced(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(self: LNSTensor, value: Tensor) -> None:
    """``x.data = value``: shape, strides and memory are those of ``value`` from then on."""
    source = _source("data", self, value)
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
    self.codes = source.codes.detach()


@handles(aten.set_.source_Tensor)
def _set(func: Any, x: Any, value: Any) -> Any:
    source = _source("set_", x, value)
    func(x.codes, source.codes)
    with no_dispatch():
        func(x, source)  # shape and strides of the wrapper
    return x


@handles(
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor_storage_offset,
    aten.resize_.default,
    aten.resize_as_.default,
)
def _refused(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{func} of an LNSTensor: not every word of memory is a code; make the codes (x.codes, int16) and LNSTensor(codes, x.fmt)"
    )


@replaces_untraced(torch.Tensor.storage)
def storage(self: LNSTensor) -> NoReturn:
    """``Tensor.storage``: what asks for the memory's address falls back to it; ``untyped_storage`` stays, as an identity for the compiler.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"storage of an LNSTensor in {self.fmt}: it has no float32 memory. To save a model: lns_ops.serialization.save_file("
        "model.state_dict(), path) instead of safetensors' functions or save_pretrained, or torch.save (for Accelerate "
        "safe_serialization=False); its memory is that of x.codes"
    )
