"""LSTM, GRU and plain recurrent networks and their cells, composed of LNS products, sums, sigmoids and tanhs.

torch's own are written in C++ and would take the derivatives of sigmoid and tanh from their rounded results; these take them from their
arguments. The products of the input with its weights are one matrix product for all steps. Equations and the order of the gates are
those of torch.nn.LSTM, GRU and RNN; initial states that are plain tensors are encoded.

Sources: S. Hochreiter, J. Schmidhuber 1997; K. Cho et al. 2014 (arXiv:1406.1078).

Limits: packed sequences and projections (``proj_size``) raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops.tensor import LNSTensor, replaces

_Step = Callable[..., tuple[Tensor, ...]]


def _lstm_step(from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_step(from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    update = torch.sigmoid(z_x + z_h)
    new = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return ((state[0] - new) * update + new,)


def _tanh_step(from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.tanh(from_input + from_state),)


def _relu_step(from_input: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.relu(from_input + from_state),)


def _encoded(x: Tensor, like: LNSTensor) -> Tensor:
    return x if isinstance(x, LNSTensor) else LNSTensor.from_float(x, like.fmt)


def _direction(
    x_TBI: Tensor, state: tuple[Tensor, ...], weights: Any, step: _Step, reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: the outputs of all steps, and the last state."""
    w_x, w_h, b_x, b_h = (*weights, None, None)[:4]
    from_input, outputs = F.linear(x_TBI, w_x, b_x), []
    for t in reversed(range(len(x_TBI))) if reverse else range(len(x_TBI)):
        state = step(from_input[t], F.linear(state[0], w_h, b_h), state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _run(
    x: Tensor, states: tuple[Tensor, ...], params: Any, step: _Step, has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Outputs ``[T, B, H]`` (``[B, T, H]`` if ``batch_first``) and last states ``[layers, B, H]``, for one sequence without B as well."""
    like = next(p for p in params if isinstance(p, LNSTensor))
    x, states = _encoded(x, like), tuple(_encoded(s, like) for s in states)
    single = x.dim() == 2
    if single:
        x, states = x.unsqueeze(1), tuple(s.unsqueeze(1) for s in states)
    elif batch_first:
        x = x.transpose(0, 1)
    directions, per = 2 if bidirectional else 1, 4 if has_biases else 2
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for d in range(directions):
            at = layer * directions + d
            out, end = _direction(x, tuple(s[at] for s in states), params[at * per : (at + 1) * per], step, reverse=d == 1)
            outputs.append(out)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    if single:
        return x.squeeze(1), [s.squeeze(1) for s in last]
    return (x.transpose(0, 1) if batch_first else x), last


def _network(function: Any, step: _Step, states: int) -> None:
    @replaces(function)
    def network(x: Tensor, hx: Any, params: Any, *args: Any) -> tuple[Tensor, ...]:
        if isinstance(hx, Tensor) and not hx.dtype.is_floating_point:  # the batch sizes of a packed sequence
            raise NotImplementedError(
                "a packed sequence has no LNS form: pad the sequences (pad_packed_sequence) and mask the outputs"
            )
        if len(params) % (4 if args[0] else 2) or (states == 2 and hx[0].shape[-1] != hx[1].shape[-1]):
            raise NotImplementedError("an LSTM with proj_size has no LNS form: project with a linear layer behind it")
        outputs, last = _run(x, tuple(hx) if states == 2 else (hx,), params, step, *args)
        return outputs, *last


def _cell(function: Any, step: _Step, states: int) -> None:
    @replaces(function)
    def cell(x: Tensor, hx: Any, w_x: LNSTensor, w_h: LNSTensor, b_x: Any = None, b_h: Any = None) -> Any:
        state = tuple(_encoded(s, w_x) for s in (hx if states == 2 else (hx,)))
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
    """``y_o = sum over i, j of x1_i w_oij x2_j + b_o``: the sum over i as a product, then that over j."""
    outputs, first, second = weight.shape
    rows = input1.reshape(-1, first) @ weight.permute(1, 0, 2).reshape(first, -1)
    y = (rows.reshape(-1, outputs, second) * input2.reshape(-1, 1, second)).sum(-1).reshape(*input1.shape[:-1], outputs)
    return y if bias is None else y + bias
