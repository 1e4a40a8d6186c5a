"""Trials with other losses than the cross-entropy of classes, and with torchmetrics metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torchmetrics.functional import accuracy, r2_score

from tests.trainers.processes import spawned
from trainers.config import (
    DataConfig,
    LossConfig,
    MetricConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.config.layout import Layout
from trainers.data import prepare
from trainers.models.loss import Loss
from trainers.training.trainer import Training, check

TASKS = """
import torch
from torch import nn


def two(train):
    x, y = line(train)
    return x, (y > 0).long()



def line(train, wide=1):
    x = torch.linspace(-1, 1, 120 if train else 40)[:, None] * torch.arange(1.0, 4.0)
    y = x @ torch.tensor([[0.5], [-0.25], [1.0]]).repeat(1, wide)
    return x, y if wide > 1 else y[:, 0]


def labels(train):
    x, y = line(train, 3)
    return x, (y > 0.1).long()


def tokens(train):
    x = torch.arange(200 if train else 60).view(-1, 5) * 7 % 11
    return x, (x + 1) % 11


def padded(train):
    x, y = tokens(train)
    return x, torch.where(torch.arange(5) < 3, y, -100)


def words(classes):
    return nn.Sequential(nn.Embedding(classes, 8), nn.Linear(8, classes))


def channels_first(classes):
    return nn.Sequential(nn.Embedding(classes, 8), nn.Linear(8, classes), Swap())


class Swap(nn.Module):
    def forward(self, x):
        return x.movedim(-1, 1)


class Answer:
    def __init__(self, logits):
        self.logits = logits


class Named(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inner = words(classes)

    def forward(self, x):
        return Answer(self.inner(x))


def mean(power=2):
    return lambda outputs, targets: (outputs[:, 0] - targets).abs().pow(power).mean()


def each(power=2):
    return lambda outputs, targets: (outputs[:, 0] - targets).abs().pow(power)


def summed(power=2):
    return lambda outputs, targets: (outputs[:, 0] - targets).abs().pow(power).sum()


def wide(train):
    x, y = line(train)
    return x, torch.stack([x, x], 1) * y[:, None, None]


def turned():
    return nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (3, 2)))


def nothing():
    return 3


def rare(train):
    x, _ = line(train)
    return x, (torch.arange(len(x)) % 10 == 9).long()


def lenient():
    return lambda outputs, targets: (outputs[:, 0] - targets).nan_to_num(0.0).square().mean()


def broken():
    return nn.Sequential(nn.Linear(3, 1), Broken())


class Broken(nn.Module):
    def forward(self, x):
        return x.log() * torch.where(x > 0, 1.0, float("nan"))


def vector():
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(num_classes=11, average=None)
"""
LNS16 = PrecisionConfig(format="lns16", scope="everywhere")
OWN = ("mean", "each", "summed", "nothing", "lenient")
ACCURACY = {"accuracy": MetricConfig(name="torchmetrics.classification:MulticlassAccuracy")}
R2 = {"r2": MetricConfig(name="torchmetrics:R2Score")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    return path


def trial(file: Path, data: str, loss: str = "mse", model: str = "", **changes: Any) -> TrialConfig:
    return TrialConfig(
        data=DataConfig(name=f"{file}:{data}", args=changes.pop("data_args", {})),
        model=ModelConfig(name=f"{file}:{model}") if model else ModelConfig(hidden=[16]),
        loss=LossConfig(name=f"{file}:{loss}" if loss in OWN else loss),
        **{"epochs": 2, "batch_size": 20, "optimizer": OptimizerConfig(lr=0.05)} | changes,
    )


def outputs(training: Training, x: Tensor) -> Tensor:
    with torch.no_grad():
        made = training.model(x)
    return made.to_float() if hasattr(made, "to_float") else made


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("precision", [PrecisionConfig(), LNS16], ids=lambda p: p.format)
def test_a_regression_reports_its_loss_and_metrics_and_no_error(
    file: Path, wide: int, precision: PrecisionConfig
) -> None:
    config = trial(
        file, "line", data_args={"wide": wide}, precision=precision, metrics=R2, epochs=4
    )
    check(config, prepare(config.data))
    training = Training(config)
    found = [training.train_epoch() for _ in range(4)][-1]
    assert not any(name.endswith("/error") for name in found)
    y = training.data.validation.y
    predicted = outputs(training, training.data.validation.x).reshape(y.shape)
    assert found["validation/loss"] == pytest.approx(float((predicted - y).square().mean()))
    assert found["validation/r2"] == pytest.approx(float(r2_score(predicted, y)), rel=1e-5)
    assert training.test().keys() == {"test/loss", "test/r2"}
    assert found["train/loss"] < 0.5


def test_the_step_is_that_of_the_mean_over_answers(file: Path) -> None:
    """Three equal answers per example move the weights like one."""
    one = Training(trial(file, "line", batch_size=100))
    three = Training(trial(file, "line", data_args={"wide": 3}, batch_size=100))
    for training in (one, three):
        last = training.model[-1]
        with torch.no_grad():
            last.weight.copy_(one.model[-1].weight.expand_as(last.weight))
            last.bias.copy_(one.model[-1].bias.expand_as(last.bias))
    with torch.no_grad():
        three.model[0].weight.copy_(one.model[0].weight)
        three.model[0].bias.copy_(one.model[0].bias)
    losses = [training.train_epoch()["train/loss"] for training in (one, three)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    expected = one.model[-1].weight.detach().clone()
    torch.testing.assert_close(three.model[0].bias, one.model[0].bias, rtol=1e-5, atol=1e-6)
    moved = three.model[-1].weight.detach()[:1]
    before = Training(trial(file, "line", batch_size=100)).model[-1].weight.detach()
    torch.testing.assert_close((moved - before) * 3, expected - before, rtol=1e-4, atol=1e-6)


def test_labels_are_right_or_wrong_one_by_one(file: Path) -> None:
    config = trial(file, "labels", "binary_cross_entropy", epochs=6)
    check(config, prepare(config.data))
    training = Training(config)
    found = [training.train_epoch() for _ in range(6)][-1]
    y = training.data.validation.y
    wrong = (outputs(training, training.data.validation.x) > 0) != (y > 0.5)
    assert found["validation/error"] == pytest.approx(float(wrong.float().mean()))


@pytest.mark.parametrize("data", ["tokens", "padded"])
@pytest.mark.parametrize("model", ["words", "channels_first", "Named"])
def test_a_sequence_has_an_answer_a_token(file: Path, data: str, model: str) -> None:
    metrics = {
        "accuracy": MetricConfig(
            name="torchmetrics.classification:MulticlassAccuracy",
            args={"average": "micro", "ignore_index": -100},
        )
    }
    config = trial(file, data, "cross_entropy", model, metrics=metrics, batch_size=12)
    check(config, prepare(config.data))
    training = Training(config)
    found = training.train_epoch()
    split = training.data.validation
    logits = training.model(split.x)
    logits = logits if model != "channels_first" else logits.movedim(1, -1)
    asked = split.y >= 0
    right = accuracy(logits[asked], split.y[asked], "multiclass", num_classes=11)
    assert found["validation/error"] == pytest.approx(1 - float(right))
    assert found["validation/accuracy"] == pytest.approx(float(right))
    wanted = torch.nn.functional.cross_entropy(logits[asked], split.y[asked])
    assert found["validation/loss"] == pytest.approx(float(wanted.detach()))


def test_a_loss_of_ones_own_may_be_a_mean_or_one_an_example(file: Path) -> None:
    found = []
    for name in ("mse", "mean", "each"):
        config = trial(file, "line", name)
        check(config, prepare(config.data))
        training = Training(config)
        found.append(training.train_epoch() | {"samples_per_second": 0.0})
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "nothing"}, "returned a int; return a function"),
        ({"loss": "cross_entropy"}, "its targets are float32"),
        ({"data": "tokens", "model": "words"}, r"IndexError in .*tasks.py: index out"),
        ({"loss": "summed"}, r"on the same examples twice, so it is a sum over them; return their"),
        ({"data": "wide", "model": "turned"}, r"into \(2, 3, 2\); return outputs .* \(batch, 2, 3"),
        ({"metrics": {"r2": MetricConfig(name="torchmetrics:Nothing")}}, "no function or class No"),
        ({"metrics": {"m": MetricConfig(name="math:floor")}}, "metrics.m.name='math:floor'"),
        ({"metrics": {"n": MetricConfig(name="decimal:Decimal")}}, "return a\n? ?torchmetrics"),
    ],
)
def test_what_does_not_go_together_is_refused_before_it_starts(
    file: Path, changes: dict[str, Any], message: str
) -> None:
    config = trial(file, **({"data": "line"} | changes))
    with pytest.raises(ValueError, match=message):
        check(config, prepare(config.data))


MISFITS = [
    ("mse", "torchmetrics:MeanMetric", {}, "it summarises one series of values"),
    ("mse", "torchmetrics.text:BLEUScore", {}, "does not take outputs of shape (batch, 1)"),
    ("cross_entropy", "torchmetrics:R2Score", {}, "with targets of shape (batch,), which are cl"),
    ("cross_entropy", "torchmetrics:MeanMetric", {}, "it summarises one series of values"),
    ("cross_entropy", "torchmetrics.text:BLEUScore", {}, "TypeError"),
    ("cross_entropy", "torchmetrics:AUROC", {"task": "binary"}, "IndexError"),
    ("cross_entropy", "torchmetrics.clustering:MutualInfoScore", {}, "same shape"),
    ("binary_cross_entropy", "torchmetrics:Perplexity", {}, "which are labels"),
]


@pytest.mark.parametrize(("loss", "name", "args", "message"), MISFITS)
def test_a_metric_that_does_not_fit_is_refused_by_its_own_name_and_the_one_shown_is_taken(
    loss: str, name: str, args: dict[str, Any], message: str, file: Path
) -> None:
    """The error does not blame the network, the loss or the format."""
    data = {"mse": "line", "cross_entropy": "two", "binary_cross_entropy": "labels"}[loss]
    metrics = {"m": MetricConfig(name=name, args=args)}
    config = trial(file, data, loss, metrics=metrics)
    with pytest.raises(ValueError, match=r"use a metric of \w+, for example ") as refusal:
        check(config, prepare(config.data))
    text = str(refusal.value)
    assert text.startswith(f"metrics.m.name={name!r}: ")
    assert message in text
    assert "precision" not in text
    assert "model.name" not in text
    shown = yaml.safe_load(text.partition("for example ")[2].rpartition(", or other args")[0])
    config = trial(file, data, loss, metrics={"m": MetricConfig(**shown)})
    check(config, prepare(config.data))


def test_errors_of_metrics_name_near_names_and_args(file: Path) -> None:
    for name, args, message in (
        ("torchmetrics:Acuracy", {}, r"no function or class Acuracy \(did you mean 'Accuracy'\?\)"),
        (f"{file}:vecto", {}, r"no function or class vecto \(did you mean 'vector'\?\)"),
        ("torchmetrics:Accuracy", {"task": "multilabel"}, "num_labels.*; change its args"),
    ):
        config = trial(
            file, "two", "cross_entropy", metrics={"m": MetricConfig(name=name, args=args)}
        )
        with pytest.raises(ValueError, match=message):
            check(config, prepare(config.data))


def test_a_metric_must_be_one_number(file: Path) -> None:
    metrics = {"each": MetricConfig(name=f"{file}:vector")}
    config = trial(file, "tokens", "cross_entropy", "words", metrics=metrics)
    with pytest.raises(ValueError, match=r"metrics.each: .*shape \(11,\).*average=macro"):
        check(config, prepare(config.data))


def test_names_of_metrics_and_combinations_are_checked() -> None:
    with pytest.raises(ValueError, match=r"metrics.error: must be a name .*other than loss"):
        TrialConfig(metrics={"error": MetricConfig(name="torchmetrics:R2Score")})
    with pytest.raises(ValueError, match=r"metrics.NAME.name='R2Score': must be a factory"):
        MetricConfig(name="R2Score")
    with pytest.raises(ValueError, match="only the last stage sees answers"):
        TrialConfig(metrics=R2, workers=2, layout=Layout(pp=2, micro_batches=2))


def replica(rank: int, folder: str) -> dict[str, Any]:
    return measured(trial(Path(folder) / "tasks.py", "line", metrics=R2, workers=2), rank)


def measured(config: TrialConfig, rank: int = 0) -> dict[str, Any]:
    training = Training(config, rank=rank, world_size=config.workers)
    epoch = training.train_epoch()
    return training.test() | {name: epoch[name] for name in epoch if "validation" in name}


def test_replicas_measure_as_one_worker_does(file: Path) -> None:
    """Gradients of two halves are added in another order, in float32."""
    whole = measured(trial(file, "line", metrics=R2))
    for found in spawned(replica, file.parent):
        del found["pid"]
        assert found == pytest.approx(whole, rel=1e-4)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "wrong"),
    [
        ("cross_entropy", [[NAN, NAN], [1.0, 0.0], [INF, 0.0]], [0, 0, 0], 2),
        ("cross_entropy", [[1.0, NAN], [-INF, 1.0], [0.0, 1.0]], [0, 1, 1], 1),
        ("cross_entropy", [[[NAN, 0.0], [1.0, 0.0], [NAN, 0.0]]], [[0, 0, -100]], 1),
        ("margin", [[NAN, NAN], [0.9, 0.1], [0.9, 0.1]], [0, 0, 1], 2),
        ("binary_cross_entropy", [NAN, -1.0, -INF], [0.0, 0.0, 0.0], 2),
        ("binary_cross_entropy", [[NAN, -1.0], [1.0, NAN]], [[0.0, 0.0], [1.0, 1.0]], 2),
    ],
)
def test_an_answer_that_is_no_number_is_wrong(
    loss: str, outputs: Any, targets: Any, wrong: int
) -> None:
    found = Loss(LossConfig(name=loss)).wrong(torch.tensor(outputs), torch.tensor(targets))
    assert int(found) == wrong


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_a_diverged_trial_answers_nothing_right(file: Path, rate: float) -> None:
    """Nine of ten examples are of class 0, which argmax returns for NaN logits."""
    config = trial(
        file, "rare", "cross_entropy", optimizer=OptimizerConfig(lr=rate), metrics=ACCURACY
    )
    training = Training(config)
    found = [training.train_epoch() for _ in range(2)][-1] | training.test()
    for split in ("validation", "test"):
        assert found[f"{split}/error"] == 1.0
        assert math.isnan(found[f"{split}/loss"])
        assert math.isnan(found[f"{split}/accuracy"])


def test_an_own_loss_that_ignores_nan_diverges_all_the_same(file: Path) -> None:
    config = trial(file, "line", "lenient", metrics=R2, model="broken", epochs=1)
    training = Training(config)
    found = training.train_epoch() | training.test()
    assert training.diverged
    assert math.isnan(found["validation/loss"])
    assert math.isnan(found["validation/r2"])
    assert math.isnan(found["test/loss"])
