"""Time every CUDA kernel of lns_ops beside its peers and the ceilings of the chip, in the same run.

    python scripts/bench_gpu.py [--quick] [--json FILE]
    python scripts/bench_gpu.py --draw FILE PICTURE        the roofline of such a file; needs no GPU

Prints medians of CUDA-event times (warm-up first, rotating inputs larger than the L2 together) as a
fraction of what bounds them:

- copy: bytes a second of a large device-to-device copy, read plus written, through torch;
- issue: instructions a second that the multiprocessors issue, from a kernel of independent float
  additions. A multiply-add of the GEMM takes 7 of them at least (lns_ops/cuda/src/arithmetic.cuh),
  so issue / 7 bounds it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.gpu_picture import INSTRUCTIONS, draw

import lns_ops
from lns_ops import LNSFormat, cuda, lns12, lns16
from lns_ops import functional as lns
from lns_ops.cuda import float32_matmul, gemm, runtime
from lns_ops.spec.gaussian_log import gaussian_tables

_RESULTS: dict[str, Any] = {}


def seconds(calls: list[Callable[[], Any]], *, repeats: int = 20, graph: bool = False) -> float:
    """Return the median time of a call, over ``calls`` in rotation.

    Short calls are captured in a graph, which leaves out launch overhead.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(5):
                for call in calls:
                    call()
        count, run = 5 * len(calls), captured.replay
    else:
        count, run = len(calls), lambda: [call() for call in calls]
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / count)
    return statistics.median(times)


def copy_bandwidth() -> float:
    x = [torch.empty(1 << 30, dtype=torch.int16, device="cuda") for _ in range(4)]
    return 4 * x[0].numel() / seconds([lambda: x[1].copy_(x[0]), lambda: x[3].copy_(x[2])])


def issue_rate() -> float:
    """Return the lane-instructions a second of independent float additions.

    There are 16 chains a thread and 2,048 threads a multiprocessor.
    """
    lines = "".join(f"x{i} += y;" for i in range(16))
    source = (
        'extern "C" __global__ void issue(float* out, int n, float y) {'
        + "".join(f"float x{i} = threadIdx.x + {i};" for i in range(16))
        + "for (int i = 0; i < n; i++) {"
        + lines * 16
        + "} *out = "
        + " + ".join(f"x{i}" for i in range(16))
        + "; }"
    )
    kernel = runtime.CudaKernel(runtime.compile_function(source, "issue", (), 0), "Pif", 0)
    out, blocks = torch.zeros(1, device="cuda"), runtime.multiprocessor_count(0) * 2
    time = seconds([lambda: kernel((blocks, 1, 1), 1024, 0, out.data_ptr(), 2000, 1.0)])
    return blocks * 1024 * 2000 * 256 / time


NAIVE = r"""extern "C" __global__ void naive(const short* A, const short* B, short* C,
                                   const int* plus, const int* minus, int last,
                                   int M, int N, int K) {
    int n = blockIdx.x * 16 + threadIdx.x % 16, m = blockIdx.y * 16 + threadIdx.x / 16;
    int acc = -(1 << 28), sign = 0;
    for (int k = 0; k < K; k++) {
        int a = A[m * K + k], b = B[k * N + n], fa = a & 0x7fff, fb = b & 0x7fff;
        if (fa == 0 || fb == 0) continue;
        int p = fa + fb - 32768, s = (a ^ b) < 0, d = min(abs(acc - p), last);
        int g = s == sign ? plus[d] : minus[d];
        sign = acc >= p ? sign : s;
        acc = max(acc, p) + g;
    }
    int field = min(acc, 16383) + 16384;
    C[m * N + n] = field <= 0 ? 0 : sign ? field | 0x8000 : field;
}"""


def codes(shape: tuple[int, ...], fmt: LNSFormat) -> torch.Tensor:
    return lns.encode(torch.randn(shape, device="cuda"), fmt)


def check() -> None:
    """Compare products, updates and conversions with the CPU backend.

    The speed of a wrong kernel means nothing, so this comes first.
    """
    from lns_ops import cpu

    for fmt in (lns16, lns12):
        x, y = codes((128, 784), fmt), codes((784, 512), fmt)
        wanted = torch.from_numpy(cpu.matmul(x.cpu().numpy(), y.cpu().numpy(), fmt))
        for tile in cuda.TILES:
            got = cuda.matmul(x, y, fmt.bits, fmt.fraction_bits, tile=tile)
            assert torch.equal(got.cpu(), wanted), f"{fmt} {tile}: the product is wrong"
        near = [
            lns.decode(lns.matmul(a, b, fmt, accumulation="float32"), fmt).cpu()
            for a, b in ((x, y), (x.cpu(), y.cpu()))
        ]
        assert (near[0] - near[1]).norm() < fmt.epsilon * near[1].norm(), (
            f"{fmt}: the product with float32 sums is wrong"
        )
        floats = torch.randn(100_000, device="cuda")
        assert torch.equal(lns.encode(floats, fmt).cpu(), lns.encode(floats.cpu(), fmt)), (
            f"{fmt}: encode is wrong"
        )


def report(
    name: str, seconds_: float, work: float, unit: str, ceiling: float | None = None, note: str = ""
) -> None:
    rate = work / seconds_
    fraction = "" if ceiling is None else f"{rate / ceiling:6.3f} of {ceiling / 1e12:.3g}"
    print(
        f"{name:44s} {seconds_ * 1e6:10.1f} us  {rate / 1e12:8.3f} {unit}  {fraction} {note}",
        flush=True,
    )
    _RESULTS[name] = {"seconds": seconds_, "rate": rate, "unit": unit, "ceiling": ceiling}


def report_product(
    name: str, calls: list[Callable[[], Any]], shape: tuple[int, int, int], bound: float,
    note: str = "", **how: Any,
) -> None:  # fmt: skip
    report(name, seconds(calls, **how), math.prod(shape), "TMAC/s", bound, note)


def products(issue: float, quick: bool) -> None:
    """Measure products with the contract's sums; fractions are of what issue slots allow."""
    bound = issue / INSTRUCTIONS
    square_products(bound, quick)
    sequential_product(bound)
    layer_products(bound, quick)


def square_products(bound: float, quick: bool) -> None:
    """Measure large products, the smaller ones with every tile."""
    for fmt in (lns16, lns12):
        for M in (1024, 4096):
            x, y = [codes((M, M), fmt) for _ in range(2)], [codes((M, M), fmt) for _ in range(2)]
            calls = [lambda i=i: lns.matmul(x[i], y[i], fmt) for i in range(2)]
            report_product(f"gemm {fmt} {M}x{M}x{M}", calls, (M, M, M), bound, repeats=7)
            for tile in () if quick or M > 1024 else cuda.TILES:
                calls = [
                    lambda i=i, t=tile: cuda.matmul(x[i], y[i], fmt.bits, fmt.fraction_bits, tile=t)
                    for i in range(2)
                ]
                report_product(f"  tile {tuple(tile)}", calls, (M, M, M), bound, repeats=7)


def sequential_product(bound: float) -> None:
    """Measure a product whose threads add one term after the other from a table in memory."""
    M = 4096
    x, y = codes((M, M), lns16), codes((M, M), lns16)
    plus, minus = gaussian_tables(7)
    tables = [torch.tensor(np.array(t), device="cuda") for t in (plus, minus)]
    naive = runtime.CudaKernel(runtime.compile_function(NAIVE, "naive", (), 0), "PPPPPiiii", 0)
    out = torch.empty_like(x)
    pointers = [t.data_ptr() for t in (x, y, out, *tables)]
    call = lambda: naive((M // 16, M // 16, 1), 256, 0, *pointers, len(plus) - 1, M, M, M)
    name = f"naive gemm lns16 {M}^3 (sequential)"
    report_product(name, [call], (M, M, M), bound, repeats=3)


def layer_products(bound: float, quick: bool) -> None:
    """Measure the products of a small network's layers in CUDA graphs."""
    for fmt in (lns16, lns12):
        for label, shape in SHAPES[2:]:
            M, K, N = shape
            x = codes((K, M), fmt).t() if label == "dW" else codes((M, K), fmt)
            y = codes((N, K), fmt).t() if label in ("forward", "output") else codes((K, N), fmt)
            call = lambda: lns.matmul(x, y, fmt)
            note = str(tuple(gemm.choose_tile(1, M, N, K, 132)))
            name = f"gemm {fmt} {label} {M}x{K}x{N}"
            report_product(name, [call], shape, bound, note, graph=True)
            for tile in () if quick or fmt != lns16 else cuda.TILES[1:]:
                call = lambda t=tile: cuda.matmul(x, y, fmt.bits, fmt.fraction_bits, tile=t)
                report_product(f"  tile {tuple(tile)}", [call], shape, bound, graph=True)


SHAPES = [
    ("square", (4096, 4096, 4096)),
    ("square", (1024, 1024, 1024)),
    ("forward", (128, 784, 512)),
    ("dW", (512, 128, 784)),
    ("dX", (128, 512, 784)),
    ("output", (128, 512, 10)),
]


def float32_sums(copy: float) -> None:
    """Measure products with float32 sums, step by step.

    They are given as fractions of cuBLAS's product of the decoded operands alone.
    """
    for fmt in (lns12, lns16):
        kind = float32_matmul.operand_type(fmt.fraction_bits)
        for label, (M, K, N) in SHAPES:
            x = [codes((K, M), fmt).t() if label == "dW" else codes((M, K), fmt) for _ in range(2)]
            y = [
                codes((N, K), fmt).t() if label in ("forward", "output") else codes((K, N), fmt)
                for _ in range(2)
            ]
            decode = lambda i: float32_matmul.decoded_operands(
                x[i], y[i], fmt.bits, fmt.fraction_bits
            )
            pairs, work = [decode(i) for i in range(2)], M * K * N
            steps = {
                f"cuBLAS {kind} to float32": lambda i: float32_matmul.float32_product(
                    *pairs[i], kind
                ),
                f"{fmt} decode + product": lambda i: float32_matmul.float32_product(
                    *decode(i), kind
                ),
                f"{fmt} decode + product + encode": lambda i: lns.matmul(
                    x[i], y[i], fmt, accumulation="float32"
                ),
            }
            if kind == "bf16":
                steps["torch bf16 to bf16"] = lambda i: torch.mm(*pairs[i])
            alone = None
            for step, call in steps.items():
                time = seconds([lambda i=i, c=call: c(i) for i in range(2)], graph=work < 1 << 33)
                report(f"{step} {label} {M}x{K}x{N}", time, work, "TMAC/s", alone)
                alone = alone or work / time
        both = [codes((1 << 26,), fmt) for _ in range(4)]
        calls = [
            lambda i=i: float32_matmul.decoded_operands(
                both[i], both[i + 1], fmt.bits, fmt.fraction_bits
            )
            for i in (0, 2)
        ]
        report(
            f"decode two operands {fmt} to {kind}",
            seconds(calls),
            (4 if kind == "bf16" else 6) * (1 << 27),
            "TB/s",
            copy,
        )


def report_bytes(name: str, calls: list[Callable[[], Any]], bytes_: float, copy: float) -> None:
    """Measure calls that are bound by memory; fractions are of a copy's rate."""
    report(name, seconds(calls), bytes_, "TB/s", copy)


def memory_bound(copy: float, n: int) -> None:
    """Measure encoding, decoding, elementwise operations and updates of ``n`` elements."""
    for fmt in (lns16, lns12):
        x = [torch.randn(n, device="cuda") for _ in range(2)]
        encode = [lambda i=i: lns.encode(x[i], fmt) for i in range(2)]
        report_bytes(f"encode {fmt}", encode, 6 * n, copy)
        c = [lns.encode(x[i], fmt) for i in range(2)]
        decode = [lambda i=i: lns.decode(c[i], fmt) for i in range(2)]
        report_bytes(f"decode {fmt}", decode, 6 * n, copy)
        for name in ("add", "mul"):
            operation = getattr(lns, name)
            calls = [lambda i=i: operation(c[i], c[1 - i], fmt) for i in range(2)]
            report_bytes(f"{name} {fmt}", calls, 6 * n, copy)
        w = [c[0].clone() for _ in range(4)]
        lns_updates(fmt, w, c[1], copy)
        float32_updates(fmt, w, c[1], copy)
    torch_updates(n, copy)


def lns_updates(fmt: LNSFormat, w: list[torch.Tensor], grad: torch.Tensor, copy: float) -> None:
    """Measure SGD and AdamW in LNS operations; ``w`` are a weight and three buffers like it."""
    rate = int(lns.encode(torch.tensor(-0.01), fmt))
    decay = int(lns.encode(torch.tensor(0.9), fmt))
    tick = torch.ones((), dtype=torch.int64, device="cuda")
    for label, bytes_, options in [
        ("SGD", 6, {}),
        ("Kahan SGD", 10, {"compensation": w[1]}),
        ("stochastic SGD", 6, {"step": tick, "key": 1}),
        ("Kahan momentum", 14, {"momentum": decay, "buffer": w[2], "compensation": w[1]}),
    ]:
        call = lambda: lns.sgd_update_(w[0], grad, fmt, negative_lr=rate, **options)
        report_bytes(f"{label} {fmt}", [call], bytes_ * grad.numel(), copy)
    root, residue = lns.absolute(w[3], fmt), torch.zeros_like(w[3])
    scalars = {"negative_lr": rate, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    scalars |= {"weight_decay": rate & fmt.field_mask, "decoupled": True}
    for label, bytes_, options in adam_forms("", residue, w[1]):
        call = lambda: lns.adam_update_(
            w[0], grad, fmt, step=tick, exp_avg=w[2], root=root, **scalars, **options
        )
        report_bytes(f"{label} {fmt}", [call], bytes_ * grad.numel(), copy)


def adam_forms(
    suffix: str, residue: torch.Tensor, compensation: torch.Tensor
) -> list[tuple[str, int, dict[str, Any]]]:
    """Return each form of AdamW: its label, bytes an element, and options."""
    return [
        (f"AdamW{suffix}", 18, {"residue": residue}),
        (f"Kahan AdamW{suffix}", 22, {"residue": residue, "compensation": compensation}),
        (f"stochastic AdamW{suffix}", 14, {"key": 1}),
    ]


def float32_updates(fmt: LNSFormat, w: list[torch.Tensor], grad: torch.Tensor, copy: float) -> None:
    """Measure SGD and AdamW in float32 operations between codes; arguments as above."""
    tick = torch.ones((), dtype=torch.int64, device="cuda")
    momentum = {"momentum": 0.9, "buffer": w[2]}
    for label, bytes_, options in [
        ("Kahan SGD in float32", 10, {"compensation": w[1]}),
        ("Kahan momentum in float32", 14, {"compensation": w[1], **momentum}),
        ("stochastic SGD in float32", 6, {"step": tick, "key": 1}),
    ]:
        call = lambda: lns.sgd_update_float32_(w[0], grad, fmt, lr=0.01, **options)
        report_bytes(f"{label} {fmt}", [call], bytes_ * grad.numel(), copy)
    root, residue = lns.absolute(w[3], fmt), torch.zeros_like(w[3])
    scalars = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    scalars |= {"weight_decay": 0.01, "decoupled": True}
    for label, bytes_, options in adam_forms(" in float32", residue, w[1]):
        call = lambda: lns.adam_update_float32_(
            w[0], grad, fmt, step=tick, exp_avg=w[2], root=root, **scalars, **options
        )
        report_bytes(f"{label} {fmt}", [call], bytes_ * grad.numel(), copy)


def torch_updates(n: int, copy: float) -> None:
    """Measure torch's fused optimizers on one float32 parameter."""
    p = torch.nn.Parameter(torch.randn(n, device="cuda"))
    p.grad = torch.randn(n, device="cuda")
    for label, bytes_, optimizer in [
        ("SGD", 12, torch.optim.SGD([p], lr=0.01, fused=True)),
        ("momentum", 20, torch.optim.SGD([p], lr=0.01, momentum=0.9, fused=True)),
        ("AdamW", 28, torch.optim.AdamW([p], lr=0.01, fused=True)),
    ]:
        report_bytes(f"torch fused {label} float32", [optimizer.step], bytes_ * n, copy)


def network(fmt: LNSFormat | None) -> Callable[[], None]:
    net = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    if fmt is not None:
        lns_ops.convert_(net, fmt, scope="everywhere")
    net = net.cuda()
    optimizer: Any = (
        torch.optim.SGD(net.parameters(), lr=1e-3)
        if fmt is None
        else lns_ops.optim.SGD(net.parameters(), lr=1e-3, kahan_sum=True)
    )
    x, y = torch.rand(128, 784, device="cuda"), torch.randint(0, 10, (128,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
        optimizer.step()

    return step


def training_step() -> None:
    variants: dict[str, tuple[LNSFormat | None, str]] = {
        "float32": (None, "contract"),
        "lns12 everywhere + Kahan": (lns12, "contract"),
        "lns12 everywhere + Kahan, float32 sums": (lns12, "float32"),
        "lns16 everywhere + Kahan, float32 sums": (lns16, "float32"),
    }
    for label, (fmt, accumulation) in variants.items():
        lns_ops.set_matmul_accumulation(accumulation)
        step = network(fmt)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        report(f"MLP step {label}, eager", seconds([step]), 0, "")
        try:
            report(f"MLP step {label}, CUDA graph", seconds([step], graph=True), 0, "")
        except RuntimeError as error:
            print(f"MLP step {label}, CUDA graph: {error}")
    lns_ops.set_matmul_accumulation("contract")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer variants")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument(
        "--draw",
        type=Path,
        nargs=2,
        metavar=("JSON", "PICTURE"),
        help="only draw the roofline of earlier figures",
    )
    options = parser.parse_args()
    if options.draw:
        draw(*options.draw)
        return
    reason = cuda.unavailable()
    if reason is not None:
        raise SystemExit(f"no GPU to time: {reason}")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__},"
        f" {cuda.kernel_info()['reason']}, Python {platform.python_version()}"
    )
    check()
    copy, issue = copy_bandwidth(), issue_rate()
    print(
        f"ceilings: copy {copy / 1e12:.3f} TB/s, issue {issue / 1e12:.2f} T instructions/s, GEMM"
        f" {issue / INSTRUCTIONS / 1e12:.2f} TMAC/s"
    )
    products(issue, options.quick)
    float32_sums(copy)
    training_step()
    memory_bound(copy, 1 << (26 if options.quick else 28))
    cuda.check_faults()
    if options.json:
        options.json.write_text(
            json.dumps({"copy": copy, "issue": issue, "results": _RESULTS}, indent=1)
        )


if __name__ == "__main__":
    main()
