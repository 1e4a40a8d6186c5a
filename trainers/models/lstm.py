"""Layers of long short-term memory (LSTM) over a sequence, as a chain.

An example is a sequence of tokens, ``[T]`` whole numbers, which an embedding turns into vectors; of
vectors, ``[T, F]``; or of values, ``[T]``. Where the data have a target for each step (the next
character, the next notes) the logits are ``[B, T, classes]``; where they have one for the sequence,
they are ``[B, classes]`` and come from the last layer's last output. Every example begins with a
state of zeros.

Source: S. Hochreiter, J. Schmidhuber 1997, "Long Short-Term Memory"; F. Gers et al. 2000 (forget
gates); the equations are those of ``torch.nn.LSTM``.
"""

from __future__ import annotations

from torch import Tensor, nn

from trainers.config.model import LSTMArguments


class Layer(nn.Module):
    """One LSTM layer and dropout after it, ``[B, T, inputs] -> [B, T, width]``."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        outputs, _ = self.lstm(x)
        y: Tensor = self.dropout(outputs)
        return y


class Last(nn.Module):
    """The last step of a sequence, ``[B, T, width] -> [B, width]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of the last step."""
        return x[:, -1]


def lstm(
    args: LSTMArguments, shape: tuple[int, ...], classes: int, tokens: int, each_step: bool
) -> nn.Sequential:
    """Return the chain of an embedding (of tokens), LSTM layers and a linear layer of the classes.

    Args:
        args: layers, width and dropout.
        shape: of an example: ``(T,)`` or ``(T, F)``.
        classes: logits a step, or a sequence.
        tokens: different tokens; 0 where examples are vectors or values.
        each_step: whether logits are wanted for each step.

    Raises:
        ValueError: examples that are no sequences.
    """
    if len(shape) > 2 or (tokens and len(shape) != 1):
        raise ValueError(
            f"model.name=lstm with examples of shape {shape}: needs sequences, of tokens (T,), of"
            " vectors (T, F), or of values (T,); use model.name=resnet or model.name=cnn for images"
        )
    layers: list[nn.Module] = []
    inputs = shape[1] if len(shape) == 2 else 1
    if tokens:
        layers, inputs = [nn.Embedding(tokens, args.width)], args.width
    elif len(shape) == 1:
        layers = [nn.Unflatten(1, (shape[0], 1))]
    for _ in range(args.layers):
        layers.append(Layer(inputs, args.width, args.dropout))
        inputs = args.width
    head: list[nn.Module] = [] if each_step else [Last()]
    return nn.Sequential(*layers, nn.Sequential(*head, nn.Linear(inputs, classes)))
