"""Profiles: the content of a trace, its steps and ranks, and refusals."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from lns_ops.tensor import storage_of
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, ProfileConfig, TrialConfig
from trainers.telemetry import profiler as profile_module
from trainers.training.trainer import Training

BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[16]),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    epochs=2,
    batch_size=64,
)


def events(content: bytes) -> list[dict[str, Any]]:
    """Return the events of a trace that have a duration, which Perfetto draws."""
    found = [
        event
        for event in json.loads(gzip.decompress(content))["traceEvents"]
        if event.get("ph") == "X"
    ]
    assert all(
        event["dur"] >= 0 and event["ts"] >= 0 and "pid" in event and "tid" in event
        for event in found
    )
    return found


def test_a_trace_has_the_chosen_steps_and_the_kernels_by_name() -> None:
    plain_trial, profiled = (
        Training(BASE),
        Training(replace(BASE, profile=ProfileConfig(steps=[13, 16]))),
    )
    plain_trial.train_epoch()
    profiled.train_epoch()
    assert profiled.profiler.take() == {}
    plain_trial.train_epoch()
    profiled.train_epoch()
    files = profiled.profiler.take()
    assert sorted(files) == ["rank-0.summary.txt", "rank-0.trace.json.gz"]
    assert profiled.profiler.take() == {}
    names = Counter(event["name"] for event in events(files["rank-0.trace.json.gz"]))
    assert names["forward"] == names["backward"] == names["update"] == 3
    assert names["lns_ops::linear"] == 6
    assert names["lns_ops::matmul"] == 9
    summary = files["rank-0.summary.txt"].decode()
    assert summary.startswith("3 steps")
    assert any(line.split()[:2] == ["lns_ops::matmul", "3.0"] for line in summary.splitlines())
    for a, b in zip(plain_trial.model.parameters(), profiled.model.parameters(), strict=True):
        assert torch.equal(storage_of(a), storage_of(b))


def test_a_recording_ends_with_its_epoch_and_other_ranks_record_nothing() -> None:
    late = Training(replace(BASE, profile=ProfileConfig(steps=[8, 15])))
    late.train_epoch()
    names = Counter(event["name"] for event in events(late.profiler.take()["rank-0.trace.json.gz"]))
    assert names["update"] == 2
    silent = Training(replace(BASE, workers=2, profile=ProfileConfig(steps=[0, 2], ranks=[1])))
    silent.train_epoch()
    assert silent.profiler.take() == {}


def test_a_second_trial_of_the_process_goes_on_without() -> None:
    waiting = Training(replace(BASE, profile=ProfileConfig(steps=[0, 2])))
    with profile_module._IN_USE:
        waiting.train_epoch()
    files = waiting.profiler.take()
    assert list(files) == ["rank-0.summary.txt"]
    assert b"another trial" in files["rank-0.summary.txt"]


@pytest.mark.parametrize("steps", [[1], [3, 3], [-1, 2], [1, 2, 3]])
def test_steps_that_are_none_are_refused(steps: list[int]) -> None:
    with pytest.raises(ValueError, match=r"profile.steps=\[.*; use"):
        ProfileConfig(steps=steps)


def test_ranks_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"profile.ranks=\[2\] with workers=2: .*; use"):
        replace(BASE, workers=2, profile=ProfileConfig(steps=[0, 1], ranks=[2]))
    with pytest.raises(ValueError, match=r"profile.ranks=-1: .*; use"):
        ProfileConfig(steps=[0, 1], ranks=[-1])
