"""Recurrent layers on packed sequences; packing and padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from lns_ops import LNSTensor, convert_, lns12, lns16
from tests.lns_ops.tensor.twins import ROUNDINGS, check


class Packed(nn.Module):
    """A recurrent network over sequences of several lengths, packed and padded again: ``[T, B, I]``
    to ``[T, B, H]`` and last states."""

    def __init__(self, network: nn.RNNBase, lengths: list[int]) -> None:
        super().__init__()
        self.network, self.lengths = network, lengths

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        hx = (states[0] if len(states) == 1 else states) if states else None
        packed = pack_padded_sequence(x, self.lengths, enforce_sorted=False)
        out, last = self.network(packed, hx)
        padded, lengths = pad_packed_sequence(out, total_length=len(x))
        assert lengths.tolist() == self.lengths
        ends = [h.reshape(-1) for h in (last if isinstance(last, tuple) else (last,))]
        return torch.cat([padded.reshape(-1), *ends])


PACKED: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(6, 8, 2, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(6, 8, 2, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(6, 8, 2, bidirectional=True),
    "GRU without biases": lambda: nn.GRU(6, 8, bias=False),
    "RNN": lambda: nn.RNN(6, 8, 2),
    "RNN of relus": lambda: nn.RNN(6, 8, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences_agree_with_float64(name: str, given: bool) -> None:
    """Outputs, each sequence's last states, and gradients, also for initial states. The longest
    sequence is not the first, and none fills all steps."""
    torch.manual_seed(1)
    network = PACKED[name]()
    rows = network.num_layers * (2 if network.bidirectional else 1)
    widths = [
        network.proj_size or network.hidden_size,
        *[network.hidden_size] * isinstance(network, nn.LSTM),
    ]
    states = tuple(torch.randn(rows, 4, width) for width in widths) if given else ()
    check(Packed(network, [2, 4, 1, 4]), (torch.randn(5, 4, 6), *states), ROUNDINGS["many"])


@pytest.mark.parametrize("make", PACKED.values(), ids=PACKED)
def test_a_packed_sequence_has_the_bits_of_each_alone(make: Callable[[], nn.RNNBase]) -> None:
    torch.manual_seed(1)
    network, lengths = convert_(make(), lns12, scope="everywhere"), [5, 3, 3, 1]
    x = LNSTensor.from_float(torch.randn(5, 4, 6), lns12)
    out, last = network(pack_padded_sequence(x, lengths))
    padded, _ = pad_packed_sequence(out)
    for b, length in enumerate(lengths):
        alone, end = network(x[:length, b])
        assert torch.equal(padded[:length, b].codes, alone.codes)
        assert not padded[length:, b].codes.any()
        pairs = zip(last, end, strict=True) if isinstance(last, tuple) else [(last, end)]
        assert all(torch.equal(whole[:, b].codes, own.codes) for whole, own in pairs)


def test_sequences_are_packed_and_padded_as_torchs() -> None:
    shapes = [(3, 2), (5, 2), (1, 2)]
    encoded = [
        LNSTensor.from_float(torch.randn(s), lns16).detach().requires_grad_() for s in shapes
    ]
    floats = [x.detach().to_float().requires_grad_() for x in encoded]
    for side in ("right", "left"):
        got, want = (pad_sequence(xs, True, 2.0, padding_side=side) for xs in (encoded, floats))
        assert torch.equal(got.to_float(), want)
    got, want = (pack_sequence(xs, enforce_sorted=False) for xs in (encoded, floats))
    assert torch.equal(got.data.to_float(), want.data)
    assert torch.equal(got.batch_sizes, want.batch_sizes)
    weights = torch.randint(1, 9, (6, 3, 2)).float()
    for packed in (got, want):
        padded, lengths = pad_packed_sequence(packed, padding_value=-1.0, total_length=6)
        assert lengths.tolist() == [3, 5, 1]
        padded.backward(
            LNSTensor.from_float(weights, lns16) if isinstance(padded, LNSTensor) else weights
        )
    for x, f in zip(encoded, floats, strict=True):
        assert torch.equal(x.grad.codes, LNSTensor.from_float(f.grad, lns16).codes)
