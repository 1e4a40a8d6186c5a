"""Number of bytes of the tensors that a step makes.

The memory of a process also includes memory kept by the C library and by other trials; the memory
of a GPU's allocator includes the memory of CUDA graphs. This module counts only tensors: every
storage that an operator returns, until its last reference is gone, including references in
autograd's graph. The number is therefore the same on every machine. Temporary memory within an
operator is not counted, nor are tensors that existed before: parameters, data, and from the second
step on the optimizer's state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lns_ops.tensor import storage_of
from trainers._compat import TorchDispatchMode


class TensorBytes(TorchDispatchMode):
    """A context that counts the bytes of the tensors made in it.

    Attributes:
        live: current number of bytes.
        peak: maximum number of bytes at any time.
        operators: operators that ran, without their overloads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.operators: set[Any] = set()
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count the storages of its results."""
        results = func(*args, **(kwargs or {}))
        self.operators.add(getattr(func, "overloadpacket", func))
        for result in results if isinstance(results, (list, tuple)) else (results,):
            if isinstance(result, Tensor):
                self._add(storage_of(result).untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage.nbytes()).atexit = False

    def _drop(self, size: int) -> None:
        self.live -= size
