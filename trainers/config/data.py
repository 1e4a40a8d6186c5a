"""Sizes, shapes and arguments of the built-in data sets, as known before any file is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.config.validation import NoArguments, at_least, finite, one_of, share_of_one

COLLECTIONS = ("JSB_Chorales", "MuseData", "Nottingham", "Piano_midi")
"""The four collections of Boulanger-Lewandowski et al. 2012, by the names of their .mat files."""
AUGMENTATIONS = ("none", "crop_flip")


@dataclass(frozen=True, kw_only=True)
class WindowArguments:
    """The arguments of data sets that are divided into windows (:mod:`trainers.data.windows`).

    Attributes:
        context: number of characters, or frames, per example.
    """

    context: int = 64

    def __post_init__(self) -> None:
        at_least("data.args.context", self.context, 1, "use for example 64")


@dataclass(frozen=True, kw_only=True)
class TextArguments(WindowArguments):
    """The arguments of ``text``.

    Attributes:
        stride: distance between the beginnings of two successive training windows, in characters;
            at most ``context``. None for ``context``: windows do not overlap.
    """

    stride: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.args.stride", self.stride, 1, "leave it out for windows side by side")
        if self.stride is not None and self.stride > self.context:
            raise ValueError(
                f"data.args.stride={self.stride} with data.args.context={self.context}: characters"
                " between two windows would be left out; use at most data.args.context"
            )


@dataclass(frozen=True, kw_only=True)
class ImageArguments:
    """The arguments of ``cifar10`` and ``cifar100``.

    Attributes:
        augment: augmentation of training images, with new random numbers in every epoch: ``none``,
            or ``crop_flip``, a shift by up to 4 pixels and, with probability 1/2, a mirroring
            (:mod:`trainers.data.augment`).
    """

    augment: str = AUGMENTATIONS[0]

    def __post_init__(self) -> None:
        one_of("data.args.augment", self.augment, AUGMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class PianoRollArguments(WindowArguments):
    """The arguments of ``piano_rolls`` (:mod:`trainers.data.windows`).

    Attributes:
        collection: collection to read if ``data.root`` is not a file: ``JSB_Chorales``,
            ``MuseData``, ``Nottingham`` or ``Piano_midi``.
    """

    collection: str = COLLECTIONS[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.args.collection", self.collection, COLLECTIONS)


@dataclass(frozen=True, kw_only=True)
class GeneratedArguments:
    """The arguments of every generated data set (:mod:`trainers.data.generated`).

    Attributes:
        seed: seed of all random numbers.
        examples: number of training and validation examples together.
        test: number of test examples.
    """

    seed: int = 0
    examples: int = 10_000
    test: int = 2_000

    def __post_init__(self) -> None:
        at_least("data.args.seed", self.seed, 0, "use for example 0")
        for name in ("examples", "test"):
            at_least(f"data.args.{name}", getattr(self, name), 2, "use for example 1000")


@dataclass(frozen=True, kw_only=True)
class Mnist1DArguments(GeneratedArguments):
    """The arguments of ``mnist1d``.

    Attributes:
        examples, test: numbers of examples; the defaults are the paper's.
        length: number of values per example.
        noise: standard deviation of the noise at each value.
        drift: standard deviation of the noise that neighbours share.
        shear: largest slope added to an example, over its whole length.
        scale: share by which the height varies.
    """

    examples: int = 4_000
    test: int = 1_000
    length: int = 40
    noise: float = 0.02
    drift: float = 0.25
    shear: float = 0.75
    scale: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.args.length", self.length, 12, "use for example 40")
        for name in ("noise", "drift", "shear"):
            finite(f"data.args.{name}", getattr(self, name), 0.0, "use for example 0.1")
        share_of_one("data.args.scale", self.scale)


@dataclass(frozen=True, kw_only=True)
class SymbolArguments(GeneratedArguments):
    """The arguments of ``copy`` and ``sort``.

    Attributes:
        length: number of symbols per question.
        symbols: number of different symbols.
    """

    length: int = 8
    symbols: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.args.length", self.length, 1, "use for example 8")
        at_least("data.args.symbols", self.symbols, 2, "use for example 8")
        _check_questions(self, self.symbols**self.length, "length or data.args.symbols")


@dataclass(frozen=True, kw_only=True)
class AdditionArguments(GeneratedArguments):
    """The arguments of ``addition``.

    Attributes:
        length: number of decimal digits per term.
    """

    length: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.args.length", self.length, 1, "use for example 3")
        _check_questions(self, 100**self.length, "length")


def _check_questions(args: GeneratedArguments, there_are: int, more: str) -> None:
    """Refuse a data set with more than half of all possible questions; each is drawn only once."""
    if 2 * (args.examples + args.test) > there_are:
        raise ValueError(
            f"data.args.examples={args.examples}, data.args.test={args.test}: no question is drawn"
            f" twice, so they must be at most half of the {there_are} that there are; use fewer, or"
            f" a larger data.args.{more}"
        )


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """A built-in data set, described without reading it.

    Attributes:
        about: short description.
        train, test: numbers of examples, ``train`` including validation; 0 if they depend on files
            or arguments.
        shape: shape of an example; empty if it depends on the arguments.
        varying: shape of an example in terms of the arguments, if it depends on the arguments.
        classes: number of classes; 0 if it depends on files or arguments.
        validation: default number of validation examples; None for a tenth.
        arguments: dataclass of its ``data.args``.
        files: whether it is read from files.
        own_file: whether the data come from a user's file, ``data.root``.
    """

    about: str
    train: int = 0
    test: int = 0
    shape: tuple[int, ...] = ()
    varying: str = ""
    classes: int = 0
    validation: int | None = None
    arguments: type[Any] = NoArguments
    files: bool = False
    own_file: bool = False


def _idx(about: str) -> DataInfo:
    return DataInfo(
        about=about, train=60_000, test=10_000, shape=(784,), classes=10, validation=10_000,
        files=True,
    )  # fmt: skip


def _cifar(classes: int) -> DataInfo:
    return DataInfo(
        about=f"colour images of 32 x 32, {classes} classes", train=50_000, test=10_000,
        shape=(3, 32, 32), classes=classes, validation=5_000, arguments=ImageArguments,
        files=True,
    )  # fmt: skip


DATA: dict[str, DataInfo] = {
    "mnist": _idx("handwritten digits, grey images of 28 x 28"),
    "digits": DataInfo(
        about="handwritten digits of 8 x 8, in scikit-learn's package", train=1_500, test=297,
        shape=(64,), classes=10, validation=300,
    ),
    "fashion_mnist": _idx("pieces of clothing, grey images of 28 x 28"),
    "kmnist": _idx("cursive Japanese characters, grey images of 28 x 28"),
    "cifar10": _cifar(10),
    "cifar100": _cifar(100),
    "text": DataInfo(
        about="the next character of a text", arguments=TextArguments, files=True, own_file=True,
        varying="context",
    ),
    "piano_rolls": DataInfo(
        about="the next 88 notes of pieces of music", arguments=PianoRollArguments, files=True,
        own_file=True, varying="context x 88",
    ),
    "mnist1d": DataInfo(
        about="ten shapes drawn as curves, generated", arguments=Mnist1DArguments, classes=10,
        varying="length",
    ),
    "copy": DataInfo(
        about="symbols to repeat, generated", arguments=SymbolArguments, varying="2 length"
    ),
    "sort": DataInfo(
        about="symbols to sort, generated", arguments=SymbolArguments, varying="2 length"
    ),
    "addition": DataInfo(
        about="numbers to add, generated", arguments=AdditionArguments, varying="3 length + 1"
    ),
}  # fmt: skip
"""The built-in data sets by name."""
DATASETS = ("auto", *DATA)
