"""Time many small nets on one GPU in a study's worker processes: one lane each, several, and both.

    python scripts/bench_slots_gpu.py [--grid 1x12,2x6,4x3,12x1] [--epochs 12] [--hidden 512]
    [--lstm WIDTH [--music JSB_Chorales] | --deep DEPTH] [--format lns12] [--optimizer sgd]
    [--decay constant] [--json FILE]

``2x6`` is two processes of six lanes each. All train MNIST nets 784-HIDDEN-10, batch 128, in the
format everywhere with Kahan summation; or, with ``--lstm``, vanilla LSTMs of one layer that copy 20
symbols, or with ``--music`` predict the notes of a collection, eight windows a step; or, with
``--deep``, DEPTH layers of 64 units on 10,000 images. With ``--decay cosine`` every
step has its own learning rate.

Prints the seconds until the forking process is ready, until all processes are up, and until every
net has reported its first epoch. Then it prints two rates in epochs per second: from that time
until the first net is done, and over all the time in which the processes are up. (Deep nets do not
all train at the same time, because their graphs are captured one after the other.) Checks that
equal seeds have equal losses, no matter how slots are shared.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainers.config import (
    DataConfig,
    LossConfig,
    LRSchedule,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.workers.messages import DIED, ENDED, HELLO, REPORT, TRAIN, Message
from trainers.workers.node import Node
from trainers.workers.resources import IN_PROCESS, PACKED


def config(options: argparse.Namespace) -> TrialConfig:
    """Return the trial of seed 0."""
    model, data = ModelConfig(hidden=options.hidden), DataConfig()
    if options.lstm:
        model = ModelConfig(name="lstm", args={"width": options.lstm, "variant": "vanilla"})
        data = DataConfig(name="copy", train_size=1000)
        if options.music:
            data = DataConfig(name="piano_rolls", args={"collection": options.music})
    if options.deep:
        model = ModelConfig(hidden=[64] * options.deep)
        data = DataConfig(train_size=10_000)
    return TrialConfig(
        model=model,
        data=data,
        loss=LossConfig(name="binary_cross_entropy") if options.music else LossConfig(),
        batch_size=8 if options.music else 128,
        precision=PrecisionConfig(format=options.format, kahan_sum=options.format != "float32"),
        optimizer=OptimizerConfig(name=options.optimizer, lr=0.003 if options.deep else 0.01),
        lr_schedule=LRSchedule(decay=options.decay),
        epochs=options.epochs,
        device="cuda",
    )


def course(
    processes: int, lanes: int, trial: TrialConfig, folder: Path
) -> tuple[dict[str, float], dict[int, list[float]]]:
    """Return the results of one arrangement, and every seed's losses."""
    began = time.perf_counter()
    figures: dict[str, float] = {}
    losses: dict[int, list[float]] = {}
    with Node() as node:
        node.load([trial.to_dict()["data"]])
        for key in range(1, processes + 1):
            node.start(key, {}, 32 if lanes > 1 else 1)
        up = done = reports = reported = counted = 0
        first = last = now = 0.0
        while done < processes * lanes:
            for key, content in node.events(60.0):
                message: Message = pickle.loads(content)
                now = time.perf_counter()
                if message.kind == HELLO:
                    up += 1
                    figures["up"] = now - began
                    for lane in range(lanes):
                        seed = (key - 1) * lanes + lane
                        plan: dict[str, Any] = {
                            "config": replace(trial, seed=seed).to_dict(), "waits": False,
                            "executor": PACKED if lanes > 1 else IN_PROCESS,
                            "checkpoints": str(folder / f"{processes}-{seed}"), "profile": "",
                            "checkpoint_every": 10**6, "resume_from": [], "ray": "",
                        }  # fmt: skip
                        node.send(key, pickle.dumps(Message(TRAIN, str(seed), plan)))
                elif message.kind == REPORT:
                    seed = int(message.trial)
                    losses.setdefault(seed, []).append(message.payload["train/loss"])
                    reports, reported = reports + (len(losses[seed]) == 1), reported + 1
                    if reports == processes * lanes and not first:
                        first = now
                    elif first and not last:
                        counted += 1
                        last = now if message.payload["done"] else 0.0
                elif message.kind == ENDED:
                    done += 1
                    assert message.payload["how"] == "done", message
                assert message.kind != DIED, message
    figures["first epoch of all"] = first - began
    figures["epochs/s"] = counted / (last - first)
    figures["epochs/s in all"] = reported / (now - began - figures["up"])
    return figures, losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", default="1x12,2x6,3x4,4x3,12x1")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512])
    parser.add_argument("--lstm", type=int, default=0)
    parser.add_argument("--music", default="")
    parser.add_argument("--deep", type=int, default=0, metavar="DEPTH")
    parser.add_argument("--format", default="lns12")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--decay", default="constant")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, reference = {}, dict[int, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        for way in options.grid.split(","):
            processes, lanes = map(int, way.split("x"))
            figures, losses = course(processes, lanes, config(options), Path(folder) / way)
            for seed, values in losses.items():
                assert reference.setdefault(seed, values) == values, (
                    "a net's losses depend on its company"
                )
            results[way] = figures
            print(way, {name: round(value, 2) for name, value in figures.items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
