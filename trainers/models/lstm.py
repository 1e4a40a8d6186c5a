"""Layers of long short-term memory (LSTM) over a sequence, as a chain.

An example is a sequence of tokens, ``[T]`` whole numbers, which an embedding turns into vectors; of
vectors, ``[T, F]``; or of values, ``[T]``. Where the data have a target for each step (the next
character, the next notes) the logits are ``[B, T, classes]``; where they have one for the sequence,
they are ``[B, classes]`` and come from the last layer's last output. Every example begins with a
state of zeros.

``model.args.variant`` chooses the equations. ``torch`` has those of ``torch.nn.LSTM``, in its own
layer. The others are the nine of Greff et al., of which ``vanilla`` is, with the block input z,
gates i, f and o, cell c, output y, and o* the product of elements::

    z_t = g(W_z x_t + R_z y_{t-1} + b_z)                      g = tanh
    i_t = sigmoid(W_i x_t + R_i y_{t-1} + p_i o* c_{t-1} + b_i)
    f_t = sigmoid(W_f x_t + R_f y_{t-1} + p_f o* c_{t-1} + b_f)
    c_t = z_t o* i_t + c_{t-1} o* f_t
    o_t = sigmoid(W_o x_t + R_o y_{t-1} + p_o o* c_t + b_o)
    y_t = h(c_t) o* o_t                                       h = tanh

and each other one changes one thing::

    nig   no input gate                    i = 1
    nfg   no forget gate                   f = 1
    nog   no output gate                   o = 1
    niaf  no input activation function     g(x) = x
    noaf  no output activation function    h(x) = x
    cifg  coupled input and forget gate    f = 1 - i
    np    no peepholes                     p_i = p_f = p_o = 0
    fgr   full gate recurrence             the sum of each gate gets, of all three gates,
                                           R_ii i_{t-1} + R_fi f_{t-1} + R_oi o_{t-1}

Their weights, biases and peepholes are drawn from a normal distribution of standard deviation 0.1,
as in the paper.

Sources: S. Hochreiter, J. Schmidhuber 1997, "Long Short-Term Memory"; F. Gers et al. 2000 (forget
gates, peepholes); K. Greff et al. 2015, "LSTM: A Search Space Odyssey" (arXiv:1503.04069).

Shape suffixes: B sequences; T steps; I features of an input; H units; K sums of all units, those of
z first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainers.config.model import LSTMArguments
from trainers.models.init import normal_

GATES = {"nig": "fo", "nfg": "io", "nog": "if", "cifg": "io"}
"""The gates that a variant computes; all three where it is not among these."""
STD = 0.1
"""Standard deviation of the initial weights of the variants."""


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


class VariantLayer(nn.Module):
    """One layer of a variant and dropout after it, ``[B, T, inputs] -> [B, T, width]``.

    The products of all steps' inputs are one product; the sums of z and of the gates are its
    columns, in the order z, i, f, o.
    """

    def __init__(self, inputs: int, width: int, dropout: float, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.gates = GATES.get(variant, "ifo")
        blocks = 1 + len(self.gates)
        self.from_input = nn.Linear(inputs, blocks * width)
        normal_(self.from_input, weight=STD, bias=STD)
        self.from_output = nn.Linear(width, blocks * width, bias=False)
        normal_(self.from_output, weight=STD)
        if variant == "fgr":
            self.from_gates = nn.Linear(3 * width, 3 * width, bias=False)
            normal_(self.from_gates, weight=STD)
        if variant != "np":
            self.peepholes = nn.Parameter(torch.empty(len(self.gates), width))
            normal_(self, peepholes=STD)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        sums_BTK = self.from_input(x_BTI)
        width = self.from_output.in_features
        y_BH = cell_BH = torch.zeros_like(sums_BTK[:, 0, :width])
        gates = torch.zeros_like(sums_BTK[:, 0, width:])
        outputs = []
        for sums_BK in sums_BTK.unbind(1):
            sums_BK = sums_BK + self.from_output(y_BH)
            if self.variant == "fgr":
                z_BH, rest = sums_BK.split([width, 3 * width], -1)
                sums_BK = torch.cat([z_BH, rest + self.from_gates(gates)], -1)
            y_BH, cell_BH, gates = self._step(sums_BK, cell_BH)
            outputs.append(y_BH)
        y_BTH: Tensor = self.dropout(torch.stack(outputs, 1))
        return y_BTH

    def _step(self, sums_BK: Tensor, cell_BH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the cell, and i, f, o side by side where these recur."""
        z_BH, *rest = sums_BK.chunk(1 + len(self.gates), -1)
        sums = dict(zip(self.gates, rest, strict=True))
        z_BH = z_BH if self.variant == "niaf" else torch.tanh(z_BH)
        i_BH, f_BH = self._gate("i", sums, cell_BH), self._gate("f", sums, cell_BH)
        if self.variant == "cifg":
            assert i_BH is not None
            f_BH = 1 - i_BH
        cell_BH = _passed(z_BH, i_BH) + _passed(cell_BH, f_BH)
        o_BH = self._gate("o", sums, cell_BH)
        shown = cell_BH if self.variant == "noaf" else torch.tanh(cell_BH)
        gates = cell_BH
        if self.variant == "fgr":
            gates = torch.cat([gate for gate in (i_BH, f_BH, o_BH) if gate is not None], -1)
        return _passed(shown, o_BH), cell_BH, gates

    def _gate(self, name: str, sums: dict[str, Tensor], cell_BH: Tensor) -> Tensor | None:
        """Return a gate that sees ``cell_BH`` through its peephole; None for one that is open."""
        if name not in sums:
            return None
        if self.variant == "np":
            return torch.sigmoid(sums[name])
        return torch.sigmoid(sums[name] + self.peepholes[self.gates.index(name)] * cell_BH)


def _passed(value: Tensor, gate: Tensor | None) -> Tensor:
    """Return what a gate lets through."""
    return value if gate is None else value * gate


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
        args: layers, width, dropout and variant.
        shape: shape of an example: ``(T,)`` or ``(T, F)``.
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
        layers.append(
            Layer(inputs, args.width, args.dropout)
            if args.variant == "torch"
            else VariantLayer(inputs, args.width, args.dropout, args.variant)
        )
        inputs = args.width
    head: list[nn.Module] = [] if each_step else [Last()]
    return nn.Sequential(*layers, nn.Sequential(*head, nn.Linear(inputs, classes)))
