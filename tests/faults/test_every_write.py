"""Kills processes of a study after each write to its ledger; the study must lose and repeat
nothing.

A study of two trials runs as a command, once for each write. Right after that write, the main
process is killed, or all processes of trials. In a variant, the main process is killed with half of
the write on disk. Then the same command must finish the study with the same results as without
faults.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from study.ledger.log import read_ledger
from study.ledger.state import fold
from tests.faults.test_campaign import Wanted, check, end, python, wait
from tests.study.ops.launch.machines.hosts import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STUDY = """
name: faults
trial:
  {data: {name: digits, validation_size: 300}, model: {hidden: [16]}, epochs: 2, batch_size: 32}
rows: [{label: lns, overrides: {precision.format: lns12, precision.kahan_sum: true}}]
seeds: [0, 1]
cpus: 2
tracking_uri: none
"""
RUN = """
import os, signal, sys
import psutil
from study.cli.entry import main
from study.ledger.log import Ledger

victim, last, write, count = sys.argv[1], int(sys.argv[2]), Ledger._write, 0

def write_and_kill(ledger, lines):
    global count
    count += 1
    if count == last and victim == "driver in a write":
        ledger._file.write(lines[:len(lines) // 2])
        ledger._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    write(ledger, lines)
    if count == last and victim == "driver":
        os.kill(os.getpid(), signal.SIGKILL)
    if count == last and victim == "trials":
        for guard in psutil.Process().children():
            for server in guard.children():
                for worker in server.children():
                    worker.kill()

Ledger._write = write_and_kill
code = main(["run", "faults.yaml", "--plain"])
print("writes:", count, flush=True)
sys.exit(code)
"""


def command(folder: Path, victim: str, write: int) -> subprocess.Popen[bytes]:
    """Start the study; ``victim`` is killed at the given write (0: never)."""
    return python(folder, "-c", RUN, victim, str(write))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wanted, int]:
    """Return the results of a run without faults, and its number of writes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "faults.yaml").write_text(STUDY)
    assert wait(command(folder, "nobody", 0), folder) == 0
    storage = folder / "studies" / "faults"
    writes = int((folder / "said").read_text().rsplit("writes: ")[-1])
    return (fold(read_ledger(storage)), weights(storage)), writes


@pytest.mark.parametrize("victim", ["driver", "driver in a write", "trials"])
def test_who_dies_between_any_two_writes_costs_nothing(
    victim: str, tmp_path: Path, undisturbed: tuple[Wanted, int]
) -> None:
    wanted, writes = undisturbed
    # Plan, slots, starts, epochs and ends of both trials, and the study's end. Events that occur
    # together are written together, so the number of writes varies.
    assert writes >= 5
    for write in range(1, writes + 1):
        folder = tmp_path / str(write)
        folder.mkdir()
        (folder / "faults.yaml").write_text(STUDY)
        for wanted_code in [0] if victim == "trials" else [-signal.SIGKILL, 0]:
            process = command(folder, victim, write if wanted_code or victim == "trials" else 0)
            try:
                code = wait(process, folder)
            finally:
                end(process)
            said = f"{victim}, write {write}:\n{(folder / 'said').read_text()}"
            if wanted_code and code == 0 and int(said.rsplit("writes: ")[-1]) < write:
                break  # this time several events were written at once
            assert code == wanted_code, said
        check(folder, said, wanted)
