"""Measure the CPU backend beside torch float32 and other LNS libraries, all in the same run.

    python scripts/bench_cpu.py [--json FILE]        # everything but the peers, some 30 seconds
                                                     # once kernels are compiled
    python scripts/bench_cpu.py --peers ~/lns-peers  # builds a virtual environment there with xlns
                                                     # and xlnstorch (minutes)

Figures are the best of many repetitions: other processes only ever make a run slower. ``G/s`` are
10^9 multiply-accumulates a second, ``M/s`` 10^6 elements (or parameters) a second. Operands are
encoded standard normals, without zeros unless it says so. "full range" draws codes from the whole
format; such products of lns16 leave 16 bits and take the gather kernel.

Peers run in an interpreter of their own. xlnstorch loads its C++ part only if symbols are loaded
globally (RTLD_GLOBAL) and otherwise falls back to Python without a word, so the flag is set and
CSRC_AVAILABLE is printed. xlns is numpy-based.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.peers import peers

from lns_ops import LNSTensor, convert_, cpu, optim
from lns_ops import functional as lns
from lns_ops.format import LNSFormat, lns12, lns16
from lns_ops.functional import convolution, indexed
from trainers.config import ModelConfig, PrecisionConfig
from trainers.config.optimizer import OptimizerConfig
from trainers.data import Split
from trainers.models import build
from trainers.models.precision import apply_precision
from trainers.optim.build import make_optimizer
from trainers.training.step import train_step

SHAPES = [(128, 784, 512), (512, 512, 512), (64, 64, 64)]
CONVOLUTIONS = [
    (8, 64, 64, 32, 1),
    (8, 128, 128, 16, 1),
    (16, 256, 256, 8, 1),
    (32, 512, 512, 4, 1),
    (8, 64, 128, 32, 2),
]
"""Images, channels, outputs, side of the image and stride of the 3x3 convolutions of a ResNet-18 on
32x32 images."""
ELEMENTS = 1_000_000
PARAMETERS = 400_000
STEPS = {
    "float32": PrecisionConfig(),
    "lns12 matmul": PrecisionConfig(format="lns12", scope="matmul"),
    "lns12 everywhere": PrecisionConfig(format="lns12"),
    "lns12 everywhere + kahan": PrecisionConfig(format="lns12", kahan_sum=True),
}

_RESULTS: list[dict[str, Any]] = []


def rate(call: Callable[[], Any], work: float, seconds: float = 0.6) -> float:
    """Return the units of work a second, from the fastest call within ``seconds``."""
    call()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return work / fastest


@contextmanager
def product_kernel(name: str) -> Iterator[None]:
    """Force a matrix-product kernel within the context."""
    before = os.environ.get("LNS_OPS_CPU_KERNEL")
    os.environ["LNS_OPS_CPU_KERNEL"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["LNS_OPS_CPU_KERNEL"]
        else:
            os.environ["LNS_OPS_CPU_KERNEL"] = before


def use_threads(threads: int) -> None:
    """Set the threads of the kernels and of torch."""
    cpu.set_num_threads(threads)
    torch.set_num_threads(threads)


def keep(label: str, value: float, unit: str) -> None:
    """Keep a figure for ``--json``."""
    _RESULTS.append({"threads": torch.get_num_threads(), "what": label, unit: value})


def line(label: str, value: float, unit: str, float32: float | None = None) -> None:
    """Print one rate, in 10^9 or 10^6 a second, with its share of float32's."""
    scale = 1e9 if unit.startswith("G") else 1e6
    share = f"   {value / float32:8.3f} of torch float32" if float32 else ""
    keep(label, value / scale, unit)
    print(f"  {label:<58}{value / scale:9.2f} {unit}{share}", flush=True)


def codes(
    rng: np.random.Generator, fmt: LNSFormat, shape: tuple[int, ...], zeros: float = 0.0
) -> np.ndarray[Any, Any]:
    """Return encoded standard normals."""
    x = cpu.encode(rng.standard_normal(shape).astype(np.float32), fmt)
    x[x == 0] = 1
    return np.where(rng.random(shape) < zeros, np.int16(0), x)


def available_kernels() -> list[str]:
    """Return the names that force each kernel that this processor can run, the fastest first."""
    found: dict[str, str] = {}
    for name in ("simd", "avx2", "gather"):
        with product_kernel(name), suppress(ValueError):
            found.setdefault(cpu.kernel_info()["kernel"], name)
    return list(found.values())


def products(threads: int) -> dict[str, float]:
    """Measure matrix products; return the dense lns16 rates by shape, for the peers."""
    rng = np.random.default_rng(0)
    rates: dict[str, float] = {}
    for M, K, N in SHAPES:
        work, name = float(M * K * N), f"{M}x{K}x{N}"
        a, b = (torch.randn(shape) for shape in ((M, K), (K, N)))
        with torch.no_grad():
            float32 = rate(partial(torch.matmul, a, b), work)
        line(f"{name} torch float32", float32, "G/s")
        for fmt in (lns12, lns16):
            x, y, sparse = (
                codes(rng, fmt, (M, K)),
                codes(rng, fmt, (K, N)),
                codes(rng, fmt, (M, K), zeros=0.8),
            )
            wide_x, wide_y = (rng.choice(fmt.codes(), shape) for shape in ((M, K), (K, N)))
            for kernel in available_kernels():
                with product_kernel(kernel):
                    for label, left, right in (
                        ("dense", x, y),
                        ("80 % zeros in x", sparse, y),
                        ("full range", wide_x, wide_y),
                    ):
                        got = rate(partial(cpu.matmul, left, right, fmt), work)
                        line(f"{name} {fmt} {kernel} {label}", got, "G/s", float32)
                        if label == "dense" and fmt == lns16:
                            rates.setdefault(name, got)
    return rates


def float32_sums() -> None:
    """Measure products with float32 sums: decode, torch's float32 product, encode."""
    rng = np.random.default_rng(0)
    for M, K, N in SHAPES:
        x, y = (torch.from_numpy(codes(rng, lns12, shape)) for shape in ((M, K), (K, N)))
        got = rate(partial(lns.matmul, x, y, lns12, accumulation="float32"), float(M * K * N))
        line(f"{M}x{K}x{N} lns12 float32 sums", got, "G/s")


def elementwise() -> None:
    """Measure elementwise operations, conversions and sums of 10^6 codes."""
    rng = np.random.default_rng(1)
    a, b = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    float32 = rate(lambda: a + b, ELEMENTS)
    line("add, torch float32", float32, "M/s")
    for fmt in (lns12, lns16):
        x, y = codes(rng, fmt, (ELEMENTS,)), codes(rng, fmt, (ELEMENTS,))
        values = cpu.decode(x, fmt)
        doubles, square = values.astype(np.float64), x.reshape(1000, 1000)
        calls: dict[str, Callable[[], Any]] = {
            "add": partial(cpu.add, x, y, fmt),
            "mul": partial(cpu.mul, x, y, fmt),
            "encode float32": partial(cpu.encode, values, fmt),
            "encode float64": partial(cpu.encode, doubles, fmt),
            "decode float32": partial(cpu.decode, x, fmt),
            "sum over axis 0 of 1000 x 1000": partial(cpu.sum, square, 0, fmt),
            "sum over axis 1 of 1000 x 1000": partial(cpu.sum, square, 1, fmt),
        }
        for name, call in calls.items():
            line(f"{name}, {fmt}", rate(call, ELEMENTS), "M/s", float32 if name == "add" else None)


def convolutions() -> None:
    """Measure 3x3 convolutions and their gradients.

    Beside them stands the product of matrices of the same sizes for one chunk of images.
    """
    rng = np.random.default_rng(3)
    for n, c, o, side, stride in CONVOLUTIONS:
        x, w = (
            torch.from_numpy(codes(rng, lns12, shape))
            for shape in ((n, c, side, side), (o, c, 3, 3))
        )
        geometry = convolution.Geometry((stride, stride), (1, 1), (1, 1))
        y = convolution.convolution(x, w, geometry, lns12)
        grad, work = torch.from_numpy(codes(rng, lns12, tuple(y.shape))), float(y.numel() * c * 9)
        columns = max(1, (1 << 20) // (c * 9 * y[0, 0].numel())) * y[0, 0].numel()
        left, right = (
            torch.from_numpy(codes(rng, lns12, shape)) for shape in ((o, c * 9), (c * 9, columns))
        )
        name = f"conv {n}x{c}x{side}x{side} to {o}, stride {stride}"
        product = rate(
            partial(lns.matmul, left, right, lns12), float(o * c * 9 * columns), seconds=1.5
        )
        line(f"{name}: product {o}x{c * 9}x{columns}", product, "G/s")
        calls: dict[str, Callable[[], Any]] = {
            "forward": partial(convolution.convolution, x, w, geometry, lns12),
            "gradient of the input": partial(
                convolution.input_gradient, grad, w, (side, side), geometry, lns12
            ),
            "gradient of the weight": partial(
                convolution.weight_gradient, grad, x, (3, 3), geometry, lns12
            ),
        }
        for part, call in calls.items():
            got = rate(call, work, seconds=1.5)
            keep(f"{name}: {part}", got / 1e9, "G/s")
            print(f"  {name}: {part:<33}{got / 1e9:9.2f} G/s   {got / product:8.2f} of the product")


def functions() -> None:
    """Measure look-ups, normalizations, pooling and softmax of 10^6 values, forward."""
    torch.manual_seed(4)
    x = LNSTensor.from_float(torch.randn(ELEMENTS), lns12)
    image, rows = x.reshape(-1, 16, 25, 25), x.reshape(-1, 500)
    norm = convert_(torch.nn.BatchNorm2d(16), lns12, "everywhere")
    layer_norm = convert_(torch.nn.LayerNorm(500), lns12, "everywhere")
    calls: dict[str, Callable[[], Any]] = {
        "look-up (GELU)": partial(indexed.lookup, x.codes, "gelu", lns12),
        "batch norm": partial(norm, image),
        "layer norm": partial(layer_norm, rows),
        "softmax over 500": partial(torch.softmax, rows, -1),
        "max pool 3x3, stride 2": partial(torch.nn.functional.max_pool2d, image, 3, 2, 1),
        "average pool 2x2": partial(torch.nn.functional.avg_pool2d, image, 2),
    }
    with torch.no_grad():
        for name, call in calls.items():
            line(f"{name}, lns12", rate(call, ELEMENTS), "M/s")


def optimizers() -> None:
    """Measure a step of every optimizer with Kahan summation, lns12.

    Beside it stands its share of the rate of the same optimizer on float32.
    """
    names = (
        "SGD",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "Rprop",
        "ASGD",
        "LARS",
        "LAMB",
        "Lion",
        "Madam",
        "Mul",
        "SignMul",
        "HybridMul",
    )
    recipes: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in names}
    recipes["SGD with Nesterov"] = ("SGD", {"momentum": 0.9, "nesterov": True})
    for label, (name, options) in recipes.items():
        rates = []
        for lns_too in (False, True):
            value, grad = torch.randn(PARAMETERS), torch.randn(PARAMETERS)
            parameter = torch.nn.Parameter(LNSTensor.from_float(value, lns12) if lns_too else value)
            parameter.grad = LNSTensor.from_float(grad, lns12) if lns_too else grad
            optimizer = getattr(optim, name)([parameter], lr=1e-3, kahan_sum=True, **options)
            rates.append(rate(optimizer.step, PARAMETERS))
        line(f"{label} with Kahan, lns12", rates[1], "M/s", rates[0])


def updates() -> None:
    """Measure the fused SGD step, and torch's fused float32 step."""
    rng = np.random.default_rng(2)
    parameter = torch.nn.Parameter(torch.randn(PARAMETERS))
    parameter.grad = torch.randn(PARAMETERS)
    optimizer = torch.optim.SGD([parameter], lr=1e-3, momentum=0.9, fused=True)
    float32 = rate(optimizer.step, PARAMETERS)
    line("SGD with momentum, torch float32 fused", float32, "M/s")
    for fmt in (lns12, lns16):
        weight, grad, buffer, compensation = (codes(rng, fmt, (PARAMETERS,)) for _ in range(4))
        lr, momentum = (int(cpu.encode(np.array(value), fmt)) for value in (-1e-3, 0.9))
        variants: dict[str, dict[str, Any]] = {
            "SGD": {},
            "SGD with momentum": {"momentum": momentum, "buffer": buffer},
            "SGD with Kahan": {"compensation": compensation},
            "SGD with momentum and Kahan": {
                "momentum": momentum,
                "buffer": buffer,
                "compensation": compensation,
            },
        }
        for name, options in variants.items():
            got = rate(
                partial(cpu.sgd_update, weight, grad, fmt, negative_lr=lr, **options), PARAMETERS
            )
            line(f"{name}, {fmt}", got, "M/s", float32 if name == "SGD with momentum" else None)


def steps() -> None:
    """Measure a training step of a 784-128-10 net, forward to update.

    The batch has 128 random examples.
    """
    batch = Split(torch.rand(128, 784), torch.randint(0, 10, (128,)))
    recipe, milliseconds = OptimizerConfig(lr=0.1), {}
    for label, precision in STEPS.items():
        model = apply_precision(build(ModelConfig(hidden=[128]), 784, 10), precision)
        optimizer = make_optimizer(model, recipe, precision, batch_size=128)
        milliseconds[label] = 1e3 / rate(partial(train_step, model, optimizer, batch, None), 1.0)
        ratio = milliseconds[label] / milliseconds["float32"]
        keep(f"step of 784-128-10, batch 128, {label}", milliseconds[label], "ms")
        print(
            f"  step of 784-128-10, batch 128, {label:<27}{milliseconds[label]:9.2f} ms   "
            f" {ratio:8.2f} times float32",
            flush=True,
        )


def start_up() -> None:
    """Measure import and first call, kernels already compiled, in fresh interpreters."""
    script = (
        "import time, torch; t = time.perf_counter(); import numpy; from lns_ops import cpu; from"
        " lns_ops.format import lns12; u = time.perf_counter(); x = numpy.ones((4, 4),"
        " numpy.int16); cpu.matmul(x, x, lns12); print(u - t, time.perf_counter() - u)"
    )
    command = [sys.executable, "-c", script]
    runs = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(5)
    ]
    load, first = (min(float(run[i]) for run in runs) for i in (0, 1))
    keep("import beyond torch", load, "s")
    keep("first product", first, "s")
    print(f"  import beyond torch {load:.2f} s, first product {first:.2f} s")


def main() -> None:
    """Run and print everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="measure xlnstorch and xlns, installed in a venv there",
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="thread counts to measure"
    )
    parser.add_argument("--json", type=Path, help="write our figures to this file as well")
    options = parser.parse_args()
    print(f"matrix product: {cpu.kernel_info()}; torch {torch.__version__}, {os.cpu_count()} CPUs")
    ours: dict[str, float] = {}
    for threads in options.threads:
        use_threads(threads)
        print(f"{threads} thread{'s' if threads > 1 else ''}")
        rates = products(threads)
        if threads == 1:
            ours = rates
        float32_sums()
        elementwise()
        functions()
        convolutions()
        updates()
        optimizers()
        steps()
    print("start-up")
    start_up()
    if options.peers:
        use_threads(1)
        print("peers, 1 thread")
        peers(options.peers, SHAPES, ours or products(1))
    if options.json:
        options.json.write_text(json.dumps(_RESULTS, indent=1))


if __name__ == "__main__":
    main()
