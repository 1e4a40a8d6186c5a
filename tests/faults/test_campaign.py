"""Fault injection at random moments of a running study; the study must lose and repeat nothing.

Every run is a real command line that uses all of its eight slots. The seed chooses the moment of
one of these faults:

- one process is killed (SIGKILL): the study's main process, a trial's process, a rank of a gang,
  the process that packed trials share, the process that forks workers, its guard, or, on a Ray
  cluster of three nodes, a node's raylet or agents;
- the storage, a separate file system, is full until the command has ended;
- the main process is killed, and a line of the ledger, a checkpoint or MLflow's database is
  damaged.

If the command ends because of the fault, the same command is run again until it finishes; a damaged
ledger is repaired first, as the command asks. Then every trial must have finished once, with each
epoch reported once and the same metrics as in a run without faults, and MLflow must be complete.

A study with Ray Tune has two more faults: killing the actor that supervises a trial, and killing
the actor that has the processes of a node.

The slow tests run the first seeds, one per fault; ``python -m pytest
tests/faults/test_campaign.py -m slow --seeds 20-39`` runs other seeds.

A command counts as hanging if the ledger gets no event for :data:`STILL_SECONDS`. The total
duration is not limited, because it depends on the machine and its load.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from study.evidence.rerun import differences
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, StudyState, fold
from tests.mounts import mounted
from tests.study.ops.launch.machines.hosts import weights
from tests.study.raylets import cluster_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAST = 10
"""Number of epochs at the end of a study without faults, so that a fault occurs before the end."""
STILL_SECONDS = 180.0
"""Maximum time between two events in the ledger, including starts and drawing of the report.

Four gangs of Ray Train import torch in some 20 processes: 72 s on two busy cores.
"""
ON_CLUSTER, DAMAGE = ("raylet", "agents"), ("ledger", "checkpoint", "database")
FAULTS = (
    "driver",
    "trial",
    "rank",
    "raylet",
    "forkserver",
    "driver twice",
    "host",
    "full",
    *DAMAGE,
    "agents",
    "guard",
)
STUDY = """
name: faults
trial:
  {data: {name: digits, validation_size: 300}, model: {hidden: [16]}, epochs: 6, batch_size: 32}
rows:
  - {label: float32, overrides: {precision.format: float32}}
  - {label: lns, overrides: {precision.format: lns12, precision.kahan_sum: true}}
seeds: [0, 1, 2, 3, 4, 5]
cpus: 8
"""
BY_RAY = (
    "trial", "supervisor", "process host", "rank", "driver", "forkserver", "guard", "driver twice",
)  # fmt: skip
"""Faults of a study with Ray Tune on its own Ray cluster."""
ACTORS = {"supervisor": "ray::TrialSupervisor", "process host": "ray::ProcessHost"}
EPOCHS = {False: 72, True: 36}
"""Epochs of the study in all, and of the one of gangs."""
Wanted: TypeAlias = tuple[StudyState, dict[str, list[int | str]]]
GANG = ["trial.workers=2", "rows=[{label: lns, overrides: {precision.format: lns12}}]"]
PACKED = ["executor=packed"]


def command(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start the study."""
    return python(folder, "-m", "study", "run", "faults.yaml", "--plain", *overrides)


def python(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a Python process; its output is appended to the file ``said``."""
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Wanted]:
    """Return the results of runs without faults, with one process per trial and with gangs."""
    states: dict[bool, Wanted] = {}
    for gang in (False, True):
        folder = tmp_path_factory.mktemp("undisturbed")
        (folder / "faults.yaml").write_text(STUDY)
        assert wait(command(folder, "tracking_uri=none", *(GANG if gang else [])), folder) == 0
        storage = folder / "studies" / "faults"
        states[gang] = fold(read_ledger(storage)), weights(storage)
    return states


def family(process: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    """Yield a command's living descendants, including Ray's processes in other process groups."""
    try:
        yield from psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return


@contextmanager
def small_storage(folder: Path) -> Iterator[None]:
    """Mount a file system of 4 MB for the studies in ``folder``."""
    storage = folder / "studies"
    storage.mkdir()
    with mounted(storage, size="4m"):
        yield


def fill(storage: Path) -> None:
    """Fill a file system completely."""
    with (storage / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def damage(fault: str, chance: random.Random, storage: Path) -> None:
    """Damage a file as a faulty disk would.

    Changes bytes in a line of the ledger, in a checkpoint or in many places of MLflow's database,
    or removes the database.
    """
    if fault == "database":
        if chance.random() < 0.5:
            remove_database(storage.parent)
            return
        for path in storage.parent.glob("mlflow.db*"):
            content = bytearray(path.read_bytes())
            for _ in range(100 if content else 0):
                content[chance.randrange(len(content))] ^= 0xFF
            path.write_bytes(content)
        return
    ledger = storage / "faults" / "ledger.jsonl"
    path = (
        ledger
        if fault == "ledger"
        else chance.choice(sorted((storage / "faults" / "checkpoints").glob("*/*/tensors-*")))
    )
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content) - 1)
    content[place] = ord("#") if content[place] != ord("#") else ord("!")
    path.write_bytes(content)


def remove_database(folder: Path) -> None:
    for path in folder.glob("mlflow.db*"):
        path.unlink()


def rename_database(folder: Path) -> None:
    for path in folder.glob("mlflow.db*"):
        path.rename(folder / f"damaged.{path.name}")


def study(folder: Path, *words: str) -> int:
    """Run another ``lns-study`` command; return its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "study", *words],
        cwd=folder,
        capture_output=True,
        timeout=300,
        check=False,
    )
    return done.returncode


def make(
    process: subprocess.Popen[bytes], fault: str, chance: random.Random, storage: Path, cluster: Any
) -> bool:
    """Inject the fault; return False if the process to kill does not exist now."""
    if fault in DAMAGE:
        end(process)
        damage(fault, chance, storage)
        return True
    if fault == "agents":
        raylet = psutil.Process(
            chance.choice(list(cluster.worker_nodes)).all_processes["raylet"][0].process.pid
        )
        agents = [each for each in raylet.children() if "agent" in " ".join(each.cmdline()).lower()]
        for agent in agents:
            agent.kill()
        return bool(agents)
    if fault == "full":
        fill(storage)
        return True
    if fault == "raylet":
        cluster.remove_node(chance.choice(list(cluster.worker_nodes)), allow_graceful=False)
        return True
    return kill(process, fault, chance)


def kill(process: subprocess.Popen[bytes], fault: str, chance: random.Random) -> bool:
    """Kill a process of the kind that the fault names; return False if none exists now."""
    if fault.startswith("driver"):
        process.kill()
        return True
    try:
        if fault in ACTORS:
            actors = [each for each in family(process) if _is_actor(each, ACTORS[fault])]
            if actors:
                chance.choice(actors).kill()
            return bool(actors)
        guards = [child for child in family(process) if _guards(child)]
        servers = [server for guard in guards for server in guard.children()]
        found = {"guard": guards, "forkserver": servers}.get(
            fault, [worker for server in servers for worker in server.children()]
        )
        if found:
            chance.choice(found).kill()
    except psutil.NoSuchProcess:  # it has just ended
        return False
    return bool(found)


def _is_actor(process: psutil.Process, title: str) -> bool:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).startswith(title)
    return False


def _guards(process: psutil.Process) -> bool:
    """Return whether a process is the guard, the parent of the process that forks workers."""
    try:
        return "from trainers.workers.fork_server" in " ".join(process.cmdline()) and not _guards(
            process.parent()
        )
    except psutil.NoSuchProcess:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its descendants; Ray's processes get 20 s to end by themselves."""
    left = list(family(process))
    if process.poll() is None:
        process.kill()
    process.wait()
    _, alive = psutil.wait_procs(left, timeout=20)
    for child in alive:
        child.kill()


def run_with_fault(
    folder: Path,
    fault: str,
    chance: random.Random,
    overrides: list[str],
    tracking: str,
    cluster: Any,
    epochs: int,
) -> None:
    """Run the command until it finishes by itself; inject the fault before the last epochs."""
    faults, planned = 0, 2 if "twice" in fault else 1
    for _ in range(6):
        process = command(folder, f"tracking_uri={tracking}", *overrides)
        children: dict[int, psutil.Process] = {}
        made = False
        try:
            most = epochs - LAST - reports(folder)
            if faults < planned and wait_for_reports(
                folder, process, chance.randrange(1, max(2, most // (planned - faults))), children
            ):
                time.sleep(chance.random() * 0.3)
                while process.poll() is None and not (
                    made := make(process, fault, chance, folder / "studies", cluster)
                ):
                    time.sleep(0.01)
                faults += made
            code = wait(process, folder)
        finally:
            end(process)
            (folder / "studies" / "filler").unlink(missing_ok=True)
            for child in children.values():
                if child.is_running():
                    child.kill()
        if code == 0:
            assert faults == planned, f"{fault}: it was made {faults} times"
            return
        if code == 2 and fault == "ledger":
            repaired = study(folder, "doctor", "faults", "--repair", "--tracking-uri", tracking)
            assert repaired in (0, 1)  # 1: some lines could not be recovered
        if code in (1, 2) and fault == "database":  # as the command's message asks
            rename_database(folder)
    said = (folder / "said").read_text()
    raise AssertionError(f"{fault}: the command did not end by itself; it said\n{said}")


def reports(folder: Path) -> int:
    """Return the number of epochs in the ledger."""
    path = folder / "studies" / "faults" / "ledger.jsonl"
    return path.read_bytes().count(b'"report"') if path.exists() else 0


class Still:
    """Measures the time without progress of a command in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size, self._since = -1, time.monotonic()

    def check(self) -> None:
        """Fail if the ledger has not grown for :data:`STILL_SECONDS`."""
        path = self._folder / "studies" / "faults" / "ledger.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        still = time.monotonic() - self._since
        assert still < STILL_SECONDS, (
            f"no event for {still:.0f} s: {lines(self._folder)[-1:]}; it said\n"
            + (self._folder / "said").read_text()
        )


def wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Wait for a command's end while its ledger grows; return its exit code."""
    still = Still(folder)
    while (code := process.poll()) is None:
        still.check()
        time.sleep(0.05)
    return code


def wait_for_reports(
    folder: Path, process: subprocess.Popen[bytes], more: int, children: dict[int, psutil.Process]
) -> bool:
    """Return whether the given number of epochs was reported before the command ended.

    Records the command's descendants while waiting.
    """
    still, begun = Still(folder), reports(folder)
    while process.poll() is None:
        children |= {child.pid: child for child in family(process)}
        if reports(folder) >= begun + more:
            return True
        still.check()
        time.sleep(0.05)
    return False


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the ledger's lines in file order, without torn ones."""
    found = []
    for line in (
        (folder / "studies" / "faults" / "ledger.jsonl").read_text(errors="replace").splitlines()
    ):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with the seeds of ``--seeds``, or with one seed per fault."""
    if "seed" in metafunc.fixturenames:
        faults = BY_RAY if metafunc.function is test_nothing_is_lost_on_ray else FAULTS
        given = metafunc.config.getoption("--seeds") or f"0-{len(faults) - 1}"
        first, _, last = given.partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


def test_nothing_is_lost_and_nothing_done_twice(
    seed: int, tmp_path: Path, undisturbed: dict[bool, Wanted]
) -> None:
    fault, chance = FAULTS[seed % len(FAULTS)], random.Random(seed)
    with (
        small_storage(tmp_path) if fault == "full" else nullcontext(),
        cluster_of(0, 4, 4) if fault in ON_CLUSTER else nullcontext() as ray,
    ):
        where = [] if ray is None else [f"address={ray.address}", "insecure=true"]
        disturb(tmp_path, fault, chance, where, ray, undisturbed)


def test_nothing_is_lost_on_ray(seed: int, tmp_path: Path, undisturbed: dict[bool, Wanted]) -> None:
    """With Ray Tune, also kill the actor that supervises a trial or the one with the processes."""
    disturb(
        tmp_path, BY_RAY[seed % len(BY_RAY)], random.Random(seed), ["engine=ray"], None, undisturbed
    )


def disturb(
    folder: Path,
    fault: str,
    chance: random.Random,
    where: list[str],
    cluster: Any,
    undisturbed: dict[bool, Wanted],
) -> None:
    """Run the study with a fault to its end, and check ledger, weights and MLflow."""
    gang = fault == "rank" or (fault not in ("trial", "host") and chance.random() < 0.3)
    (folder / "faults.yaml").write_text(STUDY)
    overrides = [*(PACKED if fault == "host" else GANG if gang else []), *where]
    tracking = "none" if fault == "full" else f"sqlite:///{folder}/mlflow.db"
    run_with_fault(folder, fault, chance, overrides, tracking, cluster, EPOCHS[gang])
    check(folder, fault, undisturbed[gang])
    if fault != "full":
        check_mlflow(folder, fault, tracking)


def check_mlflow(folder: Path, fault: str, tracking: str) -> None:
    """Check that MLflow is complete after missing data were sent.

    A damaged database is renamed first.
    """

    def audited() -> list[int]:
        mended = [["mlflow", "verify", "--repair"]] if fault in DAMAGE else []
        commands = [["mlflow", "sync"], *mended, ["mlflow", "verify"]]
        ends = ("faults", "--tracking-uri", tracking)
        return [study(folder, *command, *ends) for command in commands]

    codes = audited()
    if fault == "database" and any(codes):
        rename_database(folder)
        codes = audited()
    assert set(codes) == {0}, codes


def check(tmp_path: Path, fault: str, wanted: Wanted, *, lost: bool = False) -> None:
    """Check that every trial has finished once and has reported every epoch once.

    Metrics and weights must equal a run's without faults. With ``lost``, checkpoints may be
    missing.
    """
    state = fold(read_ledger(tmp_path / "studies" / "faults"))
    assert [trial.id for trial in state.trials] == [trial.id for trial in wanted[0].trials]
    found = weights(tmp_path / "studies" / "faults")
    assert found == ({name: wanted[1][name] for name in found} if lost else wanted[1])
    for trial, other in zip(state.trials, wanted[0].trials, strict=True):
        assert trial.status == FINISHED, f"{fault}: {trial.error}"
        assert sorted(trial.reports) == sorted(other.reports)
        assert differences(trial, other) == []
    written = lines(tmp_path)
    finished = Counter(event["trial"] for event in written if event["event"] == "finished")
    reported = Counter(
        (event["trial"], event["epoch"]) for event in written if event["event"] == "report"
    )
    assert set(finished.values()) == {1}
    assert set(reported.values()) == {1}
