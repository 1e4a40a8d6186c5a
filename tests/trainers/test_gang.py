"""Gangs of real processes: distinct, reused, bit-equal to Ray Train's rules, ended after an error."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from trainers.gang import Gang, write_files

from tests.trainers.test_profile import events
from trainers.bundles import Shape, bundles
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.profile import ProfileConfig
from trainers.restore import begin
from trainers.telemetry import repeatable

CONFIG = TrialConfig(
    data=DataConfig(name="digits", validation_size=300, train_size=256),
    model=ModelConfig(hidden=[8]),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    optimizer=OptimizerConfig(lr=0.2),
    epochs=2,
    batch_size=128,
    workers=2,
)
SHAPE = Shape.of(CONFIG.to_dict())


@pytest.fixture
def group(ray_cluster: None) -> Iterator[PlacementGroup]:
    """Two bundles of one CPU."""
    group = placement_group(bundles(CONFIG))
    ray.get(group.ready())
    yield group
    remove_placement_group(group)


def epochs(gang: Gang) -> list[dict[str, Any]]:
    metrics: list[dict[str, Any]] = []
    while not metrics or not metrics[-1]["done"]:
        metrics.append(repeatable(gang.step()))
    return metrics


@pytest.mark.slow
def test_one_gang_trains_trial_after_trial_and_the_order_does_not_matter(group: PlacementGroup, tmp_path: Path) -> None:
    other = replace(CONFIG, precision=PrecisionConfig(), seed=3, optimizer=OptimizerConfig(name="adam", lr=0.01))
    assert Shape.of(other.to_dict()) == SHAPE
    gang = Gang(SHAPE, group)
    assert len({*gang.pids, os.getpid()}) == 3
    assert gang.begin(CONFIG.to_dict(), []).damaged == ""
    first = epochs(gang)
    gang.save(tmp_path / "first")
    assert gang.begin(other.to_dict(), []).damaged == ""
    between = epochs(gang)
    assert gang.begin(CONFIG.to_dict(), []).damaged == ""
    assert epochs(gang) == first
    assert between != first
    assert [metrics["epoch"] for metrics in first] == [1, 2]
    assert first[-1]["test/error"] < 0.9
    # Continued after the first epoch's end, and from what is damaged not at all.
    beginning = gang.begin(replace(CONFIG, epochs=3).to_dict(), [str(tmp_path / "none"), str(tmp_path / "first")])
    assert "no whole checkpoint" in beginning.damaged
    assert [metrics["epoch"] for metrics in beginning.history] == [1, 2]
    assert [metrics["epoch"] for metrics in epochs(gang)] == [3]
    gang.close()


def test_a_gang_in_lns_ends_with_the_bits_of_one_process(group: PlacementGroup, tmp_path: Path) -> None:
    gang = Gang(SHAPE, group)
    gang.begin(CONFIG.to_dict(), [])
    gang.step()
    gang.save(tmp_path)
    gang.close()
    alone, _ = begin(replace(CONFIG, workers=1), [])
    alone.train_epoch()
    of_gang, beginning = begin(replace(CONFIG, workers=1), [str(tmp_path)])
    assert beginning.damaged == ""
    for (name, ours), theirs in zip(alone.model.named_parameters(), of_gang.model.parameters(), strict=True):
        assert (ours.codes == theirs.codes).all(), name


@pytest.mark.slow
def test_every_rank_records_its_profile(group: PlacementGroup, tmp_path: Path) -> None:
    gang = Gang(SHAPE, group)
    gang.begin(replace(CONFIG, telemetry=True, profile=ProfileConfig(steps=[0, 2])).to_dict(), [])
    metrics = gang.step()
    write_files(tmp_path, gang.profile())
    assert gang.profile() == {}
    gang.close()
    assert metrics["telemetry/communication_seconds"] > 0
    for rank in range(2):
        names = Counter(event["name"] for event in events((tmp_path / f"rank-{rank}.trace.json.gz").read_bytes()))
        assert names["update"] == names["all_gather"] == 2
        assert "lns_ops::matmul" in (tmp_path / f"rank-{rank}.summary.txt").read_text()


def test_a_dead_rank_ends_the_gang_at_once(group: PlacementGroup) -> None:
    gang = Gang(SHAPE, group)
    gang.begin(replace(CONFIG, epochs=1000).to_dict(), [])
    gang.step()
    psutil.Process(gang.pids[1]).kill()
    start = time.monotonic()
    with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.RayTaskError)):
        gang.step()
    assert time.monotonic() - start < 60  # not the two minutes that a collective would wait
    gang.close()


def test_what_cannot_work_is_a_value_error(group: PlacementGroup) -> None:
    gang = Gang(SHAPE, group)
    with pytest.raises(ValueError, match=r"batch_size=128|train_size|examples"):
        gang.begin(replace(CONFIG, data=DataConfig(name="digits", validation_size=300, train_size=64)).to_dict(), [])
    gang.close()
