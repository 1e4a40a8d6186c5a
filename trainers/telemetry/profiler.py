"""Profiles: traces of chosen steps of a trial, by torch.profiler.

Each rank writes a trace and a table with its totals. ``profile.steps=[10, 14]`` records steps 10 to
13 (of the whole trial, counted from 0) of the ranks in ``profile.ranks``. A trace shows, on one
time line, the spans of the rank's code (``communication``: the collectives by name; ``schedule``
and ``stage``: a pipeline, whose bubbles are the gaps between its stages; ``forward``, ``backward``,
``update``), torch's operators, the LNS operators by name (``lns_ops::matmul``), and the kernels of
a GPU. The file is gzip-compressed JSON, which https://ui.perfetto.dev and chrome://tracing open
directly. A study keeps the files in ``profiles/TRIAL`` of its folder, with ``gang: train`` in
``train/TRIAL/profile``.

A recording ends at the end of its epoch at the latest. The table has a line for every name: number
of calls, own time on the CPU and on the GPU (without nested calls), and share of the total own
time.

torch's profiler is process-wide. If several trials run in one process, only one at a time is
recorded; the others run without it, and their tables say so.
"""

from __future__ import annotations

import gzip
import tempfile
import threading
from pathlib import Path

import torch

from trainers.config import ProfileConfig
from trainers.telemetry.spans import Spans

TABLE_ROWS = 40
_IN_USE = threading.Lock()


class Profiler:
    """The profiler of one worker of a trial.

    Args:
        config: the steps and ranks to record.
        rank: this worker's rank.
        device: this worker's device.
        spans: spans whose names appear in the trace.
    """

    def __init__(
        self, config: ProfileConfig, rank: int, device: torch.device, spans: Spans
    ) -> None:
        wanted = bool(config.steps) and (not config.ranks or rank in config.ranks)
        self._first, self._end = config.steps if wanted else (-1, -1)
        self._rank, self._device, self._spans = rank, device, spans
        self._running: torch.profiler.profile | None = None
        self._files: dict[str, bytes] = {}

    def step(self, number: int) -> None:
        """Start or stop the recording before step ``number``, if it is the first or the end."""
        if number == self._first:
            self._start()
        elif number == self._end:
            self.stop()

    def stop(self) -> None:
        """End the current recording, if there is one."""
        if self._running is None:
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._running.stop()
        self._spans.naming = False
        _IN_USE.release()
        self._keep(self._running)
        self._running = None

    def take(self) -> dict[str, bytes]:
        """Return the files, by name, of the recordings since the last call."""
        files, self._files = self._files, {}
        return files

    def _start(self) -> None:
        """Start a recording, or write in the summary that another trial uses the profiler."""
        if not _IN_USE.acquire(blocking=False):
            self._files[self._name("summary.txt")] = (
                b"Not recorded: another trial of this process was using torch's profiler.\n"
            )
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities, record_shapes=True)
        self._spans.naming = True
        self._running.start()

    def _keep(self, profile: torch.profiler.profile) -> None:
        """Store the compressed trace and the table of a finished recording."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            trace = path.read_bytes()
        self._files[self._name("trace.json.gz")] = gzip.compress(trace, compresslevel=6, mtime=0)
        self._files[self._name("summary.txt")] = summary(profile, self._end - self._first).encode()

    def _name(self, suffix: str) -> str:
        return f"rank-{self._rank}.{suffix}"


def summary(profile: torch.profiler.profile, steps: int) -> str:
    """Return the table of a profile of ``steps`` steps, sorted by own time, longest first."""
    rows = [
        (event.key, event.count, event.self_cpu_time_total, event.self_device_time_total)
        for event in profile.key_averages()
    ]
    rows.sort(key=lambda row: -(row[2] + row[3]))
    everything = sum(row[2] + row[3] for row in rows) or 1.0
    head = (
        f"{steps} steps; own time, in milliseconds a step\n{'name':60} {'calls':>8} {'CPU':>10}"
        f" {'GPU':>10} {'share':>7}\n"
    )
    lines = [
        f"{name[:60]:60} {calls / steps:8.1f} {cpu / 1e3 / steps:10.3f} {gpu / 1e3 / steps:10.3f}"
        f" {(cpu + gpu) / everything:7.1%}\n"
        for name, calls, cpu, gpu in rows[:TABLE_ROWS]
    ]
    return head + "".join(lines)
