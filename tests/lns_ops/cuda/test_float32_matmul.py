"""Products with float32 sums on a GPU: decoded operands, the stated bound, exact cases, saturation,
streams, graphs, training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import lns_ops
from lns_ops import LNSFormat, cuda, lns8, lns12, lns16, reference
from lns_ops import functional as lns
from lns_ops.cuda import float32_matmul
from tests.lns_ops.cuda.codes import assert_same, gpu, random_codes
from tests.lns_ops.float32_sums import outside
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.training.trainer import Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]

FORMATS = [
    lns16,
    lns12,
    lns8,
    LNSFormat(2, 0),
    LNSFormat(9, 0),
    LNSFormat(10, 1),
    LNSFormat(15, 6),
    LNSFormat(14, 8),
    LNSFormat(16, 9),
    LNSFormat(16, 12),
    LNSFormat(16, 14),
]
"""Every type of operand; formats that reach float32's limits, and bfloat16's subnormal numbers."""
SHAPES = [
    (1, 1, 1),
    (3, 5, 2),
    (17, 64, 33),
    (128, 784, 512),
    (128, 512, 10),
    (10, 128, 512),
    (100, 1000, 130),
    (257, 4096, 129),
]
OPERAND_ERROR = {"bf16": 2.0**-8, "tf32": 2.0**-11, "float32": 2.0**-24}
UNIT = {"bf16": 2.0**-22, "tf32": 2.0**-22, "float32": 2.0**-24}
"""e and u of lns_ops.accumulation."""


def product(x: torch.Tensor, y: torch.Tensor, fmt: LNSFormat) -> torch.Tensor:
    return lns.matmul(x, y, fmt, accumulation="float32")


def assert_bounded(got: torch.Tensor, x: np.ndarray, y: np.ndarray, fmt: LNSFormat) -> None:
    kind = float32_matmul.operand_type(fmt.fraction_bits)
    bad = outside(got.cpu().numpy(), x, y, fmt, OPERAND_ERROR[kind], UNIT[kind])
    assert not bad.any(), (
        f"{bad.sum()} of {bad.size} outside the bound, first at {np.argwhere(bad)[0]}"
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_operands_of_every_code(fmt: LNSFormat, offset: int) -> None:
    """bfloat16 and tf32 operands are the exact values rounded to nearest; one launch takes two
    arrays of different length and alignment."""
    codes = np.concatenate([np.zeros(offset, np.int16), fmt.codes(), [fmt.sign_mask]]).astype(
        np.int16
    )
    exact = reference.decode(codes, fmt, np.float64)
    x, y = gpu(codes)[offset:], gpu(codes)
    for got, wanted in zip(
        float32_matmul.decoded_operands(x, y, fmt.bits, fmt.fraction_bits),
        (exact[offset:], exact),
        strict=True,
    ):
        values, kind = got.double().cpu().numpy(), float32_matmul.operand_type(fmt.fraction_bits)
        assert got.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
        normal = np.abs(wanted) >= 2.0**-126
        if kind == "bf16":
            rounded = torch.from_numpy(wanted).to(torch.bfloat16).double().numpy()
            assert np.array_equal(values[normal], rounded[normal])
        elif kind == "tf32":
            assert not (got.view(torch.int32).cpu().numpy()[normal] & 0x1FFF).any()
        assert (
            np.abs(values - wanted)[normal] <= OPERAND_ERROR[kind] * np.abs(wanted)[normal]
        ).all()
        assert (np.abs(values - wanted)[~normal] <= 2.0**-133).all()
        assert np.array_equal(np.signbit(values[values != 0]), wanted[values != 0] < 0)
        assert_same(
            lns.encode(got.float(), fmt)[gpu(normal)],
            (codes[offset:] if len(wanted) < len(codes) else codes)[normal],
        )


def test_large_arrays_in_one_launch() -> None:
    """More than one round per thread, odd ends, very different lengths."""
    for fmt in (lns12, lns16):
        x, y = gpu(random_codes((3_000_001,), fmt, 1)), gpu(random_codes((17,), fmt, 2))
        for pair in ((x, y), (y, x), (x[1:], y), (x, y[1:])):
            for got, codes in zip(
                float32_matmul.decoded_operands(*pair, fmt.bits, fmt.fraction_bits),
                pair,
                strict=True,
            ):
                assert_same(
                    lns.encode(got.float(), fmt),
                    (codes * (codes & fmt.field_mask != 0)).cpu().numpy(),
                )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_sums_keep_the_bound(fmt: LNSFormat, shape: tuple[int, int, int], spread: float) -> None:
    M, K, N = shape
    x, y = random_codes((M, K), fmt, 5, spread), random_codes((K, N), fmt, 6, spread)
    assert_bounded(product(gpu(x), gpu(y), fmt), x, y, fmt)
    cuda.check_faults()


@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 12)], ids=str)
def test_sums_agree_with_the_cpu(fmt: LNSFormat) -> None:
    """Results are well within the bound: for normal operands with K = 784 at most a few ulps,
    relative to the norm of the factors."""
    x, y = torch.randn(128, 784), torch.randn(784, 512)
    here, there = (
        product(*(lns.encode(t.to(device), fmt) for t in (x, y)), fmt) for device in ("cpu", "cuda")
    )
    difference = (lns.decode(here, fmt) - lns.decode(there.cpu(), fmt)).norm() / lns.decode(
        here, fmt
    ).norm()
    assert difference < 2 * (2.0 ** (0.5 / 2**fmt.fraction_bits) - 1)


@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 12)], ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "unaligned", "strided"])
def test_views(fmt: LNSFormat, layout: str) -> None:
    for M, K, N in [(128, 784, 512), (70, 130, 50), (5, 1100, 3), (1, 7, 1), (64, 1, 64)]:
        x, y = random_codes((M, K), fmt, 7, 0.05), random_codes((K, N), fmt, 8, 0.05)
        left = gpu(x.T).t() if layout[0] == "t" else gpu(x)
        right = gpu(y.T).t() if layout in ("nt", "tt") else gpu(y)
        if layout == "unaligned":  # a whole matrix that starts at an odd address
            left, right = (F.pad(t.reshape(-1), (3, 0))[3:].view(t.shape) for t in (left, right))
        if layout == "strided":
            left, right = (F.pad(t, (3, 1))[:, 3:-1] for t in (left, right))
        assert_bounded(product(left, right, fmt), x, y, fmt)


def test_transposed_operands_are_not_copied() -> None:
    x, y = gpu(random_codes((512, 256), lns12, 7)).t(), gpu(random_codes((384, 512), lns12, 8)).t()
    left, right = float32_matmul.decoded_operands(x, y, 12, 6)
    assert left.stride() == x.stride()
    assert right.stride() == y.stride()


@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 12)], ids=str)
def test_batches(fmt: LNSFormat) -> None:
    x, y = random_codes((5, 33, 70), fmt, 14, 0.1), random_codes((5, 70, 19), fmt, 15, 0.1)
    assert_bounded(product(gpu(x), gpu(y), fmt), x, y, fmt)
    assert_bounded(
        product(gpu(np.swapaxes(x, 1, 2)).mT, gpu(np.swapaxes(y, 1, 2)).mT, fmt), x, y, fmt
    )


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_empty_products(shape: tuple[int, int, int]) -> None:
    M, K, N = shape
    z = product(gpu(np.zeros((M, K), np.int16)), gpu(np.zeros((K, N), np.int16)), lns12)
    assert z.shape == (M, N)
    assert z.dtype == torch.int16
    assert not z.any()
    assert product(
        gpu(np.zeros((2, M, K), np.int16)), gpu(np.zeros((2, K, N), np.int16)), lns12
    ).shape == (2, M, N)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_identity_matrices_are_exact(fmt: LNSFormat) -> None:
    """Operands encode back to themselves, except those below float32's normal range, which may be
    flushed."""
    x = random_codes((40, 50), fmt, 5)
    x = np.where(x & fmt.field_mask, x, 0).astype(np.int16)
    x[np.abs(reference.decode(x, fmt, np.float64)) < 2.0**-126] = 0
    assert_same(product(gpu(x), gpu(np.eye(50, dtype=np.int16) * np.int16(fmt.bias)), fmt), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_product_is_the_lns_product_or_its_neighbour(fmt: LNSFormat) -> None:
    """K = 1. At f = 6 and f = 9 some 1 % of the pairs of significands miss by an ulp, elsewhere
    none."""
    x, y = random_codes((400, 1), fmt, 3), random_codes((1, 400), fmt, 4)
    got, wanted = product(gpu(x), gpu(y), fmt).cpu().numpy(), reference.mul(x, y, fmt)
    factors = np.minimum(
        *np.broadcast_arrays(*(np.abs(reference.decode(c, fmt, np.float64)) for c in (x, y)))
    )
    normal = (factors == 0) | (factors >= 2.0**-126)
    normal &= (wanted == 0) | (np.abs(reference.decode(wanted, fmt, np.float64)) >= 2.0**-125)
    fields = [(c & fmt.field_mask).astype(np.int64) for c in (got, wanted)]
    away = np.abs(fields[0] - fields[1])[normal]
    assert away.max(initial=0) <= 1
    assert (away != 0).mean() <= (0.02 if fmt.fraction_bits in (6, 9) else 0)


@pytest.mark.parametrize("fmt", [lns16, LNSFormat(15, 6), LNSFormat(9, 0)], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_sums_that_leave_float32_saturate_with_their_sign(fmt: LNSFormat, batched: bool) -> None:
    top, one, zero = fmt.field_mask, fmt.bias, 0
    bottom, minus = top | fmt.sign_mask, one | fmt.sign_mask
    x = np.array(
        [[top, top, one], [bottom, top, one], [top, bottom, minus], [top, zero, one]], np.int16
    )
    y = np.array(
        [
            [top, bottom, top, zero, one],
            [top, top, bottom, top, one],
            [one, minus, one, minus, one],
        ],
        np.int16,
    )
    if batched:
        x, y = np.stack([x, x[::-1]]), np.stack([y, y[:, ::-1]])
    for left, right in (
        (gpu(x), gpu(y)),
        (gpu(np.swapaxes(x, -1, -2)).mT, gpu(np.swapaxes(y, -1, -2)).mT),
    ):
        z = product(left, right, fmt)
        assert_bounded(z, x, y, fmt)
        first = z[0] if batched else z
        # If two products beyond float32 cancel, tensor cores may return any number within the
        # bound.
        assert [first[0, n].item() for n in (0, 3, 4)] == [top, top, top]
        assert [first[1, n].item() for n in (1, 2, 3)] == [top, bottom, top]
        assert first[3].tolist() == [top, bottom, top, minus, top]
    cuda.check_faults()  # saturation is not a fault


def test_large_matrices_with_overflow_here_and_there() -> None:
    """The recomputed elements are in every part of the grid, odd end included; the others stay
    unchanged."""
    x, y = random_codes((301, 40), lns16, 1, 0.1), random_codes((40, 1003), lns16, 2, 0.1)
    x[::37, 3], y[3, ::11], y[3, -1] = (
        lns16.field_mask,
        lns16.field_mask,
        lns16.field_mask | lns16.sign_mask,
    )
    assert_bounded(product(gpu(x), gpu(y), lns16), x, y, lns16)


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 12)], ids=str)
def test_torchs_float32_precision_is_left_as_it_was_and_does_not_matter(
    before: str, fmt: LNSFormat
) -> None:
    x, y = random_codes((64, 500), fmt, 1, 0.1), random_codes((500, 64), fmt, 2, 0.1)
    wanted, setting = product(gpu(x), gpu(y), fmt), torch.backends.cuda.matmul
    previous = setting.fp32_precision
    try:
        setting.fp32_precision = before
        assert torch.equal(product(gpu(x), gpu(y), fmt), wanted)
        assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = previous


@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 12)], ids=str)
def test_autocast_leaves_the_sums_alone(fmt: LNSFormat) -> None:
    x, y = gpu(random_codes((64, 500), fmt, 1, 0.1)), gpu(random_codes((500, 64), fmt, 2, 0.1))
    wanted = product(x, y, fmt)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(product(x, y, fmt), wanted)


@pytest.mark.parametrize("fmt", [lns12, lns16, LNSFormat(16, 12)], ids=str)
def test_runs_on_torchs_current_stream_and_in_a_graph(fmt: LNSFormat) -> None:
    x, y = (
        gpu(random_codes((256, 320), fmt, 20, 0.1)),
        gpu(random_codes((256, 320), fmt, 21, 0.1)).t(),
    )
    wanted = product(x, y, fmt)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        got = product(x.clone(), y, fmt)
    stream.synchronize()
    assert torch.equal(got, wanted)
    graph, static = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = product(static, y, fmt)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_gradients_agree_with_the_cpu(scope: str) -> None:
    """Backward products run in one of autograd's threads; under the setting contract they stay
    contract products."""
    results = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 10))
        x = torch.randn(96, 40)
        net = lns_ops.convert_(net, lns16, scope=scope).to(device)
        with lns_ops.matmul_accumulation("float32"):
            output = net(x.to(device))
            F.cross_entropy(output, (torch.arange(96) % 10).to(device), reduction="sum").backward()
        grads = [p.grad for p in net.parameters()]
        results[device] = [
            g.to_float().cpu() if isinstance(g, lns_ops.LNSTensor) else g.cpu() for g in grads
        ]
    for here, there in zip(results["cpu"], results["cuda"], strict=True):
        assert (
            (here - there).norm() / here.norm() < 0.03
        )  # five roundings of half an ulp (2^-8.5) on each side, and LNS sums over the batch


def test_operator_passes_torchs_own_checks() -> None:
    x, y = gpu(random_codes((6, 70), lns12, 6)), gpu(random_codes((70, 8), lns12, 7))
    torch.library.opcheck(torch.ops.lns_ops.matmul_float32.default, (x, y, 12, 6))


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_trials_train_in_a_graph_and_resume(scope: str, tmp_path: Path) -> None:
    trial = TrialConfig(
        data=DataConfig(name="digits", validation_size=300),
        model=ModelConfig(hidden=[32]),
        epochs=4,
        batch_size=32,
        device="cuda",
        precision=PrecisionConfig(
            format="lns12", scope=scope, kahan_sum=True, accumulation="float32"
        ),
        optimizer=OptimizerConfig(lr=0.5, momentum=0.5),
    )
    undisturbed = Training(trial)
    first = undisturbed.train_epoch()
    undisturbed.save(tmp_path)
    rest = [undisturbed.train_epoch() for _ in range(3)]
    assert rest[-1]["train/loss"] < first["train/loss"]
    assert undisturbed.test()["test/error"] < 0.2
    resumed = Training(trial)
    resumed.restore(tmp_path)
    again = [resumed.train_epoch() for _ in range(3)]
    for one, other in zip(rest, again, strict=True):
        assert {k: v for k, v in one.items() if k != "samples_per_second"} == {
            k: v for k, v in other.items() if k != "samples_per_second"
        }
    assert lns_ops.get_matmul_accumulation() == "contract"
