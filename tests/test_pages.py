"""The commands of the pages run, with a small budget on digits, and generated pages hold what they
should.

A fence after a line ``<!-- runs -->`` holds commands of a shell, one a line. Those of a page run in
its order, in one folder. A fence after ``<!-- file: NAME -->`` is a file there. ``TRIAL`` stands
for the id of a trial of the study that the command names. A fence after ``<!-- refused -->`` has
commands that end with 2, each with a part of its message in the next line. Studies that come with
the program get :data:`BUDGET` before the page's own keys, which count more. Of other commands
tests/test_docs.py asks whether the program takes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from study.ledger.log import read_ledger
from study.ledger.state import FAILED, FINISHED, StudyState, fold
from study.manage.rerun import differences
from trainers.data.download import find_folder

ROOT = Path(__file__).parents[1]
BRING = "docs/tutorials/bring-your-own.md"
RUNS = {
    "README.md": 2,
    "docs/tutorials/first-study.md": 7,
    "docs/howto/studies.md": 12,
    "docs/howto/python.md": 7,
    "docs/howto/search.md": 3,
    "docs/howto/formats.md": 5,
    "docs/howto/workers.md": 3,
    BRING: 7,
    "docs/howto/coming-from.md": 4,
}
"""Pages whose commands run, and how many they are."""
BUDGET = (
    "data=digits 'trial.model.hidden=[16]' trial.epochs=2 'seeds=[0,1]' tracking_uri=none cpus=2"
)
MORE = {
    "search": "'seeds=[0]' search.num_samples=3 trial.data.train_size=null",
    "formats": "'seeds=[0]' trial.epochs=1",
    "updates": "cpus=4",
}
"""What some studies need beside it, by name."""
SCRIPTS = {
    "quickstart": "data=digits trial.epochs=1 'seeds=[0]' cpus=2",
    "test": "tests/test_imports.py -k import_direction",
}
"""What is given to the scripts of a checkout: a budget, and some of the tests."""
FENCE = r"```\w*\n(.*?)```\n"
SECONDS = 180
"""Most that a command may take where the machine is busy; alone it takes some seconds."""


def commands_of(text: str) -> list[str]:
    """Return the commands of a page that run."""
    blocks = re.findall(rf"<!-- runs -->\n{FENCE}", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def with_budget(command: str, storage: Path) -> str:
    """Return a command as it runs here: the same program on less."""
    script = re.match(r"\./scripts/(\w+)", command)
    if script:
        options = SCRIPTS[script[1]]
        if script[1] == "quickstart":
            options += f" storage={shlex.quote(str(storage))}"
        return f"{ROOT}/scripts/{script[1]} {options} {command[script.end() :]}"
    named = re.match(r"lns-study (?:run|plan) (\S+)", command)
    if named and not named[1].endswith((".yaml", ".py")):
        return f"{named[0]} {BUDGET} {MORE.get(named[1], '')} {command[named.end() :]}"
    return command


def state_of(storage: Path, name: str) -> StudyState:
    """Return what the ledger of a study holds."""
    return fold(read_ledger(storage / name))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What makes ``lns-study`` and the scripts run this checkout with the packages that the tests
    have: a command, and a venv that needs no installation."""
    folder = tmp_path_factory.mktemp("programs")
    program = folder / "lns-study"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m study "$@"\n')
    program.chmod(0o755)
    venv = folder / "venv"
    venv.mkdir()
    for part in Path(sys.prefix).iterdir():
        (venv / part.name).symlink_to(part)
    (venv / ".installed").unlink(missing_ok=True)
    made_of = [
        (ROOT / name).read_bytes() for name in ("pyproject.toml", "setup.py", "constraints.txt")
    ]
    digest = hashlib.sha256(b"".join(made_of)).hexdigest()
    (venv / ".installed").write_text(f"{digest} {sys.version}\n")
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHON": sys.executable,
        "LNS_STUDY_VENV": str(venv),
        "COLUMNS": "120",
    }


def write_files(page: str, folder: Path) -> str:
    """Write the files of a page, which then finds CIFAR-10 if it asks for it; the page's text."""
    text = (ROOT / page).read_text()
    for name, content in re.findall(rf"<!-- file: (\S+) -->\n{FENCE}", text, re.DOTALL):
        (folder / name).write_text(content)
    if page == BRING:
        if find_spec("transformers") is None:
            pytest.skip("transformers is not installed")
        cifar10 = find_folder("cifar10", None)
        if cifar10 is None or not (cifar10 / "test_batch.bin").is_file():
            pytest.skip("CIFAR-10's binary files are not here")
        (folder / "cifar10").symlink_to(cifar10)
    return text


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command of a page; what it printed."""
    done = finished(command, folder, environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def finished(
    command: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUNS)
def test_the_commands_of_a_page_run(page: str, environment: dict[str, str], tmp_path: Path) -> None:
    text = write_files(page, tmp_path)
    storage = tmp_path / "studies"
    commands = commands_of(text)
    assert len(commands) == RUNS[page]
    for command in commands:
        words = command.split()
        if "TRIAL" in words:
            trial = state_of(storage, words[2]).trials[0].id
            command = command.replace("TRIAL", trial)
        run(with_budget(command, storage), tmp_path, environment)
    for study in studies_in(storage):
        trials = state_of(storage, study).trials
        assert trials
        assert not any(trial.status == FAILED for trial in trials)
        assert any(trial.status == FINISHED for trial in trials)


@pytest.mark.slow
def test_what_a_page_says_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    text = write_files(BRING, tmp_path)
    blocks = re.findall(rf"<!-- refused -->\n{FENCE}", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 6
    for command, message in zip(lines[::2], lines[1::2], strict=True):
        done = finished(command.removeprefix("$ "), tmp_path, environment)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_network_of_hugging_face_goes_on_after_a_kill_with_the_same_bits(
    device: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Formats, replicas and learning rates by TPE, one trial after the other."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, needs two")
    command = [
        *("lns-study", "run", "resnet.yaml", "--plain", f"trial.device={device}"),
        *("tracking_uri=none", "max_concurrent=1", "search.num_samples=3"),
    ]
    states, tensors = [], []
    for faults in (0, 1):
        folder = tmp_path / str(faults)
        folder.mkdir()
        write_files(BRING, folder)
        ledger = folder / "studies" / "resnet" / "ledger.jsonl"
        if faults:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE)
            while not (ledger.exists() and ledger.read_bytes().count(b'"report"') >= 3):
                assert process.poll() is None
                time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.communicate()
            _, alive = psutil.wait_procs(children, timeout=60)
            assert alive == []
            assert not any(b'"ended"' in line for line in ledger.read_bytes().splitlines())
        run(" ".join(command), folder, environment)
        states.append(fold(read_ledger(ledger.parent)))
        saved = ledger.parent / "checkpoints"
        tensors.append({path.relative_to(saved) for path in saved.rglob("tensors-*")})
    whole, killed = states
    assert [trial.id for trial in killed.trials] == [trial.id for trial in whole.trials]
    assert {trial.config["workers"] for trial in whole.trials} == {1, 2}
    for one, other in zip(killed.trials, whole.trials, strict=True):
        assert one.status == FINISHED
        assert sorted(one.reports) == [1, 2]
        assert differences(one, other) == []
    assert tensors[0] == tensors[1]  # their names are digests
    assert len({path.parts[0] for path in tensors[0]}) == len(whole.trials) == 6


def studies_in(storage: Path) -> Iterator[str]:
    """Yield the studies of a storage; there is one at least."""
    names = [path.parent.name for path in storage.glob("*/ledger.jsonl")]
    assert names
    yield from names


def test_a_command_that_fails_is_seen(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nobody"):
        run("lns-study status nobody", tmp_path, environment)


def test_every_ledger_event_is_listed_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import ledger_events

    listed = [entry.event for entry in ledger_events.listed()]
    assert len(listed) == len(set(listed)) == 16
    assert ledger_events.writers().keys() - {"ledger"} == set(listed)


def test_number_formats_are_all_on_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import number_formats

    page = number_formats.page()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert rows.keys() == set(number_formats.NAMES)
    assert "| 12 |" in rows["lns12"]
    assert rows["lns12"].endswith("LNS, on codes |")
    assert rows["bfloat16"].split("|")[3].strip() == "2^-8"
