"""What one trial is: data, model, precision, optimizer, length, seed, workers.

Frozen dataclasses, validated once, where they are made; nothing checks them again. ``study`` builds them from YAML; a script
may build them by hand::

    TrialConfig(precision=PrecisionConfig(format="lns12", scope="everywhere", kahan_sum=True), epochs=3)
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lns_ops.accumulation import ACCUMULATIONS
from lns_ops.format import LNSFormat
from lns_ops.optim import ARITHMETICS
from trainers.combinations import check_combinations
from trainers.layout import Layout
from trainers.lr_schedule import LRSchedule
from trainers.sync_config import SyncConfig
from trainers.validation import at_least, finite, one_of
from trainers.wire import WireConfig

DATASETS = ("auto", "mnist", "digits")
MODELS = ("mlp",)
SCOPES = ("matmul", "everywhere")
OPTIMIZERS = ("sgd", "adam", "adamw")
FLOAT_FORMATS = ("float32",)
DEVICES = ("cpu", "cuda", "auto")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which examples a trial sees.

    Attributes:
        name: ``mnist`` (28 x 28, 60,000 + 10,000), ``digits`` (8 x 8, scikit-learn's 1,797, the last 297 for testing), or ``auto``:
            mnist where it is found or can be downloaded, otherwise digits.
        root: folder of the four MNIST IDX files (plain or .gz); None looks in the usual places.
        validation_size: examples taken from the end of the training set for validation, never trained on; None for 10,000 (mnist)
            or 300 (digits).
        train_size: train on the first so many of the rest; None for all. A budget, not part of the recipe.
    """

    name: str = "mnist"
    root: str | None = None
    validation_size: int | None = None
    train_size: int | None = None

    def __post_init__(self) -> None:
        one_of("data.name", self.name, DATASETS)
        at_least("data.validation_size", self.validation_size, 1, "leave it out for the usual size")
        at_least("data.train_size", self.train_size, 1, "leave it out to train on all")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A feed-forward net: ``inputs - hidden... - classes`` with ReLU between; inputs and classes come from the data."""

    name: str = "mlp"
    hidden: list[int] = field(default_factory=lambda: [512])

    def __post_init__(self) -> None:
        one_of("model.name", self.name, MODELS)
        for width in self.hidden:
            at_least("model.hidden", width, 1, "use for example model.hidden=[512]")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """In which arithmetic a trial trains.

    Attributes:
        format: ``float32``, or an LNS format: ``lns16``, ``lns12``, ``lns8``, ``lns(bits,fraction_bits)``.
        scope: for LNS formats, ``matmul`` (products and their sums only) or ``everywhere`` (parameters, activations,
            gradients and updates too). Ignored for float formats.
        kahan_sum: keep a Kahan compensation for each parameter. With scope ``matmul`` the parameters are float32 and so is it.
        stochastic_rounding: round weights at random, their expected value exact, where the update is added; LNS parameters (scope
            ``everywhere``) only. The random bits come from the trial's seed.
        update_arithmetic: of LNS parameters' updates: ``lns``, or ``float32`` between loads and stores of codes.
        accumulation: for LNS formats, how sums of matrix products are taken: ``contract`` (in LNS) or ``float32``; see
            :mod:`lns_ops.accumulation`. Ignored for float formats.
    """

    format: str = "float32"
    scope: str = "everywhere"
    kahan_sum: bool = False
    stochastic_rounding: bool = False
    update_arithmetic: str = "lns"
    accumulation: str = "contract"

    def __post_init__(self) -> None:
        one_of("precision.scope", self.scope, SCOPES)
        one_of("precision.update_arithmetic", self.update_arithmetic, ARITHMETICS)
        one_of("precision.accumulation", self.accumulation, ACCUMULATIONS)
        if self.stochastic_rounding and self.kahan_sum:
            raise ValueError(
                "precision.kahan_sum=true, precision.stochastic_rounding=true: each keeps what the other has nothing left of; choose one"
            )
        if self.stochastic_rounding and (self.format in FLOAT_FORMATS or self.scope != "everywhere"):
            raise ValueError(
                f"precision.stochastic_rounding=true with precision.format={self.format}, precision.scope={self.scope}: the parameters are "
                "float32, which rounds to nearest; use an LNS format with precision.scope=everywhere, or precision.kahan_sum=true"
            )
        if self.format not in FLOAT_FORMATS:
            try:
                LNSFormat.parse(self.format)
            except ValueError as error:
                raise ValueError(
                    f"precision.format={self.format!r}: must be {', '.join(FLOAT_FORMATS)} or an LNS format: {error}; "
                    "use for example precision.format=lns12"
                ) from None

    @property
    def lns_format(self) -> LNSFormat | None:
        """The LNS format, or None for a float format."""
        return None if self.format in FLOAT_FORMATS else LNSFormat.parse(self.format)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a step changes the weights, for the mean loss of a batch.

    Attributes:
        name: ``sgd``, ``adam`` or ``adamw``.
        lr: step size.
        momentum: heavy-ball momentum of sgd.
        betas: decays of Adam's two averages.
        eps: added to the root of Adam's second moment.
        weight_decay: of adam (added to the gradient) or adamw (decoupled).
    """

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, OPTIMIZERS)
        finite("optimizer.lr", self.lr, 0.0, "0.1 is a good start for sgd, 0.001 for adam")
        finite("optimizer.momentum", self.momentum, 0.0, "0 turns it off")
        finite("optimizer.weight_decay", self.weight_decay, 0.0, "0 turns it off")
        if self.momentum >= 1:
            raise ValueError(f"optimizer.momentum={self.momentum}: must be below 1, or the buffer grows without bound; try 0.9")
        if len(self.betas) != 2 or not all(1e-6 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"optimizer.betas={list(self.betas)}: must be two numbers of at least 1e-6 and below 1; use for example [0.9, 0.999]"
            )
        if not 0 < self.eps < math.inf:
            raise ValueError(f"optimizer.eps={self.eps}: must be positive and finite; use for example 1e-8")
        if self.name == "sgd" and self.weight_decay:
            raise ValueError(
                f"optimizer.weight_decay={self.weight_decay} with optimizer.name=sgd: sgd has none; use optimizer.name=adamw, or 0"
            )
        if self.name != "sgd" and self.momentum:
            raise ValueError(
                f"optimizer.momentum={self.momentum} with optimizer.name={self.name}: it has betas instead; use optimizer.momentum=0"
            )


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """One training run, complete: the same config gives the same bits on the same machine.

    Attributes:
        epochs: passes over the training examples.
        batch_size: examples a step, over all workers together.
        seed: of the initial weights and the data order.
        workers: processes that train together, the layout's dp x pp.
        threads: CPU threads a worker computes with.
        device: ``cpu``, ``cuda`` (an NVIDIA GPU), or ``auto``: cuda where there is one and the trial has one worker, otherwise
            cpu. LNS arithmetic gives the same bits
            on both; float32 parts, such as the softmax at the loss, may round differently.
        gpus: share of a GPU that the worker of a one-worker trial takes on device cuda; Ray packs as many trials on one as fit. Each
            of several workers takes a whole one.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    layout: Layout = field(default_factory=Layout)
    wire: WireConfig = field(default_factory=WireConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    epochs: int = 20
    batch_size: int = 128
    seed: int = 0
    workers: int = 1
    threads: int = 1
    device: str = "cpu"
    gpus: float = 0.08

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "workers", "threads"):
            at_least(name, getattr(self, name), 1, f"use for example {name}={getattr(TrialConfig, name)}")
        one_of("device", self.device, DEVICES)
        finite("gpus", self.gpus, 0.0, "1 for a whole GPU, 0.08 for twelve trials on one")
        if self.gpus > 1 or self.gpus == 0:
            raise ValueError(f"gpus={self.gpus}: must lie above 0 and be at most 1, a worker computes on one GPU; use gpus=1")
        at_least("seed", self.seed, 0, "use for example 0, 1, 2")
        if self.seed >= 1 << 32:
            raise ValueError(f"seed={self.seed}: must be below 2^32 = {1 << 32}; use for example 0, 1, 2")
        check_combinations(self)

    @property
    def update_examples(self) -> int:
        """Over how many examples one update takes the mean gradient: the batch, or a replica's share where it steps by itself."""
        return self.batch_size // self.layout.replicas(self.workers) if self.sync.local else self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of JSON values; :meth:`from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TrialConfig:
        """The config whose :meth:`to_dict` is ``values``."""
        parts: dict[str, Any] = {
            "data": DataConfig,
            "model": ModelConfig,
            "precision": PrecisionConfig,
            "optimizer": OptimizerConfig,
        }
        parts |= {"lr_schedule": LRSchedule, "layout": Layout, "wire": WireConfig, "sync": SyncConfig}
        return TrialConfig(**{key: parts[key](**value) if key in parts else value for key, value in values.items()})
