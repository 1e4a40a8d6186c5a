"""``conf/cluster/Dockerfile``, read as Docker reads it: what it copies is there, what it installs
has the programs that the other files of ``conf/cluster`` call, and its user owns what they mount.

No image is built here. That python:3.11-slim has a shell, coreutils and Python is taken as given.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
CLUSTER = ROOT / "conf" / "cluster"
IMAGE = "lns-study:0.1.0"
BASE = {"bash", "sh", "cat", "mkdir", "install", "rm", "useradd", "apt-get", "python", "pip"}
"""Programs in python:3.11-slim that our files call."""
PACKAGES = {"wget": "wget", "rsync": "rsync", "openssh-client": "ssh"}
"""Debian's packages and the program of each."""
OUTSIDE = {"wget": "KubeRay's probes", "rsync": "ray up", "ssh": "ray up"}
"""Programs that others call in our containers: Ray's runner copies files into each with rsync, and
the head reaches the workers with ssh."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions with their arguments, lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


STEPS = instructions((CLUSTER / "Dockerfile").read_text())


def arguments(name: str) -> list[str]:
    """Return the arguments of all instructions of a name."""
    return [rest for step, rest in STEPS if step == name]


def variables() -> dict[str, str]:
    """Return the image's own variables."""
    return dict(word.split("=", 1) for rest in arguments("ENV") for word in rest.split())


def ignored(path: str, rules: list[str]) -> bool:
    """Return whether .dockerignore leaves a path out: its last matching rule counts."""
    parts, left_out = Path(path).parts, False
    for rule in rules:
        pattern = rule.removeprefix("!").strip("/")
        tails = [Path(*parts[:end]).as_posix() for end in range(1, len(parts) + 1)]
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        else:
            fits = any(
                fnmatch.fnmatch(each, pattern) and each.count("/") == pattern.count("/")
                for each in tails
            )
        left_out = not rule.startswith("!") if fits else left_out
    return left_out


def rules() -> list[str]:
    """Return the rules of .dockerignore."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def test_what_is_copied_is_in_the_checkout_and_sent_to_docker() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    copied = [word for rest in arguments("COPY") for word in rest.split()[:-1]]
    assert len(copied) >= 9
    for source in copied:
        files = [file for file in tracked if file == source or file.startswith(f"{source}/")]
        assert files, source
        assert [file for file in files if ignored(file, rules())] == []


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "studies/mine/ledger.jsonl",
        "conf/cluster/.secrets/admin",
        "study/__pycache__/api.pyc",
    ],
)
def test_secrets_and_studies_are_not_sent_to_docker(path: str) -> None:
    assert ignored(path, rules())


def extras() -> list[str]:
    """Return the extras in the image by default."""
    (default,) = [rest for rest in arguments("ARG") if rest.startswith("EXTRAS=")]
    return default.partition("=")[2].split(",")


def test_extras_are_the_projects_and_have_what_the_other_files_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    assert set(extras()) <= set(known)
    comment = re.findall(r"^# EXTRAS=(\S+)", (CLUSTER / "Dockerfile").read_text(), re.M)
    assert {name for each in comment for name in each.split(",")} <= set(known)
    assert set(extras()) < set(comment[0].split(","))
    wanted = [re.split(r"[\[<>=]", line)[0] for name in extras() for line in known[name]]
    # Ray's autoscaler on AWS and MLflow's artifacts in s3:// import boto3, studies there s3fs
    assert {"boto3", "s3fs", "psycopg"} <= set(wanted)
    pinned = (ROOT / "constraints.txt").read_text()
    assert [name for name in wanted if not re.search(rf"(?mi)^{name}==", pinned)] == []


def services() -> dict[str, Any]:
    """Return the services of the compose file that run our image."""
    every = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    return {name: each for name, each in every.items() if each["image"] == IMAGE}


def called() -> set[str]:
    """Return the programs that the files of conf/cluster call in our containers."""
    shell, words = [], []
    for service in services().values():
        first, *_, script = service["command"]
        words.append(first)
        shell.append(script.partition("<<'END'")[0])
        words += service.get("healthcheck", {"test": []})["test"][1:2]
    aws = yaml.safe_load((CLUSTER / "aws.yaml").read_text())
    for kind in ("head", "worker"):
        shell += aws[f"{kind}_start_ray_commands"]
    job = (CLUSTER / "rayjob.yaml").read_text()
    words += re.findall(r"command:\n\s+- (\w+)", job) + re.findall(r"entrypoint: (\w+)", job)
    begin = r"(?:^|[;&|]\s*|\$\()\s*(?:[A-Z_]+=\w+ )*(?:exec )?([a-z][\w-]+)(?=\s)"
    found = {word for line in shell for word in re.findall(begin, line, re.M)}
    return (found | set(words)) - {"export"}


def installed() -> set[str]:
    """Return the programs that the image has."""
    runs = " ".join(arguments("RUN"))
    (line,) = re.findall(r"apt-get install ([^&]*)", runs)
    debian = {PACKAGES[word] for word in line.split() if not word.startswith("--")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=]", each)[0] for each in project["dependencies"]}
    scripts = {
        point.name
        for name in names
        for point in metadata.distribution(name).entry_points
        if point.group == "console_scripts"
    }
    return BASE | debian | scripts | set(project["scripts"])


def test_every_program_that_is_called_in_a_container_is_installed() -> None:
    assert {"ray", "lns-study", "python", "bash", "wget"} <= called()
    assert (called() | set(OUTSIDE)) - installed() == set()
    for line in arguments("RUN"):
        assert subprocess.run(["bash", "-n"], input=line, text=True).returncode == 0


def owned() -> set[str]:
    """Return the folders that the image's user owns, besides its home."""
    found = [re.findall(r"install --directory ([^&]+)", line) for line in arguments("RUN")]
    words = " ".join(each for lines in found for each in lines).split()
    assert words[:4] == ["--owner", "ray", "--group", "ray"]
    return {word for word in words if word.startswith("/")}


def test_its_user_owns_what_is_mounted() -> None:
    """A named volume takes owner and mode from the image's folder, and belongs to root without
    one."""
    (uid,) = arguments("USER")
    assert f"--uid {uid} --create-home ray" in " ".join(arguments("RUN"))
    places = {
        volume.split(":")[1] for each in services().values() for volume in each.get("volumes", [])
    }
    assert places == {"/studies"}
    assert places <= owned()
    for name in ("rayjob.yaml", "raycluster.yaml"):
        assert f"runAsUser: {uid}," in (CLUSTER / name).read_text()
    order = [step for step, _ in STEPS]
    assert order.index("USER") > max(place for place, step in enumerate(order) if step == "RUN")


def test_ray_up_mounts_the_token_where_the_user_looks_for_it() -> None:
    """Ray takes the home folder from the image's variable HOME, or root's without it."""
    from ray.autoscaler._private.docker import docker_start_cmds

    home = variables().get("HOME", "/root")
    assert arguments("WORKDIR")[-1] == home == "/home/ray"
    mounts = yaml.safe_load((CLUSTER / "aws.yaml").read_text())["file_mounts"]
    assert list(mounts) == ["~/.ray/auth_token"]
    started = docker_start_cmds("ubuntu", IMAGE, mounts, "name", [], "cluster", home, "docker")
    assert f":{home}/.ray/auth_token" in started
    # Docker would create the folder of a mounted file as root
    assert f"{home}/.ray" in owned()
