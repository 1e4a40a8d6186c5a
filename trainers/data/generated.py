"""Data sets generated from a seed: curves to classify, sequences to copy, sort and add.

``mnist1d``: ten classes of curves, each a template of twelve points that is stretched, moved,
scaled, sheared, and overlaid with independent and with smooth noise. The idea and the kinds of
changes are taken from MNIST-1D, but the templates and the code are our own, so figures are not
comparable with published ones. ``x`` is float32 ``[N, length]``, ``y`` the class.

``copy``, ``sort`` and ``addition``: a question, followed by as many blanks as the answer has
symbols. Targets are the answer at the blanks, and -100 (torch's ``ignore_index``) elsewhere. ``x``
and ``y`` are int64 ``[N, T]``; token 0 is the blank, and answers are counted from 0::

    copy, sort   x = s_1 ... s_L 0 ... 0     y = -100 ... -100 a_1 ... a_L
    addition     x = digits of a, digits of b, 0 ... 0     y: digits of a + b, the last one first

Questions are unique, so the test set has no question in common with the training set.

Sources: S. Greydanus 2020, "Scaling down Deep Learning" (arXiv:2011.14439); S. Hochreiter, J.
Schmidhuber 1997 and A. Graves et al. 2014 (arXiv:1410.5401) for copying and sorting.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.config.data import AdditionArguments, Mnist1DArguments, SymbolArguments
from trainers.data.split import IGNORED, Split

TEMPLATES = np.array(
    [
        [0, 3, 5, 6, 6, 5, 3, 0, -3, -5, -3, 0],
        [0, 1, 2, 3, 4, 5, 6, 5, 0, 0, 0, 0],
        [0, 4, 6, 4, 0, -4, -6, -4, 0, 3, 5, 6],
        [6, 3, 0, 3, 6, 3, 0, 3, 6, 3, 0, 3],
        [0, 0, 6, 6, 6, 0, 0, -6, -6, -6, 0, 0],
        [6, 6, 6, 2, 2, 2, -2, -2, -2, -6, -6, -6],
        [-6, -4, -1, 3, 6, 6, 5, 3, 3, 4, 2, 0],
        [6, 6, 5, 5, 4, 2, 0, -2, -4, -5, -6, -6],
        [0, 6, 0, -6, 0, 6, 0, -6, 0, 6, 0, -6],
        [5, 6, 5, 3, 5, 6, 4, 1, -1, -3, -5, -6],
    ],
    dtype=np.float64,
)
"""Template of each class's curve."""
MARGIN = 0.6
"""Maximum share of an example's length outside of the curve."""


def load_mnist1d(args: Mnist1DArguments) -> tuple[Split, Split]:
    """Return the training and the test examples."""
    rng = np.random.default_rng(args.seed)
    count = args.examples + args.test
    classes = rng.permutation(np.arange(count) % len(TEMPLATES))
    x = np.stack([_curve(args, TEMPLATES[each], rng) for each in classes])
    examples = Split(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(classes))
    return _cut(examples, args.examples)


def _curve(
    args: Mnist1DArguments, template: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return one example of a template, ``[length]``."""
    places = np.linspace(0, 1, args.length)
    width = 1 - rng.uniform(0, MARGIN)
    start = rng.uniform(0, 1 - width)
    points = (places - start) / width * (len(template) - 1)
    curve = np.interp(points, np.arange(len(template)), template / 6, left=0.0, right=0.0)
    curve *= 1 + args.scale * rng.uniform(-1, 1)
    curve += args.shear * rng.uniform(-1, 1) * (places - 0.5)
    knots = rng.normal(0, args.drift, args.length // 6 + 2)
    curve += np.interp(places * (len(knots) - 1), np.arange(len(knots)), knots)
    noisy: NDArray[np.float64] = curve + rng.normal(0, args.noise, args.length)
    return noisy


def load_symbols(args: SymbolArguments, ordered: bool) -> tuple[Split, Split]:
    """Return the training and the test examples of ``copy``, or, if ``ordered``, of ``sort``."""
    question = _questions(args.examples + args.test, args.length, args.symbols, args.seed)
    answer = np.sort(question, axis=1) if ordered else question
    return _cut(_asked(question, answer), args.examples)


def load_addition(args: AdditionArguments) -> tuple[Split, Split]:
    """Return the training and the test examples of ``addition``."""
    question = _questions(args.examples + args.test, 2 * args.length, 10, args.seed)
    places = 10 ** np.arange(args.length)[::-1]
    total = question[:, : args.length] @ places + question[:, args.length :] @ places
    answer = total[:, None] // 10 ** np.arange(args.length + 1) % 10
    return _cut(_asked(question, answer), args.examples)


def _questions(count: int, length: int, symbols: int, seed: int) -> NDArray[np.int64]:
    """Return unique rows of symbols counted from 0, ``[count, length]``, in random order."""
    rng = np.random.default_rng(seed)
    rows: NDArray[np.int64] = np.empty((0, length), np.int64)
    while len(rows) < count:
        drawn = np.concatenate([rows, rng.integers(0, symbols, (count, length))])
        _, first = np.unique(drawn, axis=0, return_index=True)
        rows = drawn[np.sort(first)]
    return rows[:count]


def _asked(question: NDArray[np.int64], answer: NDArray[np.int64]) -> Split:
    """Return questions followed by blanks, with the answers as targets at the blanks."""
    x = np.concatenate([question + 1, np.zeros_like(answer)], axis=1)
    y = np.concatenate([np.full_like(question, IGNORED), answer], axis=1)
    return Split(torch.from_numpy(x), torch.from_numpy(y))


def _cut(examples: Split, train: int) -> tuple[Split, Split]:
    return (
        Split(examples.x[:train], examples.y[:train]),
        Split(examples.x[train:], examples.y[train:]),
    )
