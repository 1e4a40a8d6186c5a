"""Calls of a ``torch.autograd.Function`` that are fast and also work under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from lns_ops._compat import is_transforming


def in_two_forms(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Return a function that calls an autograd function with a separate ``setup_context``.

    ``torch.func`` needs that form, but for it torch binds the arguments by name in every call,
    which takes as long as a small product. So outside ``torch.func`` the same function is called
    in the form whose forward takes a context.
    """

    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output: Tensor = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    # torch.compile counts parameters to decide whether the first one is a context
    own = list(signature(function.forward).parameters.values())
    context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = Signature([context, *own])  # type: ignore[attr-defined]
    members = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    quick = type(f"{function.__name__}WithContext", (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Tensor:
        chosen: Any = function if is_transforming() else quick
        result: Tensor = chosen.apply(*inputs)
        return result

    return call
