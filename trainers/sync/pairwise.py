"""Sums of gradients in pairs, whose bits do not depend on how a batch is spread over workers.

A batch is cut into ``dp * micro_batches`` parts, both powers of two. The gradients
``g_0, g_1, ...`` of the parts are the leaves of a balanced tree, and each inner node is the sum of
its two children::

    ((g_0 + g_1) + (g_2 + g_3)) + ((g_4 + g_5) + (g_6 + g_7))

A replica holds consecutive parts, a power of two, so its own sum is a node of the tree. The nodes
above are sums over replicas. With as many parts, every ``dp`` therefore computes the same sums of
the same pairs. Pipeline stages change nothing: a stage adds the gradients of its own weights in the
order of the micro-batches. In LNS one addition has the same bits on every CPU and GPU; in float32
the parts' own gradients differ between machines.

A replica holds at most ``log2(micro_batches) + 1`` partial sums of each gradient at a time.

Source of the scheme: N. Higham 1993, "The accuracy of floating point summation", pairwise
summation, with a counter in binary as in merge sort from the bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def pairwise(terms: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Return the sum of ``terms`` as a balanced tree of ``add``; their number is a power of two."""
    while len(terms) > 1:
        terms = [add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def add_pairwise_(parameters: Iterable[Tensor], micro_batches: int) -> None:
    """Let backward passes add the gradients of ``micro_batches`` micro-batches in pairs.

    After the last of them ``grad`` is their sum; before, it is None. Each parameter must have a
    gradient in every backward pass.

    Args:
        parameters: parameters of the model, or of the stages that a worker holds.
        micro_batches: backward passes of a step, a power of two.
    """
    if micro_batches == 1:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_push, [], micro_batches))


@torch.no_grad()
def _push(partials: list[tuple[int, Tensor]], micro_batches: int, parameter: Tensor) -> None:
    """Add the gradient of one more micro-batch to ``partials``: (micro-batches, sum), falling."""
    assert parameter.grad is not None
    node = (1, parameter.grad)
    parameter.grad = None
    while partials and partials[-1][0] == node[0]:
        size, left = partials.pop()
        node = (2 * size, left + node[1])
    if node[0] == micro_batches:
        parameter.grad = node[1]
    else:
        partials.append(node)
