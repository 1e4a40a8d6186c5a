"""Randomly changed files: each is rejected with an error message, or read correctly.

Mutations of the ledger are in ``tests/study/ops/repair/test_repair.py``.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from study.config import StudyConfig
from study.config.compose import load
from study.ops.launch.kuberay import ARCHIVE, ENTRYPOINT, _archive, manifest
from study.ops.launch.package import Package, pack
from tests.study.conftest import TINY
from trainers.checkpoint.files import load_checkpoint, save_checkpoint

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "conf" / "cluster"
RICH = """
question: what?
name: rich
trial:
  data: {name: digits, validation_size: 300, train_size: 200}
  model: {name: mlp, hidden: [16]}
  precision: {format: lns12, scope: everywhere, kahan_sum: true}
  optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
  lr_schedule: {decay: cosine, warmup_epochs: 1}
  layout: {pp: 1, micro_batches: 2}
  batch_size: 32
  epochs: 3
rows:
  - {label: a, published: 2.1}
  - {label: b, overrides: {precision.format: float32}, within: 0.2}
baseline: a
space: {optimizer.lr: {loguniform: [0.01, 1.0]}, optimizer.momentum: {choice: [0.0, 0.9]}}
search: {num_samples: 4}
seeds: [0, 1]
claims:
  - {name: near, claim: near, source: test, difference: {rows: [a, b], at_most: 0.3}}
limits: {trials: 100}
cpus: 2
"""
VALUES = [
    None, -1, 0, 1, 2, 0.5, float("inf"), float("nan"), [], {}, "x", "", True, [1], {"a": 1},
    "${x}", "../x", 10**30, "lns12", [None], {"choice": []}, {"uniform": [1, 0]}, "\x00", "ü",
    {1: 2}, [[1]], "0x10", "1e-3", "s3://bucket/x", "file.py:make",
]  # fmt: skip
Change = tuple[int, str, Any]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.sampled_from(["set", "remove", "rename", "double"]),
        st.sampled_from(VALUES),
    ),
    min_size=1,
    max_size=2,
)
often = pytest.mark.parametrize(
    "examples", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)


def places(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path (keys and indices) of every value in a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        yield (*way, key)
        if isinstance(value, dict | list):
            yield from places(value, (*way, key))


def changed(tree: Any, changes: list[Change]) -> Any:
    """Return a copy of a tree with changes."""
    tree = copy.deepcopy(tree)
    for number, how, value in changes:
        ways = list(places(tree))
        if not ways:
            return tree
        *way, last = ways[number % len(ways)]
        inner = tree
        for key in way:
            inner = inner[key]
        if how == "remove":
            del inner[last]
        elif how == "rename" and isinstance(inner, dict):
            inner[f"{last}x"] = inner.pop(last)
        elif how == "double" and isinstance(inner, list):
            inner.append(copy.deepcopy(inner[last]))
        else:
            inner[last] = copy.deepcopy(value)
    return tree


def attempt(call: Callable[..., Any], *words: Any) -> tuple[Any, str]:
    """Return a call's result, and the text of its ``ValueError`` or ""; other errors propagate."""
    try:
        return call(*words), ""
    except ValueError as error:
        return None, str(error)


def repeated(examples: int, test: Callable[..., None], **given_: Any) -> None:
    """Test a property with the given number of examples."""
    settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(
        given(**given_)(test)
    )()


@often
@pytest.mark.parametrize("text", [TINY, RICH], ids=["tiny", "rich"])
def test_a_changed_study_is_refused_or_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, examples: int
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(text)

    def test(changes: list[Change]) -> None:
        Path("own.yaml").write_text(yaml.safe_dump(changed(tree, changes), allow_unicode=True))
        study, refusal = attempt(load, "own.yaml", [f"storage={tmp_path}", "tracking_uri=none"])
        if not refusal:
            text = json.dumps(study.to_dict())
            assert json.dumps(StudyConfig.from_dict(json.loads(text)).to_dict()) == text

    repeated(examples, test, changes=CHANGES)


@often
def test_a_changed_checkpoint_is_refused_or_the_same(tmp_path: Path, examples: int) -> None:
    tensors = {"w": torch.arange(12.0), "codes": torch.arange(5, dtype=torch.int16)}
    state = {"epoch": 3, "history": [{"epoch": 1.0, "train/loss": 0.5}], "config": {"a": [1]}}
    save_checkpoint(tmp_path, tensors, state)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def test(which: int, place: int, change: int, cut: bool) -> None:
        path, content = sorted(files.items())[which]
        place %= len(content)
        end = b"" if cut else bytes([content[place] ^ change]) + content[place + 1 :]
        path.write_bytes(content[:place] + end)
        found, refusal = attempt(load_checkpoint, tmp_path)
        path.write_bytes(content)
        if refusal:
            assert str(tmp_path) in refusal
            return
        assert {key: found[1][key] for key in state} == state
        assert all(torch.equal(found[0][name], tensors[name]) for name in tensors)

    repeated(
        examples,
        test,
        which=st.integers(0, 1),
        place=st.integers(0, 10**6),
        change=st.integers(1, 255),
        cut=st.booleans(),
    )


@often
def test_a_changed_template_is_refused_or_makes_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    study = load("tiny.yaml", ["storage=/studies"])
    package: Package = pack("tiny.yaml", ["storage=/studies"], study)
    tree = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
    archive = _archive(package)
    monkeypatch.setattr("study.ops.launch.kuberay._archive", lambda package: archive)

    def test(changes: list[Change]) -> None:
        Path("own.yaml").write_text(yaml.safe_dump(changed(tree, changes), allow_unicode=True))
        found, refusal = attempt(manifest, package, study, Path("own.yaml"))
        if refusal:
            assert "own.yaml" in refusal
            return
        data, job = found[0], *(each for each in found if each["kind"] == "RayJob")
        assert base64.b64decode(data["binaryData"][ARCHIVE]) == archive
        name = data["metadata"]["name"]
        assert (job["metadata"]["name"], job["spec"]["entrypoint"]) == (name, ENTRYPOINT)
        spec = job["spec"]["rayClusterSpec"]
        assert spec["authOptions"]["mode"] == "token"
        for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])):
            volumes = group["template"]["spec"]["volumes"]
            packages = [each["configMap"] for each in volumes if each["name"] == "package"]
            assert packages
            assert all(each == {"name": name} for each in packages)

    repeated(examples, test, changes=CHANGES)
