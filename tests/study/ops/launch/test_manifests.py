"""The files of conf/cluster are strictly valid by the schemas of their readers, and every
misspelled key is found."""

from __future__ import annotations

import base64
import copy
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from study.config.compose import load
from study.engines.user_files import KEY
from study.errors import UserError
from study.ops.launch.kuberay import ARCHIVE, ENTRYPOINT, MOST_BYTES, manifest, object_name
from study.ops.launch.package import Package, pack
from study.tracking_uri import without_password
from tests.study.conftest import TINY

ROOT = Path(__file__).parents[4]
CLUSTER = ROOT / "conf" / "cluster"
GUIDE = (ROOT / "docs" / "howto" / "cluster.md").read_text()
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.34"
QUANTITIES = {"cpu", "memory", "storage", "nvidia.com/gpu"}
"""Resources by the names that Kubernetes and NVIDIA's device plugin give them."""


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A CRD's OpenAPI schema as JSON schema that refuses unknown fields, as ``kubectl apply
    --validate=strict`` does."""
    found = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if "properties" in schema:
        found["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = strict(schema["items"])
    return found


def crd(kind: str) -> jsonschema.Draft202012Validator:
    with lzma.open(SCHEMAS / f"ray.io_{kind.lower()}s.yaml.xz") as file:
        # libyaml, which is ten times as fast
        versions = yaml.load(file, yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    schema["properties"]["metadata"] = {
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
            "namespace": {"type": "string"},
            "annotations": {"type": "object"},
        },
        "required": ["name"],
    }
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    whole = strict(schema)
    whole["properties"]["apiVersion"] = {"const": "ray.io/v1"}
    return jsonschema.Draft202012Validator(whole)


CRDS = {kind: crd(kind) for kind in ("RayCluster", "RayJob")}


def ray_start_options() -> set[str]:
    from ray.scripts.scripts import start

    return {option.removeprefix("--") for each in start.params for option in each.opts}


def faults(document: dict[str, Any]) -> list[str]:
    """Return the errors in a manifest, by its schema and, where that leaves keys open, by other
    rules."""
    found = [
        name
        for path, value in nodes(document)
        if path and path[-1] in ("requests", "limits")
        for name in set(value) - QUANTITIES
    ]
    if (kind := document.get("kind", "")) not in CRDS:
        return [*found, *core_faults(document)]
    found += [error.message for error in CRDS[kind].iter_errors(document)]
    spec = document.get("spec", {})
    cluster = spec.get("rayClusterSpec", {}) if kind == "RayJob" else spec
    for group in (cluster.get("headGroupSpec", {}), *cluster.get("workerGroupSpecs", [])):
        found += set(group.get("rayStartParams", {})) - ray_start_options()
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        found += core_faults(pod | {"spec": group.get("template", {}).get("spec", {})})
    return found


def core_faults(document: dict[str, Any]) -> list[str]:
    """Return the errors in an object by Kubernetes' own schemas."""
    import kubernetes_validate  # collecting tests must not require a host with GPUs

    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, KeyError, ValueError) as error:
        return [str(error)]
    return []


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every mapping of a document, with its path."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from nodes(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from nodes(inner, (*path, index))


def values_of(document: Any, key: str) -> list[Any]:
    """Return every value of a key in a document."""
    return [mapping[key] for _, mapping in nodes(document) if key in mapping]


def renamed(document: Any, path: tuple[Any, ...], key: str, name: str) -> Any:
    """The document with one key misspelled."""
    changed = json.loads(json.dumps(document))  # avoids shared nodes
    place = changed
    for step in path:
        place = place[step]
    place[name] = place.pop(key)
    return changed


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((CLUSTER / name).read_text()) if each]


MANIFESTS = ("rayjob.yaml", "raycluster.yaml", "storage.yaml", "reader.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_valid_and_any_misspelled_key_is_refused(name: str) -> None:
    for document in documents(name):
        assert faults(document) == []
        keys = [(path, key) for path, mapping in nodes(document) for key in mapping]
        assert len(keys) >= 8
        unnoticed = [
            (path, key) for path, key in keys if not faults(renamed(document, path, key, f"{key}x"))
        ]
        assert unnoticed == []


@pytest.mark.parametrize("name", ["rayjob.yaml", "raycluster.yaml"])
def test_a_cluster_asks_for_a_token_bounds_its_pods_and_keeps_its_studies(name: str) -> None:
    (document,) = documents(name)
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["autoscalerOptions"]["version"] == "v2"
    (claim,) = documents("storage.yaml")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in [
            {key: value for key, value in volume.items() if key != "name"}
            for volume in pod["volumes"]
        ]
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            assert set(container["resources"]) == {"requests", "limits"}
        (main,) = pod["containers"]
        (drain,) = (each["value"] for each in main["env"] if "DRAIN_TIMEOUT" in each["name"])
        # 30 s by default
        assert int(drain) < pod.get("terminationGracePeriodSeconds", 30)


def test_the_reader_sees_the_studies_as_the_clusters_do() -> None:
    (reader,), (job,) = documents("reader.yaml"), documents("rayjob.yaml")
    assert faults(reader) == []
    pod, head = (reader["spec"], job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"])
    assert pod["securityContext"] == head["securityContext"]
    assert [volume for volume in head["volumes"] if volume in pod["volumes"]] == pod["volumes"]
    (container,), (main, *_) = pod["containers"], head["containers"]
    assert container["image"] == main["image"]
    assert container["envFrom"] == main["envFrom"]
    assert container["volumeMounts"] == [
        mount for mount in main["volumeMounts"] if mount["name"] == "studies"
    ]
    assert set(container["resources"]) == {"requests", "limits"}


def test_a_rayjob_retries_ends_and_is_removed_as_the_guide_says() -> None:
    (job,) = documents("rayjob.yaml")
    spec = job["spec"]
    assert spec["backoffLimit"] == 3
    assert spec["activeDeadlineSeconds"] == 7 * 24 * 3600
    # KubeRay refuses it beside rules
    assert spec["shutdownAfterJobFinishes"] is False
    rules = {
        (rule["policy"], rule["condition"]["jobStatus"]): rule["condition"]["ttlSeconds"]
        for rule in spec["deletionStrategy"]["deletionRules"]
    }
    assert rules == {
        ("DeleteCluster", "SUCCEEDED"): 60,
        ("DeleteCluster", "FAILED"): 3600,
        ("DeleteSelf", "SUCCEEDED"): 24 * 3600,
    }
    guide = " ".join(GUIDE.split())
    for promise in (
        "created again up to three times (`backoffLimit`)",
        "removes the cluster a minute after success and an hour after a failure. It removes the"
        " RayJob a day after success; a failed one stays",
        "A job ends after seven days (`activeDeadlineSeconds`)",
    ):
        assert promise in guide


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    words = ["storage=/studies", "tracking_uri=none"]
    return pack("tiny.yaml", words, load("tiny.yaml", words))


def test_a_launch_makes_valid_objects_that_hold_the_package(
    package: Package, tmp_path: Path
) -> None:
    study = load("tiny.yaml", ["storage=/studies"])
    objects = manifest(package, study, CLUSTER / "rayjob.yaml")
    assert [faults(each) for each in objects] == [[], []]
    data, job = objects
    name = data["metadata"]["name"]
    assert job["metadata"]["name"] == name == object_name("tiny", package.digest)
    assert job["spec"]["entrypoint"] == ENTRYPOINT
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert {"name": "package", "configMap": {"name": name}} in pod["volumes"]
        # done here in place of the pod
        (unpack,) = pod["initContainers"]
        assert f"/archive/{ARCHIVE}" in unpack["command"][-1]
    (tmp_path / ARCHIVE).write_bytes(base64.b64decode(data["binaryData"][ARCHIVE]))
    code = (
        unpack["command"][-1]
        .replace("/archive", str(tmp_path))
        .replace('/package"', f'{tmp_path}/unpacked"')
    )
    subprocess.run([*unpack["command"][:2], code], check=True)
    assert (tmp_path / "unpacked" / "folder" / "tiny.yaml").read_text() == TINY
    assert (tmp_path / "unpacked" / "site" / "study" / "conf" / "study" / "table.yaml").is_file()


STEPS = """set -e
files() { for word; do case $word in *.yaml | *Dockerfile) [ -e "$word" ] || exit 1; esac; done; }
docker() { files "$@"; }
helm() { files "$@"; }
kubectl() { files "$@"; }
ray() {
    files "$@"
    case $1 in get-auth-token) mkdir -p ~/.ray && echo token > ~/.ray/auth_token ;; esac
}
lns-study() { "$PYTHON" -m study "$@" --dry-run; }
"""
"""Programs of a cluster, whose files must exist, and ``launch``, which runs up to the
submission."""


def follow(section: str, home: Path) -> Path:
    """Run the commands in the guide's section, from top to bottom, from a checkout; return the
    folder of the files that would be submitted."""
    (home / "mine").mkdir()
    (study,) = re.findall(r"<!-- file: mine.yaml -->\n```yaml\n(.*?)```", GUIDE, re.S)
    (home / "mine" / "mine.yaml").write_text(study)
    steps = re.findall(r"```\n(.*?)```", GUIDE.partition(f"## {section}\n")[2], re.S)[0]
    env = os.environ | {"HOME": str(home), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", f"{STEPS}{steps}"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (stage,) = (home / "mine" / ".lns-study").iterdir()
    return stage


def test_the_printed_steps_to_kubernetes_lead_from_a_checkout_to_a_launch(tmp_path: Path) -> None:
    data, job = yaml.safe_load_all((follow("Kubernetes", tmp_path) / "kuberay.yaml").read_text())
    assert faults(job) == []
    mine = tmp_path / "mine"
    written = [
        job,
        *(yaml.safe_load((mine / name).read_text()) for name in ("rayjob.yaml", "reader.yaml")),
    ]
    images = [value for each in written for value in values_of(each, "image")]
    assert images == ["REGISTRY/lns-study:0.1.0"] * 9
    assert (mine / "storage.yaml").read_text() == (CLUSTER / "storage.yaml").read_text()
    part = len(base64.b64decode(data["binaryData"][ARCHIVE])) / MOST_BYTES
    (figure,) = re.findall(r"of which lns-study itself takes ([\d.]+)\)", GUIDE)
    assert float(figure) == pytest.approx(part, abs=0.02)


def test_the_printed_steps_to_aws_lead_from_a_checkout_to_a_launch(tmp_path: Path) -> None:
    stage = follow("Machines of AWS", tmp_path)
    assert {path.name for path in (stage / "folder").iterdir()} == {"mine.yaml", "my-aws.yaml"}
    assert (stage / "ray-job.json").is_file()


def test_a_storage_that_dies_with_the_cluster_is_refused(package: Package) -> None:
    for storage in ("/package/studies", "/elsewhere"):
        study = load("tiny.yaml", [f"storage={storage}"])
        with pytest.raises(UserError, match=r"must be in a volume that outlives .*storage=/stud"):
            manifest(package, study, CLUSTER / "rayjob.yaml")


@pytest.mark.parametrize("volumes", [None, [{"name": "other", "emptyDir": {}}]])
def test_a_template_without_the_packages_volume_is_refused(
    package: Package, tmp_path: Path, volumes: list[Any] | None
) -> None:
    template = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    pod = template["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    pod.pop("volumes") if volumes is None else pod.update(volumes=volumes)
    (path := tmp_path / "own.yaml").write_text(yaml.safe_dump(template))
    study = load("tiny.yaml", ["storage=s3://bucket/studies"])
    with pytest.raises(UserError, match=r"own.yaml: every pod must have a volume 'package'"):
        manifest(package, study, path)


@pytest.mark.parametrize("said", [None, {}, {"mode": "disabled"}])
def test_a_template_whose_cluster_asks_nobody_is_refused_unless_told(
    package: Package, tmp_path: Path, said: dict[str, str] | None
) -> None:
    template = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    cluster = template["spec"]["rayClusterSpec"]
    cluster.pop("authOptions") if said is None else cluster.update(authOptions=said)
    (path := tmp_path / "own.yaml").write_text(yaml.safe_dump(template))
    with pytest.raises(UserError, match=r"own.yaml: its Ray cluster must ask for a token"):
        manifest(package, load("tiny.yaml", ["storage=/studies"]), path)
    told = load("tiny.yaml", ["storage=/studies", "insecure=true"])
    assert manifest(package, told, path)[1]["spec"]["rayClusterSpec"].get("authOptions") == said


def test_names_are_those_that_kubernetes_takes() -> None:
    for slug in ("tiny", "Über_Study.2", "x" * 200, "---", "-a-"):
        name = object_name(slug, "0123456789abcdef")
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= 47


def test_ray_takes_the_file_of_ray_up() -> None:
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((CLUSTER / "aws.yaml").read_text())
    validate_config(prepare_config(copy.deepcopy(config)))
    open_maps = {"node_config", "resources", "file_mounts"}  # EC2's, Ray's and paths
    schema = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())
    known = set(schema["properties"]["provider"]["properties"])  # it accepts others, too
    assert set(config["provider"]) <= known
    unnoticed = []
    for path, mapping in nodes(config):
        for key in mapping:
            if path and path[-1] in {*open_maps, "InstanceMarketOptions", "available_node_types"}:
                continue
            try:
                validate_config(prepare_config(changed := renamed(config, path, key, f"{key}x")))
            except Exception:
                continue
            if set(changed["provider"]) - known:
                continue
            unnoticed.append((*path, key))
    assert unnoticed == []


def test_the_batch_script_is_shell_without_fault() -> None:
    assert subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"]).returncode == 0
    text = (CLUSTER / "slurm.sh").read_text()
    for option in ("--signal=B:USR1@120", "--requeue"):
        assert f"#SBATCH {option}" in text
    from ray.scripts.scripts import start

    known = {option for each in start.params for option in (*each.opts, *each.secondary_opts)}
    words = re.findall(
        r"(--[a-z-]+)", text.partition("run_ray --address")[2].partition("-- bash")[0]
    )
    assert len(words) >= 12
    assert set(words) - known - {"--min-nodes"} == set()


NAMED = re.compile(r"token|/run/secrets/\w+|\.secrets/\w+|~/\.ray/auth_token|FILE")
"""Values that name a secret, or Ray's mode ``token``."""


def secrets_in(text: str) -> list[str]:
    """Return the lines with a password, a token or a secret key."""
    given = re.compile(r"(?i)(?:password|token|secret)\w*[=:]\s*([^\s$,{\[(}\"']+)")
    return [
        line
        for line in text.splitlines()
        if without_password(line) != line
        or KEY.search(line.encode())
        or any(not NAMED.fullmatch(value) for value in given.findall(line))
    ]


def test_no_file_holds_a_secret() -> None:
    """Passwords and tokens are only referenced: by secret, file or variable."""
    assert {path.name: secrets_in(path.read_text()) for path in CLUSTER.iterdir()} == {
        path.name: [] for path in CLUSTER.iterdir()
    }
    for fault in (
        "postgresql://mlflow:hunter2@postgres/mlflow",
        "RAY_AUTH_TOKEN: token-0123",
        "MLFLOW_TRACKING_PASSWORD=hunter2",
        f"ENV AWS_SECRET_ACCESS_KEY {'a' * 40}",
    ):
        assert secrets_in(fault) == [fault]


ASKS = {
    "rayjob.yaml": ("authOptions: {mode: token}", 1),
    "raycluster.yaml": ("authOptions: {mode: token}", 1),
    "aws.yaml": ("RAY_AUTH_MODE=token ray start", 2),
    "compose.yaml": ("RAY_AUTH_MODE: token", 1),
    "slurm.sh": ("RAY_AUTH_MODE=token", 1),
    "Dockerfile": ("RAY_AUTH_MODE=token", 1),
}
"""How a template asks for a token, and how often: once per command that starts Ray."""


def test_every_template_asks_for_a_token_and_opens_no_port_to_others() -> None:
    lines = {
        path.name: "\n".join(
            line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
        )
        for path in CLUSTER.iterdir()
    }
    assert {name: lines[name].count(text) for name, (text, _) in ASKS.items()} == {
        name: count for name, (_, count) in ASKS.items()
    }
    starts = re.compile(r"ray start --|ray symmetric-run|kind: Ray(?:Job|Cluster)|^FROM ", re.M)
    assert {name for name, text in lines.items() if starts.search(text)} == set(ASKS)
    services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
    assert services["ray"]["environment"]["RAY_AUTH_MODE"] == "token"
    ports = [port for each in services.values() for port in each.get("ports", [])]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    assert len(ports) == 2
    for name in ("aws.yaml", "slurm.sh"):
        assert "--dashboard-host=127.0.0.1" in lines[name]


def compose() -> list[str]:
    """Return the command of this machine's Docker Compose, a program or a plugin of ``docker``."""
    for words in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(words[0]) is None:
            continue
        if subprocess.run([*words, "version"], capture_output=True).returncode == 0:
            return words
    pytest.skip("docker-compose is not installed")


@pytest.mark.slow
def test_compose_reads_its_file_and_refuses_any_misspelled_key(tmp_path: Path) -> None:
    words = compose()

    def refused(document: Any) -> str:
        (path := tmp_path / "compose.yaml").write_text(yaml.safe_dump(document))
        command = [*words, "-f", str(path), "config", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    (document,) = documents("compose.yaml")
    assert refused(document) == ""
    keys = [
        (path, key)
        for path, mapping in nodes(document)
        for key in mapping
        if path not in (("services",), ("secrets",))  # names of ours
        and path[-1:] != ("environment",)
    ]
    assert len(keys) >= 30
    named = {name for each in document["services"].values() for name in each.get("secrets", [])}
    assert named == set(document["secrets"])
    unnoticed = [
        (path, key) for path, key in keys if not refused(renamed(document, path, key, f"{key}z"))
    ]
    assert unnoticed == []
