"""Data sets that a user's factory makes.

The factory is called once per split: as ``factory(split="train" | "validation" | "test",
**data.args)`` if it has a parameter ``split``, else as ``factory(train=True | False,
**data.args)``. In the second case the last ``data.validation_size`` training examples are for
validation, by default a tenth. It returns a pair ``(x, y)`` of tensors or arrays, or a map-style
data set (``__len__`` and ``__getitem__``) of such pairs. A pair can also be a mapping with one
target and one input, as in Hugging Face's data sets: the target has one of the keys
:data:`TARGETS`, the input one of :data:`INPUTS`, or the only other key.

Examples ``x`` [N, ...] of 32 or 64 bit integers stay integers (tokens), all others become float32.
Targets ``y`` [N, ...] are integers (classes) or become float32, depending on the loss
(:mod:`trainers.models.loss`). Texts as targets become classes, numbered in the sorted order of the
training set's texts. All examples are kept in memory, unless ``data.num_workers`` is set: then so
many processes load the examples of a ``Dataset`` on demand (:mod:`trainers.data.stream`).

A factory with neither parameter is called once, and returns a ``LightningDataModule``, or an object
with its ``setup``, ``train_dataloader``, ``val_dataloader`` and ``test_dataloader``. Only the
loaders' data sets are used, not their batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.config import DataConfig
from trainers.data.split import Examples, Split
from trainers.data.stream import Stream
from trainers.text import describe_error
from trainers.user_code import call, find_source, load_code, named

KEY = "data.name"
TOKENS = (torch.int32, torch.int64)
"""Data types of examples that stay integers."""
TARGETS = ("label", "labels", "target", "targets", "y")
"""Keys of the target in a mapping."""
INPUTS = ("image", "img", "pixel_values", "input", "inputs", "features", "x")
"""Keys of the input in a mapping; without any of these keys, it is the only other key."""
VALIDATION_SHARE = 10
"""Default validation split: 1 / VALIDATION_SHARE of the training data."""


def load_own(config: DataConfig) -> tuple[Examples, Examples | None, Examples]:
    """Return the training, validation and test examples; None for validation if it is to be cut
    from the training examples.

    Raises:
        ValueError: the factory cannot be loaded or called, or returns something else.
    """
    factory = load_code(KEY, config.name, config.code)
    try:
        splits = _loaded(config, factory)
        _check_alike(config, [split for split in splits if split is not None])
        return splits
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if str(error).startswith(f"{KEY}="):
            raise
        raise ValueError(
            f"{named(KEY, config.name)}: its examples cannot be put together:"
            f" {describe_error(error, find_source(KEY, config.name))}; return examples of one shape"
            " each with its target"
        ) from error


def _loaded(
    config: DataConfig, factory: Callable[..., Any]
) -> tuple[Examples, Examples | None, Examples]:
    """Return the splits of :func:`load_own`."""
    parameters, names = inspect.signature(factory).parameters, list[str]()
    if not {"split", "train"} & parameters.keys():
        return _of_module(config, call(KEY, config.name, factory, config.args))
    if "split" not in parameters:
        train, test = (
            _examples(config, call(KEY, config.name, factory, config.args, train=train), names)
            for train in (True, False)
        )
        return train, None, test
    if config.validation_size is not None:
        raise ValueError(
            f"data.validation_size={config.validation_size} with {KEY}={config.name!r}: the factory"
            " has a parameter split, and gives the validation examples; leave it out"
        )
    train, validation, test = (
        _examples(config, call(KEY, config.name, factory, config.args, split=split), names)
        for split in ("train", "validation", "test")
    )
    return train, validation, test


def _of_module(config: DataConfig, module: Any) -> tuple[Examples, Examples | None, Examples]:
    """Return the data sets of a ``LightningDataModule``'s loaders.

    Raises:
        ValueError: ``module`` is not such a module.
    """
    names = ("train_dataloader", "val_dataloader", "test_dataloader")
    if any(not callable(getattr(module, name, None)) for name in names):
        raise ValueError(
            f"{named(KEY, config.name)}: takes neither train= nor split=, and returned a"
            f" {type(module).__name__} without {', '.join(names)}; give it a parameter train, or"
            " return a LightningDataModule"
        )
    if config.validation_size is not None:
        raise ValueError(
            f"data.validation_size={config.validation_size} with {KEY}={config.name!r}: the module"
            " gives the validation examples; leave it out"
        )
    for name, arguments in (("prepare_data", ()), ("setup", (None,))):
        getattr(module, name, lambda *_: None)(*arguments)
    loaders = [_only(config, name, getattr(module, name)()) for name in names]
    classes: list[str] = []
    train, validation, test = (_examples(config, loader.dataset, classes) for loader in loaders)
    return train, validation, test


def _only(config: DataConfig, name: str, loader: Any) -> Any:
    """Return a loader, or the only loader of a list."""
    found = list(loader) if isinstance(loader, list | tuple) else [loader]
    if len(found) != 1 or not hasattr(found[0], "dataset"):
        raise ValueError(
            f"{named(KEY, config.name)}: its {name}() returned {len(found)} of"
            f" {type(found[0] if found else loader).__name__}; return one DataLoader"
        )
    return found[0]


def _check_alike(config: DataConfig, splits: list[Examples]) -> None:
    """Check that all splits have examples of the same shape, which is not empty.

    Raises:
        ValueError: they do not; the message has the shapes.
    """
    shapes = [tuple(split.head(1).x.shape[1:]) for split in splits]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{named(KEY, config.name)}: its training examples have the shape {shapes[0]}, others"
            f" {next(shape for shape in shapes if shape != shapes[0])}; return examples of one"
            " shape in all splits"
        )
    if 0 in shapes[0]:
        raise ValueError(
            f"{named(KEY, config.name)}: its examples have the shape {shapes[0]}, so they hold no"
            " value; return at least one feature an example"
        )


def _examples(config: DataConfig, made: Any, names: list[str]) -> Examples:
    """Convert a factory's return value to tensors, or to a stream if ``data.num_workers`` is set.

    Args:
        config: config with the factory's name.
        made: return value of the factory.
        names: names of the classes; filled by the training set if its targets are texts.
    """
    if _is_dataset(made):
        _check_map_style(config, made)
        if config.num_workers is not None:
            return _streamed(config, made)
        pairs = [_pair(config, made[index]) for index in range(len(made))]
        made = _collected([x for x, _ in pairs]), _collected([y for _, y in pairs])
    made = _pair(config, made)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ValueError(
            f"{named(KEY, config.name)}: returned a {type(made).__name__}; return a pair (x, y) of"
            " tensors or arrays, or a torch.utils.data.Dataset of such pairs"
        )
    x, y = made[0], _numbered(config, made[1], names)
    return _checked(config, Split(_tensor(x), _tensor(y)))


def _is_dataset(made: Any) -> bool:
    """Return whether a value is a map-style data set, including Hugging Face's and lists of
    dicts."""
    if isinstance(made, list):
        return bool(made) and all(isinstance(example, Mapping) for example in made)
    if isinstance(made, torch.utils.data.Dataset):
        return True
    is_array = isinstance(made, tuple | Mapping | str | np.ndarray | Tensor)
    return not is_array and hasattr(made, "__getitem__") and hasattr(made, "__len__")


def _pair(config: DataConfig, example: Any) -> Any:
    """Return the input and the target of a mapping; return any other value unchanged.

    Raises:
        ValueError: a mapping does not have exactly one input and one target.
    """
    if not isinstance(example, Mapping):
        return example
    targets = [key for key in TARGETS if key in example]
    inputs = [key for key in INPUTS if key in example]
    inputs = inputs or [key for key in example if key not in targets]
    if len(targets) != 1 or len(inputs) != 1:
        raise ValueError(
            f"{named(KEY, config.name)}: its examples are dicts of"
            f" {', '.join(map(str, example)) or 'nothing'}; one must be the target"
            f" ({', '.join(TARGETS)}) and one the input ({', '.join(INPUTS)}, or the only other"
            " key); rename them, or return pairs (x, y)"
        )
    return example[inputs[0]], example[targets[0]]


def _numbered(config: DataConfig, y: Any, names: list[str]) -> Any:
    """Convert text classes to numbers; return other targets unchanged.

    Raises:
        ValueError: a text does not occur in the training set.
    """
    texts = None if isinstance(y, Tensor) else np.asarray(y)
    if texts is None or not _are_texts(texts):
        return y
    if not names:
        names += sorted(set(texts.ravel().tolist()))
    if unknown := sorted(set(texts.ravel().tolist()) - set(names)):
        raise ValueError(
            f"{named(KEY, config.name)}: has the class {unknown[0]!r}, which no training example"
            f" has ({', '.join(names[:10])}{' ...' if len(names) > 10 else ''}); leave it out, or"
            " number the classes from 0"
        )
    return np.searchsorted(np.array(names), texts.astype(str)).astype(np.int64)


def _are_texts(values: np.ndarray[Any, Any]) -> bool:
    """Return whether values are texts, including pandas-style arrays of objects."""
    objects = values.dtype == object and values.size
    return values.dtype.kind == "U" or bool(
        objects and all(isinstance(value, str) for value in values.ravel())
    )


def _checked(config: DataConfig, split: Split) -> Split:
    """Check examples and targets, and convert them to the data types of training.

    Raises:
        ValueError: they are complex, not finite, too large for their type, or differ in number.
    """
    x, y = split
    for name, part in (("examples", x), ("targets", y)):
        kind = str(part.dtype).removeprefix("torch.")
        if part.is_complex():
            raise ValueError(
                f"{named(KEY, config.name)}: its {name} are {kind}; return real ones, for example"
                " torch.view_as_real of them"
            )
    if y.dtype == torch.uint64 and bool((y.long() < 0).any()):
        raise ValueError(
            f"{named(KEY, config.name)}: has targets of uint64 beyond int64 (2^63 - 1); return"
            " smaller whole numbers, or floats"
        )
    if not x.dim() or not y.dim() or len(x) != len(y) or not len(y):
        raise ValueError(
            f"{named(KEY, config.name)}: returned examples of shape {tuple(x.shape)} and targets of"
            f" shape {tuple(y.shape)}; return as many targets as examples, at least one"
        )
    x = x.long() if x.dtype in TOKENS else x.float()
    y = y.float() if y.is_floating_point() else y.long()
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
        most = torch.finfo(torch.float32).max
        raise ValueError(
            f"{named(KEY, config.name)}: returned examples or targets that are not finite, or"
            f" beyond float32's {most:.1e}; mend or scale them"
        )
    return Split(x.detach().contiguous(), y.detach().contiguous())


def _check_map_style(config: DataConfig, dataset: Any) -> None:
    """Check that a data set has a length and is not empty.

    Raises:
        ValueError: it does not, or is.
    """
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise ValueError(
            f"{named(KEY, config.name)}: returned a {type(dataset).__name__} without examples or"
            " without a length; return a map-style data set, with __len__ and __getitem__, so that"
            " an epoch's order can be drawn"
        )


def _streamed(config: DataConfig, dataset: Any) -> Stream:
    """Return a data set whose examples are loaded on demand.

    Raises:
        ValueError: the number of classes is unknown, or the classes are texts.
    """
    assert config.num_workers is not None
    check, pairs = partial(_checked, config), dataset
    if isinstance(dataset[0], Mapping):
        pairs = _Pairs(config, dataset)
    if isinstance(_pair(config, dataset[0])[1], str):
        raise ValueError(
            f"{named(KEY, config.name)} with data.num_workers={config.num_workers}: its classes are"
            " texts, which are numbered once all are known; number them from 0, or leave"
            " data.num_workers out"
        )
    first = Stream(pairs, config.num_workers, 0, (check,)).head(1)
    outputs = first.outputs
    if not first.y.is_floating_point():
        classes = getattr(dataset, "classes", None)
        if not isinstance(classes, int | Sized):
            raise ValueError(
                f"{named(KEY, config.name)} with data.num_workers={config.num_workers}: its data"
                " set must say how many classes there are, as examples are not all loaded first;"
                " give it an attribute classes, their number or a list of their names"
            )
        outputs = classes if isinstance(classes, int) else len(classes)
    return Stream(pairs, config.num_workers, outputs, (check,))


class _Pairs(torch.utils.data.Dataset[Any]):
    """Adapter that converts a data set's mappings to pairs."""

    def __init__(self, config: DataConfig, dataset: Any) -> None:
        self._config, self._dataset = config, dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: int) -> Any:
        return _pair(self._config, self._dataset[place])


def _collected(parts: list[Any]) -> Any:
    """Stack the inputs or the targets of a data set's pairs; texts become a NumPy array."""
    if all(isinstance(part, str) for part in parts):
        return np.array(parts)
    return torch.stack([_tensor(part) for part in parts])


def _tensor(values: Any) -> Tensor:
    """Convert numbers to a tensor.

    Raises:
        ValueError: the values are texts.
    """
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if _are_texts(array):
        raise ValueError("its examples are texts; return numbers, for example tokens")
    return torch.from_numpy(array)
