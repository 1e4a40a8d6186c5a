"""Profile a training step of ResNet-18 in LNS: the processor time of products and of the rest.

    python scripts/profile_resnet.py [--images N] [--threads N]

ResNet-18 for 32 x 32 images, written in plain torch (``tests/lns_ops/nets.py``), converted with
scope everywhere, lns12, SGD with Kahan summation; forward, backward and update of one batch, the
second of two steps, by torch.profiler. Self time of the operators of ``lns_ops``; gathering the
columns of a convolution is counted with its product.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

import lns_ops
from lns_ops import convert_, lns12, optim
from tests.lns_ops.nets import ResNet18

PRODUCTS = ("conv", "matmul", "linear", "bmm")


def cifar(net: ResNet18) -> ResNet18:
    """Return the net for small images.

    It has a 3 x 3 convolution without stride, and no pooling before the blocks.
    """
    net.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    net.maxpool = torch.nn.Identity()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lns_ops.cpu.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = convert_(cifar(ResNet18(width=64)), lns12, "everywhere")
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, kahan_sum=True)
    x, y = torch.randn(options.images, 3, 32, 32), torch.randint(10, (options.images,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    times = {event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()}
    total = sum(times.values())
    products = sum(value for key, value in times.items() if any(word in key for word in PRODUCTS))
    share = 100 * products / total
    print(
        f"{options.images} images, {options.threads} thread(s): {total:.0f} ms of processor time,"
        f" {share:.0f} % in products"
    )
    for key, value in sorted(times.items(), key=lambda pair: -pair[1])[:14]:
        print(f"  {100 * value / total:5.1f} %  {value:8.1f} ms  {key}")


if __name__ == "__main__":
    main()
