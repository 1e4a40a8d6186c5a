"""The keys of one trial (:class:`TrialKeys`) and its parts: data, model, own loop, profile.

Each part is a frozen dataclass that checks its own values. :class:`~trainers.config.TrialConfig`,
in :mod:`trainers.config.compatibility`, also checks the rules between the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any, Self, get_args

from trainers.config.data import DATA
from trainers.config.layout import Layout
from trainers.config.loss import LossConfig, MetricConfig, check_metrics
from trainers.config.lr_schedule import LRSchedule
from trainers.config.memory import AUTOCASTS, MemoryConfig
from trainers.config.model import ARGUMENTS, CHANNELS, HIDDEN, MOVED
from trainers.config.optimizer import RATE_OF_HOST, OptimizerConfig
from trainers.config.precision import PrecisionConfig
from trainers.config.sync import SyncConfig
from trainers.config.validation import (
    NoArguments,
    as_dict,
    at_least,
    check_named,
    field_types,
    finite,
    make_arguments,
    one_of,
    plain_values,
    require,
)
from trainers.config.wire import WireConfig
from trainers.user_code import names_code, split_name

DEVICES = ("cpu", "cuda", "auto")
EPOCHS = 1 << 20
"""The distance between the data orders of two seeds (:func:`trainers.data.epoch_order`)."""


UNKNOWN = 1 << 30
"""Number of layers of a user's network, which is unknown: more than any layout's stages."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The examples that a trial sees.

    Attributes:
        name: a built-in data set (docs/howto/data.md): ``mnist`` (28 x 28, 60,000 + 10,000),
            ``digits`` (8 x 8, scikit-learn's 1,797, the last 297 for testing), ``fashion_mnist``,
            ``kmnist``, ``cifar10``, ``cifar100``, ``text``, ``piano_rolls``, ``mnist1d``, ``copy``,
            ``sort``, ``addition``; or ``auto``: mnist if it is found or can be downloaded,
            otherwise digits; or ``file.py:factory`` or ``package.module:factory``, which returns
            examples and classes (:mod:`trainers.data.factory`).
        args: arguments of a data set that takes some (:mod:`trainers.config.data`), or of the
            factory.
        code: sha256 of the factory's file, or of the file of text or piano_rolls, filled in when a
            study is planned.
        root: folder of the data set's files, or the file of text or piano_rolls; None looks in the
            usual places.
        validation_size: examples taken from the end of the training set for validation, never
            trained on; None for 10,000 (mnist, fashion_mnist, kmnist), 5,000 (cifar10, cifar100),
            300 (digits), or a tenth.
        train_size: number of the remaining examples to train on, from the first; None for all. A
            budget, not part of the recipe.
        num_workers: number of processes that load the examples of a factory's ``Dataset`` when they
            are needed, as in torch's ``DataLoader``; None to load all examples at the start and
            keep them in memory.

    Example::

        >>> part_of_mnist = DataConfig(name="mnist", train_size=10_000)
    """

    name: str = "mnist"
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    code: str = ""
    root: str | None = None
    validation_size: int | None = None
    train_size: int | None = None
    num_workers: int | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same values of the same types; 1 differs from 1.0 and true,
        as a factory may distinguish them."""
        return isinstance(other, DataConfig) and repr(self) == repr(other)

    def __post_init__(self) -> None:
        kinds = {name: known.arguments for name, known in DATA.items()}
        kinds = {"auto": NoArguments} | kinds
        object.__setattr__(self, "args", _checked("data", self.name, self.args, kinds))
        at_least("data.num_workers", self.num_workers, 1, "leave it out to keep them in memory")
        if self.num_workers is not None and not names_code(self.name):
            raise ValueError(
                f"data.num_workers={self.num_workers} with data.name={self.name}: our data sets"
                " are kept in memory; leave it out"
            )
        at_least("data.validation_size", self.validation_size, 1, "leave it out for the usual size")
        at_least("data.train_size", self.train_size, 1, "leave it out to train on all")
        if self.name == "piano_rolls" and self.validation_size is not None:
            raise ValueError(
                f"data.validation_size={self.validation_size} with data.name=piano_rolls: its file"
                " has pieces for validation; leave it out"
            )

    @property
    def arguments(self) -> Any:
        """The arguments of a built-in data set as its dataclass."""
        return make_arguments("data", self.name, DATA[self.name].arguments, self.args)

    @property
    def own_file(self) -> bool:
        """Whether the data come from a user's file, ``root``."""
        return self.name in DATA and DATA[self.name].own_file


@plain_values
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network of a trial; the data decide the number of inputs and classes.

    Attributes:
        name: ``mlp``: ``inputs - hidden... - classes`` with activations between; ``cnn``: 3 x 3
            convolutions, each with activation and pooling to half the size, followed by an mlp;
            ``resnet``, ``lstm`` or ``gpt`` (:mod:`trainers.models`);
            or ``file.py:factory`` or ``package.module:factory``, which returns a torch module
            (:mod:`trainers.models.factory`).
        args: arguments of mlp and cnn (activation, beta), resnet (depth, width), lstm (layers,
            width, dropout, variant) or gpt (layers, heads, width, dropout), see
            :mod:`trainers.config.model`; or of the factory.
        code: sha256 of the factory's file, filled in when a study is planned.
        hidden: widths of the linear layers of mlp and cnn before the last one.
        channels: channels of the cnn's convolutions; None for [8, 16].

    Example::

        >>> net = ModelConfig(name="mlp", hidden=[512, 256])
    """

    name: str = "mlp"
    args: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    hidden: list[int] = field(default_factory=lambda: list(HIDDEN))
    channels: list[int] | None = None

    def __post_init__(self) -> None:
        require(
            f"model.name={self.name}",
            self.name not in MOVED,
            "is no network of this version",
            f"{MOVED.get(self.name)} of the repository has it",
        )
        object.__setattr__(self, "args", _checked("model", self.name, self.args, ARGUMENTS))
        if self.name not in ("mlp", "cnn") and self.hidden != HIDDEN:
            raise ValueError(
                f"model.hidden={self.hidden} with model.name={self.name}: only mlp and cnn have"
                f" it; leave it out (in a row by model.hidden={HIDDEN}), and use model.args for"
                " what this model takes"
            )
        if self.name != "cnn" and self.channels is not None:
            raise ValueError(
                f"model.channels={self.channels} with model.name={self.name}: only the cnn has"
                " convolutions; leave it out, or use model.name=cnn"
            )
        require(
            f"model.channels={self.channels}",
            self.channels is None or 1 <= len(self.channels) <= 3,
            "must be one to three widths, as 8 x 8 pixels can be halved three times",
            "use [8, 16]",
        )
        for width in self.channels or []:
            at_least("model.channels", width, 1, "use for example model.channels=[8,16]")
        for width in self.hidden:
            at_least("model.hidden", width, 1, "use for example model.hidden=[512]")

    @property
    def own(self) -> bool:
        """Whether the model comes from the user's code."""
        return names_code(self.name)

    @property
    def feedforward(self) -> bool:
        """Whether the model is mlp or cnn."""
        return self.name in ("mlp", "cnn")

    @property
    def stateless(self) -> bool:
        """Whether the model is built in, draws no random numbers in training and keeps no state
        between steps."""
        recurrent = self.name in ("lstm", "gpt") and self.arguments.dropout == 0
        return self.feedforward or recurrent

    @property
    def normed(self) -> bool:
        """Whether the model is built in and has batch norm, which keeps running statistics."""
        return self.name == "resnet"

    @property
    def arguments(self) -> Any:
        """The arguments of a built-in model as its dataclass."""
        return make_arguments("model", self.name, ARGUMENTS[self.name], self.args)

    @property
    def layers(self) -> int:
        """The minimum number of layers of the model's chain; a pipeline stage holds at least one.
        :data:`UNKNOWN` for a user's model, as its layers are only known once it is made."""
        if self.own:
            return UNKNOWN
        if self.name in ("mlp", "cnn"):
            convolutions = len(self.channels or CHANNELS) if self.name == "cnn" else 0
            return convolutions + len(self.hidden) + 1
        return int(self.arguments.chain)


def _checked(
    part: str, name: str, args: dict[str, Any], ours: Mapping[str, type[Any]]
) -> dict[str, Any]:
    """Check the name and, for a built-in, the arguments, and return the arguments.

    For a built-in, arguments with the value None are removed unless it accepts None: rows merge
    their arguments with the base trial's arguments and remove an argument in this way.

    Args:
        part: ``model`` or ``data``.
        name: name of the model or data set.
        args: arguments of the model or data set.
        ours: the built-in names, each with the dataclass of its arguments.

    Raises:
        ValueError: the name is neither built in nor a factory, or a built-in does not accept an
            argument; the message has the value, the rule and the remedy.
    """
    check_named(part, name, tuple(ours))
    if names_code(name):
        return args
    kinds = field_types(ours[name])  # type: ignore[arg-type]
    args = {
        key: value
        for key, value in args.items()
        if value is not None or NoneType in get_args(kinds.get(key))
    }
    make_arguments(part, name, ours[name], args)
    return args


@plain_values
@dataclass(frozen=True, kw_only=True)
class TrainableConfig:
    """A user's training loop, which replaces the built-in loop.

    Of the trial's other keys only ``epochs`` (the largest number of reports), ``seed``, ``device``,
    ``gpus``, ``threads`` and ``workers`` have an effect; the loop can read all keys.

    Attributes:
        name: ``file.py:function`` or ``package.module:function``, called with ``args``
            (:mod:`trainers.user_loop`); empty for the built-in loop.
        args: arguments of the function.
        code: sha256 of the function's file, filled in when a study is planned.

    Example::

        >>> loop = TrainableConfig(name="loop.py:train", args={"depth": 3})
    """

    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    code: str = ""

    def __post_init__(self) -> None:
        if self.name:
            split_name("trainable.name", self.name)
        elif self.args:
            raise ValueError(
                f"trainable.args={self.args} without trainable.name: they are arguments of a loop"
                " of your own; name it, trainable.name=file.py:function, or leave them out"
            )


@plain_values
@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The steps and ranks that torch's profiler records.

    Attributes:
        steps: the first step and the one after the last, counted from 0 over the whole trial; empty
            for none.
        ranks: ranks of the workers that record; empty for all.

    Example::

        >>> ten_steps = ProfileConfig(steps=[10, 20])
    """

    steps: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in self.ranks:
            at_least("profile.ranks", rank, 0, "use for example profile.ranks=[0]")
        require(
            f"profile.steps={list(self.steps)}",
            not self.steps or (len(self.steps) == 2 and 0 <= self.steps[0] < self.steps[1]),
            "must be the first step and the one after the last, counted from 0",
            "use for example [10, 14]",
        )


@dataclass(frozen=True, kw_only=True)
class TrialKeys:
    """The keys of a trial, checked one by one.

    Attributes:
        loss: loss to minimise.
        metrics: additional metrics of the answers on validation and test examples, by name.
        epochs: passes over the training examples; for a user's loop the maximum number of reports.
        batch_size: number of examples per step, over all workers together.
        seed: seed of the initial weights and the data order.
        workers: number of processes that train together, the layout's dp x pp x tp.
        min_workers: with Ray Train (``gang``), the smallest number of data-parallel workers with
            which the trial runs if the cluster has no resources for ``workers``; more workers join
            when resources become free. None for always ``workers``.
        threads: number of CPU threads per worker.
        device: ``cpu``, ``cuda`` (an NVIDIA GPU), or ``auto``: cuda if there is a GPU and the trial
            has one worker, otherwise cpu. LNS arithmetic gives the same bits on both; float32
            parts, such as the softmax at the loss, may round differently.
        analysis_every: number of epochs between analyses of the format's effect on each layer
            (:mod:`trainers.training.format_analysis`), reported as ``analysis/LAYER/...``; 0 for
            none.
        gpus: share of a GPU that the worker of a one-worker trial takes on device cuda; with 0.25
            four trials share a GPU. None for a share according to the trial's size
            (:data:`trainers.workers.resources.SHARES`). With several workers each takes a whole
            GPU.
        telemetry: whether to report the use of time, memory and energy, as ``telemetry/...``
            (:mod:`trainers.telemetry.metrics`).
        profile: steps whose trace is kept with the trial's files
            (:mod:`trainers.telemetry.profiler`).
        autocast: ``bfloat16`` or, on cuda, ``float16`` to compute the products of a float32 trial
            in that type (:mod:`trainers.models.forward`); or ``none``.
        memory: activation checkpoints (:mod:`trainers.models.forward`), and optimizer state on the
            CPU (:mod:`trainers.optim.offload`).
        changes: options of the optimizer that change in the middle of the trial
            (:mod:`trainers.config.schedule_changes`).
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    metrics: dict[str, MetricConfig] = field(default_factory=dict)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    layout: Layout = field(default_factory=Layout)
    wire: WireConfig = field(default_factory=WireConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    trainable: TrainableConfig = field(default_factory=TrainableConfig)
    epochs: int = 20
    batch_size: int = 128
    seed: int = 0
    workers: int = 1
    min_workers: int | None = None
    threads: int = 1
    device: str = "cpu"
    gpus: float | None = None
    analysis_every: int = 0
    telemetry: bool = False
    autocast: str = "none"
    changes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "workers", "threads"):
            at_least(
                name, getattr(self, name), 1, f"use for example {name}={getattr(TrialKeys, name)}"
            )
        require(
            f"epochs={self.epochs}",
            self.epochs < EPOCHS,
            f"must be below 2^20 = {EPOCHS}, as an epoch's data order is drawn from seed x 2^20 +"
            " epoch and would repeat an order of another seed",
            "use for example epochs=20",
        )
        at_least("analysis_every", self.analysis_every, 0, "use 1 for every epoch, 0 for none")
        one_of("device", self.device, DEVICES)
        at_least("min_workers", self.min_workers, 1, "leave it out for a fixed number of workers")
        one_of("autocast", self.autocast, AUTOCASTS)
        finite("gpus", self.gpus, 0.0, "1 for a whole GPU, 0.08 for twelve trials on one")
        share = "must lie above 0 and be at most 1, a worker computes on one GPU"
        holds = self.gpus is None or 0 < self.gpus <= 1
        require(f"gpus={self.gpus}", holds, share, "use gpus=1")
        few = "use for example 0, 1, 2"
        at_least("seed", self.seed, 0, few)
        require(f"seed={self.seed}", self.seed < 1 << 32, f"must be below 2^32 = {1 << 32}", few)
        check_metrics(self.metrics)

    @property
    def own_loop(self) -> bool:
        """Whether a user's loop trains the trial."""
        return bool(self.trainable.name)

    @property
    def own_code(self) -> bool:
        """Whether the trial's model, data, loss or a metric comes from the user's code."""
        return bool(self.user_code) and not self.own_loop

    @property
    def user_code(self) -> tuple[str, ...]:
        """Names of the user's code that the trial runs: a loop, or parts for the built-in loop."""
        if self.own_loop:
            return (self.trainable.name,)
        named = [self.model.name, self.data.name, self.loss.name]
        every = [*named, *(metric.name for metric in self.metrics.values())]
        return tuple(filter(names_code, every))

    @property
    def update_examples(self) -> int:
        """The number of examples whose mean gradient makes one update.

        The whole batch, or a replica's share of the batch if each replica updates by itself.
        """
        apart = self.layout.replicas(self.workers) if self.sync.local else 1
        return self.batch_size // apart

    @property
    def step_captured(self) -> bool:
        """Whether a GPU replays the trial's steps from a CUDA graph, perhaps without the update.

        Trials with user code are not captured, as the code would only run once instead of in every
        step. Of networks other than mlp and cnn, neither are those with activation checkpoints,
        whose generators a graph cannot reset, nor those with autocast, which are untested.
        """
        own = self.own_loop or self.model.own or self.loss.own
        on_host = self.memory.offload_optimizer or self.autocast == "float16"
        in_parts = self.workers > 1 or self.layout.pairwise
        if own or on_host or in_parts or self.data.num_workers is not None:
            return False
        plain = self.autocast == "none" and not self.memory.activation_checkpoints
        return self.model.feedforward or plain

    @property
    def recurrence_fused(self) -> bool:
        """Whether a GPU runs all steps of an LSTM layer in one kernel
        (:mod:`trainers.models.lstm.kernels`)."""
        if self.model.name != "lstm" or self.precision.format != "float32":
            return False
        arguments = self.model.arguments
        return arguments.variant != "torch" and arguments.width <= 256 and self.autocast == "none"

    @property
    def update_captured(self) -> bool:
        """Whether the CUDA graph of a step includes the optimizer's update."""
        return not self.lr_schedule.varies or self.optimizer.name not in RATE_OF_HOST

    def to_dict(self) -> dict[str, Any]:
        """Return a nested dict of JSON values, the input of :meth:`from_dict`."""
        return as_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the config whose :meth:`to_dict` is ``values``."""
        made = ((key.name, key.default_factory) for key in fields(cls))
        parts: dict[str, Any] = {name: part for name, part in made if is_dataclass(part)}
        if "metrics" in values:
            metrics = {name: MetricConfig(**each) for name, each in values["metrics"].items()}
            values = values | {"metrics": metrics}
        return cls(
            **{key: parts[key](**value) if key in parts else value for key, value in values.items()}
        )
