"""Time a training step of the LSTM's variants: all steps as one node, one by one, and torch's LSTM.

    python scripts/bench_lstm.py [--variants vanilla,np,fgr] [--widths 20,64,128,200] [--batch 8]
    [--steps 64] [--inputs 88] [--device cpu] [--seconds 1.0] [--json FILE]

A step is a layer forward and back, float32; on a GPU it is replayed from a CUDA graph, on a CPU it
has one thread. A layer that something watches goes step by step. Printed are milliseconds, and
times torch.nn.LSTM's (cuDNN's on a GPU), which has the equations of ``np`` and runs in the same
minute.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import lns_ops
from trainers.models.lstm.variant import VariantLayer


class Peer(nn.Module):
    """torch's LSTM as a layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(x)[0]
        return outputs


def drawn(layer: nn.Module, device: str) -> nn.Module:
    """Draw a layer's weights and move it."""
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer.to(device)


def milliseconds(layer: nn.Module, x: Tensor, seconds: float) -> float:
    """Return the median time of a step, after five."""

    def step(x: Tensor) -> None:
        layer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        loss.backward()

    run, times = lns_ops.cuda_graph(step) if x.is_cuda else step, list[float]()
    for _ in range(5):
        run(x)
    while sum(times) < seconds or len(times) < 10:
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="vanilla,np,fgr")
    parser.add_argument("--widths", default="20,64,128,200")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--inputs", type=int, default=88)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the milliseconds to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.batch, options.steps, options.inputs, device=options.device)
    results: list[dict[str, str | int | float]] = []
    print("variant  width   all steps  one by one  nn.LSTM  (ms; times nn.LSTM's)")
    for width in map(int, options.widths.split(",")):
        peer = milliseconds(drawn(Peer(options.inputs, width), options.device), x, options.seconds)
        for variant in options.variants.split(","):
            layer = drawn(VariantLayer(options.inputs, width, 0.0, variant), options.device)
            whole = milliseconds(layer, x, options.seconds)
            layer.get_submodule("from_output").register_forward_hook(lambda *_: None)
            each = milliseconds(layer, x, options.seconds)
            print(
                f"{variant:8} {width:5}  {whole:9.3f}  {each:10.3f}  {peer:7.3f}"
                f"  ({whole / peer:.2f}, {each / peer:.2f})",
                flush=True,
            )
            results.append(
                {"variant": variant, "width": width, "all": whole, "each": each, "peer": peer}
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
