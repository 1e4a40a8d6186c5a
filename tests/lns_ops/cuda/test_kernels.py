"""Every CUDA kernel equals the reference bit for bit, on any stream, in a graph, in every
variant."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lns_ops
from lns_ops import LNSFormat, cuda, lns8, lns12, lns16, reference
from lns_ops import cpu as fast_cpu
from lns_ops import functional as lns
from tests.lns_ops.cuda.codes import FORMATS, assert_same, gpu, random_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_binary_operations_equal_the_reference(fmt: LNSFormat, name: str) -> None:
    for seed, size in enumerate([1, 7, 64, 1003, 100_000]):
        x, y = random_codes((size,), fmt, seed, 0.3), random_codes((size,), fmt, seed + 100, 0.3)
        if name == "div":
            y = np.where(y & fmt.field_mask, y, fmt.bias).astype(np.int16)
        assert_same(getattr(lns, name)(gpu(x), gpu(y), fmt), getattr(reference, name)(x, y, fmt))
        x, y = (
            x[: size // 2],
            -x[: size // 2] if fmt.bits == 16 else reference.neg(x[: size // 2], fmt),
        )
        if name != "div":
            y = reference.neg(x, fmt)
            assert_same(
                getattr(lns, name)(gpu(x), gpu(y), fmt), getattr(reference, name)(x, y, fmt)
            )
    cuda.check_faults()


@pytest.mark.parametrize("fmt", [lns8, LNSFormat(9, 0), LNSFormat(10, 4)], ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_binary_operations_on_every_pair_of_codes(fmt: LNSFormat, name: str) -> None:
    x, y = np.meshgrid(fmt.codes(), fmt.codes())
    assert_same(getattr(lns, name)(gpu(x), gpu(y), fmt), getattr(reference, name)(x, y, fmt))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 4), (4,)),
        ((5, 4), (5, 1)),
        ((3, 5, 4), (5, 1)),
        ((3, 5, 4), (3, 1, 4)),
        ((5, 1), (1, 4)),
        ((64, 8), (1, 1)),
        ((2, 3, 4, 8), (3, 1, 1)),
        ((4,), (5, 4)),
    ],
)
def test_operands_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    x, y = random_codes(left, lns16, 1, 0.2), random_codes(right, lns16, 2, 0.2)
    assert_same(lns.sub(gpu(x), gpu(y), lns16), reference.sub(x, y, lns16))


def test_a_scalar_on_the_cpu_meets_a_tensor_on_the_gpu() -> None:
    values = torch.randn(100)
    for device in ("cpu", "cuda"):
        x = lns_ops.LNSTensor.from_float(values.to(device), lns16)
        results = [x + 1.5, 1.5 + x, x - 1.5, 1.5 - x, x * 3, 3 * x, x / 3, 3 / x]
        if device == "cpu":
            wanted = [r.codes.numpy() for r in results]
        else:
            for got, codes in zip(results, wanted, strict=True):
                assert_same(got.codes, codes)


def test_unaligned_and_strided_operands() -> None:
    x, y = random_codes((1000,), lns16, 1, 0.2), random_codes((1000,), lns16, 2, 0.2)
    assert_same(lns.add(gpu(x)[1:], gpu(y)[1:], lns16), reference.add(x[1:], y[1:], lns16))
    assert_same(lns.add(gpu(x)[::3], gpu(y)[::3], lns16), reference.add(x[::3], y[::3], lns16))
    matrix = x.reshape(20, 50)
    assert_same(
        lns.add(gpu(matrix).t(), gpu(matrix).t(), lns16), reference.add(matrix.T, matrix.T, lns16)
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_sqrt_of_every_code(fmt: LNSFormat) -> None:
    codes = fmt.codes()
    codes = codes[codes >= 0]
    assert_same(lns.sqrt(gpu(codes), fmt), reference.sqrt(codes, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_encode_equals_the_reference(fmt: LNSFormat) -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 300_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x), x, 1.5).astype(np.float32)
    edges = reference.decode(fmt.codes(), fmt, np.float64)
    middles = np.sqrt(np.abs(edges[1:] * edges[:-1]) + 0.0).astype(np.float32)
    near = [np.nextafter(middles, np.float32(side)) for side in (0, np.inf)]
    tiny = np.array(
        [0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38], np.float32
    )
    x = np.concatenate(
        [x, middles, -middles, *near, np.exp(rng.normal(0, 3, 100_000)).astype(np.float32), tiny]
    )
    assert_same(lns.encode(torch.from_numpy(x).cuda(), fmt), reference.encode(x, fmt))
    double = np.concatenate(
        [edges, np.exp(rng.normal(0, 20, 50_000)), [5e-324, -5e-324, 1e300, -1e300, 0.0]]
    )
    assert_same(lns.encode(torch.from_numpy(double).cuda(), fmt), reference.encode(double, fmt))
    cuda.check_faults()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decode_of_every_code(fmt: LNSFormat, dtype: type) -> None:
    codes = np.append(fmt.codes(), np.int16(fmt.sign_mask))
    got = lns.decode(gpu(codes), fmt, torch.float32 if dtype is np.float32 else torch.float64)
    assert_same(got, reference.decode(codes, fmt, dtype))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (3, 5),
        (64, 7),
        (65, 33),
        (128, 512),
        (1000, 1),
        (4200, 2),
        (0, 4),
        (2, 40_000),
        (33, 70_001),
        (70, 40_000),
    ],
)
def test_sum_equals_the_reference(fmt: LNSFormat, shape: tuple[int, int]) -> None:
    for spread in (1.0, 0.1):
        x = random_codes(shape, fmt, 4, spread)
        assert_same(lns.sum(gpu(x), [0], fmt), reference.long_sum(x, 0, fmt))


SHAPES = [
    (1, 1, 1),
    (3, 5, 2),
    (17, 64, 33),
    (32, 65, 16),
    (128, 784, 512),
    (128, 512, 10),
    (10, 128, 512),
    (100, 1000, 130),
    (257, 200, 129),
    (33, 2048, 8),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_matmul_equals_the_cpu(fmt: LNSFormat, shape: tuple[int, int, int], spread: float) -> None:
    M, K, N = shape
    x, y = random_codes((M, K), fmt, 5, spread), random_codes((K, N), fmt, 6, spread)
    assert_same(lns.matmul(gpu(x), gpu(y), fmt), fast_cpu.matmul(x, y, fmt))


@pytest.mark.parametrize("fmt", [lns16, lns12], ids=str)
@pytest.mark.parametrize("tile", cuda.TILES, ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "unaligned"])
def test_every_variant_of_the_gemm(fmt: LNSFormat, tile: cuda.Tile, layout: str) -> None:
    for M, K, N in [(128, 784, 512), (70, 130, 50), (130, 64, 131), (5, 1100, 3)]:
        for spread in (1.0, 0.05):
            x, y = random_codes((M, K), fmt, 7, spread), random_codes((K, N), fmt, 8, spread)
            left = gpu(x.T).t() if layout[0] == "t" else gpu(x)
            right = gpu(y.T).t() if layout[1] == "t" else gpu(y)
            if layout == "unaligned":
                left = torch.nn.functional.pad(left, (3, 1))[:, 3:-1]
                right = torch.nn.functional.pad(right, (3, 1))[:, 3:-1]
            assert_same(
                cuda.matmul(left, right, fmt.bits, fmt.fraction_bits, tile=tile),
                fast_cpu.matmul(x, y, fmt),
            )


def test_matmul_of_reference_size_equals_the_reference_itself() -> None:
    for fmt in (lns16, lns12):
        x, y = random_codes((20, 200), fmt, 9, 0.1), random_codes((200, 30), fmt, 10, 0.1)
        assert_same(lns.matmul(gpu(x), gpu(y), fmt), reference.matmul(x, y, fmt))


@pytest.mark.parametrize("fmt", [lns16, lns12, LNSFormat(16, 9)], ids=str)
def test_fused_bias_and_relu(fmt: LNSFormat) -> None:
    x, y, bias = (
        random_codes((50, 300), fmt, 11, 0.05),
        random_codes((300, 70), fmt, 12, 0.05),
        random_codes((70,), fmt, 13, 0.3),
    )
    wanted = reference.add(fast_cpu.matmul(x, y, fmt), bias, fmt)
    got = cuda.matmul(gpu(x), gpu(y), fmt.bits, fmt.fraction_bits, bias=gpu(bias))
    assert_same(got, wanted)
    got = cuda.matmul(gpu(x), gpu(y), fmt.bits, fmt.fraction_bits, bias=gpu(bias), relu=True)
    assert_same(got, np.maximum(wanted, 0))


@pytest.mark.parametrize("fmt", [lns12, LNSFormat(16, 9)], ids=str)
def test_batched_matmul(fmt: LNSFormat) -> None:
    x, y = random_codes((5, 33, 70), fmt, 14, 0.1), random_codes((5, 70, 19), fmt, 15, 0.1)
    assert_same(lns.matmul(gpu(x), gpu(y), fmt), fast_cpu.matmul_batched(x, y, fmt))
    turned = gpu(np.swapaxes(x, 1, 2)).transpose(1, 2)
    assert_same(lns.matmul(turned, gpu(y), fmt), fast_cpu.matmul_batched(x, y, fmt))


def test_faults_are_counted_and_raised_later() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")], device="cuda")
    codes = lns.encode(x, lns16)
    assert codes.tolist() == [lns16.bias, 0, lns16.field_mask, lns16.field_mask | lns16.sign_mask]
    with pytest.raises(lns_ops.NonFiniteError, match=r"NaN or infinity .*3 values on cuda"):
        cuda.check_faults()
    cuda.check_faults()
    lns.div(codes, torch.zeros_like(codes), lns16)
    with pytest.raises(ValueError, match="division by zero"):
        cuda.check_faults()
    lns.sqrt(codes, lns16)
    with pytest.raises(ValueError, match="square root of a negative"):
        cuda.check_faults()


def test_kernels_run_on_torchs_current_stream_and_in_a_graph() -> None:
    x, y = (
        gpu(random_codes((256, 256), lns12, 20, 0.1)),
        gpu(random_codes((256, 256), lns12, 21, 0.1)),
    )
    wanted = lns.add(lns.matmul(x, y, lns12), x, lns12)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x.clone()
        got = lns.add(lns.matmul(late, y, lns12), late, lns12)
    stream.synchronize()
    assert torch.equal(got, wanted)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = lns.add(lns.matmul(static, y, lns12), static, lns12)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted)


def test_a_network_trains_to_the_same_bits_as_on_the_cpu() -> None:
    def trained(device: str) -> list[np.ndarray]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        lns_ops.convert_(net, lns12, scope="everywhere")
        net = net.to(device)
        optimizer = lns_ops.optim.SGD(net.parameters(), lr=0.01, momentum=0.5, kahan_sum=True)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(32, 40, generator=generator).to(device)
            output = net(x)
            # without float32 softmax in between, so that the gradient is the same on both devices
            output.backward(lns_ops.LNSTensor.from_float(output.detach().to_float() - 1, lns12))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().codes.cpu().numpy() for p in net.parameters()]

    for got, wanted in zip(trained("cuda"), trained("cpu"), strict=True):
        assert np.array_equal(got, wanted)


def test_backends_tells_what_runs_on_the_gpu() -> None:
    assert str(lns_ops.backends()["cuda"]["kernel"]).startswith("cupy sm_")


def test_a_compiled_net_is_the_eager_one() -> None:
    """torch.compile traces the operators through their fake kernels, without a graph break, forward
    and backward."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5)
    ).cuda()
    lns_ops.convert_(net, lns12, scope="everywhere")
    x, y = torch.rand(16, 20, device="cuda"), torch.randint(0, 5, (16,), device="cuda")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = []
    for model in (net, compiled):
        net.zero_grad()
        out = model(x)
        torch.nn.functional.cross_entropy(out, y, reduction="sum").backward()
        found.append([out.codes, *(p.grad.codes for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
