"""The configuration of a trial's loss and additional metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainers.config.validation import check_named, plain_values, require
from trainers.user_code import names_code

LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("label_smoothing", "softmax"),
    "margin": ("positive", "negative", "weight"),
    "binary_cross_entropy": (),
    "mse": (),
    "l1": (),
    "huber": ("delta",),
}
"""The built-in losses with the names of their arguments."""
OF_CLASSES = ("cross_entropy", "margin", "binary_cross_entropy")
"""Losses of answers that are right or wrong."""
MEASURED = ("loss", "error")
"""Names of the measurements that every trial reports."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss, averaged over all answers of a batch; an example has one answer or several.

    Attributes:
        name: ``cross_entropy`` or ``margin`` for classes; ``binary_cross_entropy``, from logits,
            for labels 0 and 1; ``mse``, ``l1`` or ``huber`` for numbers; or
            ``file.py:factory`` or ``package.module:factory``, which returns
            ``loss(outputs, targets)`` (:mod:`trainers.models.loss`).
        args: arguments of the loss (``label_smoothing`` of cross_entropy and ``delta`` of huber, as
            in torch; ``positive``, ``negative`` and ``weight`` of margin) or of the factory.
            ``softmax: lns`` of cross_entropy computes its gradient in LNS, with the same bits on
            every CPU and GPU.
        code: sha256 of the factory's file, filled in when a study is planned.

    Example::

        >>> smooth = LossConfig(name="cross_entropy", args={"label_smoothing": 0.1})
    """

    name: str = "cross_entropy"
    args: dict[str, Any] = field(default_factory=dict)
    code: str = ""

    def __post_init__(self) -> None:
        check_named("loss", self.name, tuple(LOSSES))
        if self.own:
            return
        for name in self.args:
            if name not in LOSSES[self.name]:
                takes = ", ".join(LOSSES[self.name]) or "none"
                raise ValueError(
                    f"loss.args={self.args} with loss.name={self.name}: {name} is not among its"
                    f" arguments ({takes}); leave it out"
                )
        if self.args.get("softmax", "lns") != "lns" or (self.in_lns and len(self.args) > 1):
            raise ValueError(
                f"loss.args={self.args}: softmax is lns, and then takes no other argument; use"
                " loss.args={softmax: lns}, or leave softmax out for float32"
            )

    @property
    def in_lns(self) -> bool:
        """Whether the gradient of cross_entropy is computed in LNS."""
        return not self.own and "softmax" in self.args

    @property
    def own(self) -> bool:
        """Whether the loss comes from the user's code."""
        return names_code(self.name)

    @property
    def chooses(self) -> bool:
        """Whether an answer is one of several classes, the one with the largest output."""
        return self.name in ("cross_entropy", "margin")

    @property
    def counts_errors(self) -> bool:
        """Whether answers are right or wrong, so that a trial reports ``error``."""
        return self.name in OF_CLASSES


@plain_values
@dataclass(frozen=True, kw_only=True)
class MetricConfig:
    """A metric of all answers of a split, reported as ``validation/NAME`` and ``test/NAME``.

    Attributes:
        name: ``package.module:factory`` or ``file.py:factory``, which returns a
            ``torchmetrics.Metric``, for example ``torchmetrics:R2Score``.
        args: arguments of the factory.
        code: sha256 of the factory's file, filled in when a study is planned.

    Example::

        >>> r2 = MetricConfig(name="torchmetrics:R2Score")
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    code: str = ""

    def __post_init__(self) -> None:
        check_named("metrics.NAME", self.name, ())


def check_metrics(metrics: dict[str, MetricConfig]) -> None:
    """Refuse metrics with a reserved or invalid name.

    Raises:
        ValueError: with the name, the rule and the remedy.
    """
    for name in metrics:
        require(
            f"metrics.{name}",
            name not in MEASURED and name.isidentifier(),
            f"must be a name of letters, digits and _, other than {' and '.join(MEASURED)}, which"
            " are always reported",
            "use for example metrics.r2",
        )
