"""Training images that are shifted and mirrored."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lns_ops.tensor import storage_of
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.data import cifar, load
from trainers.data.augment import SHIFT, AugmentedImages, augment
from trainers.data.split import Split
from trainers.training.trainer import Training


def numbered(count: int) -> Tensor:
    """Return images of 3 x 5 x 4 whose values are all different and not 0."""
    return torch.arange(1.0, 1 + count * 60).view(count, 3, 5, 4)


@given(seed=st.integers(0, 2**63 - 1), flat=st.booleans())
def test_each_image_is_a_window_of_itself(seed: int, flat: bool) -> None:
    x = numbered(6)
    made = AugmentedImages(Split(x.flatten(1) if flat else x, torch.arange(6)), (3, 5, 4))
    seen = made.draw(seed).x.view(x.shape)
    for image, other in zip(seen, x, strict=True):
        wide = functional.pad(other, [SHIFT] * 4)
        windows = [
            wide[:, top : top + 5, left : left + 4]
            for top in range(2 * SHIFT + 1)
            for left in range(2 * SHIFT + 1)
        ]
        assert any(torch.equal(image, w) or torch.equal(image.flip(-1), w) for w in windows)


def test_every_shift_and_both_directions_come_up_alike() -> None:
    """Chi-squared of 162 versions of 32,400 copies of an image, within three deviations."""
    x = torch.ones(32_400, 1, 9, 9).cumsum(-1).cumsum(-2)
    made = AugmentedImages(Split(x, torch.zeros(32_400)), (1, 9, 9))
    counts = made.draw(0).x.flatten(1).unique(dim=0, return_counts=True)[1]
    assert len(counts) == 2 * (2 * SHIFT + 1) ** 2
    statistic = float(((counts - 200.0) ** 2 / 200).sum())
    assert abs(statistic - 161) < 3 * (2 * 161) ** 0.5


def test_a_seed_gives_the_same_and_another_seed_others() -> None:
    made = AugmentedImages(Split(numbered(50), torch.arange(50)), (3, 5, 4))
    first = made.draw(1).x.clone()
    other = made.draw(2).x.clone()
    assert torch.equal(made.draw(1).x, first)
    assert not torch.equal(other, first)
    assert made.draw(1).x.data_ptr() == made.draw(2).x.data_ptr()  # as in a captured graph


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialConfig:
    """A trial on CIFAR-10's binary version, with ten images per file."""
    monkeypatch.setattr(cifar, "TRAIN", 50)
    monkeypatch.setattr(cifar, "TEST", 10)
    records = torch.randint(256, (60, 3073), generator=torch.Generator().manual_seed(0))
    records[:, 0] %= 10
    for place, name in enumerate(cifar.BATCHES):
        some = records[10 * place : 10 * place + 10].byte().numpy()
        (tmp_path / f"{name}.bin").write_bytes(some.tobytes())
    load.cache_clear()
    return TrialConfig(
        data=DataConfig(
            name="cifar10", root=str(tmp_path), validation_size=10, args={"augment": "crop_flip"}
        ),
        model=ModelConfig(name="cnn", channels=[2], hidden=[]),
        precision=PrecisionConfig(format="lns12", kahan_sum=True),
        batch_size=8,
        epochs=3,
        device="cpu",
        threads=1,
    )


def weights(training: Training) -> list[Tensor]:
    return [storage_of(p.detach()).clone() for p in training.model.parameters()]


def test_an_interrupted_trial_sees_the_same_images(config: TrialConfig, tmp_path: Path) -> None:
    whole = Training(config)
    for _ in range(3):
        whole.train_epoch()
    first, second = Training(config), Training(config)
    first.train_epoch()
    first.save(tmp_path / "kept")
    second.restore(tmp_path / "kept")
    second.train_epoch()
    second.train_epoch()
    assert all(map(torch.equal, weights(whole), weights(second)))


def test_each_epoch_and_seed_sees_others_and_validation_the_images_as_they_are(
    config: TrialConfig,
) -> None:
    plain = replace(config, data=replace(config.data, args={}))
    assert augment(plain.data, load(plain.data).train) is None
    trained = []
    for each in (config, plain, replace(config, seed=1)):
        training = Training(each)
        before = training.data.train.head(40).x
        training.train_epoch()
        assert torch.equal(training.data.train.head(40).x, before)  # other trials share them
        trained.append(weights(training))
    assert not any(torch.equal(a[0], b[0]) for a, b in pairwise(trained))


def test_a_flat_network_sees_shifted_images(config: TrialConfig) -> None:
    training = Training(replace(config, model=ModelConfig(name="mlp", hidden=[4])))
    assert training.train_epoch()["epoch"] == 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"augment='flip': must be one of none, crop_flip"):
        DataConfig(name="cifar100", args={"augment": "flip"})
    with pytest.raises(ValueError, match=r"data.args.augment='crop_flip' with .*mnist"):
        DataConfig(name="mnist", args={"augment": "crop_flip"})
