"""Training loops as users write them, for tests of their trials."""

from __future__ import annotations

LOOPS = """
import pathlib
import random
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

import trainers
from trainers import get_checkpoint, report


def descend(config):
    \"\"\"Train one weight, from the checkpoint if there is one.\"\"\"
    state = get_checkpoint() or {"epoch": 0, "weight": torch.ones(1)}
    weight = state["weight"]
    for epoch in range(state["epoch"], config.get("epochs", 4)):
        weight = weight * config.get("factor", 0.5)
        time.sleep(config.get("seconds", 0.0))
        report(
            {"validation/error": weight, "validation/loss": np.float32(epoch), "plain": 1},
            checkpoint={"epoch": epoch + 1, "weight": weight},
        )
    return {"test/error": float(weight), "accuracy": 0.25}


def by_context(context):
    \"\"\"Report what the context has, with a folder as checkpoint.\"\"\"
    drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
    done = len(list(context.resume.iterdir())) if context.resume else 0
    folder = pathlib.Path(tempfile.mkdtemp())
    for epoch in range(done):
        (folder / f"{epoch}.txt").write_text("kept")
    for epoch in range(done, 3):
        (folder / f"{epoch}.txt").write_text(context.device)
        context.report(
            {"seed": context.seed, "batch": context.trial.batch_size, "resumed": done,
             "torch": drawn[0], "numpy": drawn[1], "python": drawn[2],
             "threads": torch.get_num_threads()},
            checkpoint=folder,
        )
        (folder / f"{epoch}.txt").unlink()
        (folder / f"{epoch}.txt").write_text("kept")


def endless(config):
    try:
        while True:
            report({"validation/error": 0.5})
    except Exception:
        raise AssertionError("the end of a trial is no error")
    finally:
        pathlib.Path(config["note"]).write_text("unwound")


def summed(context):
    \"\"\"Add the ranks of a gang up.\"\"\"
    start = context.resume["epoch"] if context.resume else 0
    for epoch in range(start, 3):
        total = torch.tensor([float(context.rank + 1)])
        dist.all_reduce(total)
        figures = {"validation/error": total / 10, "rank": context.rank}
        context.report(figures, checkpoint={"epoch": epoch + 1})
    return {"workers": context.world_size}


def silent(config):
    return {"test/error": 0.5}


def raises(config):
    report({"validation/error": 0.5})
    raise RuntimeError("no such weights\\nin this file")


def gives(config):
    report(eval(config["metrics"]), checkpoint=eval(config.get("checkpoint", "None")))
    return eval(config.get("returned", "None"))


def lacks_memory(config):
    report({"validation/error": 0.5})
    raise MemoryError("unable to allocate 9 TiB")


def lost(config):
    raise ConnectionError("the network is away")


def left_alone(config):
    place = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547"
    raise RuntimeError(f"[{place}] Connection closed by peer [127.0.0.1]:4711")


def stubborn(config):
    report({"validation/error": 0.5})


def two(config, other):
    pass


def nothing():
    pass


def stream(config):
    yield 1


class Trainable:
    pass
"""
"""A file of loops: the first ones train, the others fail."""
