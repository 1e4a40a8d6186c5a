"""The arguments of the built-in models, ``model.args``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.config.validation import at_least, one_of, positive, require, share_of_one

ACTIVATIONS = ("relu", "swish", "swish_beta")
VARIANTS = ("torch", "vanilla", "nig", "nfg", "nog", "niaf", "noaf", "cifg", "np", "fgr")
"""The equations of ``lstm`` (:mod:`trainers.models.lstm`)."""


@dataclass(frozen=True, kw_only=True)
class FeedforwardArguments:
    """The arguments of ``mlp`` and ``cnn``.

    Attributes:
        activation: ``relu``; ``swish``, x sigmoid(beta x) (P. Ramachandran, B. Zoph, Q. V. Le 2017,
            arXiv:1710.05941); or ``swish_beta``, swish with one learned beta per layer.
        beta: constant of swish; initial value of swish_beta's betas.
    """

    activation: str = "relu"
    beta: float = 1.0

    def __post_init__(self) -> None:
        one_of("model.args.activation", self.activation, ACTIVATIONS)
        positive("model.args.beta", self.beta, "1.0")
        if self.activation == "relu" and self.beta != 1.0:
            raise ValueError(
                f"model.args.beta={self.beta} with model.args.activation=relu: only swish and"
                " swish_beta have it; leave it out, or use model.args.activation=swish"
            )


@dataclass(frozen=True, kw_only=True)
class ResNetArguments:
    """The arguments of ``resnet`` (:mod:`trainers.models.resnet`).

    Attributes:
        depth: number of layers with weights, 6 n + 2: a first convolution, three stages of n blocks
            of two convolutions, and a linear layer.
        width: channels of the first stage; the second has twice, the third four times as many.
    """

    depth: int = 20
    width: int = 16

    def __post_init__(self) -> None:
        require(
            f"model.args.depth={self.depth}",
            self.depth >= 8 and self.depth % 6 == 2,
            "must be 6 n + 2, n blocks of two convolutions in each of three stages",
            "use 8, 14, 20, 32, 44, 56 or 110",
        )
        at_least("model.args.width", self.width, 1, "use for example 16")

    @property
    def chain(self) -> int:
        """The number of layers of the chain that pipeline stages divide."""
        return 2 + (self.depth - 2) // 2


@dataclass(frozen=True, kw_only=True)
class LSTMArguments:
    """The arguments of ``lstm`` (:mod:`trainers.models.lstm`).

    Attributes:
        layers: number of LSTM layers.
        width: number of units per layer.
        dropout: share of each layer's outputs that training sets to zero.
        variant: ``torch`` for the equations of ``torch.nn.LSTM``; or a variant of Greff et al.
            2015: ``vanilla`` with peepholes, or one of its eight modifications ``nig``, ``nfg``,
            ``nog``, ``niaf``, ``noaf``, ``cifg``, ``np`` and ``fgr``.
    """

    layers: int = 1
    width: int = 64
    dropout: float = 0.0
    variant: str = "torch"

    def __post_init__(self) -> None:
        at_least("model.args.layers", self.layers, 1, "use for example 1")
        at_least("model.args.width", self.width, 1, "use for example 64")
        share_of_one("model.args.dropout", self.dropout)
        one_of("model.args.variant", self.variant, VARIANTS)

    @property
    def chain(self) -> int:
        """The number of layers of the chain that pipeline stages divide; with tokens one more."""
        return self.layers + 1


@dataclass(frozen=True, kw_only=True)
class GPTArguments:
    """The arguments of ``gpt`` (:mod:`trainers.models.gpt`).

    Attributes:
        layers: number of blocks of an attention and a feed-forward layer.
        heads: number of heads per attention layer; they share the width evenly.
        width: number of values per token between the blocks.
        dropout: share of values that training sets to zero after the embedding, in the attention
            weights and at the end of each branch.
    """

    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width"):
            at_least(
                f"model.args.{name}",
                getattr(self, name),
                1,
                f"use for example {getattr(GPTArguments, name)}",
            )
        if self.width % self.heads:
            raise ValueError(
                f"model.args.width={self.width}, model.args.heads={self.heads}: heads share the"
                f" width evenly; use a width that is a multiple of {self.heads}"
            )
        share_of_one("model.args.dropout", self.dropout)

    @property
    def chain(self) -> int:
        """The number of layers of the chain that pipeline stages divide."""
        return self.layers + 2


ARGUMENTS: dict[str, type[Any]] = {
    "mlp": FeedforwardArguments,
    "cnn": FeedforwardArguments,
    "resnet": ResNetArguments,
    "lstm": LSTMArguments,
    "gpt": GPTArguments,
}
"""The built-in models with the dataclass of their ``model.args``."""
MODELS = tuple(ARGUMENTS)
MOVED = {name: f"examples/{name}/study.yaml" for name in ("capsules", "densenet", "vanilla")}
"""Built-in networks of earlier versions, with the study that contains each network now."""
HIDDEN = [512]
"""The default of ``model.hidden``."""
CHANNELS = [8, 16]
"""The default channels of the cnn's convolutions."""
