"""``conf/cluster/aws.yaml`` as Ray reads it, with moto's AWS: Ray fills in defaults, and EC2
accepts its instances. No machine is reached; the commands for machines are only read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.study.ops.launch.test_image import arguments

FILE = Path(__file__).resolve().parents[4] / "conf" / "cluster" / "aws.yaml"
AMI = "ami-12c6146b"
"""A machine image that moto knows."""


@pytest.fixture
def config() -> dict[str, Any]:
    """The file with Ray's defaults in what it leaves out."""
    from ray.autoscaler._private.util import prepare_config

    filled = FILE.read_text().replace("ImageId: AMI", f"ImageId: {AMI}")
    return dict(prepare_config(yaml.safe_load(filled)))


def test_nothing_is_installed_into_the_containers(config: dict[str, Any]) -> None:
    """Ray's defaults would install another Ray if Ray is missing, and boto3."""
    for name in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        assert config[name] == [], name


def test_the_commands_on_each_machine_may_run_twice_and_leave_a_folder_of_the_images_user(
    config: dict[str, Any],
) -> None:
    commands = config["initialization_commands"]
    for command in commands:
        assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
    (mount,) = [place for place, line in enumerate(commands) if "mount -t nfs4" in line]
    assert commands[mount].startswith("mountpoint -q /studies ||")
    (uid,) = arguments("USER")
    assert f"sudo chown {uid}:{uid} /studies" in commands[mount + 1 :]
    assert "--volume=/studies:/studies" in config["docker"]["run_options"]


def test_each_variable_and_file_of_a_start_is_known(config: dict[str, Any]) -> None:
    named = {}
    for kind in ("head", "worker"):
        lines = " ".join(config[f"{kind}_start_ray_commands"])
        named[kind] = re.findall(r"\$(\w+)", lines), re.findall(r"~/[\w.]+", lines)
    assert named == {"head": ([], ["~/ray_bootstrap_config.yaml"]), "worker": (["RAY_HEAD_IP"], [])}


@pytest.mark.slow
def test_ec2_takes_every_kind_of_node(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    from moto import mock_aws

    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps a key pair in ~/.ssh
    (tmp_path / ".ssh").mkdir()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        from ray.autoscaler._private.aws.config import bootstrap_aws
        from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

        whole = bootstrap_aws(config)
        provider = AWSNodeProvider(whole["provider"], whole["cluster_name"])
        for name, kind in whole["available_node_types"].items():
            provider.create_node(kind["node_config"], {"ray-user-node-type": name}, 1)
        ec2 = boto3.client("ec2", region_name=whole["provider"]["region"])
        made = [
            machine
            for reservation in ec2.describe_instances()["Reservations"]
            for machine in reservation["Instances"]
        ]
    assert {machine["InstanceType"] for machine in made} == {
        kind["node_config"]["InstanceType"] for kind in config["available_node_types"].values()
    }
    assert {machine["ImageId"] for machine in made} == {AMI}
    assert [each.get("InstanceLifecycle") for each in made].count("spot") == 1
