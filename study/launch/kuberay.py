"""Launch on Kubernetes: a ConfigMap with the package and a RayJob of KubeRay that runs it.

Both are written into one file, from ``conf/cluster/rayjob.yaml`` or the user's own copy of it, and
given to ``kubectl apply --server-side``: a client-side apply copies the object into an annotation,
which may have 256 KiB. The package must fit a ConfigMap (1 MiB before base64); each pod unpacks it
into an empty folder of its own before Ray starts. The study's storage must lie in a volume of
the head that outlives the cluster. Secrets are named in the template, never contained.

Docs: https://docs.ray.io/en/latest/cluster/kubernetes/getting-started/rayjob-quick-start.html,
https://kubernetes.io/docs/concepts/configuration/configmap/,
https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

from __future__ import annotations

import base64
import io
import lzma
import re
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from study.config import StudyConfig
from study.errors import OutOfSightError, UserError
from study.execution.launched import VARIABLE
from study.launch.package import Package
from study.launch.slurm import run_tool
from trainers.object_store import is_url, local_folder

ARCHIVE = "package.tar.xz"
TEXT = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}
"""Compression of text, which is 1 % smaller than by the preset alone."""
LEFT_OUT = ("site/*.dist-info/RECORD", "site/study/conf/cluster/*")
"""Files of the wheel that no job needs, a thirtieth of its archive: the list of hashes by which pip
removes it, and the templates of clusters, which are copied where a study is launched."""
VOLUME = "package"
"""Name of the template's volumes that hold the package."""
CODE = "lns-study/code"
"""Annotation of a ConfigMap with the digest of its package."""
MANAGER = "lns-study"
"""Name under which the server notes what a launch has set."""
MOST_BYTES = 2**20
"""Largest size of a ConfigMap's data, in bytes: those that its base64 stands for (MaxSecretSize of
Kubernetes' core/validation, which sums what it has decoded)."""
LONGEST_NAME = 47
"""Most characters of a RayJob's name that KubeRay takes."""
DIGITS = 8
ENDED = ("Complete", "Failed", "ValidationFailed")
"""What KubeRay calls a RayJob that it does not touch again."""
LOOK_SECONDS = 2.0
"""Seconds between looks at a RayJob."""
WAIT_SECONDS = 3600.0
"""Seconds for which a RayJob may stay in a state without a line of its log, and its pod may take
to start."""
OPEN_SECONDS = 10.0
"""Seconds after which a log without a line was not refused, but is silent."""
LOG_ATTEMPTS = 5
"""Times in a row that a log may fail without a line before it is left."""
AWAY = re.compile(
    r"connect|refused|timeout|timed out|deadline|EOF|reset|no route|unavailable|currently unable",
    re.IGNORECASE,
)
"""What ``kubectl`` says of a cluster that does not answer for a while."""
ENTRYPOINT = "bash /package/start.sh"


def manifest(package: Package, loaded: StudyConfig, template: Path) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a launch.

    Raises:
        UserError: the template is no RayJob with a volume ``package``, the storage is in no volume
            that outlives the cluster, or the package is too large.
    """
    name = object_name(loaded.slug, package.digest)
    try:
        documents = [each for each in yaml.safe_load_all(template.read_text()) if each]
        jobs = [each for each in documents if each["kind"] == "RayJob"]
        if len(jobs) != 1:
            raise UserError(f"{template}: must hold one RayJob; copy conf/cluster/rayjob.yaml")
        _fill(jobs[0], name, loaded, template)
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:
        raise UserError(
            f"{template}: is no RayJob as KubeRay takes it ({type(error).__name__}: {error});"
            " compare it with conf/cluster/rayjob.yaml"
        ) from None
    archive = _archive(package)
    if len(archive) > MOST_BYTES:
        raise UserError(
            f"the package is {len(archive) >> 10} KiB, and Kubernetes takes 1 MiB in a ConfigMap;"
            " launch from a folder with the study alone, or build its files into the image"
            " (conf/cluster/Dockerfile) and launch a study by name"
        )
    place = {key: jobs[0]["metadata"][key] for key in ("namespace",) if key in jobs[0]["metadata"]}
    data = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **place, "annotations": {CODE: package.digest}},
        "immutable": True,
        "binaryData": {ARCHIVE: base64.b64encode(archive).decode()},
    }
    return [data, *documents]


def namespace_words(objects: list[dict[str, Any]]) -> list[str]:
    """Return kubectl's words for the namespace of a launch; none for that of its context."""
    named = objects[0]["metadata"].get("namespace")
    return ["--namespace", named] if named else []


@dataclass(frozen=True)
class RayJobState:
    """What Kubernetes says of a RayJob: KubeRay's states of it and of its study, and why."""

    state: str
    study: str
    why: str


def look(name: str, namespace: list[str]) -> RayJobState | None:
    """Ask for a RayJob; return None if it is not there.

    Raises:
        UserError: ``kubectl`` fails.
    """
    fields = ("jobDeploymentStatus", "jobStatus", "reason", "message")
    form = "".join(f"|{{.status.{field}}}" for field in fields)
    job = ("rayjob", name, *namespace, "--ignore-not-found")
    found = run_tool(("kubectl", "get", *job, f"--output=jsonpath={{.metadata.name}}{form}"))
    if not found:
        return None
    _, state, study, *why = found.split("|", len(fields))
    return RayJobState(state, study, ": ".join(filter(None, why)))


def remove_ended(name: str, namespace: list[str]) -> str:
    """Delete a RayJob that has ended: as long as it is there, the same manifest starts nothing.
    Return the entrypoint of one that has not; "" if there is none.

    Raises:
        UserError: ``kubectl`` fails.
    """
    seen = look(name, namespace)
    if seen is None:
        return ""
    job = ("rayjob", name, *namespace)
    if seen.state not in ENDED:
        return run_tool(("kubectl", "get", *job, "--output=jsonpath={.spec.entrypoint}"))
    run_tool(("kubectl", "delete", *job, "--cascade=foreground"))
    return ""


def set_entrypoint(objects: list[dict[str, Any]], running: str, launched: str) -> None:
    """Give the RayJob the times of its launch (:mod:`study.execution.launched`), or the entrypoint
    of the one that runs, which stays as it is."""
    (job,) = (each for each in objects if each["kind"] == "RayJob")
    job["spec"]["entrypoint"] = running or f"env {VARIABLE}={launched} {ENTRYPOINT}"


def has_package(data: dict[str, Any], namespace: list[str]) -> bool:
    """Tell whether the ConfigMap of a launch is there with the same code; it is immutable.

    Raises:
        UserError: ``kubectl`` fails.
    """
    about = data["metadata"]
    form = f"--output=jsonpath={{.metadata.annotations.{CODE}}}"
    words = ("configmap", about["name"], *namespace, "--ignore-not-found", form)
    return run_tool(("kubectl", "get", *words)) == str(about["annotations"][CODE])


def apply(path: Path) -> str:
    """Create the objects of a file, or change them to what it says; return what ``kubectl`` says.

    The file wins over what others have changed (``kubectl edit``), as in a client-side apply.

    Raises:
        UserError: ``kubectl`` fails.
    """
    server = ("--server-side", f"--field-manager={MANAGER}", "--force-conflicts")
    return run_tool(("kubectl", "apply", *server, "-f", str(path)))


def follow(name: str, namespace: list[str], say: Callable[[str], None]) -> bool:
    """Print the log of each Job that the operator makes for a RayJob, of its name, until the RayJob
    has ended; tell whether it succeeded.

    A cluster that dies is made anew, with another Job (``backoffLimit``). A log whose connection
    broke is followed on from its last line, of which about a second may be printed twice; one that
    cannot be read is left after :data:`LOG_ATTEMPTS`.

    Raises:
        UserError: ``kubectl`` fails, but not because the cluster does not answer for a while.
        OutOfSightError: the RayJob was deleted, has no Job that runs for a long time, or the
            cluster does not answer for as long.
    """
    log, before, changed, away = _Log(name, namespace), "", time.monotonic(), False
    while True:
        try:
            seen, job = look(name, namespace), _job(name, namespace)
        except UserError as error:
            if not AWAY.search(str(error)) or time.monotonic() > changed + WAIT_SECONDS:
                raise
            if not away:
                say(f"Kubernetes does not answer ({error}); RayJob {name} goes on")
            away = True
            time.sleep(LOOK_SECONDS)
            continue
        away = False
        if seen is None:
            raise OutOfSightError(f"RayJob {name} was deleted")
        if seen.state != before:
            before, changed = seen.state, time.monotonic()
            if seen.state not in ENDED:
                say(f"RayJob {name}: {seen.state} {seen.why}".rstrip())
        if log.follow(*job, say):
            changed = time.monotonic()
        elif seen.state in ENDED:
            say(f"RayJob {name}: {seen.state} {seen.study} {seen.why}".rstrip())
            return seen.study == "SUCCEEDED"
        elif time.monotonic() > changed + WAIT_SECONDS:
            raise OutOfSightError(
                f"RayJob {name} has been {seen.state or 'new'} for {WAIT_SECONDS / 60:.0f} minutes:"
                f" look why with kubectl describe rayjob,raycluster,pods {' '.join(namespace)}"
            )
        time.sleep(LOOK_SECONDS)


def _job(name: str, namespace: list[str]) -> tuple[str, bool]:
    """Return the id of a RayJob's present Job, "" if there is none, and whether its pod runs."""
    form = "--output=jsonpath={.metadata.uid}|{.status.active}"
    found = run_tool(("kubectl", "get", "job", name, *namespace, "--ignore-not-found", form))
    uid, _, active = found.partition("|")
    return uid, bool(active)


class _Log:
    """The log of a RayJob's Jobs, of which each line is printed once."""

    def __init__(self, name: str, namespace: list[str]) -> None:
        self._words = ("kubectl", "logs", "--follow", f"job/{name}", *namespace)
        self._uid, self._heard, self._failures = "", 0.0, 0

    def follow(self, uid: str, runs: bool, say: Callable[[str], None]) -> bool:
        """Print a Job's log until it ends; tell whether there was any, or it was open for long."""
        is_new = uid != self._uid
        if not uid or not (is_new or (runs and self._failures < LOG_ATTEMPTS)):
            return False
        since = [] if is_new else [f"--since={time.monotonic() - self._heard + 1:.0f}s"]
        if is_new:
            self._uid, self._heard, self._failures = uid, time.monotonic(), 0
        words = [*self._words, *since, f"--pod-running-timeout={WAIT_SECONDS:.0f}s"]
        printed, began = False, time.monotonic()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                printed, self._heard = True, time.monotonic()
        self._failures = 0 if printed or not process.returncode else self._failures + 1
        if self._failures == LOG_ATTEMPTS:
            say(f"The log cannot be read: {' '.join(self._words)}")
        return printed or time.monotonic() > began + OPEN_SECONDS


def object_name(slug: str, digest: str) -> str:
    """Return a name that Kubernetes takes: lower-case letters, digits and dashes (RFC 1123)."""
    plain = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-") or "study"
    return f"{plain[: LONGEST_NAME - DIGITS - 1].strip('-')}-{digest[:DIGITS]}"


def _fill(job: dict[str, Any], name: str, loaded: StudyConfig, template: Path) -> None:
    """Fill in name, entrypoint and package; refuse a pod without the volumes for package, study,
    and a cluster that the study would refuse."""
    job["metadata"]["name"] = name
    job["spec"]["entrypoint"] = ENTRYPOINT
    cluster = job["spec"]["rayClusterSpec"]
    if cluster.get("authOptions", {}).get("mode") != "token" and not loaded.insecure:
        raise UserError(
            f"{template}: its Ray cluster asks nobody for a token; copy `authOptions: {{mode:"
            " token}` of conf/cluster/rayjob.yaml, or say insecure=true where only you reach it"
        )
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    for pod in (group["template"]["spec"] for group in groups):
        _check_storage(pod, loaded.storage, template)
        found = [each for each in pod.get("volumes", []) if each["name"] == VOLUME]
        if not found:
            raise UserError(
                f"{template}: a pod has no volume {VOLUME!r}, in which the code travels; copy"
                " volumes and init container of conf/cluster/rayjob.yaml"
            )
        for volume in found:
            volume["configMap"] = {"name": name}


def _check_storage(pod: dict[str, Any], storage: str, template: Path) -> None:
    """Refuse a storage that no lasting volume of the pod's first container holds, nor a store."""
    if is_url(storage):
        return
    lasting = {
        volume["name"]
        for volume in pod.get("volumes", [])
        if not {"emptyDir", "ephemeral", "configMap", "secret"} & set(volume)
    }
    mounts = [
        mount["mountPath"]
        for mount in pod["containers"][0].get("volumeMounts", [])
        if mount["name"] in lasting
    ]
    if not any(PurePosixPath(local_folder(storage)).is_relative_to(mount) for mount in mounts):
        raise UserError(
            f"storage={storage!r}: must lie in a volume that outlives the cluster; {template.name}"
            f" mounts {', '.join(mounts) or 'none'}: use for example"
            f" storage={mounts[0] if mounts else '/studies'}, or s3:// or gs://bucket/prefix"
        )


def _archive(package: Package) -> bytes:
    """Return ``folder``, ``site`` and ``start.sh`` as a compressed archive, the same every time.

    It lacks the bytecode of a job that ran there, and what :data:`LEFT_OUT` names.
    """

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = PurePosixPath(info.name)
        if "__pycache__" in path.parts or any(map(path.match, LEFT_OUT)):
            return None
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.mode & 0o100 else 0o644  # whatever the umask
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("folder", "site", "start.sh"):
            archive.add(package.stage / name, name, filter=plain)
    return lzma.compress(buffer.getvalue(), filters=[TEXT])
