"""Layers of long short-term memory (LSTM) over a sequence, as a chain.

An example is a sequence of tokens, ``[T]`` integers, which an embedding converts to vectors; of
vectors, ``[T, F]``; or of values, ``[T]``. If the data have a target for each step (the next
character, the next notes), the logits are ``[B, T, classes]``. If they have one target per
sequence, the logits are ``[B, classes]``, from the last layer's last output. Every example starts
with a state of zeros.

``model.args.variant`` selects the equations. ``torch`` uses ``torch.nn.LSTM``. The others are the
nine variants of Greff et al. With the block input z, gates i, f and o, cell c, output y, and o* the
elementwise product, ``vanilla`` is::

    z_t = g(W_z x_t + R_z y_{t-1} + b_z)                      g = tanh
    i_t = sigmoid(W_i x_t + R_i y_{t-1} + p_i o* c_{t-1} + b_i)
    f_t = sigmoid(W_f x_t + R_f y_{t-1} + p_f o* c_{t-1} + b_f)
    c_t = z_t o* i_t + c_{t-1} o* f_t
    o_t = sigmoid(W_o x_t + R_o y_{t-1} + p_o o* c_t + b_o)
    y_t = h(c_t) o* o_t                                       h = tanh

and each other variant has one change::

    nig   no input gate                    i = 1
    nfg   no forget gate                   f = 1
    nog   no output gate                   o = 1
    niaf  no input activation function     g(x) = x
    noaf  no output activation function    h(x) = x
    cifg  coupled input and forget gate    f = 1 - i
    np    no peepholes                     p_i = p_f = p_o = 0
    fgr   full gate recurrence             the sum of each gate gets, of all three gates,
                                           R_ii i_{t-1} + R_fi f_{t-1} + R_oi o_{t-1}

Their weights, biases and peepholes are drawn from a normal distribution with standard deviation
0.1, as in the paper. In floating point all steps are one node of autograd's graph, in float32 on a
GPU one kernel (:mod:`trainers.models.lstm.steps`).

Sources: S. Hochreiter, J. Schmidhuber 1997, "Long Short-Term Memory"; F. Gers et al. 2000 (forget
gates, peepholes); K. Greff et al. 2015, "LSTM: A Search Space Odyssey" (arXiv:1503.04069).
"""

from __future__ import annotations

from torch import Tensor, nn

from trainers.config.model import LSTMArguments
from trainers.models.lstm.variant import VariantLayer


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
    """Return the chain of an embedding (for tokens), LSTM layers and a linear layer for the
    classes.

    Args:
        args: number of layers, width, dropout and variant.
        shape: shape of an example: ``(T,)`` or ``(T, F)``.
        classes: number of logits per step, or per sequence.
        tokens: number of different tokens; 0 if examples are vectors or values.
        each_step: whether to return logits for each step.

    Raises:
        ValueError: the examples are not sequences.
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
        layers.append(
            Layer(inputs, args.width, args.dropout)
            if args.variant == "torch"
            else VariantLayer(inputs, args.width, args.dropout, args.variant)
        )
        inputs = args.width
    head: list[nn.Module] = [] if each_step else [Last()]
    return nn.Sequential(*layers, nn.Sequential(*head, nn.Linear(inputs, classes)))
