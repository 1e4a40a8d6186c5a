"""The command ``launch``: runs a study on a cluster and follows its log."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from study.cli.manage import Commands
from study.cli.run import add_study
from study.engines.launch_times import told
from study.errors import OutOfSightError, UserError, refusals
from study.program import lns_study

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.ops.launch.package import Package

TARGETS = ("ray", "slurm", "kuberay")
TEMPLATES = {"slurm": "slurm.sh", "kuberay": "rayjob.yaml"}
"""Default of --template by target: file in conf/cluster that is submitted."""
LOOK_SECONDS = 2.0
"""Seconds between two polls of a Slurm job's state."""

DESCRIPTION = """\
Run a study on a cluster: pack the current folder's files and this version of
lns-study, submit them, and follow the log. Ctrl-C detaches, and prints the
command that follows the log again; the study keeps running.

  --to ray       a running Ray cluster, by its job server (--address)
  --to slurm     sbatch, with conf/cluster/slurm.sh
  --to kuberay   kubectl apply --server-side, with conf/cluster/rayjob.yaml

storage=... must be an absolute path that all nodes see, or s3:// or
gs://bucket/prefix. Repeat the same command to continue the study.
"""


def add_launch(commands: Commands) -> None:
    """Add the command ``launch`` to argparse's subparsers."""
    launch = commands.add_parser(
        "launch",
        help="run a study on a cluster: Ray, Slurm or Kubernetes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_study(launch)
    launch.add_argument("--to", required=True, choices=TARGETS, help="kind of cluster")
    launch.add_argument(
        "--address",
        default="http://127.0.0.1:8265",
        help="the Ray cluster's dashboard (default: http://127.0.0.1:8265)",
    )
    launch.add_argument(
        "--template", type=Path, help="your copy of conf/cluster/slurm.sh or rayjob.yaml"
    )
    launch.add_argument(
        "--dry-run",
        action="store_true",
        help="write the files, print the expected cost, and submit nothing",
    )
    launch.set_defaults(command=_launch)


def _launch(options: argparse.Namespace) -> int:
    from study.config.compose import load
    from study.ops.launch.package import pack
    from study.plan.estimate import describe_cost, describe_size
    from study.plan.plan import make_plan

    small = ["--small"] if options.small else []
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    began = time.monotonic()
    with refusals():
        study = load(options.config, options.overrides, say, download=False, small=options.small)
        plan = make_plan(study, download=False)
        package = pack(options.config, [*small, *options.overrides], study)
    options.packing = time.monotonic() - began
    print(
        f"Package: {package.files} files and the wheel, {package.size / 2**20:.1f} MiB, code"
        f" {package.digest[:12]}, packed in {options.packing:.1f} s"
    )
    if package.links:
        print(f"Linked folders do not travel: {', '.join(package.links)}")
    print(f"{study.name}: {describe_size(plan, plan.size)}. {describe_cost(plan)}", flush=True)
    target = {"ray": _to_ray, "slurm": _to_slurm, "kuberay": _to_kuberay}[options.to]
    with refusals():
        return target(options, study, package)


def _to_ray(options: argparse.Namespace, study: StudyConfig, package: Package) -> int:
    from study.ops.launch import ray_jobs

    request = ray_jobs.job_request(package, study.slug, _launched(options))
    path = package.stage / "ray-job.json"
    path.write_text(json.dumps(request, indent=1) + "\n")
    if options.dry_run:
        return _written(path)
    began = time.monotonic()
    client, job = ray_jobs.submit(options.address, request), request["submission_id"]
    print(f"Submitted in {time.monotonic() - began:.1f} s")
    print(f"Stop:    {ray_jobs.command(options.address, job, 'stop')}")
    again = ray_jobs.command(options.address, job, "logs", "--follow")
    try:
        return 0 if ray_jobs.follow(client, job, lambda line: print(line, flush=True)) else 1
    except OutOfSightError as why:
        return _lost(why, again)
    except KeyboardInterrupt:
        return _detached(again)


def _to_slurm(options: argparse.Namespace, study: StudyConfig, package: Package) -> int:
    from study.ops.launch import slurm

    command = slurm.batch_command(package, study, _template(options), _launched(options))
    path = package.stage / "sbatch.txt"
    path.write_text(shlex.join(command) + "\n")
    if options.dry_run:
        return _written(path)
    began = time.monotonic()
    job = slurm.submit(command)
    log = package.stage / slurm.LOG.format(job=job)
    print(f"Submitted in {time.monotonic() - began:.1f} s")
    stop = lns_study("stop", "--now", study.slug, storage=study.storage)
    print(f"Stop:    {stop}\nKill:    scancel {job}", flush=True)
    log.touch()
    reader = subprocess.Popen(["tail", "-n", "+1", "-F", str(log)])
    try:
        return _follow_slurm(job, lns_study("status", study.slug, storage=study.storage))
    except KeyboardInterrupt:
        return _detached(f"tail -F {shlex.quote(str(log))}")
    finally:
        reader.terminate()
        reader.wait()


def _follow_slurm(job: str, status: str) -> int:
    """Wait for a job's end; return the exit code. ``status`` is the command that shows the
    study."""
    from study.ops.launch.slurm import Seen, look

    before, goes_on = Seen.RUNNING, (Seen.RUNNING, Seen.AWAY)
    # a requeued job is FAILED for a moment, so only two such polls in a row count
    while (seen := look(job)) in goes_on or (seen is Seen.FAILED and seen is not before):
        if seen is Seen.AWAY and before is not Seen.AWAY:
            print(f"{Seen.AWAY.value}; job {job} may still run, polling again", file=sys.stderr)
        before = seen
        time.sleep(LOOK_SECONDS)
    if seen is Seen.FORGOTTEN:
        return _lost(OutOfSightError(f"job {job} {seen.value}"), status)
    if seen is Seen.FAILED:
        print(f"Job {job} failed.", file=sys.stderr)
    return 0 if seen is Seen.COMPLETED else 1


def _to_kuberay(options: argparse.Namespace, study: StudyConfig, package: Package) -> int:
    import yaml

    from study.ops.launch import kuberay

    objects = kuberay.manifest(package, study, _template(options))
    path = package.stage / "kuberay.yaml"
    if options.dry_run:
        path.write_text(yaml.safe_dump_all(objects, sort_keys=False))
        return _written(path)
    began = time.monotonic()
    name, where = objects[0]["metadata"]["name"], kuberay.namespace_words(objects)
    running = kuberay.remove_ended(name, where)
    kuberay.set_entrypoint(objects, running, _launched(options))
    if kuberay.has_package(objects[0], where):
        del objects[0]
    path.write_text(yaml.safe_dump_all(objects, sort_keys=False))
    print(kuberay.apply(path))
    print(f"Submitted in {time.monotonic() - began:.1f} s")
    print(f"Stop:    {shlex.join(['kubectl', 'delete', 'rayjob', name, *where])}", flush=True)
    again = shlex.join(["kubectl", "logs", "--follow", f"job/{name}", *where])
    try:
        return 0 if kuberay.follow(name, where, lambda line: print(line, flush=True)) else 1
    except (OutOfSightError, UserError) as why:
        return _lost(why, again)
    except KeyboardInterrupt:
        return _detached(again)


def _launched(options: argparse.Namespace) -> str:
    """Return the launch's times, for the job; "" in a dry run."""
    return "" if options.dry_run else told(options.packing, time.time())


def _template(options: argparse.Namespace) -> Path:
    """Return the file to submit.

    Raises:
        UserError: the file does not exist.
    """
    from study.config.compose import config_file

    path: Path = options.template or config_file(f"cluster/{TEMPLATES[options.to]}")
    if not path.is_file():
        raise UserError(f"--template {path}: file not found; copy one of conf/cluster")
    return path


def _written(path: Path) -> int:
    print(f"Written: {path}\nNothing was submitted.")
    return 0


def _lost(why: Exception, again: str) -> int:
    print(
        f"\nNot followed any more ({why}); the study may still run. Look again: {again}",
        file=sys.stderr,
    )
    return 1


def _detached(again: str) -> int:
    print(f"\nDetached; the study keeps running. Follow it again: {again}", file=sys.stderr)
    return 0
