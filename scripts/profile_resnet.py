"""Profile a training step of ResNet-18 in LNS: the processor time of products and of the rest, and
what of it is Python.

    python scripts/profile_resnet.py [--images N] [--threads N] [--width N] [--size N]
                                     [--device NAME]

ResNet-18 for small images, written in plain torch (``tests/lns_ops/nets.py``), converted with
scope everywhere, lns12, SGD with momentum and Kahan summation; forward, backward and update of one
batch. First the calls of Python functions, of functions in C from Python and of operators of
``lns_ops`` in each part of a step, which do not depend on the machine, and each part's shortest
time of ten; a net of ``--width 8 --size 8 --images 2`` has next to no arithmetic. Then one step by
torch.profiler: self time of the operators of ``lns_ops``, where gathering the columns of a
convolution is counted with its product, and the statistics of a normalization with it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lns_ops
from lns_ops import convert_, lns12, optim
from tests.lns_ops.nets import ResNet18

PRODUCTS = ("conv", "matmul", "linear", "bmm")
REPETITIONS = 10


def cifar(net: ResNet18, width: int) -> ResNet18:
    """Return the net for small images.

    It has a 3 x 3 convolution without stride, and no pooling before the blocks.
    """
    net.conv1 = torch.nn.Conv2d(3, width, 3, 1, 1, bias=False)
    net.maxpool = torch.nn.Identity()
    return net


def parts_of_a_step(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return the parts of a training step, to be called in turn."""
    torch.manual_seed(0)
    model = convert_(cifar(ResNet18(width=options.width), options.width), lns12, "everywhere")
    model.to(options.device)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, kahan_sum=True)
    x = torch.randn(options.images, 3, options.size, options.size, device=options.device)
    y = torch.randint(10, (options.images,), device=options.device)
    loss: list[Tensor] = []

    def forward() -> None:
        loss[:] = [torch.nn.functional.cross_entropy(model(x), y)]

    return {
        "gradients cleared": optimizer.zero_grad,
        "forward": forward,
        "backward": lambda: loss[0].backward(),
        "update": optimizer.step,
    }


def calls(part: Callable[[], None]) -> tuple[int, int, int]:
    """Count calls of Python functions, of C functions from Python, and of our operators."""
    counts = {"call": 0, "c_call": 0}
    operators = 0

    def count(frame: Any, event: str, function: Any) -> None:
        nonlocal operators
        if event in counts:
            counts[event] += 1
        if event == "c_call" and getattr(function, "__module__", "") == "torch._ops.lns_ops":
            operators += 1

    sys.setprofile(count)
    try:
        part()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"], operators


def seconds(part: Callable[[], None], device: str) -> float:
    """Return the time of a part, to the end of what it has a GPU do."""
    start = time.perf_counter()
    part()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def print_parts(parts: dict[str, Callable[[], None]], device: str) -> None:
    counted = {name: calls(part) for name, part in parts.items()}
    times = [[seconds(part, device) for part in parts.values()] for _ in range(REPETITIONS)]
    best = [1e3 * min(column) for column in zip(*times, strict=True)]
    print(f"{'':19}{'Python calls':>14}{'C calls':>10}{'operators':>11}{'ms':>9}")
    for (name, counts), ms in zip(counted.items(), best, strict=True):
        print(f"  {name:17}{counts[0]:14,}{counts[1]:10,}{counts[2]:11,}{ms:9.2f}")
    total = [sum(column) for column in zip(*counted.values(), strict=True)]
    print(f"  {'step':17}{total[0]:14,}{total[1]:10,}{total[2]:11,}{sum(best):9.2f}")


def print_operators(parts: dict[str, Callable[[], None]], shown: int = 14) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for part in parts.values():
            part()
    times = {event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()}
    total = sum(times.values())
    products = sum(value for key, value in times.items() if any(word in key for word in PRODUCTS))
    print(f"{total:.0f} ms of processor time, {100 * products / total:.0f} % in products")
    for key, value in sorted(times.items(), key=lambda pair: -pair[1])[:shown]:
        print(f"  {100 * value / total:5.1f} %  {value:8.1f} ms  {key}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("images", 8), ("threads", 1), ("width", 64), ("size", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lns_ops.cpu.set_num_threads(options.threads)
    parts = parts_of_a_step(options)
    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, to count it
        for part in 2 * list(parts.values()):
            part()
        print(f"{options.images} images of {options.size} x {options.size}, width {options.width}")
        print_parts(parts, options.device)
        print_operators(parts)


if __name__ == "__main__":
    main()
