"""A node for tests of worker processes, and the messages of its processes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.training.trainer import Training
from trainers.workers.messages import DIED, ENDED, HELLO, REPORT, TRAIN, Message
from trainers.workers.node import Node
from trainers.workers.resources import IN_PROCESS

SMALL = TrialConfig(
    data=DataConfig(name="digits", validation_size=300, train_size=256),
    model=ModelConfig(hidden=[8]),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    optimizer=OptimizerConfig(lr=0.2),
    epochs=2,
    batch_size=64,
)
MADE_UP = "tests.trainers.made_up:"


def plan(
    config: TrialConfig, folder: Path, executor: str = IN_PROCESS, **values: Any
) -> dict[str, Any]:
    """Return what a worker process needs for a trial."""
    folder.mkdir(parents=True, exist_ok=True)  # the folder of a study is never empty
    defaults = {
        "checkpoint_every": 1,
        "resume_from": [],
        "waits": False,
        "storage": str(folder),
        "max_failures": 0,
        "ray": "",
    }
    places = {"checkpoints": str(folder / "checkpoints"), "profile": str(folder / "profile")}
    return {"config": config.to_dict(), "executor": executor, **defaults, **places, **values}


class Driver:
    """A driver of a node's processes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.said: list[tuple[int, Message]] = []
        self.pids: dict[int, int] = {}

    def start(self, key: int, lanes: int = 1, **environment: str) -> int:
        """Start a process and return its process id."""
        self.node.start(key, environment, lanes)
        self.until(key, lambda message: message.kind == HELLO)
        return self.pids[key]

    def send(self, key: int, kind: str, trial: str = "", payload: Any = None) -> None:
        self.node.send(key, pickle.dumps(Message(kind, trial, payload)))

    def train(
        self, key: int, trial: str, config: TrialConfig, folder: Path, *values: str, **more: Any
    ) -> list[Message]:
        """Train a trial and return the messages that the process sent about it."""
        self.send(key, TRAIN, trial, plan(config, folder, *values, **more))
        return self.until(key, lambda message: message.kind == ENDED or message.kind == DIED)

    def until(
        self, key: int, wanted: Callable[[Message], bool], seconds: float = 60.0
    ) -> list[Message]:
        """Return the messages of a process up to the wanted one."""
        found: list[Message] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for entry in list(self.said):
                if entry[0] == key:
                    self.said.remove(entry)
                    found.append(entry[1])
                    if wanted(entry[1]):
                        return found
            self.said += [
                (number, pickle.loads(content)) for number, content in self.node.events(0.2)
            ]
            self.pids |= {
                number: message.payload for number, message in self.said if message.kind == HELLO
            }
        raise AssertionError(f"process {key} said only {found}")


def alone(config: TrialConfig) -> list[dict[str, Any]]:
    """The same as :func:`reports` for a trial that this process trains."""
    training = Training(config)
    epochs: list[dict[str, Any]] = [
        {**training.train_epoch(), "done": training.epoch == config.epochs}
        for _ in range(config.epochs)
    ]
    epochs[-1] |= training.test()
    return reports([Message(REPORT, "", metrics) for metrics in epochs])


def reports(said: list[Message]) -> list[dict[str, Any]]:
    """Return the metrics that do not depend on the machine's load, by epoch."""
    from trainers.telemetry.metrics import repeatable

    return [
        {
            name: value
            for name, value in repeatable(message.payload).items()
            if name not in ("checkpoint_path", "seconds")
        }
        for message in said
        if message.kind == REPORT
    ]
