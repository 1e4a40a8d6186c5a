"""Functions, sums by index, convolutions, layers and whole nets give the same bits on a GPU as on
the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSFormat, LNSTensor, convert_, cuda, lns8, lns12, lns16
from lns_ops import functional as lns
from lns_ops.functional import convolution, indexed
from lns_ops.functional.convolution import Geometry
from lns_ops.spec import unary_functions
from tests.lns_ops.nets import GPT, LSTMClassifier, ResNet18
from tests.lns_ops.spec.test_unary_functions import PARAMETERS
from tests.lns_ops.tensor.ops.test_packed_sequences import PACKED, Packed
from tests.lns_ops.tensor.test_layers import LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]


def random_codes(shape: tuple[int, ...], fmt: LNSFormat, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return lns.encode(torch.where(values.abs() < 0.1, 0, values), fmt)


@pytest.mark.parametrize("name", [*sorted(unary_functions.FUNCTIONS), "power"])
@pytest.mark.parametrize("fmt", [lns8, lns12, lns16], ids=str)
def test_functions_of_every_code(name: str, fmt: LNSFormat) -> None:
    parameters = (2.0,) if name == "power" else PARAMETERS.get(name, ())
    table = unary_functions.table(name, parameters, fmt)
    codes = fmt.codes()
    codes = codes[
        table[codes.astype(np.int64) & (2 * fmt.field_mask + 1)] != unary_functions.undefined(fmt)
    ]
    x = torch.from_numpy(np.resize(codes, 3 * codes.size + 5))
    for part in (x, x[1:], x[::3]):
        assert torch.equal(
            indexed.lookup(part.cuda(), name, fmt, *parameters).cpu(),
            indexed.lookup(part, name, fmt, *parameters),
        )
    cuda.check_faults()


def test_arguments_without_a_value_are_counted() -> None:
    x = LNSTensor.from_float(torch.tensor([0.0, 1.0, -2.0], device="cuda"), lns12)
    assert torch.equal(x.log().codes.cpu(), torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"no finite real value.*\(2 values on cuda"):
        cuda.check_faults()


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16, LNSFormat(16, 10)], ids=str)
def test_sums_by_index_and_means(fmt: LNSFormat) -> None:
    x, index = random_codes((3000, 37), fmt, 0), torch.randint(0, 12, (3000,))
    assert torch.equal(
        indexed.index_sum(x.cuda(), index.cuda(), 11, fmt).cpu(),
        indexed.index_sum(x, index, 11, fmt),
    )
    long = random_codes((9000, 3), fmt, 1)
    index = torch.randint(0, 7, (9000,)).clamp(max=1)  # more than 4,096 terms in one place
    assert torch.equal(
        indexed.index_sum(long.cuda(), index.cuda(), 3, fmt).cpu(),
        indexed.index_sum(long, index, 3, fmt),
    )
    for operation in (lns.sum, lns.mean):
        assert torch.equal(operation(long.cuda(), [0], fmt).cpu(), operation(long, [0], fmt))


@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize(
    ("size", "kernel", "geometry"),
    [
        ((40,), (5,), Geometry((2,), (3,), (2,), 2)),
        ((17, 20), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 1)),
        ((17, 20), (3, 2), Geometry((2, 3), (1, 0), (1, 2), 4)),
        ((9, 8, 7), (2, 3, 1), Geometry((1, 2, 1), (1, 1, 0), (1, 1, 1), 1)),
        ((720,), (700,), Geometry((1,), (0,), (1,), 1)),  # more than 4,096 taps
    ],
    ids=str,
)
def test_convolutions(
    fmt: LNSFormat, size: tuple[int, ...], kernel: tuple[int, ...], geometry: Geometry
) -> None:
    x, w = (
        random_codes((9, 8, *size), fmt, 0),
        random_codes((12, 8 // geometry.groups, *kernel), fmt, 1),
    )
    y = convolution.convolution(x, w, geometry, fmt)
    calls: list[Callable[[Callable[[Tensor], Tensor]], Tensor]] = [
        lambda to: convolution.convolution(to(x), to(w), geometry, fmt),
        lambda to: convolution.input_gradient(to(y), to(w), size, geometry, fmt),
        lambda to: convolution.weight_gradient(to(y), to(x), kernel, geometry, fmt),
    ]
    for call in calls:
        assert torch.equal(call(Tensor.cuda).cpu(), call(lambda t: t))


def outputs_and_gradients(model: nn.Module, x: Tensor, device: str) -> list[Tensor]:
    model, x = copy.deepcopy(model).to(device), x.to(device)
    if x.dtype.is_floating_point:
        x = LNSTensor.from_float(x, lns12).detach().requires_grad_()
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device)
    out.backward(LNSTensor.from_float(seed, lns12))
    found = [out, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [f.codes.cpu() for f in (found if x.grad is None else [*found, x.grad])]


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, shape, _ = LAYERS[name]
    torch.manual_seed(1)
    model, x = convert_(make(), lns12, scope="everywhere"), torch.randn(shape)
    for got, wanted in zip(
        outputs_and_gradients(model, x, "cuda"), outputs_and_gradients(model, x, "cpu"), strict=True
    ):
        assert torch.equal(got, wanted)
    cuda.check_faults()


@pytest.mark.parametrize("name", [*PACKED, "sum", "mean", "max"])
def test_packed_sequences_and_bags(name: str) -> None:
    torch.manual_seed(1)
    if name in PACKED:
        model, x = Packed(PACKED[name](), [2, 4, 1, 4]), torch.randn(5, 4, 6)
    else:
        model, x = nn.EmbeddingBag(9, 5, mode=name, padding_idx=2), torch.randint(0, 9, (4, 30))
    convert_(model, lns12, scope="everywhere")
    for got, wanted in zip(
        outputs_and_gradients(model, x, "cuda"), outputs_and_gradients(model, x, "cpu"), strict=True
    ):
        assert torch.equal(got, wanted)
    cuda.check_faults()


@pytest.mark.parametrize("name", ["resnet", "lstm", "gpt", "gpt written out", "attention"])
def test_nets(name: str) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 20, (3, 9))
    if name == "resnet":
        model, x = ResNet18(width=8), torch.randn(4, 3, 32, 32)
    elif name == "lstm":
        model, x = LSTMClassifier(layers=2, bidirectional=True), tokens
    elif name == "attention":
        model, x = (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
            torch.randn(2, 5, 8),
        )
    else:
        model, x = GPT(fused=name == "gpt").eval(), tokens
    convert_(model, lns12, scope="everywhere")
    for got, wanted in zip(
        outputs_and_gradients(model, x, "cuda"), outputs_and_gradients(model, x, "cpu"), strict=True
    ):
        assert torch.equal(got, wanted)
    cuda.check_faults()


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_a_convolutional_net_in_a_cuda_graph(scope: str) -> None:
    torch.manual_seed(0)
    model = convert_(ResNet18(width=8), lns12, scope=scope).cuda().eval()
    static, inputs = (
        torch.zeros(2, 3, 32, 32, device="cuda"),
        torch.randn(2, 3, 32, 32, device="cuda"),
    )

    def codes(x: Tensor) -> Tensor:
        return x.codes if isinstance(x, LNSTensor) else x

    with torch.no_grad():
        wanted = codes(model(inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = codes(model(static))
        static.copy_(inputs)
        graph.replay()
    assert torch.equal(captured, wanted)


def test_nets_train_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = convert_(ResNet18(width=8), lns12, scope="everywhere").cuda()
    x, y = torch.randn(8, 3, 32, 32, device="cuda"), torch.arange(8, device="cuda")
    optimizer, losses = lns_ops.optim.Adam(model.parameters(), lr=3e-3, kahan_sum=True), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    cuda.check_faults()


def test_dropout_and_its_gradient_share_a_mask() -> None:
    x = LNSTensor.from_float(torch.full((1000,), 3.0, device="cuda"), lns12).requires_grad_()
    y = nn.functional.dropout(x, 0.5)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad.codes != 0, y.codes != 0)
    assert 350 < int((y.codes != 0).sum()) < 650
