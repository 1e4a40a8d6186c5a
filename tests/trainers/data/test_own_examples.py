"""Forms of examples from a user's factory: dicts, texts as classes, columns of targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.config import DataConfig, LossConfig, ModelConfig, TrialConfig
from trainers.data import load, prepare
from trainers.training.build import load_data
from trainers.training.check import check
from trainers.training.trainer import Training

FACTORIES = """
import numpy as np
import torch
from torch.utils.data import Dataset

NAMES = np.array(["cat", "ant", "bee"])


def made(train):
    x = torch.linspace(-1, 1, 90 if train else 30)[:, None] * torch.ones(4)
    return x, (torch.arange(len(x)) % 3)


def pairs(train):
    return made(train)


class Rows(Dataset):
    classes = ["ant", "bee", "cat"]

    def __init__(self, train, keys=("image", "label"), texts=False):
        self.x, self.y = made(train)
        self.keys, self.texts = keys, texts

    def __len__(self):
        return len(self.y)

    def __getitem__(self, place):
        y = int(self.y[place])
        target = ["ant", "bee", "cat"][y] if self.texts else y
        return dict(zip(self.keys, (self.x[place].numpy(), target, "more", 3)))


class Plain:
    \"\"\"As Hugging Face's: no class of torch's.\"\"\"

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return self.rows[place]


def rows(train, keys=("image", "label"), texts=False):
    return Rows(train, keys, texts)


def plain(train):
    return Plain(Rows(train, texts=True))


def listed(train):
    return [Rows(train)[place] for place in range(len(Rows(train)))]


def arrays(train):
    x, y = made(train)
    return {"input": x.numpy(), "target": np.array(["ant", "bee", "cat"], dtype=object)[y]}


def texts(train, extra=""):
    x, y = made(train)
    y = NAMES[[1, 2, 0]][y]
    if extra and not train:
        y = np.array([extra, *y[1:]])
    return x, y.tolist()


def column(train):
    x, y = made(train)
    return x, y[:, None]


def from_1(train):
    x, y = made(train)
    return x, y + 1


def narrow(train):
    x, y = made(train)
    return x if train else x[:, :3], y


def nothing(train):
    x, y = made(train)
    return x[:, :0], y


def words(train):
    x, y = made(train)
    return ["a b"] * len(y), y
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "examples.py"
    path.write_text(FACTORIES)
    return path


def trial(file: Path, factory: str, num_workers: int | None = None, **args: Any) -> TrialConfig:
    data = DataConfig(name=f"{file}:{factory}", args=args, num_workers=num_workers)
    return TrialConfig(data=data, model=ModelConfig(hidden=[8]), epochs=1, batch_size=10)


@pytest.mark.parametrize(
    ("factory", "args"),
    [
        ("rows", {}),
        ("rows", {"keys": ["x", "y"]}),
        ("rows", {"keys": ["sound", "labels"]}),
        ("rows", {"keys": ["img", "label", "note"]}),
        ("rows", {"texts": True}),
        ("plain", {}),
        ("listed", {}),
        ("arrays", {}),
        ("texts", {}),
        ("column", {}),
    ],
)
def test_dicts_texts_and_columns_train_as_pairs_of_numbers_do(
    file: Path, factory: str, args: dict[str, Any]
) -> None:
    config, plain = trial(file, factory, **args), trial(file, "pairs")
    check(config, prepare(config.data))
    for split, other in zip(load_data(config), load_data(plain), strict=True):
        assert split.outputs == 3
        assert all(map(torch.equal, split.head(90), other.head(90)))
    first, second = (Training(each).train_epoch() for each in (config, plain))
    assert first["train/loss"] == second["train/loss"]


def test_dicts_are_loaded_when_needed_too(file: Path) -> None:
    config, held = trial(file, "rows", num_workers=1), trial(file, "pairs")
    check(config, prepare(config.data))
    first, second = (Training(each).train_epoch() for each in (config, held))
    assert first["train/loss"] == second["train/loss"]


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("rows", {"keys": ["image", "label", "target"]}, "are dicts of image, label, target; one"),
        ("rows", {"keys": ["a", "label", "b"]}, "or the only other key.*or return pairs"),
        ("rows", {"keys": ["a", "b"]}, "are dicts of a, b; one must be the target .label, labels"),
        ("texts", {"extra": "cow"}, "the class 'cow', which no training example has .ant, bee, c"),
        ("narrow", {}, r"training examples have the shape \(4,\), others \(3,\); return examples"),
        ("nothing", {}, r"examples have the shape \(0,\), so they hold no value; return at least"),
        ("words", {}, "its examples are texts; return numbers, for example tokens"),
    ],
)
def test_what_is_not_clear_is_refused_with_what_to_return(
    file: Path, factory: str, args: dict[str, Any], message: str
) -> None:
    config = trial(file, factory, **args)
    with pytest.raises(ValueError, match=message) as refusal:
        prepare(config.data)
    assert str(refusal.value).startswith(f"data.name='{file}:{factory}'")
    assert "precision" not in str(refusal.value)


def test_texts_that_are_loaded_when_needed_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"its classes are texts, .* number them from 0"):
        load(trial(file, "rows", num_workers=1, texts=True).data)


def test_a_column_of_numbers_stays_one(file: Path) -> None:
    config = TrialConfig(data=DataConfig(name=f"{file}:column"), loss=LossConfig(name="mse"))
    assert load_data(config).train.head(2).y.shape == (2, 1)


def test_classes_that_count_from_1_are_pointed_out(file: Path) -> None:
    """They train, with an output that is never right."""
    source = prepare(trial(file, "from_1").data).source
    assert source.endswith(
        "its targets are 1 to 3: as classes, which count from 0, no example has those below 1"
    )
    assert "targets" not in prepare(trial(file, "pairs").data).source
