"""Does what Docker Compose does with ``conf/cluster/compose.yaml``, on loopback without Docker.

Each service's own command line runs unchanged, except for the parts that need a container: the
names of services become addresses of 127.0.0.1, ``/run/secrets`` and volumes become folders, and
this checkout has the programs of the image. Other images are replaced: PostgreSQL by the tests'
own, the object store by moto's.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.study.servers import free_port

ROOT = Path(__file__).resolve().parents[5]
FILE = ROOT / "conf" / "cluster" / "compose.yaml"
ANSWERS = 300
"""Seconds to wait for a server."""
CONTAINERS_OWN = ("RAY_", "MLFLOW_", "AWS_", "PG", "LNS_STUDY_")
"""Prefixes of variables that a container does not get from its host."""
PROGRAMS = {
    "lns-study": "exec {python} -m study",
    "ray": "exec {python} -m ray.scripts.scripts",
    "python": "exec {python}",
    "versitygw": "exec {python} -m tests.study.ops.launch.machines.stand_in_store",
}
"""Programs of the images, and their replacements."""


@dataclass
class Host:
    """A machine on which Compose would run.

    Attributes:
        folder: folder with the secrets, the volumes and the programs.
        ports: port of 127.0.0.1 of each service and the port that it has in its container.
        started: processes of the services by name.
    """

    folder: Path
    ports: dict[tuple[str, int], int]
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.services: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
        for name in ("bin", "volumes", ".secrets"):
            (self.folder / name).mkdir()
        for name, words in PROGRAMS.items():
            program = self.folder / "bin" / name
            program.write_text(f'#!/bin/sh\n{words.format(python=sys.executable)} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        for volume in yaml.safe_load(FILE.read_text())["volumes"]:
            (self.folder / "volumes" / volume).mkdir()

    def secret(self, name: str) -> str:
        """Return a secret, made as the file's first lines say."""
        return (self.folder / ".secrets" / name).read_text()

    def address(self, service: str, port: int) -> str:
        """Return the address of a service from outside of its container."""
        return f"http://127.0.0.1:{self.ports[service, port]}"

    def here(self, text: str) -> str:
        """Return a word or variable of a service, with names that this machine can resolve."""
        for (service, port), own in self.ports.items():
            text = re.sub(rf"\b{service}:{port}\b", f"127.0.0.1:{own}", text)
            text = text.replace(f"@{service}/", f"@127.0.0.1:{own}/")
        text = text.replace("/run/secrets/", f"{self.folder}/.secrets/").replace("$$", "$")
        for volume in (v for each in self.services.values() for v in each.get("volumes", [])):
            name, _, place = volume.partition(":")
            text = re.sub(rf"(?<![\w/]){place}\b", f"{self.folder}/volumes/{name}", text)
        return text.replace("0.0.0.0", "127.0.0.1")

    def words(self, service: str, more: str = "") -> list[str]:
        """Return the command line of a service; ``more`` is appended."""
        known = self.services[service]
        every = [self.here(word) for word in (*known.get("entrypoint", []), *known["command"])]
        every[-1] = f"{every[-1].rstrip()} {more}".rstrip()
        return every

    def environment(self, service: str) -> dict[str, str]:
        """Return the variables of a service's container."""
        ours = {
            name: value for name, value in os.environ.items() if not name.startswith(CONTAINERS_OWN)
        }
        given = self.services[service].get("environment", {})
        return (
            ours
            | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
            | {"RAY_USAGE_STATS_ENABLED": "0", "LNS_STUDY_COMMAND": "lns-study"}
            | {name: self.here(str(value)) for name, value in given.items()}
        )

    def run(self, service: str) -> subprocess.CompletedProcess[str]:
        """Run a service that ends by itself."""
        return subprocess.run(
            self.words(service),
            env=self.environment(service),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=ANSWERS,
        )

    def start(self, service: str, more: str = "", asked: str = "", **variables: str) -> None:
        """Start a service, and return when ``asked`` answers."""
        with (self.folder / f"{service}.log").open("wb") as log:
            self.started[service] = subprocess.Popen(
                self.words(service, more),
                env=self.environment(service) | variables,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + ANSWERS
        while True:
            assert self.started[service].poll() is None, self.said(service)
            assert time.monotonic() < until, self.said(service)
            try:
                urllib.request.urlopen(asked, timeout=5).close()
            except urllib.request.HTTPError:
                return  # it asks for a login
            except OSError:
                time.sleep(0.2)
            else:
                return

    def said(self, service: str) -> str:
        """Return what a service has printed."""
        return (self.folder / f"{service}.log").read_text(errors="replace")

    def close(self) -> None:
        """End the services and all of their processes."""
        every = [psutil.Process(each.pid) for each in self.started.values() if each.poll() is None]
        every += [child for each in every for child in each.children(recursive=True)]
        for process in self.started.values():
            process.terminate()
        for process in psutil.wait_procs(every, timeout=20)[1]:
            process.kill()


def free_ports(*services: tuple[str, int]) -> dict[tuple[str, int], int]:
    """Return a free port for each port of a service."""
    return {each: free_port() for each in services}
