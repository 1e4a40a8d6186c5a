"""``torch.einsum`` in LNS: operands are multiplied in pairs, from left to right.

Each pair is one batched product. Its letters are *batch* (in both operands and needed later),
*summed* (in both and not needed later) or *free* (in one of them). Letters that only one operand
has and that are not needed later are summed first, in float32, as torch does. A pair without a
summed letter stays float32, as ``*`` does, and so does a pair of activations.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lns_ops.nn.products.matrices import matmul
from lns_ops.nn.products.weights import Weights
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import in_float32

_FOR_ELLIPSIS = 0x1D400
"""The first letter used for the dimensions of an ellipsis; users do not use these letters."""


def _written(equation: Any, operands: tuple[Any, ...]) -> tuple[str, list[Tensor]]:
    """Return the equation as text, and the operands, from either form that torch accepts."""
    if isinstance(equation, str):
        listed = len(operands) == 1 and isinstance(operands[0], list | tuple)
        return equation.replace(" ", ""), list(operands[0] if listed else operands)
    given = (equation, *operands)
    tensors, sublists = list(given[0::2]), list(given[1::2])
    out = tensors.pop() if len(given) % 2 else None
    terms = [_as_text(sublist) for sublist in sublists]
    return ",".join(terms) + ("" if out is None else f"->{_as_text(out)}"), tensors


def _as_text(sublist: Any) -> str:
    return "".join(
        "..." if i is Ellipsis else chr(ord("A") + i if i < 26 else ord("a") + i - 26)
        for i in sublist
    )


def _terms(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """Return the letters of each operand's dimensions and of the result's."""
    left, arrow, result = equation.partition("->")
    written = left.split(",")
    hidden = [
        x.dim() - len(term) + 3 if "..." in term else 0
        for term, x in zip(written, operands, strict=True)
    ]
    letters = "".join(chr(_FOR_ELLIPSIS + i) for i in range(max(hidden)))
    terms = [
        term.replace("...", letters[len(letters) - count :])
        for term, count in zip(written, hidden, strict=True)
    ]
    if not arrow:
        counted = Counter(left.replace(".", "").replace(",", ""))
        result = "..." + "".join(sorted(c for c, count in counted.items() if count == 1))
    return terms, result.replace("...", letters)


def _alone(x: Tensor, term: str, needed: str) -> tuple[Tensor, str]:
    """Return an operand without letters that it has twice or that are not needed later."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            x = x.diagonal(dim1=first, dim2=second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    lost = [i for i, letter in enumerate(term) if letter not in needed]
    return (x.sum(lost) if lost else x), "".join(c for c in term if c in needed)


def _pair(
    fmt: LNSFormat, a: Tensor, of_a: str, b: Tensor, of_b: str, needed: str
) -> tuple[Tensor, str] | None:
    """Return the product of two operands and its letters; None if nothing is summed."""
    a, of_a = _alone(a, of_a, needed + of_b)
    b, of_b = _alone(b, of_b, needed + of_a)
    both = [c for c in of_a if c in of_b]
    batch = "".join(c for c in both if c in needed)
    summed = "".join(c for c in both if c not in needed)
    if not summed:
        return None
    free_a = "".join(c for c in of_a if c not in of_b)
    free_b = "".join(c for c in of_b if c not in of_a)
    sizes = dict(zip(of_a, a.shape, strict=True))
    for letter, size in zip(of_b, b.shape, strict=True):
        sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    x = _laid_out(a, of_a, (batch, free_a, summed), sizes)
    y = _laid_out(b, of_b, (batch, summed, free_b), sizes)
    out = matmul(fmt, x, y) if batch else matmul(fmt, x[0], y[0])
    letters = batch + free_a + free_b
    return out.reshape([sizes[c] for c in letters]), letters


def _laid_out(
    x: Tensor, letters: str, groups: tuple[str, str, str], sizes: dict[str, int]
) -> Tensor:
    """Return an operand with its dimensions in three groups; dimensions of size 1 are broadcast."""
    order = "".join(groups)
    x = x.permute([letters.index(c) for c in order]).expand([sizes[c] for c in order])
    shape = []
    for group in groups:
        size = 1
        for letter in group:
            size = size * sizes[letter]
        shape.append(size)
    return x.reshape(shape)


def einsum(fmt: LNSFormat, weights: Weights, equation: Any, *operands: Any) -> Tensor | None:
    """Return ``torch.einsum`` with the products of weights in LNS.

    Returns None if nothing is computed in LNS: no weight, no sum, or an invalid equation.
    """
    text, tensors = _written(equation, operands)
    if len(tensors) < 2 or not weights.multiply(*tensors):
        return None
    if text.partition("->")[0].count(",") != len(tensors) - 1:
        return None
    terms, result = _terms(text, tensors)
    if any(len(t) != x.dim() for t, x in zip(terms, tensors, strict=True)):
        return None
    is_weight = [x in weights for x in tensors]
    dtype = next((x.dtype for x in tensors if x not in weights), tensors[0].dtype)
    tensors = [in_float32(x) for x in tensors]
    found, letters, of_weight, used = tensors[0], terms[0], is_weight[0], False
    for i in range(1, len(tensors)):
        needed = result + "".join(terms[i + 1 :])
        pair = None
        if of_weight or is_weight[i]:
            pair = _pair(fmt, found, letters, tensors[i], terms[i], needed)
        used = used or pair is not None
        if pair is None:
            pair = _in_float32(found, letters, tensors[i], terms[i], needed)
        (found, letters), of_weight = pair, of_weight and is_weight[i]
    return found.permute([letters.index(c) for c in result]).to(dtype) if used else None


def _in_float32(a: Tensor, of_a: str, b: Tensor, of_b: str, needed: str) -> tuple[Tensor, str]:
    """Return the float32 product of two operands and its letters; torch gets letters as numbers."""
    kept = "".join(c for c in dict.fromkeys(of_a + of_b) if c in needed)
    number = {c: i for i, c in enumerate(dict.fromkeys(of_a + of_b))}
    of_first, of_second, of_result = ([number[c] for c in term] for term in (of_a, of_b, kept))
    return torch.einsum(a, of_first, b, of_second, of_result), kept
