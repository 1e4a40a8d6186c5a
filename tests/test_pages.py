"""Run the commands of the pages, with a small budget on digits, and check the generated pages.

A fence after a line ``<!-- runs -->`` holds shell commands, one per line. A page's commands run in
order, in one folder. Commands after ``<!-- runs: SERVICE -->`` run separately from the page's
others, with the service that ``tests/page_services.py`` starts. Their ``export`` applies to the
following commands, and a server runs until the next server or the end. A fence after ``<!-- file:
NAME -->`` is a file there. ``TRIAL`` is replaced by the id of a trial of the study that the command
names. A fence after ``<!-- refused -->`` has commands that exit with 2, each with a part of its
message in the next line.

Studies that come with the program get :data:`BUDGET` before the page's own keys, which take
precedence. Fences that do not run here are in :data:`NOT_HERE` with the reason; tests/test_docs.py
checks that the program accepts their commands.
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

from study.evidence.rerun import differences
from study.ledger.log import read_ledger
from study.ledger.state import FAILED, FINISHED, StudyState, fold
from tests.page_services import Shell, finished, run, start
from tests.study.conftest import postgres
from tests.study.object_store import s3, s3_server
from tests.study.ray_head import head
from tests.test_docs import GENERATED, SHELLS
from trainers.data.download import find_folder

__all__ = ["head", "postgres", "s3", "s3_server"]
ROOT = Path(__file__).parents[1]
BRING = "docs/tutorials/bring-your-own.md"
RUNS = {
    "README.md": 2,
    "docs/tutorials/first-study.md": 7,
    "docs/tutorials/a-search.md": 6,
    "docs/gallery.md": 8,
    "docs/howto/studies.md": 15,
    "docs/howto/python.md": 7,
    "docs/howto/search.md": 4,
    "docs/howto/formats.md": 6,
    "docs/studies/atlas.md": 2,
    "docs/howto/workers.md": 3,
    BRING: 7,
    "docs/howto/coming-from.md": 4,
    "docs/howto/claims.md": 5,
    "docs/howto/data.md": 3,
    "docs/howto/own-loop.md": 3,
    "docs/howto/own-network.md": 2,
    "docs/howto/repair-and-resume.md": 12,
    "docs/howto/repair-and-resume.md: S3 and aws": 11,
    "docs/howto/cluster.md: Ray": 5,
    "docs/howto/cluster.md: S3": 3,
    "docs/howto/gpus.md: GPU": 1,
    "docs/howto/ray-tune.md": 3,
    "docs/howto/team-mlflow.md: PostgreSQL": 8,
    "docs/tracking.md: TensorBoard": 6,
}
"""Pages with commands that run, by service, and the number of commands."""
INSTALLS = "installs packages"
MEASURES = "takes hours, or many cores and GPUs; tests/test_docs.py looks at its words"
NOT_HERE = {
    "README.md": {"import torch": "tests/test_docs.py runs it"},
    "docs/benchmarks": {"": MEASURES},
    "docs/explanation/life-of-a-trial.md": {"rows:": "a part of a study's file"},
    "docs/examples.md": {
        "lns-study run examples/capsules": "from a checkout; tests/examples/test_runs.py"
    },
    "docs/howto/claims.md": {
        "amendments:": "a part of a study's file; conf/study has files with it, which tests load",
        "lns-study run law_of_bits": "takes hours",
    },
    "docs/howto/cluster.md": {
        "ray get-auth-token": "two machines; tests/study/ops/launch/test_hosts.py starts them",
        "ray drain-node": "test_cluster.py drains a node",
        "docker build": "Docker; test_compose.py and test_image.py run and read what it takes",
        "ssh -L": "another machine; test_compose.py launches so",
        "docker compose exec": "Docker; test_compose.py",
        "helm repo add": "a registry and a Kubernetes; test_manifests.py reads the manifests",
        "pip install": INSTALLS,
    },
    "docs/howto/coming-from.md": {
        "import optuna": "another program's, for comparison",
        "from ray import tune": "another program's, for comparison",
        "program: train.py": "another program's, for comparison",
    },
    "docs/howto/gpus.md": {"lns-study run formats_by_layout": "eight GPUs"},
    "docs/howto/ray-tune.md": {"lns-study run mine.yaml": "a Ray cluster that runs"},
    "docs/howto/studies.md": {
        "lns-study status table --json": "needs jq; tests/study/cli/test_json.py",
        "lns-study pause": "a study that runs; tests/study/engines/test_steering.py",
    },
    "docs/howto/team-mlflow.md": {"pip install": INSTALLS},
    "docs/howto/workers.md": {"lns-study run parallelism": "takes hours"},
    "docs/tutorials/bring-your-own.md": {"lns-study data fetch": "downloads CIFAR-10"},
    "docs/tutorials/first-study.md": {
        "lns-study run table trial.epochs=3": "on MNIST, as the page's other commands on less",
        "lns-study report --serve": "servers; tests/study/ops/serve",
    },
}
"""Fences of pages, or of folders, that do not run here: their first words, and the reason."""
BUDGET = (
    "data=digits 'trial.model.hidden=[16]' trial.epochs=2 'seeds=[0,1]' tracking_uri=none cpus=2"
)
MORE = {
    "search": "'seeds=[0]' search.num_samples=3 trial.data.train_size=null",
    "formats": "'seeds=[0]' trial.epochs=1",
    "format_atlas": "'rows=[{label: MLP}]' 'space.precision.format={grid: [float32, lns12]}'",
    "updates": "cpus=4",
}
"""Keys that some studies need in addition, by name."""
FILES = {
    "rates.yaml": "search.num_samples=2 trial.epochs=2 cpus=2",
    "wide.yaml": "trial.data.name=digits trial.data.train_size=null",
    "tuned.yaml": "search.num_samples=2 trial.epochs=2 cpus=2",
    "kahan.yaml": "trial.data.name=digits trial.data.train_size=null 'trial.model.hidden=[16]'",
    "tracked.yaml": "cpus=2",
}
"""Keys that studies in a page's own files need, by name."""
SCRIPTS = {
    "quickstart": "data=digits trial.epochs=1 'seeds=[0]' cpus=2",
    "test": "tests/test_imports.py -k import_direction",
}
"""Arguments for the scripts of a checkout: a budget, and some of the tests."""
FENCE = r"```\w*\n(.*?)```\n"


def commands_of(text: str, service: str = "") -> list[str]:
    """Return the commands of a page that run, with a service or without any."""
    mark = f"runs: {service}" if service else "runs"
    blocks = re.findall(rf"<!-- {re.escape(mark)} -->\n{FENCE}", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def with_budget(command: str, storage: Path) -> str:
    """Return a command with a smaller budget."""
    script = re.match(r"\./scripts/(\w+)", command)
    if script:
        options = SCRIPTS[script[1]]
        if script[1] == "quickstart":
            options += f" storage={shlex.quote(str(storage))}"
        return f"{ROOT}/scripts/{script[1]} {options} {command[script.end() :]}"
    named = re.match(r"lns-study (?:run|plan|reproduce) (?!--)([^\s;]+)(?!.* --verify)", command)
    if named and not named[1].endswith((".yaml", ".py")):
        return f"{named[0]} {BUDGET} {MORE.get(named[1], '')} {command[named.end() :]}"
    return f"{named[0]} {FILES.get(named[1], '')} {command[named.end() :]}" if named else command


def state_of(storage: Path, name: str) -> StudyState:
    """Return the state of a study from its ledger."""
    return fold(read_ledger(storage / name))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``lns-study`` and the scripts run this checkout with the tests'
    packages: a command, and a venv that needs no installation."""
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
    """Write the files of a page, which finds CIFAR-10 if it asks for it; return the page's text."""
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.gpu] if name.endswith(": GPU") else [])
        for name in RUNS
    ],
)
def test_the_commands_of_a_page_run(
    name: str, environment: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page, _, service = name.partition(": ")
    text = write_files(page, tmp_path)
    commands = commands_of(text, service)
    assert len(commands) == RUNS[name]
    there = start(service, request, tmp_path)
    storage = there.storage or tmp_path / "studies"
    shell = Shell(tmp_path, environment | there.variables)
    try:
        for command in commands:
            if "TRIAL" in (words := command.split()):
                command = command.replace("TRIAL", state_of(storage, words[2]).trials[0].id)
            for word, meant in there.stands_for.items():
                command = command.replace(word, meant)
            shell.run(with_budget(command, storage))
    finally:
        shell.close()
    for study in studies_in(storage) if there.storage else ():
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
    """Yield the studies of a storage; there is at least one."""
    names = [path.parent.name for path in storage.glob("*/ledger.jsonl")]
    assert names
    yield from names


def unaccounted(page: str, text: str) -> list[str]:
    """Return the first words of fences (shell, Python, YAML) that no test runs and that have no
    reason in NOT_HERE."""
    reasons = [*NOT_HERE.get(page, {}), *NOT_HERE.get(page.rpartition("/")[0], {})]
    services = {name.partition(": ")[2] for name in RUNS if name.partition(": ")[0] == page}
    marks = {f"runs: {name}" if name else "runs" for name in services} | {"refused"}
    fence = r"(?:<!-- ([^\n]*) -->\n)?^ *```(\S*)[^\n]*\n(.*?)^ *```$"
    found = re.findall(fence, text, re.DOTALL | re.MULTILINE)
    return [
        words
        for mark, kind, words in found
        if kind in (*SHELLS, "python", "yaml")
        and mark not in marks
        and not (kind in ("python", "yaml") and mark.startswith("file: "))
        and not words.startswith(tuple(reasons))
    ]


PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path not in GENERATED
]


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_of_commands_runs_or_says_why_not(page: str) -> None:
    assert unaccounted(page, (ROOT / page).read_text()) == []


def test_every_reason_has_its_fence() -> None:
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    for place, reasons in NOT_HERE.items():
        text = "".join(texts[page] for page in texts if page == place or page.startswith(place))
        assert [words for words in reasons if not re.search(rf"```\w*\n{words}", text)] == []


def test_a_fence_that_nothing_runs_is_seen() -> None:
    fence = "In between.\n```\nlns-study run table\n```\n"
    assert unaccounted("docs/howto/new.md", fence) == ["lns-study run table\n"]
    marked = fence.replace("```\nlns", "<!-- runs -->\n```\nlns")
    assert unaccounted("docs/howto/new.md", marked) == ["lns-study run table\n"]  # not in RUNS
    assert unaccounted("docs/howto/data.md", marked) == []


def test_a_command_that_fails_is_seen(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nobody"):
        run("lns-study status nobody", tmp_path, environment)


def test_every_ledger_event_is_listed_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import ledger_events

    listed = [entry.event for entry in ledger_events.listed()]
    assert len(listed) == len(set(listed)) == 16
    assert ledger_events.writers().keys() == set(listed)


def test_number_formats_are_all_on_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import number_formats

    page = number_formats.page()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert rows.keys() == set(number_formats.NAMES)
    assert "| 12 |" in rows["lns12"]
    assert "| LNS, on codes | 0.555" in rows["lns12"]
    assert rows["bfloat16"].split("|")[3].strip() == "2^-8"


def test_operations_say_of_every_number_format_how_they_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import lns_operations
    import number_formats

    rows = [row.split(" | ") for row in lns_operations.formats()]
    names = [name for formats, *_ in rows for name in re.findall("`(.*?)`", formats)]
    assert sorted(names) == sorted(number_formats.NAMES)
    (on_codes,) = (formats for formats, form, _ in rows if "on codes" in form)
    assert "`lns12`" in on_codes
    assert "/" not in on_codes  # a scale is simulated
