"""The bytes of the tensors that a step makes.

The memory of a process says what the C library keeps, too, and what other trials have left in it;
that of a GPU's allocator what a CUDA graph holds. This counts the tensors alone: every storage that
an operator returns, from then until nothing refers to it any more, autograd's graph included. So it
is the same on every machine. What an operator takes and gives back by itself is not seen, nor what
was there before: parameters, data, and from the second step on the optimizer's state.
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
        live: bytes of those that there are.
        peak: the most that there were at once.
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
        """Run an operator, and count the storages of what it returns."""
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
