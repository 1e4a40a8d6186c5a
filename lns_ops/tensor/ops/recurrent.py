"""LSTM, GRU and plain recurrent networks and their cells, composed of LNS products, sums, sigmoids
and tanhs.

torch's own networks are written in C++ and would compute the derivatives of sigmoid and tanh from
the rounded results; here they are computed from the arguments. The input is multiplied by its
weights in one matrix product for all steps. Equations and the order of the gates are those of
torch.nn.LSTM, GRU and RNN; initial states that are plain tensors are encoded. A batch of sequences
is processed like a packed one: step by step, each with the sequences that have not ended, the
longest first.

Sequences of different lengths (torch.nn.utils.rnn) are padded or packed. torch's own functions
write into a new float tensor, which would silently convert LNS to float32. So here torch packs
integer positions, and the values are gathered by them.

Sources: S. Hochreiter, J. Schmidhuber 1997; K. Cho et al. 2014 (arXiv:1406.1078); projections: H.
Sak et al. 2014 (arXiv:1402.1128).

Shape suffixes: N terms of all steps, one step after the other; B sequences; H, I features of states
and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import _compat
from lns_ops.tensor.lns_tensor import LNSTensor
from lns_ops.tensor.registry import replaces

_Step = Callable[..., tuple[Tensor, ...]]


def _lstm_step(
    from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_step(
    from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    update = torch.sigmoid(z_x + z_h)
    new = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return ((state[0] - new) * update + new,)


def _tanh_step(
    from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (torch.tanh(from_input + from_state),)


def _relu_step(
    from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (torch.relu(from_input + from_state),)


def _encoded(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` in the format of ``like``; unchanged if that is float32 (scope ``matmul``)."""
    if isinstance(x, LNSTensor) or not isinstance(like, LNSTensor):
        return x
    return LNSTensor.from_float(x, like.fmt)


def _direction(
    x_NI: Tensor,
    sizes: list[int],
    first: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    step: _Step,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in one direction over steps of ``sizes`` sequences.

    Returns all outputs ``[N, H]``, and every sequence's last states ``[B, H]``.
    """
    w_x, w_h, *rest = weights
    b_x, b_h = rest[:2] if len(rest) > 1 else (None, None)
    projection = rest[-1] if len(rest) % 2 else None
    from_input, outputs = F.linear(x_NI, w_x, b_x).split(sizes), []
    state = tuple(s[: sizes[-1 if reverse else 0]] for s in first)
    ended: list[tuple[Tensor, ...]] = []
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        running = len(state[0])
        if sizes[t] > running:  # backwards: sequences start
            state = tuple(
                torch.cat([s, f[running : sizes[t]]]) for s, f in zip(state, first, strict=True)
            )
        elif sizes[t] < running:  # forwards: sequences end
            ended.append(tuple(s[sizes[t] :] for s in state))
            state = tuple(s[: sizes[t]] for s in state)
        state = step(from_input[t], F.linear(state[0], w_h, b_h), state)
        if projection is not None:
            state = F.linear(state[0], projection), *state[1:]
        outputs.append(state[0])
    last = tuple(
        torch.cat(parts) if ended else parts[0]
        for parts in zip(state, *reversed(ended), strict=True)
    )
    return torch.cat(outputs[::-1] if reverse else outputs), last


def _run(
    x_NI: Tensor, sizes: list[int], states: tuple[Tensor, ...], params: Any, step: _Step,
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Run all layers and directions over steps of ``sizes`` sequences.

    Returns outputs ``[N, directions H]`` and last states ``[layers directions, B, H]``.
    """
    directions = 2 if bidirectional else 1
    per = len(params) // (num_layers * directions)
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for d in range(directions):
            at = layer * directions + d
            weights = params[at * per : (at + 1) * per]
            out, end = _direction(
                x_NI, sizes, tuple(s[at] for s in states), weights, step, reverse=d == 1
            )
            outputs.append(out)
            ends.append(end)
        x_NI = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x_NI = F.dropout(x_NI, dropout)
    return x_NI, [torch.stack(parts) for parts in zip(*ends, strict=True)]


def _padded(
    x: Tensor,
    states: tuple[Tensor, ...],
    params: Any,
    step: _Step,
    *options: Any,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run :func:`_run` on a padded batch or one sequence.

    Shapes: ``[T, B, I]``, ``[B, T, I]`` with ``batch_first``, or one sequence ``[T, I]``.
    """
    single = x.dim() == 2
    if single:
        x, states = x.unsqueeze(1), tuple(s.unsqueeze(1) for s in states)
    elif batch_first:
        x = x.transpose(0, 1)
    outputs, last = _run(x.flatten(0, 1), [x.shape[1]] * len(x), states, params, step, *options)
    outputs = outputs.unflatten(0, x.shape[:2])
    if single:
        return outputs.squeeze(1), [s.squeeze(1) for s in last]
    return (outputs.transpose(0, 1) if batch_first else outputs), last


def _network(function: Any, step: _Step, states: int) -> None:
    @replaces(function)
    def network(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        # the batch sizes of a packed sequence
        packed = isinstance(args[0], Tensor) and not args[0].dtype.is_floating_point
        hx, params, *options = args[packed:]
        like = next((p for p in params if isinstance(p, LNSTensor)), params[0])
        x, first = (
            _encoded(x, like),
            tuple(_encoded(s, like) for s in (hx if states == 2 else (hx,))),
        )
        if packed:
            outputs, last = _run(x, args[0].tolist(), first, params, step, *options)
        else:
            *options, batch_first = options
            outputs, last = _padded(x, first, params, step, *options, batch_first=batch_first)
        return outputs, *last


def _cell(function: Any, step: _Step, states: int) -> None:
    @replaces(function)
    def cell(x: Tensor, hx: Any, w_x: Tensor, w_h: Tensor, b_x: Any = None, b_h: Any = None) -> Any:
        state = tuple(_encoded(s, w_x) for s in (hx if states == 2 else (hx,)))
        for each in state:
            if each.shape[:-1] != x.shape[:-1] or each.shape[-1] != w_h.shape[-1]:
                raise ValueError(
                    f"state of shape {tuple(each.shape)} for an input of {tuple(x.shape)}: must be"
                    f" {(*x.shape[:-1], w_h.shape[-1])}"
                )
        new = step(F.linear(_encoded(x, w_x), w_x, b_x), F.linear(state[0], w_h, b_h), state)
        return new if states == 2 else new[0]


_network(torch.lstm, _lstm_step, 2)
_network(torch.gru, _gru_step, 1)
_network(torch.rnn_tanh, _tanh_step, 1)
_network(torch.rnn_relu, _relu_step, 1)
_cell(torch.lstm_cell, _lstm_step, 2)
_cell(torch.gru_cell, _gru_step, 1)
_cell(torch.rnn_tanh_cell, _tanh_step, 1)
_cell(torch.rnn_relu_cell, _relu_step, 1)


@replaces(torch.bilinear, F.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``y_o = sum over i, j of x1_i w_oij x2_j + b_o``.

    The sum over i is computed first, as a matrix product, then the sum over j.
    """
    outputs, first, second = weight.shape
    rows = F.linear(input1.reshape(-1, first), weight.transpose(1, 2).reshape(-1, first))
    y = (
        (rows.reshape(-1, outputs, second) * input2.reshape(-1, 1, second))
        .sum(-1)
        .reshape(*input1.shape[:-1], outputs)
    )
    return y if bias is None else y + bias


@replaces(_compat.pack_padded_sequence)
def pack_padded_sequence(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack ``[T, B, ...]`` of descending lengths into ``[N, ...]``; also return the number of
    sequences in each step. With ``batch_first`` the input is ``[B, T, ...]``.
    """
    places = torch.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)
    packed, sizes = _compat.pack_padded_sequence(places, lengths, batch_first)
    return x.flatten(0, 1).index_select(0, packed.reshape(-1).to(x.device)), sizes


@replaces(_compat.pad_packed_sequence)
def pad_packed_sequence(
    data: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Undo :func:`pack_padded_sequence`; return the padded sequences and the lengths."""
    places, lengths = _compat.pad_packed_sequence(
        torch.arange(len(data))[:, None], sizes, batch_first, -1, total_length
    )
    places = places[..., 0].to(data.device)
    padded = data.index_select(0, places.reshape(-1).clamp_min(0)).unflatten(0, places.shape)
    missing = (places < 0).reshape(*places.shape, *[1] * (data.dim() - 1))
    return padded.masked_fill(missing, padding_value), lengths


@replaces(_compat.pad_sequence)
def pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """Stack sequences ``[T_i, ...]``, each padded to the longest."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r}: must be 'right' or 'left'")
    longest = max(len(s) for s in sequences)
    amounts = [
        (longest - len(s), 0) if padding_side == "left" else (0, longest - len(s))
        for s in sequences
    ]
    padded = [
        F.pad(s, [0, 0] * (s.dim() - 1) + list(a), value=padding_value)
        for s, a in zip(sequences, amounts, strict=True)
    ]
    return torch.stack(padded, 0 if batch_first else 1)
