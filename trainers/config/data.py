"""What is known of our data sets before they are read, and the arguments that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.config.validation import NoArguments, at_least, finite, one_of, share_of_one

COLLECTIONS = ("JSB_Chorales", "MuseData", "Nottingham", "Piano_midi")
"""The four collections of Boulanger-Lewandowski et al. 2012, by the names of their .mat files."""
AUGMENTATIONS = ("none", "crop_flip")


@dataclass(frozen=True, kw_only=True)
class WindowArguments:
    """The arguments of cuts into windows (:mod:`trainers.data.windows`).

    Attributes:
        context: characters, or frames, of an example.
    """

    context: int = 64

    def __post_init__(self) -> None:
        at_least("data.args.context", self.context, 1, "use for example 64")


@dataclass(frozen=True, kw_only=True)
class TextArguments(WindowArguments):
    """The arguments of ``text``.

    Attributes:
        stride: characters from the beginning of a training window to that of the next, at most
            ``context``; None for ``context``, where windows do not overlap.
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
        augment: what is done to training images, anew in every epoch: ``none``, or ``crop_flip``, a
            shift by up to 4 pixels and a mirroring of every other one
            (:mod:`trainers.data.augment`).
    """

    augment: str = AUGMENTATIONS[0]

    def __post_init__(self) -> None:
        one_of("data.args.augment", self.augment, AUGMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class PianoRollArguments(WindowArguments):
    """The arguments of ``piano_rolls`` (:mod:`trainers.data.windows`).

    Attributes:
        collection: music that is read where ``data.root`` names no file: ``JSB_Chorales``,
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
        seed: seed of all that is drawn.
        examples: number of training and validation examples together.
        test: examples of the test set.
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
        examples, test: as many as in the paper.
        length: values of an example.
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
        length: symbols of a question.
        symbols: different symbols that there are.
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
        length: decimal digits of each of the two terms.
    """

    length: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.args.length", self.length, 1, "use for example 3")
        _check_questions(self, 100**self.length, "length")


def _check_questions(args: GeneratedArguments, there_are: int, more: str) -> None:
    """Refuse to draw more questions than half of those that there are; none is drawn twice."""
    if 2 * (args.examples + args.test) > there_are:
        raise ValueError(
            f"data.args.examples={args.examples}, data.args.test={args.test}: no question is drawn"
            f" twice, so they must be at most half of the {there_are} that there are; use fewer, or"
            f" a larger data.args.{more}"
        )


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """What is known of a data set of ours before it is read.

    Attributes:
        about: what it has, in a line.
        train, test: examples, those for validation among the former; 0 where files or arguments
            decide.
        shape: shape of an example; empty where arguments decide.
        varying: shape of an example in terms of the arguments, where they decide.
        classes: number of them; 0 where files or arguments decide.
        validation: examples for validation where nothing is said; None for a tenth.
        arguments: dataclass of its ``data.args``.
        files: whether it is read from files.
        own_file: whether ``data.root`` names a file of the user's, which decides what the data are.
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
"""Our data sets by name."""
DATASETS = ("auto", *DATA)
