"""Which files are sent to a cluster, and which are not."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from study.cli import main
from study.config.compose import load
from study.errors import UserError
from study.ops.launch import kuberay
from study.ops.launch import package as packages
from study.ops.launch.package import Package, pack
from study.ops.launch.ray_jobs import job_request
from study.ops.launch.slurm import batch_command
from tests.study.conftest import TINY
from tests.study.object_store import SECRET

WORDS = ["storage=/studies", "tracking_uri=none"]
HEX = "0123456789abcdef" * 2
RAYJOB = Path(__file__).parents[4] / "conf" / "cluster" / "rayjob.yaml"


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
        "net.py", "parts/layer.py", "conf/data/mine.yaml",  # these are sent
        ".git/config", ".env", "data/images", "results/tiny/ledger.jsonl", "venv/pyvenv.cfg",
        "venv/lib/big.py", "mlruns/0/meta.yaml", "parts/__pycache__/layer.pyc", ".lns-study/old",
        "results/mlflow.db", "results/mlflow.db-wal", "results/artifacts/tiny/report.html",
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
        ("one.py", f'os.environ["AWS_SECRET_ACCESS_KEY"] = "{SECRET}"'),
        ("two.py", f"os.environ.setdefault('AWS_SECRET_ACCESS_KEY', '{SECRET}')"),
        ("three.py", f'AWS_SECRET_ACCESS_KEY: str = "{SECRET}"'),
        ("four.ipynb", rf'"source": ["aws_secret_access_key=\\"{SECRET}\\""]'),
        ("five.ipynb", r'["{\"refresh_token\": \"1//0hunter2-hunter2-hunter2\"}"]'),
        ("assumed.json", f'{{"SecretAccessKey": "{SECRET}"}}'),
        ("pod.yaml", f"- name: AWS_SECRET_ACCESS_KEY\n  value: {SECRET}"),
        ("Dockerfile", f"ENV AWS_SECRET_ACCESS_KEY {SECRET}"),
        ("keys.csv", f"Access key ID,Secret access key\nAKIA{'A' * 16},{SECRET}"),
    ],
)
def test_a_file_with_a_secret_is_refused(here: Path, name: str, content: str) -> None:
    (here / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^{name}: holds a password or a secret key") as told:
        packed()
    assert "hunter2" not in str(told.value)
    assert SECRET not in str(told.value)
    assert not list(here.glob(".lns-study/*"))


@pytest.mark.parametrize("word", [HEX, HEX * 2, "q3-_kd" * 7 + "=", SECRET])
def test_a_token_alone_is_refused_and_a_list_or_a_word_is_none(here: Path, word: str) -> None:
    for content in (f"{word}  net.py\n", f"{word}\n{word}\n", "x" * 64, "3" * 64, "ab12"):
        (here / "auth_token").write_text(content)
        assert "auth_token" in names(packed())
    (here / "auth_token").write_text(f"{word}\n")
    with pytest.raises(ValueError, match=r"^auth_token: is a token or a key alone") as told:
        packed()
    assert word not in str(told.value)


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_to_a_hidden_file_is_refused(
    here: Path, tmp_path_factory: pytest.TempPathFactory, inside: bool
) -> None:
    home = here if inside else tmp_path_factory.mktemp("home")
    (home / ".cloud").mkdir()
    (home / ".cloud" / "credentials").write_text("secret_key = correct-horse")
    (here / "layer.py").write_text("W = 8")
    (here / "linked.py").symlink_to(here / "layer.py")
    assert "linked.py" in names(packed())
    (here / "credentials.txt").symlink_to(home / ".cloud" / "credentials")
    with pytest.raises(ValueError, match=r"^credentials.txt: is a link to .*, a hidden file"):
        packed()


@pytest.mark.parametrize("target", ["/etc/passwd", "/proc/self/environ", "../outside.py"])
def test_a_link_out_of_the_folder_is_refused(here: Path, target: str) -> None:
    (here / "study").mkdir()
    (here / "outside.py").write_text("W = 8")
    (here / "tiny.yaml").rename(here / "study" / "tiny.yaml")
    os.chdir(here / "study")
    Path("linked.py").symlink_to(target)
    with pytest.raises(ValueError, match=r"^linked.py: is a link to .*, a file outside of"):
        packed()


def test_linked_folders_are_named_and_the_execute_bit_travels(here: Path) -> None:
    (here / "parts").mkdir()
    (here / "linked").symlink_to(here / "parts")
    (here / "notify.sh").write_text("true")
    before = packed()
    (here / "notify.sh").chmod(0o755)
    package = packed()
    assert package.links == ("linked",)
    assert os.access(package.folder / "notify.sh", os.X_OK)
    assert package.digest != before.digest


@pytest.mark.parametrize("name", ["study.py", "trainers/__init__.py", "lns_ops.so"])
def test_a_file_that_would_be_imported_in_our_place_is_refused(here: Path, name: str) -> None:
    (here / name).parent.mkdir(exist_ok=True)
    (here / name).write_text("print('hi')")
    with pytest.raises(ValueError, match=rf"^{name}: would be imported on the cluster in place of"):
        packed()


def test_the_job_runs_our_package_whatever_its_folder_holds(here: Path) -> None:
    package = packed()
    (package.folder / "study.py").write_text("print('hi')")
    start = package.stage / "start.sh"
    text = start.read_text().replace(" run tiny.yaml --job", " plan tiny.yaml")
    start.write_text(text.replace(" address=auto", ""))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(start)],
        env=os.environ | {"PYTHONPATH": str(package.stage / "site"), "PATH": path},
        capture_output=True,
        text=True,
    )
    assert "hi" not in done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout


def test_no_other_process_of_ours_imports_from_the_current_folder() -> None:
    """``python -m`` looks there first; ``-P`` leaves it out."""
    root = Path(packages.__file__).parents[3]
    sources = [
        *(root / "study").rglob("*.py"),
        *(root / "trainers").rglob("*.py"),
        root / "conf" / "cluster" / "slurm.sh",
    ]
    starts = re.compile(r"""sys\.executable,\s*"-m"|python -[mc] (?!study`|study\.|study``)""")
    assert [
        (path.name, line)
        for path in sources
        for line in path.read_text().splitlines()
        if starts.search(line) and not line.lstrip().startswith(('"""', "#"))
    ] == []


def test_a_second_launch_leaves_the_first_ones_package_as_it_is(here: Path) -> None:
    first = packed("epochs=3")
    (first.stage / "token-77").write_text("x")
    start = (first.stage / "start.sh").read_text()
    second = packed("epochs=5")
    assert second.stage != first.stage
    assert packed("epochs=3").stage == first.stage
    other = ["storage=/elsewhere", "tracking_uri=none", "epochs=3"]
    assert pack("tiny.yaml", other, load("tiny.yaml", other)).stage != first.stage
    assert (first.stage / "start.sh").read_text() == start
    assert (first.stage / "token-77").read_text() == "x"
    assert len(list(here.glob(".lns-study/*"))) == 3


def test_a_package_that_was_changed_is_left_and_not_sent(here: Path) -> None:
    (here / "net.py").write_text("W = 8")
    first = packed()
    for place in (first.folder, first.stage / "site" / "study"):
        (place / "__pycache__").mkdir()
        (place / "__pycache__" / "net.pyc").write_text("x")
    assert packed().stage == first.stage
    assert not [name for name in archived(first) if "pycache" in name]
    (first.folder / "left_by_a_job.txt").write_text("x")
    second = packed()
    assert second.stage != first.stage
    assert second.digest == first.digest
    assert names(second) == {"tiny.yaml", "net.py"}
    assert "folder/left_by_a_job.txt" not in archived(second)
    assert (first.folder / "left_by_a_job.txt").exists()
    ours = "site/study/lifecycle.py", "site/lns_study.py"
    for name in ("folder/tiny.yaml", *ours, "start.sh", second.wheel.name):
        latest = packed()
        assert latest.digest == first.digest
        (latest.stage / name).write_text("changed")
        again = packed()
        assert again.stage != latest.stage
        assert (again.stage / name).read_text(errors="replace") != "changed"


def archived(package: Package) -> list[str]:
    """The names in the archive for Kubernetes."""
    with tarfile.open(fileobj=io.BytesIO(kuberay._archive(package))) as archive:
        return archive.getnames()


def test_equal_launches_at_once_share_a_package(here: Path) -> None:
    """Each finds no package, writes its own, and then finds the other's in its place."""
    first = packed()
    shutil.rmtree(first.stage)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: packed(), range(4)))
    assert {each.stage for each in made} == {first.stage}
    assert names(first) == {"tiny.yaml"}
    assert [path.name for path in (here / ".lns-study").iterdir()] == [first.stage.name]


def test_the_archive_is_the_same_under_any_umask(here: Path) -> None:
    (here / "notify.sh").write_text("true")
    (here / "notify.sh").chmod(0o755)
    archives = []
    for umask in (0o022, 0o077):
        shutil.rmtree(here / ".lns-study", ignore_errors=True)
        before = os.umask(umask)
        try:
            (here / "tiny.yaml").unlink()
            (here / "tiny.yaml").write_text(TINY)
            archives.append(kuberay._archive(packed()))
        finally:
            os.umask(before)
    assert archives[0] == archives[1]
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as archive:
        modes = {member.name: member.mode for member in archive}
    assert modes["folder/notify.sh"] == modes["site"] == 0o755
    assert modes["folder/tiny.yaml"] == 0o644


SCRIPT = """
from study import StudyConfig
one = StudyConfig(name="one", baseline=None)
two = StudyConfig(name="two", baseline=None)
"""


def test_a_study_in_a_python_file_takes_its_folder(here: Path) -> None:
    (here / "S.py").write_text(SCRIPT)
    package = pack("S.py:one", WORDS, load("S.py:one", WORDS))
    assert "S.py" in names(package)
    (here / "inner").mkdir()
    os.chdir(here / "inner")
    with pytest.raises(ValueError, match="must be in the current folder"):
        pack("../S.py:one", WORDS, load("../S.py:one", WORDS))


def test_the_job_runs_the_packed_files_not_those_of_here(here: Path) -> None:
    (here / "net.py").write_text("def make(): ...")
    word = f"trial.model.name={here}/net.py:make"
    config = str(here / "tiny.yaml")
    package = pack(config, [*WORDS, word], load("tiny.yaml", WORDS))
    assert package.command[:7] == ("python", "-P", "-m", "study", "run", "tiny.yaml", "--job")
    assert "trial.model.name=net.py:make" in package.command
    (here / "S.py").write_text(SCRIPT)
    assert pack(f"{here}/S.py:two", WORDS, load("S.py:two", WORDS)).command[5] == "S.py:two"


def test_code_that_would_not_travel_is_refused(here: Path) -> None:
    (here / "lib").mkdir()
    (here / "lib" / "net.py").write_text("def make(): ...")
    (here / "inner").mkdir()
    (here / "tiny.yaml").rename(here / "inner" / "tiny.yaml")
    os.chdir(here / "inner")
    words = [*WORDS, "trial.model={name: '../lib/net.py:make'}"]
    plain = TINY.replace("model: {hidden: [16]}", "model: {name: '../lib/net.py:make'}")
    Path("tiny.yaml").write_text(plain)
    with pytest.raises(ValueError, match=r"net.py: the study uses this code, and only files in"):
        pack("tiny.yaml", words[:2], load("tiny.yaml", WORDS))


def test_names_that_a_file_system_or_a_node_cannot_take(here: Path) -> None:
    long = packed(f"name={'n' * 250}")
    assert long.stage.is_dir()
    with open(os.fsencode(here) + b"/caf\xe9.txt", "w"):
        pass
    with pytest.raises(ValueError, match=r"caf.*this file name is not UTF-8.*rename it"):
        packed()


def test_a_password_in_the_command_is_refused(here: Path) -> None:
    word = "tracking_uri=https://ada:hunter2-hunter2@mlflow.example.org"
    with pytest.raises(ValueError, match="must contain no password, because every user") as told:
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
    (here / "net.py").write_text("W = 8")
    uri = "tracking_uri=https://mlflow.example.org"
    words = ["launch", "tiny.yaml", "--to", target, "--dry-run", "storage=/studies", uri]
    assert main([*words, f"question={secret}?"]) == 2
    (here / "notes.txt").write_text(f"the password is {secret}")
    assert main(words) == 2
    told = capsys.readouterr()
    assert secret not in told.out + told.err
    assert "question=***?: must contain no password" in told.err
    assert "notes.txt: holds a password or a secret key, that of $" in told.err
    assert not (here / ".lns-study").exists()
    (here / "notes.txt").unlink()
    assert main(words) == 0
    assert "Nothing was submitted." in capsys.readouterr().out
    written = [path for path in (here / ".lns-study").rglob("*") if path.is_file()]
    assert len(written) > 100
    assert "net.py" in {path.name for path in written}
    assert not [path for path in written if secret.encode() in path.read_bytes()]


def test_a_jobs_environment_is_the_nodes_own(here: Path) -> None:
    request = job_request(packed(), "tiny")
    assert set(request["runtime_env"]) == {"working_dir", "py_modules"}
    last = request["entrypoint"].splitlines()[-1]
    assert last.startswith('exec env "$python" -P -m study run '), last


def test_slurm_takes_no_part_of_a_folders_name_for_a_pattern(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "100%j").mkdir()
    (here / "tiny.yaml").rename(here / "100%j" / "tiny.yaml")
    monkeypatch.chdir(here / "100%j")
    package = packed()
    command = batch_command(package, load("tiny.yaml", WORDS), here / "slurm.sh")
    assert f"--output={here}/100%%j/.lns-study/{package.stage.name}/slurm-%j.log" in command
    assert str(package.stage) in command
    told = batch_command(package, load("tiny.yaml", WORDS), here / "slurm.sh", "1.5,20.0")
    assert told == (*command, "1.5,20.0")


def test_slurm_takes_no_folder_that_a_path_would_be_cut_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a:b").mkdir()
    (here / "tiny.yaml").rename(here / "a:b" / "tiny.yaml")
    monkeypatch.chdir(here / "a:b")
    with pytest.raises(UserError, match=r"a:b.*: must contain no colon.*rename"):
        batch_command(packed(), load("tiny.yaml", WORDS), here / "slurm.sh")


def test_a_relative_storage_is_refused(here: Path) -> None:
    with pytest.raises(ValueError, match=r"storage='studies': must not be a relative path"):
        pack("tiny.yaml", [], load("tiny.yaml"))


def test_a_config_of_another_folder_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "inner").mkdir()

    monkeypatch.chdir(here / "inner")
    with pytest.raises(ValueError, match="must be in the current folder"):
        pack("../tiny.yaml", WORDS, load("../tiny.yaml", WORDS))


def test_too_large_a_folder_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MOST_BYTES", 2**20)
    (here / "weights.bin").write_bytes(bytes(2**20))
    with pytest.raises(ValueError, match=r"the largest weights\.bin; at most 1 MiB travel"):
        packed()


def test_kubernetes_counts_what_base64_stands_for(here: Path) -> None:
    def content(noise: int) -> str:
        (here / "noise.bin").write_bytes(os.urandom(noise))
        objects = kuberay.manifest(packed(), load("tiny.yaml", WORDS), RAYJOB)
        return objects[0]["binaryData"][kuberay.ARCHIVE]

    room = kuberay.MOST_BYTES - len(base64.b64decode(content(0)))
    assert room > kuberay.MOST_BYTES // 5  # for a study's own files
    assert len(content(room - 4096)) > kuberay.MOST_BYTES
    with pytest.raises(UserError, match=r"is 10\d\d KiB, .* takes 1 MiB in a ConfigMap"):
        content(room)
