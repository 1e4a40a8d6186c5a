"""Following a launched study when the cluster or the connection fails; with replacements for the
programs of Slurm and Kubernetes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import AuthenticationError

from study.cli import launch, main
from study.engines.launch_times import VARIABLE
from study.errors import OutOfSightError, UserError
from study.ops.launch import kuberay, ray_jobs
from study.ops.launch.slurm import Seen, look
from tests.study.conftest import TINY

GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
AWAY = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("squeue", "scontrol", "seen"),
    [
        ("exit 0", "echo JobState=PENDING Reason=BeginTime", Seen.RUNNING),
        ("exit 0", "echo JobState=NODE_FAIL", Seen.FAILED),
        ("exit 0", "exit 0", Seen.FAILED),
        ("echo '7 all tiny'", "exit 1", Seen.RUNNING),
        (AWAY, AWAY, Seen.AWAY),
        (GONE, AWAY, Seen.AWAY),
        ("true", "echo JobState=COMPLETED", Seen.COMPLETED),
        (GONE, "echo JobState=FAILED", Seen.FAILED),
        (GONE, GONE, Seen.FORGOTTEN),
    ],
)
def test_slurm_that_is_away_says_nothing_of_a_job(
    programs: Path, squeue: str, scontrol: str, seen: Seen
) -> None:
    program(programs, "squeue", squeue)
    program(programs, "scontrol", scontrol)
    assert look("7") is seen


def test_a_job_is_followed_past_a_slurm_that_was_away(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = f"n=$(cat {programs}/n 2>/dev/null || echo 0); echo $((n + 1)) >{programs}/n"
    program(programs, "squeue", f"{turn}; [ $n -lt 2 ] || exit 0; {AWAY}")
    program(programs, "scontrol", "echo JobState=COMPLETED")
    assert launch._follow_slurm("7", "lns-study status tiny") == 0
    assert capsys.readouterr().err.count("Slurm does not answer; job 7 may still run") == 1
    program(programs, "scontrol", GONE)
    assert launch._follow_slurm("7", "lns-study status tiny") == 1
    assert "Look again: lns-study status tiny" in capsys.readouterr().err


def test_a_job_that_is_queued_again_is_followed_though_it_has_failed_for_a_moment(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(programs, "squeue", "exit 0")
    states = f"n=$(cat {programs}/n 2>/dev/null || echo 0); echo $((n + 1)) >{programs}/n"
    script = f'{states}; words=(CANCELLED PENDING RUNNING {{}}); echo "JobState=${{{{words[$n]}}}}"'
    program(programs, "scontrol", script.format("COMPLETED"))
    assert launch._follow_slurm("7", "lns-study status tiny") == 0
    assert capsys.readouterr().err == ""
    (programs / "n").unlink()
    program(programs, "scontrol", script.format("FAILED FAILED"))
    assert launch._follow_slurm("7", "lns-study status tiny") == 1
    assert (programs / "n").read_text() == "5\n"
    assert capsys.readouterr().err == "Job 7 failed.\n"


class Client:
    """A job server that fails in one way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit_job(self, **request: Any) -> None:
        raise self._error

    async def tail_job_logs(self, job: str) -> Any:
        yield "a line\n"
        raise self._error


def test_a_wrong_token_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Client(AuthenticationError("Unauthorized"))
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: refusing)
    with pytest.raises(UserError, match=r"takes no job .*RAY_AUTH_MODE=token.*auth_token"):
        ray_jobs.submit("http://127.0.0.1:8265", {})


@pytest.mark.parametrize(
    "error", [RuntimeError("WebSocket connection closed: 1006"), ConnectionResetError("cut")]
)
def test_a_tunnel_that_is_cut_ends_the_following_alone(error: Exception) -> None:
    lines: list[str] = []
    with pytest.raises(OutOfSightError):
        ray_jobs.follow(Client(error), "tiny-1", lines.append)
    assert lines == ["a line"]


def test_a_printed_command_brings_what_was_set_for_the_launch_alone(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "ray", 'echo "$RAY_AUTH_MODE|$RAY_AUTH_TOKEN_PATH|$*"')
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    words = ("http://127.0.0.1:8265", "tiny-1", "logs", "--follow")
    assert ray_jobs.command(*words) == shlex.join(
        ["ray", "job", *words[2:], "--address", *words[:2]]
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/a folder/token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "correct-horse")
    printed = ray_jobs.command(*words)
    assert "correct-horse" not in printed
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name)
    pasted = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True)
    assert pasted.stdout.startswith("token|/a folder/token|job logs --follow --address")


IN_A_JOB = """
import subprocess, sys
supervisor = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1], shell=True))"
sys.exit(subprocess.call([sys.executable, "-c", supervisor, sys.argv[1]]))
"""
"""A process whose child runs a job's command in a shell, like a raylet's."""


@pytest.mark.parametrize("folder", ["venv", "a venv", None])
def test_a_jobs_command_takes_the_python_of_the_raylet_above_it(
    programs: Path, folder: str | None
) -> None:
    """Or with the one on the PATH as a last choice; it prints which."""
    program(programs, "python", 'echo "of the PATH: $*"')
    own = programs.parent / (folder or "nowhere") / "bin" / "python"
    if folder:
        own.parent.mkdir(parents=True)
        program(own.parent, "python", 'echo "of the head: $LAUNCHED $*"')
    worker = subprocess.list2cmdline([str(own), f"{own.parents[1]}/setup_worker.py", "--port=1"])
    entrypoint = ray_jobs.entrypoint(("-m", "study", "run", "a b.yaml"), LAUNCHED="now")
    done = subprocess.run(
        [sys.executable, "-c", IN_A_JOB, entrypoint, "--a=1", f"--python_worker_command={worker}"],
        capture_output=True,
        text=True,
        check=True,
    )
    said, ran = done.stdout.splitlines()
    if folder:
        assert (said, ran) == (f"Python: {own}", "of the head: now -m study run a b.yaml")
    else:
        assert (said, ran) == ("Python: python", "of the PATH: -m study run a b.yaml")


@pytest.fixture
def launched(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that launch to Kubernetes in a team's namespace."""
    monkeypatch.setattr(kuberay, "LOOK_SECONDS", 0.0)
    (tmp_path / "tiny.yaml").write_text(TINY)
    shipped = Path(__file__).parents[4] / "conf" / "cluster" / "rayjob.yaml"
    own = shipped.read_text().replace("  name: lns-study\n", "  name: x\n  namespace: team-a\n", 1)
    (tmp_path / "own.yaml").write_text(own)
    words = ["launch", "tiny.yaml", "--to", "kuberay", "--template", "own.yaml"]
    return [*words, "storage=/studies", "tracking_uri=none"]


APPLY = """\
[[ $* == *--server-side* ]] || [ "$(stat --format=%s "${@: -1}")" -le 262144 ] || {
echo 'metadata.annotations: Too long: may not be more than 262144 bytes' >&2; exit 1; }"""
"""Shell lines that answer ``apply`` of the file in the last argument as a cluster does. A
client-side apply copies the file into an annotation, which has a maximum size."""


def kubectl(programs: Path, states: list[str], job: str, logs: str = "true") -> None:
    """A kubectl that reports one state of the RayJob after another, then repeats the last."""
    (programs / "states").write_text("".join(f"{state}\n" for state in states))
    program(
        programs,
        "kubectl",
        f'echo "$*" >>{programs}/calls\ncd {programs}\ncase "$*" in'
        ' "get rayjob"*) head -n 1 states; [ $(wc -l <states) = 1 ] || sed -i 1d states;;'
        f' "get job"*) {job};; "logs"*) {logs};; apply*) {APPLY};; esac',
    )


def test_kubernetes_is_asked_in_the_jobs_namespace_and_an_ended_job_makes_room(
    programs: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    unauthorized = 'echo "error: Unauthorized" >&2; exit 1'
    kubectl(programs, ["x|Failed|FAILED||", "x|Initializing|||"], unauthorized)
    assert main(launched) == 1
    calls = (programs / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["get", "delete", "get", "apply", "get", "get"]
    assert all("--namespace team-a" in call for call in calls if not call.startswith("apply"))
    told = capsys.readouterr()
    assert "--namespace team-a" in next(line for line in told.out.splitlines() if "Stop:" in line)
    assert "Unauthorized" in told.err
    assert "kubectl logs --follow job/tiny-" in told.err


@pytest.mark.parametrize(
    ("states", "job", "code", "said"),
    [
        (["|Failed||ValidationFailed|no such field"], "true", 1, "ValidationFailed: no such field"),
        (["|ValidationFailed||ValidationFailed|a gate"], "true", 1, "ValidationFailed: a gate"),
        (["|Running|RUNNING||", "|Complete|SUCCEEDED||"], "echo uid-1", 0, "Complete SUCCEEDED"),
        # the end of the log does not show how the study ended
        (["|Running|RUNNING||", "|Failed|FAILED|AppFailed|exit 1"], "echo uid-1", 1, "AppFailed"),
        (["|Initializing|||", ""], "true", 1, "was deleted"),
        (["|Initializing|||"] * 3, "true", 1, "has been Initializing for 0 minutes"),
    ],
)
def test_a_rayjob_is_followed_to_its_end_or_no_longer_than_is_sensible(
    programs: Path,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    states: list[str],
    job: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(kuberay, "WAIT_SECONDS", 0.0 if len(states) == 3 else 60.0)
    kubectl(programs, ["", *(f"x{state}" if state else "" for state in states)], job)
    assert main(launched) == code
    told = capfd.readouterr()
    assert ("Not followed any more" in told.err) == ("was deleted" in said or len(states) == 3)
    assert said in told.out + told.err


RUNNING, RETRYING, DONE = "x|Running|RUNNING||", "x|Retrying|||", "x|Complete|SUCCEEDED||"


def in_turn(*texts: str) -> str:
    """A script that prints one text after another, then repeats the last."""
    cases = " ".join(f"{turn}) echo '{text}';;" for turn, text in enumerate(texts[:-1]))
    count = "n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n"
    return f"{count}; case $n in {cases} *) echo '{texts[-1]}';; esac"


def test_the_log_of_each_cluster_that_is_made_anew_is_followed_once(
    programs: Path, launched: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    job = in_turn("first|1", "first|", "second|1", "second|")
    kubectl(programs, ["", RUNNING, RUNNING, RETRYING, DONE], job, "echo a log")
    assert main(launched) == 0
    assert capfd.readouterr().out.count("a log") == 2


def test_a_log_whose_connection_breaks_is_followed_on(
    programs: Path, launched: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    job = in_turn("only|1", "only|1", "only|")
    kubectl(programs, ["", RUNNING, RUNNING, DONE], job, "echo a line; exit 1")
    assert main(launched) == 0
    followed = [line for line in (programs / "calls").read_text().splitlines() if "logs" in line]
    assert ["--since=1s" in line for line in followed] == [False, True]
    assert capfd.readouterr().out.count("a line") == 2


def test_a_log_that_may_not_be_read_is_left_and_the_rayjob_followed(
    programs: Path, launched: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl(programs, ["", *[RUNNING] * 9, DONE], "echo 'only|1'", "exit 1")
    assert main(launched) == 0
    assert (programs / "calls").read_text().count("logs") == 5
    told = capfd.readouterr()
    assert (told.out + told.err).count("The log cannot be read: kubectl logs --follow job/") == 1


def test_a_rayjob_is_followed_past_a_kubernetes_that_was_away(
    programs: Path, launched: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    away = "echo 'Unable to connect to the server: i/o timeout' >&2; exit 1"
    count = "n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n"
    kubectl(
        programs, ["", RUNNING, RUNNING, RUNNING, DONE], f"{count}; [ $n -gt 2 ] || {{ {away}; }}"
    )
    assert main(launched) == 0
    told = capfd.readouterr()
    assert (told.out + told.err).count("Kubernetes does not answer") == 1


def test_the_log_of_a_rayjob_that_ended_at_once_is_printed(
    programs: Path, launched: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl(programs, ["", "x|Failed|FAILED|AppFailed|exit 1"], "echo 'only|'", "echo why")
    assert main(launched) == 1
    assert "why" in capfd.readouterr().out


def test_a_cluster_that_is_not_made_anew_is_not_waited_for_without_end(
    programs: Path,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kuberay, "WAIT_SECONDS", 0.5)
    kubectl(programs, ["", RUNNING, RETRYING], in_turn("first|1", ""))
    assert main(launched) == 1
    assert "has been Retrying for 0 minutes" in capfd.readouterr().err


SCRIPT = Path(__file__).parents[4] / "conf" / "cluster" / "slurm.sh"
JOB = {
    "SLURM_JOB_ID": str(os.getpid()), "SLURM_CPUS_ON_NODE": "1", "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "node", "SLURM_JOB_NUM_NODES": "1",
}  # fmt: skip
WAITS = "; touch begun; while :; do sleep 0.1; done"
NOTICES = {
    "interrupted": (f"trap 'exit 130' USR1{WAITS}", 1, True, 130),
    "stopped or cancelled by its user": (f"trap 'exit 0' USR1{WAITS}", 1, False, 0),
    "its last trial failed": (f"trap 'exit 1' USR1{WAITS}", 1, False, 1),
    "killed by the notice": (WAITS[2:], 1, True, 138),
    "hangs": (f"trap : USR1{WAITS}", 1, True, 137),
    "two notices": (f"trap 'trap \"exit 99\" USR1; sleep 3; exit 130' USR1{WAITS}", 2, True, 130),
    "not begun": (None, 1, True, 137),
    "cancelled": ("touch cancelled begun; exit 143", 1, False, 143),
    "ended by itself": ("touch begun; exit 3", 0, False, 3),
}
"""What a study on Slurm does, the notices of its job, whether it is queued again, and its exit
code."""


@pytest.mark.parametrize("case", NOTICES)
def test_a_notice_interrupts_a_study_and_its_job_is_queued_again_in_time(
    programs: Path, tmp_path: Path, case: str
) -> None:
    driver, notices, again, code = NOTICES[case]
    program(programs, "srun", 'while [[ $1 == --* ]]; do shift; done; "$@"')
    killed = f"kill -KILL $(cat /tmp/ray-{os.getpid()}-*/driver) 2>/dev/null || true"
    program(
        programs,
        "scontrol",
        f'case $* in requeue*) echo "$*" >>{tmp_path}/requeued; {killed};; *hostnames*) echo node;;'
        f" *) [ ! -e {tmp_path}/cancelled ] || echo JobState=CANCELLED;; esac",
    )
    starts = "touch begun; exec sleep 8" if driver is None else 'shift; exec "$@"'
    rest = f'while [ "$1" != -- ]; do shift; done; cd {tmp_path}; {starts}'
    program(programs, "ray", f'[ "$1" = symmetric-run ] || exit 0; {rest}')
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "start.sh").write_text(driver or "")
    assert "+ 105))" in SCRIPT.read_text()
    (tmp_path / "slurm.sh").write_text(SCRIPT.read_text().replace("+ 105))", "+ 5))"))
    words = ["bash", "slurm.sh", str(tmp_path / "package")]
    job = subprocess.Popen(words, env=os.environ | JOB, start_new_session=True)
    began = time.monotonic()
    while not (tmp_path / "begun").exists():
        assert job.poll() is None
        time.sleep(0.05)
    for _ in range(notices):
        job.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
    try:
        assert job.wait(60) == code
        assert time.monotonic() - began < 20
        requeued = tmp_path / "requeued"
        assert (requeued.read_text() if requeued.exists() else "") == (
            f"requeue {os.getpid()}\n" if again else ""
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        for folder in Path("/tmp").glob(f"ray-{os.getpid()}-*"):
            shutil.rmtree(folder)


def test_the_end_of_a_jobs_run_leaves_the_token_of_the_next(programs: Path, tmp_path: Path) -> None:
    """The next run may start before the trap of the last one; a killed run had no trap."""
    (tmp_path / "package").mkdir()
    tokens = tmp_path / "package" / f"token-{os.getpid()}"
    Path(f"{tokens}-2").touch()
    program(programs, "srun", 'while [[ $1 == --* ]]; do shift; done; "$@"')
    program(programs, "scontrol", "echo node")
    program(programs, "ray", f"[ $1 = stop ] || {{ touch {tokens}-4; ls {tokens}-* >there; }}")
    count = {"SLURM_RESTART_COUNT": "3"}
    words = ["bash", str(SCRIPT), str(tmp_path / "package")]
    subprocess.run(words, env=os.environ | JOB | count, check=True)
    assert (tmp_path / "there").read_text().split() == [f"{tokens}-3", f"{tokens}-4"]
    assert list((tmp_path / "package").iterdir()) == [Path(f"{tokens}-4")]


def test_rays_folder_of_a_slurm_job_is_its_users_alone(programs: Path, tmp_path: Path) -> None:
    for name, text in (
        ("srun", 'while [[ $1 == --* ]]; do shift; done; "$@"'),
        ("scontrol", "echo node"),
        ("ray", 'for word; do case $word in --temp-dir=*) mkdir -m 777 "${word#*=}"; stat'
         f' --format=%a "$(dirname "${{word#*=}}")" >{programs}/mode; echo "${{word#*=}}"'
         f' >{programs}/folder;; esac; done; printenv {VARIABLE} >{programs}/launched'),
    ):  # fmt: skip
        program(programs, name, text)
    (tmp_path / "package").mkdir()
    words = ["bash", str(SCRIPT), str(tmp_path / "package"), "1.5,20.0"]
    subprocess.run(words, env=os.environ | JOB, check=True)
    assert (programs / "mode").read_text() == "700\n"
    assert (programs / "launched").read_text() == "1.5,20.0\n"
    folder = Path((programs / "folder").read_text().strip()).parent
    assert folder.name != f"ray-{os.getpid()}"
    assert not folder.exists()
    assert len(str(folder)) + len("/r/session_2026-11-24_17-52-07_123456_1234567") < 107 - 21


@pytest.mark.slow
def test_rays_own_folder_is_out_of_others_reach() -> None:
    from study.engines.ray.own_ray import OwnRay

    ray = OwnRay(1, 0, dashboard=False)
    try:
        assert ray._folder is not None
        assert stat.S_IMODE(ray._folder.stat().st_mode) == 0o700
        if os.getuid() == 0:
            listed = subprocess.run(["ls", f"{ray._folder}/r"], user=65534, capture_output=True)
            assert listed.returncode != 0
    finally:
        ray.close()
