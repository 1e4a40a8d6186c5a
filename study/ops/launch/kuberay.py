"""Launch on Kubernetes: a ConfigMap with the package and a RayJob of KubeRay that runs it.

Both objects are written to one file, which ``kubectl apply --server-side`` creates on the cluster.
(A client-side apply would copy the object into an annotation, which is limited to 256 KiB.) The
template is ``conf/cluster/rayjob.yaml`` or the user's own copy; it refers to secrets by name and
contains none. The package must fit into a ConfigMap (1 MiB before base64). Each pod unpacks it into
an empty folder before Ray starts. The study's storage must be in a volume of the head pod that
outlives the cluster.

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
from study.engines.launch_times import VARIABLE
from study.errors import OutOfSightError, UserError
from study.ops.launch.package import Package
from study.ops.launch.slurm import run_tool
from trainers.object_store import is_url, local_folder

ARCHIVE = "package.tar.xz"
TEXT = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}
"""LZMA settings for text; archives are 1 % smaller than with the preset alone."""
LEFT_OUT = ("site/*.dist-info/RECORD", "site/study/conf/cluster/*")
"""Files of the wheel that jobs do not need (3 % of its archive): the hashes that pip uses to
uninstall it, and the cluster templates, which are only used on the launching machine."""
VOLUME = "package"
"""Name of the volumes in the template that contain the package."""
CODE = "lns-study/code"
"""ConfigMap annotation with the digest of the package."""
MANAGER = "lns-study"
"""Field manager: the Kubernetes server records under this name which fields a launch has set."""
MOST_BYTES = 2**20
"""Maximum size of a ConfigMap's data in bytes, before base64 encoding (MaxSecretSize in Kubernetes'
core/validation, which sums the decoded sizes)."""
LONGEST_NAME = 47
"""Maximum length of a RayJob's name in KubeRay, in characters."""
DIGITS = 8
"""Number of hexadecimal digits of the package digest in object names."""
ENDED = ("Complete", "Failed", "ValidationFailed")
"""Final states of a RayJob in KubeRay."""
LOOK_SECONDS = 2.0
"""Seconds between two polls of a RayJob."""
WAIT_SECONDS = 3600.0
"""Maximum time without a state change or a log line, and for a pod to start, in seconds."""
OPEN_SECONDS = 10.0
"""A log stream that stays open this long (seconds) works, even if it has printed nothing."""
LOG_ATTEMPTS = 5
"""Number of consecutive attempts to read a log before giving up."""
AWAY = re.compile(
    r"connect|refused|timeout|timed out|deadline|EOF|reset|no route|unavailable|currently unable",
    re.IGNORECASE,
)
"""Matches error messages of ``kubectl`` when the cluster is temporarily unreachable."""
ENTRYPOINT = "bash /package/start.sh"


def manifest(package: Package, loaded: StudyConfig, template: Path) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of a launch.

    Raises:
        UserError: the template does not have exactly one RayJob with a volume ``package`` in each
            pod, the storage is not in a volume that outlives the cluster, or the package is too
            large.
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
            f"{template}: must be a RayJob that KubeRay accepts ({type(error).__name__}: {error});"
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
    """Return kubectl's options for the namespace of a launch; none for the context's namespace."""
    named = objects[0]["metadata"].get("namespace")
    return ["--namespace", named] if named else []


@dataclass(frozen=True)
class RayJobState:
    """State of a RayJob as Kubernetes reports it.

    Attributes:
        state: KubeRay's state of the RayJob (``jobDeploymentStatus``).
        study: Ray's status of the job that runs the study (``jobStatus``).
        why: reason and message.
    """

    state: str
    study: str
    why: str


def look(name: str, namespace: list[str]) -> RayJobState | None:
    """Return the state of a RayJob; None if it does not exist.

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
    """Delete a RayJob if it has ended, because otherwise applying the same manifest starts nothing.

    Returns:
        The entrypoint of a RayJob that has not ended, or "" if the RayJob is gone.

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
    """Set the RayJob's entrypoint.

    Args:
        objects: Kubernetes objects of the launch.
        running: entrypoint of the RayJob that is running, which stays unchanged; "" for none.
        launched: times of the launch (:mod:`study.engines.launch_times`), passed in the
            environment.
    """
    (job,) = (each for each in objects if each["kind"] == "RayJob")
    job["spec"]["entrypoint"] = running or f"env {VARIABLE}={launched} {ENTRYPOINT}"


def has_package(data: dict[str, Any], namespace: list[str]) -> bool:
    """Return whether the ConfigMap of a launch exists with the same code; it is immutable.

    Raises:
        UserError: ``kubectl`` fails.
    """
    about = data["metadata"]
    form = f"--output=jsonpath={{.metadata.annotations.{CODE}}}"
    words = ("configmap", about["name"], *namespace, "--ignore-not-found", form)
    return run_tool(("kubectl", "get", *words)) == str(about["annotations"][CODE])


def apply(path: Path) -> str:
    """Create or update the objects of a file; return the output of ``kubectl``.

    The file overrides changes by others (``kubectl edit``), as in a client-side apply.

    Raises:
        UserError: ``kubectl`` fails.
    """
    server = ("--server-side", f"--field-manager={MANAGER}", "--force-conflicts")
    return run_tool(("kubectl", "apply", *server, "-f", str(path)))


def follow(name: str, namespace: list[str], say: Callable[[str], None]) -> bool:
    """Print the logs of a RayJob until it ends; return whether it succeeded.

    KubeRay starts a Job with the RayJob's name, and another one if the Ray cluster is lost
    (``backoffLimit``); the logs of all of them are printed. After a lost connection the log
    continues at its last line, so about one second may be printed twice. A log that fails
    :data:`LOG_ATTEMPTS` times in a row is not read any more.

    Raises:
        UserError: ``kubectl`` fails for another reason than a cluster that is temporarily
            unreachable.
        OutOfSightError: the RayJob was deleted, or made no progress for :data:`WAIT_SECONDS`.
    """
    log, before, changed, away = _Log(name, namespace), "", time.monotonic(), False
    while True:
        try:
            seen, job = look(name, namespace), _job(name, namespace)
        except UserError as error:
            if not AWAY.search(str(error)) or time.monotonic() > changed + WAIT_SECONDS:
                raise
            if not away:
                say(f"Kubernetes does not answer ({error}); RayJob {name} keeps running")
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
                f" find the reason with kubectl describe rayjob,raycluster,pods"
                f" {' '.join(namespace)}"
            )
        time.sleep(LOOK_SECONDS)


def _job(name: str, namespace: list[str]) -> tuple[str, bool]:
    """Return the id of a RayJob's current Job ("" without one) and whether its pod runs."""
    form = "--output=jsonpath={.metadata.uid}|{.status.active}"
    found = run_tool(("kubectl", "get", "job", name, *namespace, "--ignore-not-found", form))
    uid, _, active = found.partition("|")
    return uid, bool(active)


class _Log:
    """Log of a RayJob's Jobs; each line is printed once."""

    def __init__(self, name: str, namespace: list[str]) -> None:
        self._words = ("kubectl", "logs", "--follow", f"job/{name}", *namespace)
        self._uid, self._heard, self._failures = "", 0.0, 0

    def follow(self, uid: str, runs: bool, say: Callable[[str], None]) -> bool:
        """Print a Job's log until it ends.

        Returns whether it had lines or stayed open for longer than :data:`OPEN_SECONDS`.
        """
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
    """Return a valid Kubernetes name: lower-case letters, digits and dashes (RFC 1123)."""
    plain = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-") or "study"
    return f"{plain[: LONGEST_NAME - DIGITS - 1].strip('-')}-{digest[:DIGITS]}"


def _fill(job: dict[str, Any], name: str, loaded: StudyConfig, template: Path) -> None:
    """Fill name, entrypoint and package into a RayJob.

    Raises:
        UserError: the cluster does not ask for a token, or a pod has no volume for the package or
            for the storage.
    """
    job["metadata"]["name"] = name
    job["spec"]["entrypoint"] = ENTRYPOINT
    cluster = job["spec"]["rayClusterSpec"]
    if cluster.get("authOptions", {}).get("mode") != "token" and not loaded.insecure:
        raise UserError(
            f"{template}: its Ray cluster must ask for a token; copy `authOptions: {{mode:"
            " token}` from conf/cluster/rayjob.yaml, or set insecure=true if only you can reach it"
        )
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    for pod in (group["template"]["spec"] for group in groups):
        _check_storage(pod, loaded.storage, template)
        found = [each for each in pod.get("volumes", []) if each["name"] == VOLUME]
        if not found:
            raise UserError(
                f"{template}: every pod must have a volume {VOLUME!r}, which contains the code;"
                " copy volumes and init container from conf/cluster/rayjob.yaml"
            )
        for volume in found:
            volume["configMap"] = {"name": name}


def _check_storage(pod: dict[str, Any], storage: str, template: Path) -> None:
    """Check that the storage is an object store or in a mounted volume that outlives the pod.

    Raises:
        UserError: it is neither; the message lists such volumes.
    """
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
            f"storage={storage!r}: must be in a volume that outlives the cluster; {template.name}"
            f" mounts {', '.join(mounts) or 'none'}: use for example"
            f" storage={mounts[0] if mounts else '/studies'}, or s3:// or gs://bucket/prefix"
        )


def _archive(package: Package) -> bytes:
    """Return ``folder``, ``site`` and ``start.sh`` as a compressed archive.

    Equal packages give equal archives. Bytecode and files that match :data:`LEFT_OUT` are left out.
    """

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = PurePosixPath(info.name)
        if "__pycache__" in path.parts or any(map(path.match, LEFT_OUT)):
            return None
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.mode & 0o100 else 0o644  # independent of the umask
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("folder", "site", "start.sh"):
            archive.add(package.stage / name, name, filter=plain)
    return lzma.compress(buffer.getvalue(), filters=[TEXT])
