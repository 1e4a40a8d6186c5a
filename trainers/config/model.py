"""The arguments that our models take, ``model.args``."""

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
            arXiv:1710.05941); or ``swish_beta``, the same with a beta that each layer learns.
        beta: constant of swish; the value that those of swish_beta begin with.
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
        depth: layers with weights, 6 n + 2: a first convolution, three stages of n blocks of two
            convolutions, and a linear layer.
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
        """The layers of the chain, between which stages are cut."""
        return 2 + (self.depth - 2) // 2


@dataclass(frozen=True, kw_only=True)
class LSTMArguments:
    """The arguments of ``lstm`` (:mod:`trainers.models.lstm`).

    Attributes:
        layers: LSTM layers.
        width: units of each.
        dropout: share of each layer's outputs that training sets to zero.
        variant: ``torch`` for the equations of ``torch.nn.LSTM``; or one of the nine of Greff et
            al. 2015: ``vanilla`` with peepholes, or what differs from it, ``nig``, ``nfg``,
            ``nog``, ``niaf``, ``noaf``, ``cifg``, ``np`` or ``fgr``.
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
        """The layers of the chain, between which stages are cut; with tokens one more."""
        return self.layers + 1


@dataclass(frozen=True, kw_only=True)
class GPTArguments:
    """The arguments of ``gpt`` (:mod:`trainers.models.gpt`).

    Attributes:
        layers: blocks of attention and feed-forward layers.
        heads: number of heads of each attention; they share the width evenly.
        width: values that stand for a token between the blocks.
        dropout: share of the values that training sets to zero, after the embedding, of the
            attention weights and at the end of each branch.
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
        """The layers of the chain, between which stages are cut."""
        return self.layers + 2


ARGUMENTS: dict[str, type[Any]] = {
    "mlp": FeedforwardArguments,
    "cnn": FeedforwardArguments,
    "resnet": ResNetArguments,
    "lstm": LSTMArguments,
    "gpt": GPTArguments,
}
"""Our models, each with the dataclass of its ``model.args``."""
MODELS = tuple(ARGUMENTS)
MOVED = {name: f"examples/{name}/study.yaml" for name in ("capsules", "densenet", "vanilla")}
"""Networks that earlier versions had, each with the study of the repository that has it now."""
HIDDEN = [512]
"""``model.hidden`` where nothing is said."""
CHANNELS = [8, 16]
"""The channels of the cnn's convolutions, unless the config names others."""
