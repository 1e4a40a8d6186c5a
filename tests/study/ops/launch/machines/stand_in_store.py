"""Replaces ``versitygw`` on loopback: takes its options, and runs moto's S3 server with a bucket
for each folder, as its posix backend has."""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

PORT = "TEST_STORE_PORT"


def main() -> None:
    """Run the server until it is ended."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--health", required=True)
    options.add_argument("backend", choices=["posix"])
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    assert os.environ["ROOT_ACCESS_KEY"]
    assert len(os.environ["ROOT_SECRET_KEY"]) == 64
    port = os.environ[PORT]
    if os.fork() == 0:
        make_buckets(port, [each.name for each in given.folder.iterdir() if each.is_dir()])
        os._exit(0)
    words = ["-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    os.execv(sys.executable, [sys.executable, *words])


def make_buckets(port: str, names: list[str]) -> None:
    """Make buckets as soon as the server answers."""
    for name in names:
        there = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(there, timeout=2).close()
                break
            time.sleep(0.1)


if __name__ == "__main__":
    main()
