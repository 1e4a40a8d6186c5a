"""Moves, copies, removes or unmounts the folder of a running study at a random moment, and kills
processes too.

Every run is a real command line that uses all of its eight slots with the local engine: processes,
gangs, a process that trials share, or a user's network. The seed chooses the change of the folder,
its moment, and whether a process is killed (SIGKILL) before, with or after it.

A command whose study is gone must end by itself with exit code 1, print the losses and what to
do, and leave no process. The test follows this advice and runs the same command again, in the
study's new place or the old one. Then every trial must have finished once, with each epoch reported
once and the same metrics as in a run without faults. MLflow must be complete, and data that another
copy has sent must be unchanged.

The slow tests run the first seeds, one per change of place; ``python -m pytest
tests/faults/test_places.py -m slow --seeds 20-39`` runs other seeds.
"""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.ledger.log import FILE, read_ledger
from study.ledger.state import fold
from study.tracking.payload import MARK_TAG
from tests.faults.test_campaign import (
    GANG,
    LAST,
    PACKED,
    STUDY,
    Wanted,
    check,
    command,
    end,
    kill,
    reports,
    study,
    wait,
    wait_for_reports,
)
from tests.mounts import mount, mounted, unmount
from tests.study.ops.launch.machines.hosts import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LEFT_SECONDS = 30.0
"""Maximum time for which a process may outlive its command, in seconds. After the command was
killed, the process that writes to MLflow still sends its remaining data."""
PLACES = (
    "moved to another storage",
    "moved with its working folder",
    "moved and back",
    "copied, the copy runs after it",
    "copied, both run",
    "copied, the copy runs before it goes on",
    "removed",
    "unmounted, a tmpfs",
    "unmounted, a bind mount",
    "unmounted, its own folder",
)
KILLS = ("driver", "worker", "forkserver", "guard")
KINDS: dict[str, list[str]] = {"processes": [], "gangs": GANG, "packed": PACKED, "own": []}
EPOCHS = {"processes": 72, "gangs": 36, "packed": 72, "own": 72}
NET = """
import time
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)

def net():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""
GONE = r"storage: \S*ledger\.jsonl: was removed, moved, unmounted or replaced while the study ran; "


def work_folder(folder: Path, kind: str) -> Path:
    """Create a working folder with the study's file; kind ``own`` uses a user's network."""
    folder.mkdir(exist_ok=True)
    own = STUDY.replace("model: {hidden: [16]}", "model: {name: net.py:net}")
    (folder / "faults.yaml").write_text(own if kind == "own" else STUDY)
    (folder / "net.py").write_text(NET)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wanted]:
    """Return the results of runs without faults, by kind of process."""
    found: dict[str, Wanted] = {}
    for kind, overrides in KINDS.items():
        folder = work_folder(tmp_path_factory.mktemp("undisturbed") / "work", kind)
        assert wait(command(folder, "tracking_uri=none", *overrides), folder) == 0
        storage = folder / "studies" / "faults"
        found[kind] = fold(read_ledger(storage)), weights(storage)
    return found


@dataclass
class Scene:
    """A running study: its current place and the changes to it.

    Attributes:
        top: folder of all files of the test.
        here: current working folder of the study.
        place: change of the study's folder, from :data:`PLACES`.
        kind: kind of process that trains its trials, from :data:`KINDS`.
        chance: random generator for all choices.
        lost: whether checkpoints are lost.
        printed: number of characters that earlier commands have printed.
        children: descendants of the running command.
    """

    top: Path
    here: Path
    place: str
    kind: str
    chance: random.Random
    lost: bool = False
    printed: int = 0
    children: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def tracking(self) -> str:
        return f"sqlite:///{self.top}/mlflow.db"

    @property
    def folder(self) -> Path:
        """Current folder of the study."""
        return self.here / "studies" / "faults"

    @property
    def mount_point(self) -> Path:
        """Mount point, for changes that unmount a file system."""
        return self.folder if self.place.endswith("own folder") else self.folder.parent

    @property
    def disk(self) -> Path | None:
        """Folder to bind-mount; None for a tmpfs."""
        return None if self.place.endswith("tmpfs") else self.top / "disk"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command."""
        self.printed, self.children = len(self._all_said()), {}
        return command(self.here, f"tracking_uri={self.tracking}", *KINDS[self.kind])

    def said(self) -> str:
        """Return the output of the last command."""
        return self._all_said()[self.printed :]

    def _all_said(self) -> str:
        path = self.here / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_a_moment(self, process: subprocess.Popen[bytes], faults: int) -> None:
        """Wait until it is time for the first of the given number of faults."""
        most = EPOCHS[self.kind] - LAST - reports(self.here)
        more = self.chance.randrange(1, max(2, most // faults))
        assert wait_for_reports(self.here, process, more, self.children), self.said()
        time.sleep(self.chance.random() * 0.3)

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a command's end, check that no process is left, and return the exit code."""
        try:
            code = wait(process, self.here)
            _, alive = psutil.wait_procs(list(self.children.values()), timeout=LEFT_SECONDS)
            left = {process.pid: _described(process) for process in [*alive, *_naming(self.here)]}
            assert not left, f"{left} outlived a command that ended with {code}"
        finally:
            self.stop(process)
        return code

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a command and all processes that it may have left."""
        end(process)
        for child in [*self.children.values(), *_naming(self.here)]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{' '.join(process.cmdline())} ({process.status()}, of {process.ppid()})"
    return "it has just ended"


def _naming(folder: Path) -> list[psutil.Process]:
    """Return processes whose command line or working folder contains ``folder``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join([process.cwd(), *process.cmdline()]):
                found.append(process)
    return found


@contextmanager
def storage_of(scene: Scene) -> Iterator[None]:
    """Mount the study's storage if the scene needs it; unmount it at the end."""
    if not scene.place.startswith("unmounted"):
        yield
        return
    for folder in (scene.mount_point, scene.top / "disk"):
        folder.mkdir(parents=True)
    with mounted(scene.mount_point, scene.disk):
        yield


def change(scene: Scene) -> None:
    """Apply the planned change to the study's folder."""
    there = scene.top / "there"
    if scene.place == "moved with its working folder":
        scene.here = scene.here.rename(there)
    elif scene.place.startswith("moved"):
        (work_folder(there, scene.kind) / "studies").mkdir()
        scene.folder.rename(there / "studies" / "faults")
    elif scene.place.startswith("copied"):
        (work_folder(there, scene.kind) / "studies").mkdir()
        words = ["cp", "-r", str(scene.folder), str(there / "studies")]
        subprocess.run(words, capture_output=True, check=False)  # files may vanish meanwhile
    elif scene.place == "removed":
        until = time.monotonic() + 10
        while scene.folder.exists():  # processes write there
            shutil.rmtree(scene.folder, ignore_errors=True)
            assert time.monotonic() < until, f"{scene.folder} is created again and again"
    else:
        unmount(scene.mount_point)


def put_back(scene: Scene, code: int) -> None:
    """Follow the advice that the command printed, or the usual one if it was killed first."""
    said, there = scene.said(), scene.top / "there"
    if code != -9:
        assert code == 1, f"exit code {code}: {said}"
        assert "feeds MLflow died" not in said, said
        assert re.search(GONE, said), said
    if scene.place != "moved with its working folder" and scene.folder != scene.mount_point:
        assert not scene.folder.exists(), sorted(scene.folder.rglob("*"))
    assert scene.folder != scene.mount_point or not any(scene.folder.iterdir())
    if scene.place.startswith("moved"):
        if code != -9:
            assert f"the ledger is {there}/studies/faults/{FILE} now, complete" in said
        if scene.place == "moved and back":
            (there / "studies" / "faults").rename(scene.folder)
        elif scene.place == "moved to another storage":
            scene.here = there
        return
    named = re.findall(rf"the last complete copy of the ledger is (\S+/{FILE}): put it", said)
    assert len(named) == (code != -9), said
    mountable = scene.place.startswith("unmounted") and scene.disk is not None
    if mountable and (code == -9 or scene.chance.random() < 0.5):
        mount(scene.mount_point, scene.disk)
    else:
        scene.lost = True
        for copy in named:
            scene.folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(copy, scene.folder)
    for copy in named:
        shutil.rmtree(Path(copy).parent)


def stored(tracking: str) -> dict[str, list[Any]]:
    """Return all rows of each MLflow run: its state, metrics, params and tags."""
    database = tracking.removeprefix("sqlite:///")
    found: dict[str, list[Any]] = {}
    with closing(sqlite3.connect(database)) as connection:
        if not connection.execute("SELECT name FROM sqlite_master").fetchall():
            return {}  # the process that creates it was killed first
        for table in ("runs", "metrics", "params", "tags"):
            cursor = connection.execute(f"SELECT * FROM {table}")
            place = [column[0] for column in cursor.description].index("run_uuid")
            for row in cursor:
                found.setdefault(row[place], []).append((table, *row))
    return {run: sorted(rows, key=repr) for run, rows in found.items()}


def run_beside(copy: Scene) -> None:
    """Run a copy to its end, once; MLflow runs that only the original has sent must not change.

    A run with no more data than the copy's ledger could belong to either; the first study that
    continues keeps it.
    """
    if (copy.here / "said").exists():
        return
    known, before = fold(read_ledger(copy.folder)), stored(copy.tracking)
    process = copy.start()
    try:
        assert copy.ended(process) == 0, copy.said()
    finally:
        copy.stop(process)
    after = stored(copy.tracking)
    assert before.keys() <= after.keys()
    marks = {
        run: [row[2] for row in rows if row[:2] == ("tags", MARK_TAG)]
        for run, rows in before.items()
    }
    originals = [run for run in before if not any(map(known.is_own, marks[run]))]
    assert {run: after[run] for run in originals} == {run: before[run] for run in originals}


def make(scene: Scene, process: subprocess.Popen[bytes], fault: str) -> None:
    """Inject a fault; wait for the process to kill if it does not exist yet."""
    if fault == "place":
        change(scene)
        return
    while process.poll() is None and not kill(process, fault, scene.chance):
        time.sleep(0.01)


def play(scene: Scene, faults: list[list[str]]) -> Scene | None:
    """Run the command with one group of faults after another until it finishes by itself.

    After each group, the study's folder is restored. Returns the copy that was run, or None.
    """
    process: subprocess.Popen[bytes] | None = None
    beside: subprocess.Popen[bytes] | None = None
    copied, copy = scene.place.startswith("copied"), None
    try:
        for number, together in enumerate(faults):
            process = process or scene.start()
            scene.wait_for_a_moment(process, len(faults) - number)
            for fault in together:
                make(scene, process, fault)
            if copied and "place" in together:
                copy = dataclasses.replace(scene, here=scene.top / "there", children={})
                if scene.place.endswith("both run"):
                    beside = copy.start()
                elif scene.place.endswith("goes on") and "driver" not in together:
                    process.send_signal(signal.SIGINT)
                    together = ["driver"]
            if "driver" in together or ("place" in together and not copied):
                code, process = scene.ended(process), None
                if not copied and "place" in together:
                    put_back(scene, code)
                elif copy is not None and scene.place.endswith("goes on"):
                    run_beside(copy)
        process = process or scene.start()
        assert scene.ended(process) == 0, scene.said()
        if copy is not None and beside is None:
            run_beside(copy)
        elif copy is not None and beside is not None:
            assert copy.ended(beside) == 0, copy.said()
    finally:
        for each, running in ((scene, process), (copy, beside)):
            if each is not None and running is not None:
                each.stop(running)
    return copy


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with the seeds of ``--seeds``, or with one seed per change of place."""
    if "seed" in metafunc.fixturenames:
        given = metafunc.config.getoption("--seeds") or f"0-{len(PLACES) - 1}"
        first, _, last = given.partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


def planned(chance: random.Random) -> list[list[str]]:
    """Choose groups of faults; the faults of a group occur together."""
    killed = chance.choice(KILLS)
    return chance.choice(
        [
            [["place"]],
            [["place", killed]],
            [[killed, "place"]],
            [[killed], ["place"]],
            [["place"], [killed]],
        ]
    )


def test_where_a_study_is_changes_nothing_of_it(
    seed: int, tmp_path: Path, undisturbed: dict[str, Wanted]
) -> None:
    chance = random.Random(seed)
    place, kind = PLACES[seed % len(PLACES)], chance.choice(list(KINDS))
    faults = planned(chance)
    scene = Scene(tmp_path, work_folder(tmp_path / "work", kind), place, kind, chance)
    print(f"seed {seed}: {place}, {kind}, {faults}")
    with storage_of(scene):
        copy = play(scene, faults)
        for each in filter(None, (scene, copy)):
            check(each.here, str(faults), undisturbed[kind], lost=each.lost)
            ends = ("--tracking-uri", scene.tracking)
            assert study(each.here, "mlflow", "verify", "faults", *ends) == 0
