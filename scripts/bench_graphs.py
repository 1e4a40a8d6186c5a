"""Time training steps on a GPU, eager and as CUDA graphs, in LNS beside torch's float32.

    python scripts/bench_graphs.py [--nets NAME ...] [--steps N] [--kernels N] [--json FILE]

Nets of images in lns12 with momentum: ResNet-18 as torchvision has it and without the strides of
its beginning (``wide``), 128 images of 32 x 32; torchvision's ``resnet18_224`` (32 images), ``vit``
(vit_b_16, 16 images of 224 x 224) and ``densenet`` (densenet121, 32 of 64 x 64). Nets of tokens in
lns16 with AdamW: GPTs of four layers of 128 (8 windows of 64; ``gpt2`` is Hugging Face's) and of
six layers of 384 (64 windows of 256; ``gpt_10m``). All with scope everywhere, Kahan summation and
float32 sums of products or the contract's. Nets of libraries that are not installed are left out,
which the output says.

Median time of a step in milliseconds, and how many times as long as float32's in the same form.
Every figure of a row is of this run. ``--kernels N`` adds the N kernels that take most of a
replayed step, with their launches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
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


Case = tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]


class Logits(nn.Module):
    """Hugging Face's GPT-2 of four layers of 128, whose output is the logits alone."""

    def __init__(self) -> None:
        super().__init__()
        library = import_module("transformers")
        config = library.GPT2Config(
            n_layer=4, n_head=4, n_embd=128, vocab_size=65, n_positions=64, use_cache=False
        )
        self.net = library.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens).logits
        return logits


def images(build: Callable[[], nn.Module], size: int, batch: int, lns: bool) -> Case:
    """Return a net of images, its optimizer and a batch."""
    torch.manual_seed(0)
    model = build().cuda()
    if lns:
        lns_ops.convert_(model, "lns12", scope="everywhere")
    optimizer = lns_ops.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, kahan_sum=lns)
    x = torch.randn(batch, 3, size, size).cuda()
    return model, optimizer, (x, torch.randint(10, (batch,)).cuda())


def tokens(build: Callable[[], nn.Module], size: int, batch: int, lns: bool) -> Case:
    """Return a net of tokens, its optimizer and a batch."""
    torch.manual_seed(0)
    model = build().cuda()
    if lns:
        lns_ops.convert_(model, "lns16", scope="everywhere")
    optimizer = lns_ops.optim.AdamW(model.parameters(), lr=1e-3, kahan_sum=lns)
    x, y = (torch.randint(65, (batch, size)).cuda() for _ in range(2))
    return model, optimizer, (x, y)


def of_torchvision(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module("torchvision.models"), name)(num_classes=10)


def our_gpt(layers: int, heads: int, width: int, window: int) -> Callable[[], nn.Module]:
    args = GPTArguments(layers=layers, heads=heads, width=width)
    return lambda: initialize_(gpt(args, (window,), classes=65, tokens=65, each_step=True), seed=0)


NETS: dict[str, Callable[[bool], Case]] = {
    "resnet18": partial(images, ResNet18, 32, 128),
    "wide": partial(images, lambda: cifar(ResNet18(), 64), 32, 128),
    "resnet18_224": partial(images, of_torchvision("resnet18"), 224, 32),
    "vit": partial(images, of_torchvision("vit_b_16"), 224, 16),
    "densenet": partial(images, of_torchvision("densenet121"), 64, 32),
    "gpt": partial(tokens, our_gpt(4, 4, 128, 64), 64, 8),
    "gpt2": partial(tokens, Logits, 64, 8),
    "gpt_10m": partial(tokens, our_gpt(6, 6, 384, 256), 256, 64),
}


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


def rows(nets: list[str], steps: int, kernels: int) -> Iterator[tuple[str, str, float, float]]:
    """Yield net, arithmetic, and the times of an eager and of a replayed step."""
    for name in nets:
        for form, (fmt, sums) in FORMS.items():
            try:
                model, optimizer, batch = NETS[name](fmt is not None)
            except ImportError as error:
                print(f"{name}: left out, {error}")
                break
            with lns_ops.matmul_accumulation(sums):
                step = step_of(model, optimizer)
                eager = milliseconds(partial(step, *batch), steps)
                graph = lns_ops.cuda_graph(step)
                replayed = milliseconds(partial(graph, *batch), steps)
                if kernels:
                    print_kernels(partial(graph, *batch), kernels)
            yield name, form, eager, replayed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_graphs.py needs a GPU, and torch finds none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ms a step")
    print(f"{'net':12} {'arithmetic':14} {'eager':>8} {'ratio':>6} {'graph':>8} {'ratio':>6}")
    peer, results = (0.0, 0.0), []
    for name, form, eager, replayed in rows(arguments.nets, arguments.steps, arguments.kernels):
        if form == "float32":
            peer = (eager, replayed)
        ratios = eager / peer[0], replayed / peer[1]
        results.append({"net": name, "form": form, "eager_ms": eager, "graph_ms": replayed})
        print(
            f"{name:12} {form:14} {eager:8.2f} {ratios[0]:6.1f} {replayed:8.2f} {ratios[1]:6.1f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
