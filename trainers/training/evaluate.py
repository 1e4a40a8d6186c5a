"""One evaluation pass over a split, and a trial's metrics besides its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainers.comm.mesh import Place
from trainers.config import MetricConfig
from trainers.data import Examples
from trainers.data.batches import evaluation_batches
from trainers.models.loss import Loss, by_answer, plain
from trainers.settings import load_matplotlib
from trainers.telemetry.tally import Tally, tallied
from trainers.user_code import call, load_code


class Metrics:
    """Metrics of torchmetrics, of all answers of a split.

    Args:
        configs: configs of the metrics, by name.
        classes: number of outputs, which factories with a parameter ``num_classes`` get.
        place: this worker's place in the layout, None with one worker: replicas that evaluate
            different examples add up what they saw.
        device: device of the outputs.

    Raises:
        ValueError: a factory cannot be loaded or called, or returns no ``torchmetrics.Metric``.
    """

    def __init__(
        self,
        configs: Mapping[str, MetricConfig],
        classes: int,
        place: Place | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._metrics: dict[str, Any] = {}
        self._place = place
        for name, config in configs.items():
            self._metrics[name] = _make_metric(f"metrics.{name}.name", config, classes).to(device)

    def of(self, name: str) -> Any:
        """Return the metric ``name``."""
        return self._metrics[name]

    def reset(self, alone: bool) -> None:
        """Reset all metrics; with ``alone`` every replica sees all examples from now on."""
        shared = not alone and self._place is not None and self._place.dp > 1
        for metric in self._metrics.values():
            metric.reset()
            metric.distributed_available_fn = lambda: shared  # sync_on_compute is its constructor's
            metric.process_group = None if self._place is None else self._place.dp_group

    def update(self, outputs: Tensor, targets: Tensor, of_classes: bool) -> None:
        """Add the answers of a batch.

        Args:
            outputs: outputs of the model.
            targets: targets of the same number, or classes ``[B, ...]``.
            of_classes: whether targets are classes; outputs are then logits ``[B, ..., C]``.
        """
        if not self._metrics:
            return
        answers = plain(outputs)
        if of_classes:
            answers, targets = by_answer(answers, targets)
        elif answers.numel() == targets.numel():
            answers = answers.reshape(targets.shape)
        for metric in self._metrics.values():
            metric.update(answers, targets)

    def compute(self, split: str) -> dict[str, float]:
        """Return ``split/NAME`` of each metric; NaN if its answers were not finite.

        Raises:
            ValueError: a metric is not a single number.
        """
        found = {}
        for name, metric in self._metrics.items():
            value = metric.compute()
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError(
                    f"metrics.{name}: {type(metric).__name__} has {_said(value)}, and a metric of a"
                    " trial is one number; set its args, for example average=macro"
                )
            found[f"{split}/{name}"] = float(value)
        return found

    def missing(self, split: str) -> dict[str, float]:
        """Return NaN for each metric."""
        return {f"{split}/{name}": math.nan for name in self._metrics}


def _make_metric(key: str, config: MetricConfig, classes: int) -> Any:
    """Call a metric's factory and return the metric."""
    load_matplotlib()  # before torchmetrics imports it
    factory = load_code(key, config.name, config.code)
    metric = call(key, config.name, factory, config.args, num_classes=classes)
    from torchmetrics import Metric  # takes a second to load

    if not isinstance(metric, Metric):
        raise ValueError(
            f"{key}={config.name!r}: returned a {type(metric).__name__}; return a"
            " torchmetrics.Metric"
        )
    return metric


def _said(value: object) -> str:
    return f"values of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Examples,
    loss: Loss,
    metrics: Metrics | None = None,
    combine: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    like: int | None = None,
) -> Tally:
    """Return losses and answers of ``model`` on ``split``, in the model's own arithmetic.

    Args:
        model: the model.
        split: examples, on the model's device.
        loss: loss of the trial.
        metrics: metrics to update with the answers.
        combine: converts the model's logits to the logits that are evaluated.
        like: see :func:`evaluation_batches`.
    """
    tally, training = Tally(), model.training
    model.eval()
    try:
        for batch in evaluation_batches(split, like):
            outputs = combine(model(batch.x))
            tally.add(tallied(outputs, batch, loss(outputs, batch.y), loss))
            if metrics is not None:
                metrics.update(outputs, batch.y, loss.config.chooses)
    finally:
        model.train(training)
    return tally
