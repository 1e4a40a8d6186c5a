"""A campaign of places: the folder of a running study is moved, copied, removed or unmounted at a
random moment, and processes die as well.

Every run is a real command line with eight slots, all of them in use, on this machine's own engine:
processes, gangs, a process that trials share, or a network of the user's. The seed chooses what
happens to the study's place, whether a process is killed (SIGKILL) before, with or after it, and
the moments. A command whose study is gone must end by itself with exit code 1, say what was lost
and what to do, and leave no process; then that is done, and the same command is given again: where
the study is now, or where it was. Then every trial has finished once, with every epoch reported
once and every figure as in a run that nobody disturbed; MLflow has all of it, and what another copy
sent to it is as it was.

The first seeds, one a change of place, are in the slow tier; ``python -m pytest
tests/faults/test_places.py -m slow --seeds 20-39`` runs those.
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
from tests.study.launch.machines.hosts import weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LEFT_SECONDS = 30.0
"""Longest time that a process may outlive the command that started it: where that was killed, what
feeds MLflow sends what is left."""
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
    """A folder from which the study is run, with a network of the user's in kind ``own``."""
    folder.mkdir(exist_ok=True)
    own = STUDY.replace("model: {hidden: [16]}", "model: {name: net.py:net}")
    (folder / "faults.yaml").write_text(own if kind == "own" else STUDY)
    (folder / "net.py").write_text(NET)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wanted]:
    """What comes out where nothing happens, by kind of process."""
    found: dict[str, Wanted] = {}
    for kind, overrides in KINDS.items():
        folder = work_folder(tmp_path_factory.mktemp("undisturbed") / "work", kind)
        assert wait(command(folder, "tracking_uri=none", *overrides), folder) == 0
        storage = folder / "studies" / "faults"
        found[kind] = fold(read_ledger(storage)), weights(storage)
    return found


@dataclass
class Scene:
    """A study that is run, where it is now, and what has happened to it.

    Attributes:
        top: folder of all of it.
        here: folder from which the study is run now.
        place: what happens to the study's folder.
        kind: what trains its trials.
        chance: makes the choices.
        lost: whether checkpoints are gone.
        printed: number of characters printed before the command that runs.
        children: descendants of that command.
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
        """The study's folder now."""
        return self.here / "studies" / "faults"

    @property
    def mount_point(self) -> Path:
        """Where a file system is mounted, if the place is one."""
        return self.folder if self.place.endswith("own folder") else self.folder.parent

    @property
    def disk(self) -> Path | None:
        """The folder that is mounted; None for a file system in memory."""
        return None if self.place.endswith("tmpfs") else self.top / "disk"

    def start(self) -> subprocess.Popen[bytes]:
        """Give the command."""
        self.printed, self.children = len(self._all_said()), {}
        return command(self.here, f"tracking_uri={self.tracking}", *KINDS[self.kind])

    def said(self) -> str:
        """What the last command printed."""
        return self._all_said()[self.printed :]

    def _all_said(self) -> str:
        path = self.here / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_a_moment(self, process: subprocess.Popen[bytes], faults: int) -> None:
        """Wait for a moment at which to make the first of so many faults."""
        most = EPOCHS[self.kind] - LAST - reports(self.here)
        more = self.chance.randrange(1, max(2, most // faults))
        assert wait_for_reports(self.here, process, more, self.children), self.said()
        time.sleep(self.chance.random() * 0.3)

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a command's end; return its exit code. It leaves no process."""
        try:
            code = wait(process, self.here)
            _, alive = psutil.wait_procs(list(self.children.values()), timeout=LEFT_SECONDS)
            left = {process.pid: _described(process) for process in [*alive, *_naming(self.here)]}
            assert not left, f"{left} outlived a command that ended with {code}"
        finally:
            self.stop(process)
        return code

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End a command and all of its processes, whatever has happened."""
        end(process)
        for child in [*self.children.values(), *_naming(self.here)]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{' '.join(process.cmdline())} ({process.status()}, of {process.ppid()})"
    return "it has just ended"


def _naming(folder: Path) -> list[psutil.Process]:
    """Processes that name a folder in their command or work in it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join([process.cwd(), *process.cmdline()]):
                found.append(process)
    return found


@contextmanager
def storage_of(scene: Scene) -> Iterator[None]:
    """The study's storage, unmounted at the end."""
    if not scene.place.startswith("unmounted"):
        yield
        return
    for folder in (scene.mount_point, scene.top / "disk"):
        folder.mkdir(parents=True)
    with mounted(scene.mount_point, scene.disk):
        yield


def change(scene: Scene) -> None:
    """Do to the study's place what is planned."""
    there = scene.top / "there"
    if scene.place == "moved with its working folder":
        scene.here = scene.here.rename(there)
    elif scene.place.startswith("moved"):
        (work_folder(there, scene.kind) / "studies").mkdir()
        scene.folder.rename(there / "studies" / "faults")
    elif scene.place.startswith("copied"):
        (work_folder(there, scene.kind) / "studies").mkdir()
        words = ["cp", "-r", str(scene.folder), str(there / "studies")]
        subprocess.run(words, capture_output=True, check=False)  # what goes away meanwhile is not
    elif scene.place == "removed":
        until = time.monotonic() + 10
        while scene.folder.exists():  # processes write there
            shutil.rmtree(scene.folder, ignore_errors=True)
            assert time.monotonic() < until, f"{scene.folder} is made anew again and again"
    else:
        unmount(scene.mount_point)


def put_back(scene: Scene, code: int) -> None:
    """Do what the command said, or what is to be done where it died before it could."""
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
    """All that MLflow has of each run: its state, metrics, params and tags."""
    database = tracking.removeprefix("sqlite:///")
    found: dict[str, list[Any]] = {}
    with closing(sqlite3.connect(database)) as connection:
        if not connection.execute("SELECT name FROM sqlite_master").fetchall():
            return {}  # whoever was to make it was killed before
        for table in ("runs", "metrics", "params", "tags"):
            cursor = connection.execute(f"SELECT * FROM {table}")
            place = [column[0] for column in cursor.description].index("run_uuid")
            for row in cursor:
                found.setdefault(row[place], []).append((table, *row))
    return {run: sorted(rows, key=repr) for run, rows in found.items()}


def run_beside(copy: Scene) -> None:
    """Run a copy, once, to its end; what the original alone sent to MLflow stays as it was.

    Runs that hold no more than the copy's ledger has may be either's: who goes on first keeps them.
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
    """Make a fault: a process that is not there yet is waited for."""
    if fault == "place":
        change(scene)
        return
    while process.poll() is None and not kill(process, fault, scene.chance):
        time.sleep(0.01)


def play(scene: Scene, faults: list[list[str]]) -> Scene | None:
    """Give the command, make one fault after another, put back what they took away, and give the
    command until it ends by itself; return the copy that was run, if there is one."""
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
    """Take the seeds of the option, or one a place."""
    if "seed" in metafunc.fixturenames:
        given = metafunc.config.getoption("--seeds") or f"0-{len(PLACES) - 1}"
        first, _, last = given.partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


def planned(chance: random.Random) -> list[list[str]]:
    """Faults, one after another, some of them together."""
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
            assert study(each.here, "reconcile", "--check", "faults", *ends) == 0
