"""torch's layers, converted whole: outputs and all gradients compared with float64, and each
layer's torch conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import LNSTensor, convert_, lns12, lns16
from lns_ops import functional as lns
from lns_ops.tensor import in_float32
from tests.lns_ops.tensor.twins import FMT, ROUNDINGS, check

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
    "transposed convolution padded by a stride": (
        lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=2, dilation=3),
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
    """``x sigmoid(beta x)`` with a trained beta."""

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
    """Bags of no, one and many rows; with per-sample weights (sums only) also their gradient."""
    if mode != "sum" and "per_sample_weights" in options:
        pytest.skip("torch has no such mode")
    torch.manual_seed(1)
    tokens, offsets = torch.randint(0, 9, (200,)), torch.tensor([0, 0, 1, 6, 9, 9, 150, 200])
    keep = {name: value for name, value in options.items() if name != "per_sample_weights"}
    offsets = offsets if "include_last_offset" in options else offsets[:-1]
    bag = Bags(nn.EmbeddingBag(9, 5, mode=mode, **keep), tokens, offsets)
    check(bag, (torch.randn(200),) if "per_sample_weights" in options else (), ROUNDINGS["few"])


class Bags(nn.Module):
    """An embedding bag of given tokens as a function of its weights."""

    def __init__(self, bag: nn.EmbeddingBag, tokens: Tensor, offsets: Tensor) -> None:
        super().__init__()
        self.bag, self.tokens, self.offsets = bag, tokens, offsets

    def forward(self, factors: Tensor | None = None) -> Tensor:
        return self.bag(self.tokens, self.offsets, factors)


def test_embedding_bags_sum_in_the_contracts_order() -> None:
    """A bag is the sum of its rows, bit for bit; so is the gradient of a row, over the samples that
    use it."""
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
    """Divided by the number of times their row occurs. (torch 2.13 on a CPU divides by another
    row's count, so it is not the reference.)"""
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
    with pytest.raises(ValueError, match=r"offsets\[0\]=1: the first bag must start at 0"):
        F.embedding_bag(tokens, weight, torch.tensor([1, 2]))
    with pytest.raises(NotImplementedError, match="use sparse=False"):
        F.embedding_bag(tokens, weight, torch.tensor([0, 2]), sparse=True).sum().backward()
    empty = F.embedding_bag(
        torch.empty(0, dtype=torch.int64), weight, torch.tensor([0, 0]), mode="max"
    )
    assert empty.shape == (2, 4)
    assert not empty.codes.any()


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
    """Half a million values per channel; a single sequence of block totals would stop at a few
    thousand."""
    x = torch.randn(32, 1, 128, 128) * 0.5 + 3
    out = convert_(nn.BatchNorm2d(1), lns12, scope="everywhere")(x).to_float()
    assert abs(out.mean()) < 0.1
    assert abs(out.std() - 1) < 0.05


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(6, 3), (0, 2, 6)),
        (lambda: nn.LayerNorm(6), (0, 6)),
        (lambda: nn.RMSNorm(6), (0, 3, 6)),
        (lambda: nn.GroupNorm(2, 6), (0, 6, 4)),
        (lambda: nn.BatchNorm2d(6), (0, 6, 2, 2)),
        (lambda: nn.Conv2d(1, 2, 3), (0, 1, 5, 5)),
        (lambda: nn.ConvTranspose2d(1, 2, 3), (0, 1, 5, 5)),
        (lambda: nn.MaxPool1d(2), (0, 1, 4)),
        (lambda: nn.MaxPool2d(2), (0, 1, 4, 4)),
        (lambda: nn.AdaptiveMaxPool2d(2), (0, 1, 4, 4)),
        (lambda: nn.Unfold(2), (0, 1, 4, 4)),
        (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (0, 3, 6)),
        (lambda: nn.GRU(6, 4, batch_first=True), (0, 3, 6)),
        (lambda: nn.Embedding(6, 3), (0, 3)),
        (lambda: nn.EmbeddingBag(6, 3), (0, 3)),
    ],
    ids=lambda value: value().__class__.__name__ if callable(value) else "",
)
def test_layers_take_no_examples(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Like an expert without tokens: torch's shapes, and gradients of zeros."""
    plain, layer = make(), convert_(make(), lns16, scope="everywhere")
    if isinstance(plain, (nn.Embedding, nn.EmbeddingBag)):
        inputs = [torch.zeros(shape, dtype=torch.int64)] * 2
    else:
        inputs = [torch.zeros(shape), LNSTensor.from_float(torch.zeros(shape))]
        inputs = [x.requires_grad_() for x in inputs]
    y, exact = layer(inputs[1]), plain(inputs[0])
    y, exact = (out[0] if isinstance(out, tuple) else out for out in (y, exact))
    assert y.shape == exact.shape
    y.sum().backward()
    assert inputs[1].grad is None or inputs[1].grad.shape == shape
    assert all(not in_float32(p.grad).any() for p in layer.parameters())
    for statistics, before in zip(layer.buffers(), plain.buffers(), strict=True):
        assert torch.equal(statistics, before)


def test_a_batch_of_one_value_has_no_variance() -> None:
    with pytest.raises(ValueError, match="batch norm of 1 value per channel"):
        convert_(nn.BatchNorm1d(3), lns12, scope="everywhere")(torch.randn(1, 3))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, affine=False),
        nn.InstanceNorm2d(4),
        nn.LayerNorm([5, 5], elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.RMSNorm([5, 5], elementwise_affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_what_is_done_in_place_to_a_normalized_tensor_leaves_the_gradient_alone(
    norm: nn.Module,
) -> None:
    values, gradients = torch.randn(8, 4, 5, 5), []
    for inplace in (False, True):
        x = LNSTensor.from_float(values, lns16).requires_grad_()
        y = nn.functional.relu(norm(x), inplace=inplace)
        (y * y).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*(gradient.codes for gradient in gradients))


@pytest.mark.parametrize("sizes", [[], [4], [3, 4, 5, 6]])
@pytest.mark.parametrize("norm", [nn.functional.layer_norm, nn.functional.rms_norm])
def test_a_normalized_shape_that_is_not_the_inputs_is_refused(norm: Any, sizes: list[int]) -> None:
    """As torch refuses it."""
    with pytest.raises((RuntimeError, ValueError), match=r"normalized_shape|dimensions"):
        norm(torch.randn(4, 5), sizes)
    with pytest.raises(ValueError, match="must be its last sizes, at least one"):
        norm(LNSTensor.from_float(torch.randn(4, 5), lns16), sizes)


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 1, 1)])
def test_a_channel_of_one_position_has_no_variance(shape: tuple[int, ...]) -> None:
    """As in torch, which refuses such an input, too."""
    layer = nn.InstanceNorm1d(3) if len(shape) == 3 else nn.InstanceNorm2d(3)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        layer(torch.randn(shape))
    with pytest.raises(ValueError, match=r"instance norm of .*: needs more than one position"):
        layer(LNSTensor.from_float(torch.randn(shape), lns12))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_dropout_leaves_out_what_it_does_in_float32(order: tuple[int, ...]) -> None:
    """torch draws in memory order; layers that transpose tensors draw differently."""
    values = torch.ones(6, 5, 4).permute(order)
    x = LNSTensor.from_float(torch.ones(6, 5, 4), lns12).permute(order)
    masks = []
    for each in (values, x):
        torch.manual_seed(0)
        masks.append(in_float32(F.dropout(each, 0.5)) != 0)
    assert torch.equal(*masks)


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


def images(numbers: Tensor) -> Tensor:
    return numbers.reshape(1, -1, 1, 1)


def products(x: Tensor, y: Tensor) -> Tensor:
    """Return the products of two batches of matrices, taken one by one."""
    pairs = zip(x.flatten(0, -3), y.flatten(0, -3), strict=True)
    return torch.stack([a @ b for a, b in pairs]).reshape(*x.shape[:-1], y.shape[-1])


STATISTICS = (torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6))
STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, lambda x, w, b: x @ w.t() + b, ((5, 7), (4, 7), (4,))),
    "linear of sequences": (F.linear, lambda x, w, b: x @ w.t() + b, ((2, 3, 7), (4, 7), (4,))),
    "linear without bias": (F.linear, lambda x, w: x @ w.t(), ((5, 7), (4, 7))),
    "products": (torch.matmul, products, ((3, 4, 5), (3, 5, 6))),
    "products of heads": (lambda x, y: x @ y, products, ((2, 3, 4, 5), (2, 3, 5, 6))),
    "products with the transposed": (
        lambda x, y: x.transpose(1, 2) @ y.mT,
        lambda x, y: products(x.transpose(1, 2), y.mT),
        ((2, 4, 3, 5), (2, 3, 6, 5)),
    ),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (6, 5), w, b),
        lambda x, w, b: F.layer_norm(x, (6, 5)) * w + b,
        ((4, 6, 5), (6, 5), (6, 5)),
    ),
    "layer norm without bias": (
        lambda x, w: F.layer_norm(x, (5,), w),
        lambda x, w: F.layer_norm(x, (5,)) * w,
        ((4, 6, 5), (5,)),
    ),
    "group norm": (
        lambda x, w, b: F.group_norm(x, 3, w, b),
        lambda x, w, b: F.group_norm(x, 3) * images(w) + images(b),
        ((4, 6, 5, 1), (6,), (6,)),
    ),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: F.batch_norm(x, None, None, training=True) * images(w) + images(b),
        ((4, 6, 5, 2), (6,), (6,)),
    ),
    "batch norm in evaluation": (
        lambda x, w, b: F.batch_norm(x, *STATISTICS, w, b),
        lambda x, w, b: F.batch_norm(x, *STATISTICS) * images(w) + images(b),
        ((4, 6, 5, 2), (6,), (6,)),
    ),
}
"""Functions with one step in the graph equal several steps; and the shapes of operands."""


@pytest.mark.parametrize("name", STEPS)
def test_what_takes_one_step_has_the_bits_of_its_parts(name: str) -> None:
    """Output, gradients and, if they exist, second derivatives."""
    *ways, shapes = STEPS[name]
    twice = "norm" not in name or "evaluation" in name

    def results(way: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        operands = [LNSTensor.from_float(torch.randn(shape), "lns12") for shape in shapes]
        for operand in operands:
            operand.requires_grad = True
        out = way(*operands)
        seed = LNSTensor.from_float(torch.randn(out.shape), "lns12")
        first = torch.autograd.grad(out, operands, seed, create_graph=twice, retain_graph=True)
        squares = (first[0] * first[0]).sum() if twice else None
        second = torch.autograd.grad(squares, operands[1:2]) if squares is not None else ()
        out.backward(seed)
        return [out, *first, *second, *(operand.grad for operand in operands)]

    for one, other in zip(*map(results, ways), strict=True):
        assert torch.equal(one.codes, other.codes)


@pytest.mark.parametrize("shapes", [((0, 3, 4), (0, 4, 5)), ((2, 3, 0), (2, 0, 5))])
def test_products_of_nothing_are_zeros(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = (LNSTensor.from_float(torch.zeros(shape), "lns12").requires_grad_() for shape in shapes)
    (out := x @ y).sum().backward()
    assert out.shape == (shapes[0][0], 3, 5)
    assert not out.codes.any()
    assert x.grad.shape == x.shape
    assert y.grad.shape == y.shape


def test_products_that_do_not_fit_are_refused_as_torch_does() -> None:
    x, y = (LNSTensor.from_float(torch.ones(shape), "lns12") for shape in ((2, 3, 4), (2, 5, 4)))
    with pytest.raises(ValueError, match=r"matmul of shapes \(2, 3, 4\) and \(2, 5, 4\)"):
        x @ y
    assert (x @ y.mT[0]).shape == (2, 3, 5)
    assert torch.equal((x @ y[0].mT).codes, (x @ y.mT[:1]).codes)


class TimeFirst(nn.Module):
    """A convolution of sequences whose first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv_tbc(x, self.weight, self.bias, 1)


def test_convolutions_over_time() -> None:
    torch.manual_seed(0)
    check(TimeFirst(), (torch.randn(6, 2, 4),), ROUNDINGS["few"])
