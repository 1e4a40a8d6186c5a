"""A decoder of transformer blocks that predicts the next token, as a chain.

Embeddings of tokens and learned positions are added, followed by blocks, a norm, and a linear layer
for the classes. A block is ``x = x + attention(norm(x)); x = x + feedforward(norm(x))`` with causal
attention and a GELU feed-forward layer four times as wide. Weights are drawn from a normal
distribution with standard deviation 0.02, divided by ``sqrt(2 layers)`` at the end of each branch;
biases are zero. Unlike in GPT-2, the last layer does not share its weights with the embedding,
because it can be in another pipeline stage. Dropout is after the embedding, on the attention
weights and at the end of the branches.

Sources: A. Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; A.
Karpathy's nanoGPT, a small version whose sizes are common in tests on characters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config.model import GPTArguments
from trainers.models.init import normal_

STD = 0.02
"""Standard deviation of the initial weights."""


class Embedding(nn.Module):
    """Embedding of tokens and positions, ``[B, T] -> [B, T, width]``."""

    def __init__(self, tokens: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.dropout = nn.Dropout(dropout)
        normal_(self.tokens, weight=STD)
        normal_(self, positions=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of the tokens' and the positions' vectors."""
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        return x


class Attention(nn.Module):
    """Causal self-attention, ``[B, T, width] -> [B, T, width]``."""

    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        width, layers = args.width, args.layers
        self.heads, self.dropout = args.heads, args.dropout
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        normal_(self.qkv, weight=STD, bias=0)
        normal_(self.project, weight=STD / (2 * layers) ** 0.5, bias=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return, for each step, the projected weighted mean of the values up to this step."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y_BHTD = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        y: Tensor = self.project(y_BHTD.transpose(1, 2).contiguous().view(batch, length, width))
        return y


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        width = args.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(args)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(args.dropout)
        normal_(self.feedforward[0], weight=STD, bias=0)
        normal_(self.feedforward[2], weight=STD / (2 * args.layers) ** 0.5, bias=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, ``[B, T, width]``."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.feedforward(self.norm2(x)))
        return y


def gpt(
    args: GPTArguments, shape: tuple[int, ...], classes: int, tokens: int, each_step: bool
) -> nn.Sequential:
    """Return the chain of embedding, blocks, norm, and linear layer for the classes.

    It maps tokens ``[B, T]`` to logits ``[B, T, classes]``.

    Args:
        args: number of layers and heads, width and dropout.
        shape: shape of an example, ``(T,)``; T is the longest context.
        classes: number of logits per step.
        tokens: number of different tokens.
        each_step: whether the data have a target for each step.

    Raises:
        ValueError: the data have no tokens, or one target per sequence.
    """
    if not tokens or not each_step or len(shape) != 1:
        raise ValueError(
            f"model.name=gpt with examples of shape {shape}, {tokens} tokens and"
            f" {'a target for each step' if each_step else 'one target an example'}: predicts a"
            " token at each step; use data.name=text, copy, sort or addition, or model.name=lstm"
        )
    head = nn.Linear(args.width, classes, bias=False)
    normal_(head, weight=STD)
    return nn.Sequential(
        Embedding(tokens, shape[0], args.width, args.dropout),
        *(Block(args) for _ in range(args.layers)),
        nn.Sequential(nn.LayerNorm(args.width), head),
    )
