"""The data sets of a trial, as tensors in memory.

:mod:`trainers.data.places` finds files, and the module of their format reads them: CIFAR
:mod:`trainers.data.cifar`, text and piano rolls :mod:`trainers.data.windows`, MNIST's IDX files
:mod:`trainers.data.mnist`. :mod:`trainers.data.generated` makes data sets from a seed. The
handwritten digits come from scikit-learn.

Pixels are scaled to [0, 1] without further preprocessing. Splits are by position, never shuffled:
the last ``validation_size`` examples of the training set are for validation, the test set is as
published (digits: the last 297).

The order of an epoch's examples is a permutation that only depends on (seed, epoch), so it is the
same for any number of workers, before and after a restart.

Sources: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits"; E. Alpaydin, C.
Kaynak 1998 (digits, UCI).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from trainers.config import DataConfig
from trainers.config.data import DATA
from trainers.data.cifar import load_cifar
from trainers.data.digits import digits_table, load_digits
from trainers.data.factory import VALIDATION_SHARE, load_own
from trainers.data.generated import load_addition, load_mnist1d, load_symbols
from trainers.data.mnist import load_mnist, mnist_arrays
from trainers.data.places import resolve
from trainers.data.split import Dataset, DatasetInfo, Examples, Split
from trainers.data.windows import load_piano_rolls, load_text
from trainers.user_code import forget, names_code, placeless

STREAMED_DIGEST = 100
"""Number of examples that are hashed, together with the split's size, if a split is not in
memory."""
HELD = 8
"""Number of data sets that a process keeps in memory for its next trials."""


@lru_cache(maxsize=HELD)
def load(config: DataConfig) -> Dataset:
    """Resolve ``config`` and return its splits, which are cached for the process's next trials.

    Raises:
        ValueError: files are missing or corrupt, or split sizes do not fit.
    """
    config = resolve(config)
    whole, validation, test = _read(config)
    size = config.validation_size or max(1, whole.size // VALIDATION_SHARE)
    available = whole.size - (size if validation is None else 0)
    wanted = available if config.train_size is None else config.train_size
    if available < 1:
        raise ValueError(
            f"data.validation_size={size}: must leave some of"
            f" {config.name}'s {whole.size} training examples for training; use less, or leave it"
            " out for the usual size"
        )
    if wanted > available:
        raise ValueError(
            f"data.train_size={wanted}: must be at most the {available} examples that validation"
            f" leaves; use {available}, or null for all"
        )
    if validation is None:
        validation = whole.part(slice(available, None))
    return Dataset(whole.part(slice(wanted)), validation, test)


def _read(config: DataConfig) -> tuple[Examples, Examples | None, Examples]:
    """Return all training, validation and test examples; None for validation if it is to be cut
    from the end of the training examples."""
    if names_code(config.name):
        return load_own(config)
    name, args, root = config.name, config.arguments, Path(config.root or "")
    if name == "piano_rolls":
        return load_piano_rolls(root, args.context)
    if name == "digits":
        train, test = load_digits()
    elif name == "text":
        return load_text(root, args, config.validation_size)
    elif name in ("cifar10", "cifar100"):
        train, test = load_cifar(str(root), DATA[name].classes)
    elif name == "mnist1d":
        train, test = load_mnist1d(args)
    elif name == "addition":
        train, test = load_addition(args)
    elif name in ("copy", "sort"):
        train, test = load_symbols(args, ordered=name == "sort")
    else:
        train, test = load_mnist(str(root), name)
    return train, None, test


def _identity(config: DataConfig) -> str:
    """Return the settings that determine the examples of a user's factory, as one line."""
    return json.dumps(placeless(asdict(config)), sort_keys=True, default=repr)


def _note(data: Dataset) -> str:
    """Return a warning if the classes of a user's data set do not start at 0, else ""."""
    held = [split.y for split in data if isinstance(split, Split)]
    if any(y.is_floating_point() or y.dim() > 1 for y in held) or not held:
        return ""
    least, most = min(int(y.min()) for y in held), max(int(y.max()) for y in held)
    if least < 1:
        return ""
    return (
        f"; its targets are {least} to {most}: as classes, which count from 0, no example has those"
        f" below {least}"
    )


def describe(config: DataConfig) -> DatasetInfo:
    """Read the data of ``config`` and describe them, with digests and sizes."""
    own = names_code(config.name)
    if own:
        forget()  # files that the factory reads may have changed
        load.cache_clear()
    data = load(config)
    digest = hashlib.sha256()
    for split in data:
        known = split if isinstance(split, Split) else split.head(STREAMED_DIGEST)
        digest.update(b"" if known is split else str(split.size).encode())
        digest.update(known.x.numpy().tobytes())
        digest.update(known.y.numpy().tobytes())
    files = hashlib.sha256()
    if config.name in ("mnist", "digits"):
        mnist = config.name == "mnist"
        for array in mnist_arrays(str(config.root)) if mnist else [digits_table()]:
            files.update(array.tobytes())
    elif own:
        files.update(digest.digest())
    else:
        for part in filter(None, _read(config)):
            assert isinstance(part, Split)
            for tensor in part:
                files.update(tensor.numpy().tobytes())
    ours = DATA.get(config.name)
    where = f" in {config.root}" if config.root else ""
    source = f"{config.name} {config.args or ''} (code {config.code}){_note(data)}"
    if config.name == "mnist":
        source = f"MNIST, IDX files in {config.root}"
    elif config.name == "digits":
        source = "scikit-learn's handwritten digits (1,797 images of 8 x 8)"
    elif ours is not None:
        source = f"{ours.about}{where} {config.args or ''}".rstrip()
    return DatasetInfo(
        name=config.name, args=asdict(config)["args"], source=source, digest=digest.hexdigest(),
        files=files.hexdigest(), root=config.root, train=data.train.size,
        validation=data.validation.size, test=data.test.size,
        inputs=data.train.head(1).x[0].numel(), classes=(ours and ours.classes) or data.outputs,
        identity=_identity(config) if own else "",
    )  # fmt: skip
