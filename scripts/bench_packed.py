"""Time several small nets at once on one GPU: threads of one process, processes, and one alone.

    python scripts/bench_packed.py [--trials 1,4,12,30] [--processes 12] [--json FILE]

Trains MNIST nets 784-512-10, batch 128, LNS everywhere with Kahan summation, for two epochs in
:class:`trainers.workers.in_process.Packed`, and prints milliseconds a net and epoch of the second
one (validation included), medians over three courses. All threads begin it together. Then the same
in as many processes, each with a CUDA context of its own, as Ray packs them. Checks that each net
has the same losses as alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainers.config import ModelConfig, PrecisionConfig, TrialConfig
from trainers.training.trainer import Training
from trainers.workers.executors import Context
from trainers.workers.in_process import Packed
from trainers.workers.packed import Host

EPOCHS = 2
COURSES = 3


def config(seed: int) -> TrialConfig:
    return TrialConfig(
        model=ModelConfig(hidden=[512]),
        precision=PrecisionConfig(format="lns12", kahan_sum=True),
        epochs=EPOCHS,
        seed=seed,
        device="cuda",
    )


def in_threads(trials: int) -> tuple[float, list[float]]:
    """Seconds of the second epoch of all, and the seeds' last losses."""
    host, spans, losses = Host(), [], [0.0] * trials
    ready = threading.Barrier(trials)

    def train(seed: int) -> tuple[float, float]:
        trial = Packed(Context(trial=str(seed), plan={}, host=host))
        trial.begin(config(seed), [])
        trial.step()
        ready.wait()
        start = time.perf_counter()
        losses[seed] = trial.step()["train/loss"]
        span = start, time.perf_counter()
        trial.end()
        return span

    with ThreadPoolExecutor(trials) as threads:
        spans = list(threads.map(train, range(trials)))
    return max(end for _, end in spans) - min(start for start, _ in spans), losses


def _process(seed: int, ready: Any, spans: Any) -> None:
    training = Training(config(seed))
    training.train_epoch()
    ready.wait()
    start = time.time()
    training.train_epoch()
    spans.put((start, time.time()))


def in_processes(trials: int) -> float:
    """Return the seconds of the second epoch of all trials."""
    context = multiprocessing.get_context("spawn")
    ready, spans = context.Barrier(trials), context.Queue()
    processes = [
        context.Process(target=_process, args=(seed, ready, spans)) for seed in range(trials)
    ]
    for process in processes:
        process.start()
    found = [spans.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return max(end for _, end in found) - min(start for start, _ in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", default="1,4,12,30")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms a net and epoch,"
        " 784-512-10, lns12 everywhere + Kahan"
    )
    results: dict[str, float] = {}
    reference: list[float] = []
    for trials in [int(count) for count in options.trials.split(",")]:
        courses = [in_threads(trials) for _ in range(COURSES)]
        losses = courses[0][1]
        assert all(course[1] == losses for course in courses)
        assert losses[: len(reference)] == reference[: len(losses)], (
            "a net's losses depend on its company"
        )
        reference = max(reference, losses, key=len)
        milliseconds = 1e3 * statistics.median(seconds for seconds, _ in courses) / trials
        results[f"threads {trials}"] = milliseconds
        faster = results.get("threads 1", milliseconds) / milliseconds
        print(f"  {trials:3d} in threads of one process   {milliseconds:8.1f}   {faster:.2f}x")
    milliseconds = 1e3 * in_processes(options.processes) / options.processes
    results[f"processes {options.processes}"] = milliseconds
    print(f"  {options.processes:3d} in processes                 {milliseconds:8.1f}")
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
