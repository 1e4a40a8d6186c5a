"""Time training steps on a GPU, eager and as CUDA graphs, in LNS beside torch's float32.

    python scripts/bench_graphs.py [--steps N] [--kernels N]

ResNet-18 as torchvision has it and without the strides of its beginning (``wide``), 128 images of
32 x 32, lns12, momentum; a GPT of four layers of 128, 8 windows of
64 tokens, lns16, AdamW; both with scope everywhere, Kahan summation and float32 sums of products or
the contract's. Median time of a step in milliseconds, and how many times as long as float32's in
the same form. Every figure of a row is of this run. ``--kernels N`` adds the N kernels that take
most of a replayed step, with their launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import lns_ops
from scripts.profile_resnet import cifar
from tests.lns_ops.nets import ResNet18
from trainers.config.model import GPTArguments
from trainers.models.gpt import gpt
from trainers.models.init import initialize_

FORMS = {
    "float32": (None, "contract"),
    "float32 sums": ("lns", "float32"),
    "contract sums": ("lns", "contract"),
}


def resnet(lns: bool) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Return net, optimizer and a batch."""
    torch.manual_seed(0)
    return images(ResNet18(), lns)


def wide(lns: bool) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Return net, optimizer and a batch."""
    torch.manual_seed(0)
    return images(cifar(ResNet18(), 64), lns)


def images(
    model: nn.Module, lns: bool
) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Return net, optimizer and a batch."""
    model = model.cuda()
    if lns:
        lns_ops.convert_(model, "lns12", scope="everywhere")
    optimizer = lns_ops.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, kahan_sum=lns)
    return model, optimizer, (torch.randn(128, 3, 32, 32).cuda(), torch.randint(10, (128,)).cuda())


def transformer(lns: bool) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Return net, optimizer and a batch."""
    torch.manual_seed(0)
    args = GPTArguments(layers=4, heads=4, width=128)
    model = initialize_(gpt(args, (64,), classes=65, tokens=65, each_step=True), seed=0).cuda()
    if lns:
        lns_ops.convert_(model, "lns16", scope="everywhere")
    optimizer = lns_ops.optim.AdamW(model.parameters(), lr=1e-3, kahan_sum=lns)
    return model, optimizer, tuple(torch.randint(65, (8, 64)).cuda() for _ in range(2))  # type: ignore[return-value]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """Return a training step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, y.ndim - 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def milliseconds(step: Callable[[], Any], steps: int) -> float:
    """Return the median time of a call, by events of the GPU, after five calls."""
    for _ in range(5):
        step()
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def print_kernels(step: Callable[[], Any], count: int) -> None:
    """Print the kernels that take most of a step, its launches and its time on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    total, launches = sum(e.self_device_time_total for e in found), sum(e.count for e in found)
    print(f"    {total / 1e3:.2f} ms on the GPU in {launches} launches, of which")
    for event in found[:count]:
        print(f"    {event.self_device_time_total / 1e3:7.2f} ms {event.count:5} {event.key[:90]}")


def rows(steps: int, kernels: int = 0) -> Iterator[tuple[str, str, float, float]]:
    """Yield net, arithmetic, and the times of an eager and of a replayed step."""
    for name, make in (("resnet18", resnet), ("wide", wide), ("gpt", transformer)):
        for form, (fmt, sums) in FORMS.items():
            model, optimizer, batch = make(fmt is not None)
            with lns_ops.matmul_accumulation(sums):
                step = step_of(model, optimizer)
                eager = milliseconds(lambda step=step, batch=batch: step(*batch), steps)  # type: ignore[misc]
                graph = lns_ops.cuda_graph(step)
                replayed = milliseconds(lambda step=graph, batch=batch: step(*batch), steps)  # type: ignore[misc]
                if kernels:
                    print_kernels(lambda step=graph, batch=batch: step(*batch), kernels)  # type: ignore[misc]
            yield name, form, eager, replayed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernels", type=int, default=0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_graphs.py needs a GPU, and torch finds none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ms a step")
    print(f"{'net':10} {'arithmetic':14} {'eager':>8} {'ratio':>6} {'graph':>8} {'ratio':>6}")
    peer = (0.0, 0.0)
    for name, form, eager, replayed in rows(arguments.steps, arguments.kernels):
        if form == "float32":
            peer = (eager, replayed)
        ratios = eager / peer[0], replayed / peer[1]
        print(
            f"{name:10} {form:14} {eager:8.2f} {ratios[0]:6.1f} {replayed:8.2f} {ratios[1]:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
