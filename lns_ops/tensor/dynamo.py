"""Functions that ``torch.compile`` does not trace into, registered when its tracer is imported.

``torch.compiler.allow_in_graph`` imports torch._dynamo, which takes as long as the rest of torch
(1.6 s), and only programs that compile need it. So functions are kept here until another module
imports torch._dynamo.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from lns_ops._compat import COMPILER

_waiting: list[Callable[[], object]] = []


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Call ``torch.compiler.allow_in_graph(function)``, now or when the tracer is imported."""
    once_imported(lambda: torch.compiler.allow_in_graph(function))


def once_imported(action: Callable[[], object]) -> None:
    """Call ``action``, now or when the tracer is imported."""
    if COMPILER in sys.modules:
        action()
    else:
        _waiting.append(action)


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that runs the waiting actions once the tracer is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the tracer; see :class:`importlib.abc.MetaPathFinder`."""
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                while _waiting:
                    _waiting.pop()()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if COMPILER not in sys.modules:
    sys.meta_path.insert(0, _Finder())
