"""Cached descriptions of data sets: used while the files are unchanged, made again when one
changes. The set's files are short and are not read; a stand-in describes them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainers.config import DataConfig
from trainers.data import datasets, prepare
from trainers.data.split import DatasetInfo

TIME = 10**18
"""Time of every file's last change, in ns."""
FILES = [f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DataConfig]:
    """The data sets that had to be described, in order."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found: list[DataConfig] = []

    def describe(config: DataConfig) -> DatasetInfo:
        found.append(config)
        return DatasetInfo(
            name=config.name,
            args={},
            source=f"reading {len(found)}",
            digest="d",
            files="f",
            root=config.root,
            train=1,
            validation=1,
            test=1,
            inputs=1,
            classes=10,
        )

    monkeypatch.setattr(datasets, "describe", describe)
    return found


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return placed(tmp_path / "kmnist")


def placed(folder: Path) -> DataConfig:
    """Return a data set whose files are in a folder."""
    folder.mkdir()
    for name in FILES:
        write(folder, name, "bytes", TIME)
    return DataConfig(name="kmnist", root=str(folder))


def write(folder: Path, name: str, text: str, time: int) -> None:
    path = folder / f"{name}-ubyte.gz"
    path.write_text(text)
    os.utime(path, ns=(time, time))


def test_a_description_is_used_again_while_path_size_and_time_are_the_same(
    described: list[DataConfig], config: DataConfig, tmp_path: Path
) -> None:
    first = prepare(config)
    write(tmp_path / "kmnist", FILES[0], "BYTES", TIME)  # no process reads the file
    assert prepare(config) == first
    assert len(described) == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("text", "time"), [("longer bytes", TIME), ("bytes", TIME + 1)])
def test_it_is_made_anew_when_a_file_changes(
    described: list[DataConfig], config: DataConfig, tmp_path: Path, name: str, text: str, time: int
) -> None:
    prepare(config)
    write(tmp_path / "kmnist", name, text, time)
    assert [prepare(config).source for _ in range(2)] == ["reading 2"] * 2


@pytest.mark.parametrize(
    "other",
    [
        lambda config: placed(Path(config.root).with_name("elsewhere")),
        lambda config: dataclasses.replace(config, validation_size=7),
    ],
    ids=["path", "config"],
)
def test_other_files_and_configs_are_kept_beside_it(
    described: list[DataConfig], config: DataConfig, other: Callable[[DataConfig], DataConfig]
) -> None:
    changed = other(config)
    for _ in range(2):
        assert prepare(config).source == "reading 1"
        assert prepare(changed).source == "reading 2"


@pytest.mark.parametrize("kept", ["", "[]", '{"torn', "of another version"])
def test_what_was_kept_and_cannot_be_used_is_made_anew(
    described: list[DataConfig], config: DataConfig, tmp_path: Path, kept: str
) -> None:
    prepare(config)
    (place,) = (tmp_path / "cache").rglob("datasets.json")
    known = json.loads(place.read_text())
    assert len(known) == 1
    other = json.dumps({key: {"name": "kmnist", "pixels": 784} for key in known})
    place.write_text(other if kept == "of another version" else kept)
    assert [prepare(config).source for _ in range(2)] == ["reading 2"] * 2
