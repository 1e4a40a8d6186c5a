"""MLflow servers behind a proxy, and made-up ledgers, for ``bench_tracking.py``."""

from __future__ import annotations

import http.client
import http.server
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_study import DIGITS

from study.config import RowConfig, StudyConfig
from study.ledger.log import FILE
from study.ops.serve.ui import command, environment, listen, start, stop
from study.plan.plan import make_plan


class Proxy(http.server.BaseHTTPRequestHandler):
    """A proxy that passes requests on to ``port`` and counts them."""

    protocol_version = "HTTP/1.1"
    port = 0
    count = 0

    def _pass(self) -> None:
        type(self).count += 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("host", "connection")
        }
        there.request(self.command, self.path, body, headers)
        answer = there.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        there.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def server(
    folder: Path, port: int, uri: str = "", workers: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the embedded server, or one of several workers over the database ``uri``.

    Returns when it answers.
    """
    listening = listen(port)
    words = [*command(str(folder / "artifacts"), listening, workers=workers), "--open"]
    process = start(words, environment(uri or f"sqlite:///{folder}/mlflow.db"), listening)
    try:
        while True:
            try:
                there = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
                there.request("GET", "/health")
                there.getresponse().read()
                break
            except OSError:
                time.sleep(0.05)
        yield process
    finally:
        stop(process)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def made_up(folder: Path, trials: int, reports: int, metrics: int) -> None:
    """Write a ledger with made-up trials."""
    settings = StudyConfig(
        name=folder.name,
        trial=DIGITS,
        rows=[RowConfig(label="a")],
        seeds=list(range(trials)),
        storage=str(folder.parent),
    )
    plan = make_plan(settings)
    sizes = dict.fromkeys(("train", "validation", "test"), 1)
    data = [{"name": "digits", "source": "made up", "digest": "d" * 64, "root": None, **sizes}]
    provenance = {
        "commit": "c0ffee", "dirty": False, "versions": {}, "python": "3", "platform": "Linux"
    }  # fmt: skip
    now = time.time()
    events: list[dict[str, Any]] = [
        {**plan.to_event(folder.name), "data": data, "provenance": provenance}
    ]
    for trial in plan.trials:
        events.append({"event": "started", "trial": trial.id})
        for epoch in range(1, reports + 1):
            values = {
                "validation/error": 0.5 / epoch,
                **{f"train/m{index}": index / epoch for index in range(metrics - 1)},
            }
            events.append({"event": "report", "trial": trial.id, "epoch": epoch, "metrics": values})
        events.append({"event": "finished", "trial": trial.id, "metrics": {"test/error": 0.1}})
    events.append({"event": "ended", "outcome": "finished"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(
        "".join(
            json.dumps({**event, "time": now + place * 1e-3}) + "\n"
            for place, event in enumerate(events)
        )
    )


def made_up_search(folder: Path) -> None:
    """Write 1,000 trials of a search over three keys, nine reports each."""
    space = {
        "optimizer.lr": {"loguniform": [0.01, 1.0]},
        "optimizer.momentum": {"uniform": [0.0, 0.9]},
        "batch_size": {"choice": [32, 64]},
    }
    from study.config import SearchConfig

    settings = StudyConfig(
        name="bench",
        trial=DIGITS,
        rows=[RowConfig(label="a"), RowConfig(label="b", overrides={"epochs": 4})],
        storage=str(folder.parent),
        space=space,
        search=SearchConfig(num_samples=500),
    )
    plan = make_plan(settings)
    made_up(folder, 1, 1, 1)
    first = json.loads((folder / FILE).read_text().splitlines()[0])
    events = [{**first, **plan.to_event(first["ledger"])}]
    for place, trial in enumerate(plan.trials):
        rate = trial.config.optimizer.lr
        events.append({"event": "started", "trial": trial.id})
        for epoch in range(1, 10):
            values = {
                "validation/error": 0.02 + 0.1 * abs(rate - 0.2) + 0.2 / epoch,
                "train/loss": 1 / epoch,
            }
            events.append({"event": "report", "trial": trial.id, "epoch": epoch, "metrics": values})
        events.append(
            {"event": "finished", "trial": trial.id, "metrics": {"test/error": 0.1 + place * 1e-6}}
        )
    (folder / FILE).write_text(
        "".join(
            json.dumps({**event, "time": first["time"] + n}) + "\n"
            for n, event in enumerate(events)
        )
    )
