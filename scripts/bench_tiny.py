"""Time a training step of tiny networks in LNS on a CPU, where nearly all of it is Python.

    python scripts/bench_tiny.py [--networks mlp,llama] [--rounds 60] [--format lns16]
                                 [--json FILE]

A step of SGD with momentum (gradients cleared, forward, backward, update) of ten networks
(``bench/tiny_networks.py``), in float32, with LNS products (scope ``matmul``) and in LNS throughout
(scope ``everywhere``, Kahan summation). The three alternate step by step in one process with one
thread, so that other load on the machine affects all three. Prints the minimum CPU time of a step
over the rounds, in milliseconds and relative to float32, and the number of Python function calls in
a step, which does not depend on the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.tiny_networks import NETWORKS

import lns_ops

MODES = ("float32", "matmul", "everywhere")


def steps_of(name: str, fmt: str) -> dict[str, Callable[[], None]]:
    """Return a training step of a network in each mode."""
    torch.manual_seed(0)
    original, loss_of = NETWORKS[name]()
    steps: dict[str, Callable[[], None]] = {}
    for mode in MODES:
        net = copy.deepcopy(original)
        if mode != "float32":
            lns_ops.convert_(net, fmt, scope=mode)
        trained = [p for p in net.parameters() if p.requires_grad]
        if mode == "everywhere":
            optimizer: Any = lns_ops.optim.SGD(trained, lr=0.01, momentum=0.9, kahan_sum=True)
        else:
            optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)

        def step(net: Any = net, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(net).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        steps[mode] = step
    return steps


def milliseconds(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the least processor time of each step, taken in turns after ten rounds."""
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for i in range(10 + rounds):
        for mode, step in steps.items():
            start = time.process_time()
            step()
            if i >= 10:
                times[mode].append(1e3 * (time.process_time() - start))
    return {mode: min(found) for mode, found in times.items()}


def python_calls(step: Callable[[], None]) -> int:
    """Return how many Python functions a step calls, in the thread of the caller."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--format", default="lns16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lns_ops.cpu.set_num_threads(1)
    print(f"{'':10}{'ms':>32}{'times float32':>24}{'calls of Python':>32}")
    print(f"{'':10}" + "".join(f"{m:>12}" for m in (*MODES, *MODES[1:], *MODES)))
    rows: dict[str, dict[str, Any]] = {}
    for name in options.networks.split(","):
        steps = steps_of(name, options.format)
        ms = milliseconds(steps, options.rounds)
        ratios = {mode: ms[mode] / ms["float32"] for mode in MODES[1:]}
        calls = {mode: python_calls(step) for mode, step in steps.items()}
        rows[name] = {"milliseconds": ms, "times float32": ratios, "calls": calls}
        cells = "".join(f"{v:12.2f}" for v in (*ms.values(), *ratios.values()))
        print(f"{name:10}{cells}" + "".join(f"{n:12,}" for n in calls.values()), flush=True)
    middle = {m: median(row["times float32"][m] for row in rows.values()) for m in MODES[1:]}
    print(f"{'median':10}{'':36}" + "".join(f"{v:12.2f}" for v in middle.values()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "median": middle}, indent=1) + "\n")


if __name__ == "__main__":
    main()
