"""torch's layers, converted whole: outputs and all gradients against float64, and the torch
conventions that each layer has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from lns_ops import LNSFormat, LNSTensor, convert_, decode, lns12, lns16
from lns_ops import functional as lns
from tests.lns_ops.lns_formats import half_ulp

FMT = LNSFormat(16, 10)

ROUNDINGS = {"few": 12, "some": 40, "many": 150}
"""Half-ulps in the norm: a layer of a few operations; norms and attention; recurrences over steps,
where errors are fed back."""


def values(x: Any) -> Tensor:
    return (
        decode(x.detach().codes, x.fmt, torch.float64)
        if isinstance(x, LNSTensor)
        else x.detach().double()
    )


def gradients(
    model: nn.Module, inputs: tuple[Tensor, ...], weight: Tensor, **kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    inputs = tuple(x.detach().requires_grad_() if x.dtype.is_floating_point else x for x in inputs)
    out = model(*inputs, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(
        LNSTensor.from_float(weight, FMT) if isinstance(out, LNSTensor) else weight.double()
    )
    found = [x.grad for x in inputs if x.grad is not None] + [
        p.grad for p in model.parameters() if p.grad is not None
    ]
    return out, found


def exact_twin(model: nn.Module) -> nn.Module:
    """float64 with the weights that the encoded ones stand for."""
    from lns_ops import revert_

    return revert_(copy.deepcopy(model)).double()


def check(model: nn.Module, inputs: tuple[Tensor, ...], half_ulps: float, **kwargs: Any) -> None:
    model = convert_(model, FMT, scope="everywhere")
    exact = exact_twin(model)
    encoded = tuple(
        LNSTensor.from_float(x, FMT) if x.dtype.is_floating_point else x for x in inputs
    )
    wide = {
        k: v.double() if isinstance(v, Tensor) and v.dtype.is_floating_point else v
        for k, v in kwargs.items()
    }
    shape = exact(*(x.double() if x.dtype.is_floating_point else x for x in inputs), **wide)
    weight = values(
        LNSTensor.from_float(
            torch.randn((shape[0] if isinstance(shape, tuple) else shape).shape), FMT
        )
    ).float()
    exact = exact_twin(model)
    out, found = gradients(model, encoded, weight, **kwargs)
    truth, wanted = gradients(
        exact, tuple(values(x) if isinstance(x, LNSTensor) else x for x in encoded), weight, **wide
    )
    assert len(found) == len(wanted)
    for got, want in zip([out, *found], [truth, *wanted], strict=True):
        assert got.shape == want.shape
        assert (values(got) - values(want)).norm() <= half_ulps * half_ulp(FMT) * values(
            want
        ).norm() + 32 * FMT.smallest


IMAGES = (4, 6, 5, 7)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (16, 6), "some"),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), IMAGES, "some"),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2, affine=False), (4, 2, 3, 4, 5), "some"),
    "BatchNorm without statistics": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False),
        IMAGES,
        "some",
    ),
    "BatchNorm in evaluation": (lambda: nn.BatchNorm2d(6).eval(), IMAGES, "few"),
    "LayerNorm": (lambda: nn.LayerNorm(24), (3, 5, 24), "some"),
    "LayerNorm over two": (lambda: nn.LayerNorm((5, 7), bias=False), IMAGES, "some"),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6), IMAGES, "some"),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(6, affine=True), IMAGES, "some"),
    "InstanceNorm with statistics": (
        lambda: nn.InstanceNorm1d(6, track_running_stats=True),
        (4, 6, 9),
        "some",
    ),
    "RMSNorm": (lambda: nn.RMSNorm(24), (3, 5, 24), "some"),
    "LSTM": (lambda: nn.LSTM(6, 8, 2, bidirectional=True), (5, 3, 6), "many"),
    "LSTM batch first": (lambda: nn.LSTM(6, 8, batch_first=True, bias=False), (3, 5, 6), "many"),
    "LSTM with a projection": (
        lambda: nn.LSTM(6, 8, 2, bidirectional=True, proj_size=3),
        (5, 3, 6),
        "many",
    ),
    "LSTM of one sequence": (lambda: nn.LSTM(6, 8), (5, 6), "many"),
    "GRU": (lambda: nn.GRU(6, 8, 2), (5, 3, 6), "many"),
    "RNN": (lambda: nn.RNN(6, 8), (5, 3, 6), "many"),
    "RNN of relus": (
        lambda: nn.RNN(6, 8, nonlinearity="relu", bidirectional=True),
        (5, 3, 6),
        "many",
    ),
    "GRUCell": (lambda: nn.GRUCell(6, 8), (3, 6), "some"),
    "RNNCell": (lambda: nn.RNNCell(6, 8), (3, 6), "some"),
    "LSTMCell": (lambda: nn.LSTMCell(6, 8), (3, 6), "some"),
    "Transformer encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
        "many",
    ),
    "Transformer encoder before": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, norm_first=True),
        (5, 2, 8),
        "many",
    ),
    "PReLU": (lambda: nn.PReLU(6), IMAGES, "few"),
    "max pool": (lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 4, 1)), IMAGES, "few"),
    "adaptive max pool": (
        lambda: nn.Sequential(nn.AdaptiveMaxPool2d((2, 3)), nn.Conv2d(6, 4, 1)),
        IMAGES,
        "few",
    ),
    "average pool": (
        lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1, True, False), nn.Conv2d(6, 4, 1)),
        IMAGES,
        "few",
    ),
    "adaptive average pool": (
        lambda: nn.Sequential(nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d((2, 3))),
        IMAGES,
        "few",
    ),
    "global average pool": (
        lambda: nn.Sequential(nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGES,
        "few",
    ),
    "upsample": (
        lambda: nn.Sequential(nn.Conv2d(6, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
        IMAGES,
        "some",
    ),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(6, 4, 1), nn.PixelShuffle(2)), IMAGES, "few"),
    "weighted SiLU": (lambda: Swish(), (3, 7), "few"),
}


class Swish(nn.Module):
    """``x sigmoid(beta x)`` with beta trained."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_agree_with_float64(name: str) -> None:
    make, shape, kind = LAYERS[name]
    torch.manual_seed(1)
    check(make(), (torch.randn(shape),), ROUNDINGS[kind])


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    check(nn.Embedding(9, 5, **options), (torch.randint(0, 9, (4, 50)),), ROUNDINGS["few"])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"include_last_offset": True},
        {"per_sample_weights": True, "padding_idx": 1},
    ],
    ids=str,
)
def test_embedding_bag(mode: str, options: dict[str, Any]) -> None:
    """Bags of no, one and many rows; of the weights of samples (sums only) the gradient too."""
    if mode != "sum" and "per_sample_weights" in options:
        pytest.skip("torch has no such mode")
    torch.manual_seed(1)
    tokens, offsets = torch.randint(0, 9, (200,)), torch.tensor([0, 0, 1, 6, 9, 9, 150, 200])
    keep = {name: value for name, value in options.items() if name != "per_sample_weights"}
    offsets = offsets if "include_last_offset" in options else offsets[:-1]
    bag = Bags(nn.EmbeddingBag(9, 5, mode=mode, **keep), tokens, offsets)
    check(bag, (torch.randn(200),) if "per_sample_weights" in options else (), ROUNDINGS["few"])


class Bags(nn.Module):
    """An embedding bag of given tokens as a function of what weighs them."""

    def __init__(self, bag: nn.EmbeddingBag, tokens: Tensor, offsets: Tensor) -> None:
        super().__init__()
        self.bag, self.tokens, self.offsets = bag, tokens, offsets

    def forward(self, factors: Tensor | None = None) -> Tensor:
        return self.bag(self.tokens, self.offsets, factors)


def test_embedding_bags_sum_in_the_contracts_order() -> None:
    """A bag is the sum of its rows, bit for bit, and so is the gradient of a row over the samples
    that name it."""
    torch.manual_seed(1)
    weight = LNSTensor.from_float(torch.randn(30, 4), lns12).requires_grad_()
    tokens = torch.randint(0, 30, (6, 200))
    out = F.embedding_bag(tokens, weight, mode="sum")
    for bag, row in zip(tokens, out.codes, strict=True):
        assert torch.equal(row, lns.sum(weight.codes[bag], [0], lns12))
    mean = F.embedding_bag(tokens, weight, mode="mean")
    assert torch.equal(
        mean.codes, lns.div(out.codes, lns.encode(torch.tensor(200.0).double(), lns12), lns12)
    )
    seed = LNSTensor.from_float(torch.randn(6, 4), lns12)
    out.backward(seed)
    for row in range(30):
        bags = (tokens.flatten() == row).nonzero()[:, 0] // 200
        assert torch.equal(weight.grad.codes[row], lns.sum(seed.codes[bags], [0], lns12))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_of_bags_by_frequency(mode: str) -> None:
    """Divided by how often their row occurs. (torch 2.13 on a CPU divides by the count of another
    row: no reference.)"""
    torch.manual_seed(1)
    values, tokens, grads = torch.randn(9, 5), torch.randint(0, 9, (4, 50)), []
    for by_frequency in (False, True):
        weight = LNSTensor.from_float(values, FMT).detach().requires_grad_()
        out = F.embedding_bag(tokens, weight, mode=mode, scale_grad_by_freq=by_frequency)
        out.backward(LNSTensor.from_float(torch.linspace(-1, 2, 20).view(4, 5), FMT))
        grads.append(weight.grad.codes)
    counts = lns.encode(tokens.flatten().bincount().double(), FMT)[:, None]
    assert torch.equal(grads[1], lns.div(grads[0], counts, FMT))


def test_what_an_embedding_bag_cannot_do() -> None:
    weight, tokens = (
        LNSTensor.from_float(torch.randn(5, 4), lns12).requires_grad_(),
        torch.tensor([1, 2, 3]),
    )
    with pytest.raises(ValueError, match=r"offsets\[0\]=1: the first bag begins at 0"):
        F.embedding_bag(tokens, weight, torch.tensor([1, 2]))
    with pytest.raises(NotImplementedError, match="use sparse=False"):
        F.embedding_bag(tokens, weight, torch.tensor([0, 2]), sparse=True).sum().backward()
    empty = F.embedding_bag(
        torch.empty(0, dtype=torch.int64), weight, torch.tensor([0, 0]), mode="max"
    )
    assert empty.shape == (2, 4)
    assert not empty.codes.any()


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention(options: dict[str, Any], need_weights: bool) -> None:
    torch.manual_seed(1)
    k, v = options.get("kdim", 8), options.get("vdim", 8)
    inputs = torch.randn(4, 2, 8), torch.randn(6, 2, k), torch.randn(6, 2, v)
    check(
        nn.MultiheadAttention(8, 2, **options), inputs, ROUNDINGS["some"], need_weights=need_weights
    )


def test_the_masks_of_multi_head_attention() -> None:
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = (
        torch.randn(2, 5, 8),
        torch.tensor([[False] * 5, [False, False, False, True, True]]),
    )
    for mask in (
        torch.ones(5, 5, dtype=torch.bool).triu(1),
        nn.Transformer.generate_square_subsequent_mask(5),
        torch.randn(4, 5, 5),
    ):
        for key_padding in (None, padding):
            check(
                copy.deepcopy(attention),
                (x, x, x),
                ROUNDINGS["some"],
                attn_mask=mask,
                key_padding_mask=key_padding,
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float", "inf"])
def test_scaled_dot_product_attention(causal: bool, mask: str | None) -> None:
    if causal and mask is not None:
        pytest.skip("torch takes one of them")
    torch.manual_seed(1)
    shapes = [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)]
    inputs = [LNSTensor.from_float(torch.randn(s), FMT).detach().requires_grad_() for s in shapes]
    exact = [values(x).requires_grad_() for x in inputs]
    masks = {
        None: None,
        "bool": torch.rand(5, 6) > 0.4,
        "float": torch.randn(5, 6),
        "inf": torch.zeros(5, 6).fill_diagonal_(-torch.inf),
    }
    chosen = masks[mask]
    got = F.scaled_dot_product_attention(*inputs, attn_mask=chosen, is_causal=causal)
    want = F.scaled_dot_product_attention(
        *exact,
        attn_mask=chosen.double() if chosen is not None and chosen.dtype != torch.bool else chosen,
        is_causal=causal,
    )
    weight = values(LNSTensor.from_float(torch.randn(want.shape), FMT))
    got.backward(LNSTensor.from_float(weight, FMT))
    want.backward(weight)
    for a, b in zip(
        [got, *(x.grad for x in inputs)], [want, *(x.grad for x in exact)], strict=True
    ):
        assert (values(a) - values(b)).norm() <= ROUNDINGS["some"] * half_ulp(FMT) * values(
            b
        ).norm()


def test_a_masked_score_takes_no_part() -> None:
    q, k, v = (LNSTensor.from_float(torch.randn(1, 4, 8), lns12) for _ in range(3))
    kept = torch.tensor([[True, False, True, False]])
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    k.codes[:, 1::2], v.codes[:, 1::2] = 321, 1234
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=kept).codes, got.codes)
    nothing = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 4, dtype=torch.bool))
    assert not nothing.codes.any()


def test_minus_infinity_masks_scores_before_a_softmax() -> None:
    scores = LNSTensor.from_float(torch.tensor([1.0, 2.0, 3.0]), lns12).masked_fill(
        torch.tensor([False, True, False]), float("-inf")
    )
    weights = F.softmax(scores, -1)
    assert isinstance(weights, LNSTensor)
    torch.testing.assert_close(
        weights.to_float(), torch.tensor([0.1192, 0.0, 0.8808]), rtol=0.03, atol=0
    )
    assert weights.codes[1] == 0


def test_running_statistics_are_float32_and_follow_the_batches() -> None:
    torch.manual_seed(0)
    norm, exact = convert_(nn.BatchNorm2d(3), lns16, scope="everywhere"), nn.BatchNorm2d(3)
    for _ in range(20):
        x = torch.randn(8, 3, 4, 4) * 2 + 1
        norm(x)
        exact(x)
    assert type(norm.running_mean) is Tensor
    torch.testing.assert_close(norm.running_mean, exact.running_mean, rtol=0.03, atol=0.03)
    torch.testing.assert_close(norm.running_var, exact.running_var, rtol=0.03, atol=0)
    assert norm.num_batches_tracked == 20
    norm.eval()
    exact.eval()
    torch.testing.assert_close(norm(x).to_float(), exact(x), rtol=0.03, atol=0.03)


def test_statistics_of_many_values_do_not_stick() -> None:
    """Half a million values a channel; in one sequence of block totals the sum would stop at a few
    thousand."""
    x = torch.randn(32, 1, 128, 128) * 0.5 + 3
    out = convert_(nn.BatchNorm2d(1), lns12, scope="everywhere")(x).to_float()
    assert abs(out.mean()) < 0.1
    assert abs(out.std() - 1) < 0.05


def test_a_batch_of_one_value_has_no_variance() -> None:
    with pytest.raises(ValueError, match="batch norm of 1 value per channel"):
        convert_(nn.BatchNorm1d(3), lns12, scope="everywhere")(torch.randn(1, 3))


def test_dropout_keeps_a_share_and_scales_it_exactly() -> None:
    torch.manual_seed(0)
    x = LNSTensor.from_float(torch.full((100, 100), 3.0), lns12).requires_grad_()
    for p in (0.5, 0.2):
        y = F.dropout(x, p)
        kept = y.codes != 0
        assert abs(kept.float().mean() - (1 - p)) < 0.03
        factor = lns.mul(x.codes, lns.encode(torch.tensor(1 / (1 - p)).double(), lns12), lns12)
        assert ((y.codes == factor) | ~kept).all()
        x.grad = None
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad.codes != 0, kept)
    assert torch.equal(F.dropout(x, 0.5, training=False).codes, x.codes)
    assert not F.dropout(x, 1.0).codes.any()


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
    """Outputs, the last states of each sequence, and gradients, to initial states as well; the
    longest neither first nor full."""
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


def test_gradients_of_sigmoid_and_tanh_survive_where_the_result_rounds_to_one() -> None:
    x = LNSTensor.from_float(torch.tensor([4.0, 8.0]), lns12).requires_grad_()
    for function, slope in (
        (torch.sigmoid, [0.01766, 3.352e-4]),
        (lambda t: torch.tanh(t / 2), [0.03533, 6.705e-4]),
    ):
        x.grad = None
        function(x).sum().backward()
        torch.testing.assert_close(x.grad.to_float(), torch.tensor(slope), rtol=0.006, atol=0)


def test_clipping_of_gradients() -> None:
    model = convert_(nn.Linear(4, 3), lns12, scope="everywhere")
    F.mse_loss(model(torch.randn(5, 4) * 10), torch.zeros(5, 3)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = torch.cat([p.grad.to_float().flatten() for p in model.parameters()]).norm()
    assert norm.to_float() > 0.5
    assert abs(clipped - 0.5) < 0.01


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_linear_in_one_step_has_the_bits_of_its_parts(bias: bool, leading: tuple[int, ...]) -> None:
    """Output, gradients and second derivatives of ``F.linear`` are those of the product and the
    addition that it is."""

    def results(together: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, w, b = (
            LNSTensor.from_float(torch.randn(shape), "lns12").requires_grad_()
            for shape in ((*leading, 7), (4, 7), (4,))
        )
        operands = [x, w, b] if bias else [x, w]
        parts = x @ w.t() + b if bias else x @ w.t()
        out = F.linear(*operands) if together else parts
        seed = LNSTensor.from_float(torch.randn(out.shape), "lns12")
        first = torch.autograd.grad(out, operands, seed, create_graph=True)
        second = torch.autograd.grad((first[0] * first[0]).sum(), [w])
        out.backward(seed)
        return [out, *first, *second, *(operand.grad for operand in operands)]

    for one, other in zip(results(True), results(False), strict=True):
        assert torch.equal(one.codes, other.codes)
