"""What travels to a cluster, and what does not."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from study.cli import main
from study.config.compose import load
from study.launch import package as packages
from study.launch.package import Package, pack
from study.launch.ray_jobs import job_request
from study.launch.slurm import batch_command
from tests.study.conftest import TINY
from tests.study.object_store import SECRET

WORDS = ["storage=/studies", "tracking_uri=none"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packed(*words: str) -> Package:
    return pack("tiny.yaml", [*WORDS, *words], load("tiny.yaml", [*WORDS, *words]))


def names(package: Package) -> set[str]:
    return {
        path.relative_to(package.folder).as_posix()
        for path in package.folder.rglob("*")
        if path.is_file()
    }


def test_code_travels_but_neither_data_git_environments_nor_storage(here: Path) -> None:
    for name in (
        "net.py", "parts/layer.py", "conf/data/mine.yaml",  # these travel
        ".git/config", ".env", "data/images", "results/tiny/ledger.jsonl", "venv/pyvenv.cfg",
        "venv/lib/big.py", "mlruns/0/meta.yaml", "parts/__pycache__/layer.pyc", ".lns-study/old",
    ):  # fmt: skip
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("x")
    package = packed("trial.data.root=data")
    assert names(package) == {"tiny.yaml", "net.py", "parts/layer.py", "conf/data/mine.yaml"}
    inside = [*WORDS, f"storage={here / 'parts'}"]
    assert "parts/layer.py" not in names(pack("tiny.yaml", inside, load("tiny.yaml", inside)))


def test_a_study_by_name_takes_nothing_of_the_folder(here: Path) -> None:
    words = [*WORDS, "data=digits"]
    assert names(pack("quickstart", words, load("quickstart", words))) == set()


def test_the_digest_is_that_of_contents(here: Path) -> None:
    first = packed()
    assert packed().digest == first.digest
    assert packed().wheel.read_bytes() == first.wheel.read_bytes()
    (here / "tiny.yaml").write_text(f"{TINY}# changed\n")
    changed = packed()
    assert changed.digest != first.digest
    assert changed.wheel.name == first.wheel.name
    assert json.loads((changed.stage / "package.json").read_text())["code"] == changed.digest


def test_pip_installs_the_wheel_and_it_runs(tmp_path: Path) -> None:
    package = packed()
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", f"--target={target}"]
    subprocess.run([*pip, str(package.wheel)], check=True)
    code = (
        "import study, sys; from study.cli import main; main(sys.argv[1:]); print(study.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "table", "--dry-run", "trial.data.name=digits"],
        env={"PYTHONPATH": str(target), "PATH": ""},
        cwd=package.folder,
        capture_output=True,
        text=True,
    )
    assert "# 12 trials:" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == str(target / "study" / "__init__.py")
    with zipfile.ZipFile(package.wheel) as wheel:
        (record,) = [name for name in wheel.namelist() if name.endswith("/RECORD")]
        listed = {row[0] for row in csv.reader(wheel.read(record).decode().splitlines())}
        assert listed == set(wheel.namelist())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", "postgresql://ada:hunter2-hunter2@db/mlflow"),
        ("key.txt", "-----BEGIN RSA PRIVATE KEY-----\nabc"),
        ("environment.sh", f"export AWS_SECRET_ACCESS_KEY={SECRET}"),
        ("credentials", f"[default]\naws_secret_access_key = {SECRET}"),
        ("google.json", '{"refresh_token": "1//0hunter2-hunter2-hunter2"}'),
    ],
)
def test_a_file_with_a_secret_is_refused(here: Path, name: str, content: str) -> None:
    (here / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^{name}: holds a password or a secret key") as told:
        packed()
    assert "hunter2" not in str(told.value)
    assert SECRET not in str(told.value)
    assert not list(here.glob(".lns-study/*"))


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_to_a_hidden_file_is_refused(
    here: Path, tmp_path_factory: pytest.TempPathFactory, inside: bool
) -> None:
    home = here if inside else tmp_path_factory.mktemp("home")
    (home / ".cloud").mkdir()
    (home / ".cloud" / "credentials").write_text("secret_key = correct-horse")
    (home / "layer.py").write_text("W = 8")
    (here / "linked.py").symlink_to(home / "layer.py")
    assert "linked.py" in names(packed())
    (here / "credentials.txt").symlink_to(home / ".cloud" / "credentials")
    with pytest.raises(ValueError, match=r"^credentials.txt: is a link to .*, a hidden file"):
        packed()


def test_a_password_in_the_command_is_refused(here: Path) -> None:
    word = "tracking_uri=https://ada:hunter2-hunter2@mlflow.example.org"
    with pytest.raises(ValueError, match="holds a password, which every user") as told:
        packed(word)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("target", ["ray", "slurm", "kuberay"])
def test_no_secret_of_the_environment_is_written(
    here: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "correct-horse-battery-staple"
    for variable in ("MLFLOW_TRACKING_PASSWORD", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, secret)
    (here / ".env").write_text(secret)
    uri = "tracking_uri=https://mlflow.example.org"
    words = ["launch", "tiny.yaml", "--to", target, "--dry-run", "storage=/studies", uri]
    assert main(words) == 0
    assert "Nothing was submitted." in capsys.readouterr().out
    written = [path for path in (here / ".lns-study").rglob("*") if path.is_file()]
    assert len(written) > 100
    assert not [path for path in written if secret.encode() in path.read_bytes()]


def test_a_jobs_environment_is_the_nodes_own(here: Path) -> None:
    request = job_request(packed(), "tiny")
    assert set(request["runtime_env"]) == {"working_dir", "py_modules"}
    assert request["entrypoint"].split()[:5] == ["python", "-m", "study", "run", "tiny.yaml"]


def test_slurm_takes_no_part_of_a_folders_name_for_a_pattern(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "100%j").mkdir()
    (here / "tiny.yaml").rename(here / "100%j" / "tiny.yaml")
    monkeypatch.chdir(here / "100%j")
    package = packed()
    command = batch_command(package, load("tiny.yaml", WORDS), here / "slurm.sh")
    assert f"--output={here}/100%%j/.lns-study/{package.stage.name}/slurm.log" in command
    assert str(package.stage) in command


def test_a_relative_storage_is_refused(here: Path) -> None:
    with pytest.raises(ValueError, match=r"storage='studies': a relative path ends with the job"):
        pack("tiny.yaml", [], load("tiny.yaml"))


def test_a_config_of_another_folder_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "inner").mkdir()

    monkeypatch.chdir(here / "inner")
    with pytest.raises(ValueError, match="lies outside the current folder"):
        pack("../tiny.yaml", WORDS, load("../tiny.yaml", WORDS))


def test_too_large_a_folder_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MOST_BYTES", 2**20)
    (here / "weights.bin").write_bytes(bytes(2**20))
    with pytest.raises(ValueError, match=r"the largest weights\.bin; at most 1 MiB travel"):
        packed()
