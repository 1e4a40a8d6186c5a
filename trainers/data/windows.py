"""Sequences with a target at each step: characters of a text, frames of piano rolls.

Both are streams that are cut into consecutive windows of ``data.args.context`` steps; an incomplete
last window is dropped. The target of a step is the next element of the stream, so each element is
predicted once, from at most ``context`` preceding steps in the same window.

**text**: a UTF-8 file whose characters are numbered in the order of their code points. ``x`` and
``y`` are int64 ``[N, T]``, where ``y[i]`` is the character after ``x[i]``. The last tenth of the
file is for testing, the end of the rest for validation. char-rnn and nanoGPT have the same split
into nine and one tenths, and call our test set validation. With ``data.args.stride``, training
windows start every ``stride`` characters, so they can overlap. Validation and test windows do not
overlap with each other or with training.

**piano_rolls**: a .mat file with ``traindata``, ``validdata`` and ``testdata``, pieces of ``[T,
88]`` zeros and ones, one column per note (MIDI 21 to 108). ``y`` are frames, float32 ``[N, T,
88]``; ``x`` the preceding frames, with silence before the first. The pieces of a split are
concatenated, without padding or mask, so a piece's first frame is predicted from the end of the
previous piece. Published figures restart at each piece and use its whole past, so they are similar
but not equal. Loss: ``binary_cross_entropy``; times 88 it is the usual figure, in nats per frame.

Sources: A. Karpathy 2015, "The Unreasonable Effectiveness of Recurrent Neural Networks";
N. Boulanger-Lewandowski et al. 2012, "Modeling Temporal Dependencies in High-Dimensional Sequences"
(arXiv:1206.6392), four collections; the .mat files are by S. Bai et al. 2018 (arXiv:1803.01271).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.config.data import TextArguments
from trainers.data.factory import VALIDATION_SHARE
from trainers.data.split import Split

NOTES = 88
TEST_SHARE = 10
"""Test split: the last 1 / TEST_SHARE of a text's characters."""


def load_text(
    path: Path, args: TextArguments, validation_size: int | None
) -> tuple[Split, Split | None, Split]:
    """Return the training, validation and test examples of a text.

    Without ``args.stride``, validation is None: it is to be cut from the end of the training
    examples.

    Raises:
        ValueError: the file is not UTF-8, or too short for one window per split.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.root={str(path)!r}: not a text in UTF-8 ({error.reason} at byte {error.start});"
            " convert it, for example with iconv"
        ) from None
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    ids = torch.from_numpy(np.unique(points, return_inverse=True)[1].astype(np.int64))
    cut = len(ids) - len(ids) // TEST_SHARE
    context = args.context
    train = _windows(ids[: cut - 1], ids[1:cut], context, path)
    test = _windows(ids[cut:-1], ids[cut + 1 :], context, path)
    if args.stride is None:
        return train, None, test
    left = train.size - (validation_size or max(1, train.size // VALIDATION_SHARE))
    if left < 1:
        raise ValueError(
            f"data.validation_size={validation_size}: must leave some of text's {train.size}"
            " windows for training; use less, or leave it out for a tenth"
        )
    x, y = (ids[start : start + left * context] for start in (0, 1))
    strided = Split(*(part.unfold(0, context, args.stride).contiguous() for part in (x, y)))
    return strided, train.part(slice(left, None)), test


def load_piano_rolls(path: Path, context: int) -> tuple[Split, Split, Split]:
    """Return the training, validation and test examples of a .mat file.

    Raises:
        ValueError: the file has another format, or is too short for one window per split.
    """
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        parts = loadmat(path)
        train, validation, test = (
            _frames(parts[name]) for name in ("traindata", "validdata", "testdata")
        )
    except (MatReadError, ValueError, KeyError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"data.root={str(path)!r}: no .mat file with traindata, validdata and testdata, pieces"
            f" of [T, {NOTES}] zeros and ones ({type(error).__name__}: {error}); download one with"
            " lns-study data fetch piano_rolls"
        ) from None
    silence = torch.zeros(1, NOTES)
    return tuple(  # type: ignore[return-value]
        _windows(torch.cat([silence, frames[:-1]]), frames, context, path)
        for frames in (train, validation, test)
    )


def _frames(pieces: Any) -> Tensor:
    """Return the concatenated frames of all pieces, float32 ``[frames, 88]``."""
    frames = np.concatenate([np.asarray(piece) for piece in np.ravel(pieces)])
    if frames.ndim != 2 or frames.shape[1] != NOTES or not np.isin(frames, (0, 1)).all():
        raise ValueError(f"frames of shape {frames.shape[1:]}, or not zeros and ones")
    return torch.from_numpy(frames.astype(np.float32))


def _windows(x: Tensor, y: Tensor, context: int, path: Path) -> Split:
    """Cut two streams of the same length into windows."""
    windows = len(x) // context
    if not windows:
        raise ValueError(
            f"data.args.context={context} with data.root={str(path)!r}: one of its parts has"
            f" {len(x)} steps, fewer than a window; use a smaller context or a longer file"
        )
    steps = windows * context
    return Split(
        x[:steps].reshape(windows, context, *x.shape[1:]).clone(),
        y[:steps].reshape(windows, context, *y.shape[1:]).clone(),
    )
