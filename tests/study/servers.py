"""A real MLflow server on loopback, that can be killed and started again at the same port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from study.ui import ENVIRONMENT, command, stop


class Server:
    """One over its own database in ``folder``; ``uri`` says where. Not running until :meth:`start`."""

    def __init__(self, folder: Path, database: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self._database = database or f"sqlite:///{folder}/mlflow.db"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(
            command(self._database, self.folder / "artifacts", self.port),
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for _ in range(900):
            assert self._process.poll() is None
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"{self.uri} does not answer")

    def kill(self) -> None:
        """As a power cut would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Politely."""
        if self._process is not None:
            stop(self._process)
            self._process = None
