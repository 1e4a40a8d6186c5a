"""Commands that messages suggest to the user work as printed, in the shell from which the program
was started."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from study.program import lns_study, own_version

ROOT = Path(__file__).parents[2]


def an_executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_bare_name_where_the_path_has_it_else_the_program_beside_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = an_executable(tmp_path / "a venv" / "bin" / "lns-study")
    monkeypatch.delenv("LNS_STUDY_COMMAND")
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(program.parent))
    assert lns_study("run", "a b.yaml", "seeds=[0]") == "lns-study run 'a b.yaml' 'seeds=[0]'"
    monkeypatch.setenv("PATH", "/nowhere")
    assert lns_study("ui") == f"'{program}' ui"
    program.unlink()
    assert lns_study("ui") == f"'{program.with_name('python')}' -m study ui"


def test_the_storage_is_named_unless_it_is_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        lns_study("run", "--resume", "table", storage="studies") == "lns-study run --resume table"
    )
    usual = str(tmp_path / "studies")
    assert lns_study("run", "--resume", "table", storage=usual) == "lns-study run --resume table"
    assert (
        lns_study("run", "--resume", "table", storage="my studies")
        == "lns-study run --resume table --storage 'my studies'"
    )


def test_a_checkout_that_is_not_installed_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert own_version() == about["project"]["version"]


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A venv that ``scripts/_env.sh`` accepts as complete; its ``lns-study`` prints its folder and
    arguments."""
    folder = tmp_path / "a venv"
    an_executable(folder / "bin" / "lns-study", '#!/bin/sh\necho "$PWD" "$@"\n')
    content = b"".join(
        (ROOT / name).read_bytes() for name in ("pyproject.toml", "setup.py", "constraints.txt")
    )
    (folder / ".installed").write_text(f"{hashlib.sha256(content).hexdigest()} {sys.version}\n")
    return folder


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_what_the_scripts_say_works_in_the_shell_that_called_them(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, inside: bool, active: bool
) -> None:
    path = f"{venv}/bin:{os.environ['PATH']}" if active else "/usr/bin:/bin"
    shell = {"PATH": path, "PYTHON": sys.executable, "LNS_STUDY_VENV": str(venv)}
    here = ROOT if inside else tmp_path
    script = shlex.quote(str(ROOT / "scripts" / "_env.sh"))

    def say(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=here, env=shell, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    monkeypatch.setenv("LNS_STUDY_COMMAND", say(f'source {script}; echo "$LNS_STUDY_COMMAND"'))
    again = lns_study("ui", "--port", "5001")
    assert say(again) == f"{ROOT} ui --port 5001"
    assert inside == (not again.startswith("cd ")), again
    assert active == (str(venv.name) not in again.replace("\\", "")), again


def test_a_process_knows_when_it_began() -> None:
    code = "import time; from study.program import process_began; print(process_began())"
    before = time.monotonic()
    began = float(subprocess.check_output([sys.executable, "-c", code]))
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before - 2 * tick <= began <= time.monotonic()
    # a module was loaded since
    code += "; print(time.monotonic())"
    first, now = map(float, subprocess.check_output([sys.executable, "-c", code]).split())
    assert first < now
