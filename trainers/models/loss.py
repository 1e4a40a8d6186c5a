"""The losses that a trial minimises, computed from a model's outputs and the data's targets.

An *answer* is one element of the targets ``y``; an example has one, or several (a text one for each
token). With B examples:

- ``cross_entropy``: classes ``[B]``, or ``[B, ...]`` with -100 at positions without an answer;
  logits ``[B, ..., C]``, or ``[B, C, ...]`` as in torch. Answers are right or wrong.
- ``margin``: classes as above; outputs from 0 to 1, such as the lengths of capsules. The loss is
  the sum of ``max(0, positive - v_k)^2`` for the right class and ``weight max(0, v_k -
  negative)^2`` for each other class, where ``v_k`` is the output of class k (defaults: positive
  0.9, negative 0.1, weight 0.5; S. Sabour et al. 2017, arXiv:1710.09829, equation 4).
- ``binary_cross_entropy``: labels 0 or 1, ``[B, ...]``; logits of the same shape. Answers are right
  or wrong.
- ``mse``, ``l1``, ``huber``: numbers ``[B, ...]``; outputs of the same shape.
- your own, ``loss(outputs, targets)``: gets float32 outputs in all formats, and returns a mean over
  the examples, as torch's losses do, or losses that are averaged. One answer per example.

``cross_entropy`` with ``softmax: lns`` computes the gradient ``softmax(logits) - one_hot`` only by
LNS operations, so its bits follow the arithmetic contract on every device; in float32 the last bit
depends on the device's ``exp``. One minus a probability near 1 is computed as the sum of the other
probabilities, because the probability itself is already rounded to the format.

An output that is NaN or infinite is a wrong answer for all targets: an infinite or NaN logit of a
class or of a label. A loss of your own is NaN if an output is. If the loss is not finite, all other
metrics of those examples are NaN (:meth:`trainers.training.trainer.Training.test`).

The trial minimises the mean over all answers. The gradient is of their *sum*, and the optimizer
divides (:mod:`trainers.optim.build`), because gradients of a mean underflow in narrow formats. It
divides by the same number in every step, so ignored answers make a step smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import LNSTensor, LossScale
from trainers.config import LossConfig
from trainers.data.split import IGNORED, Dataset, Split
from trainers.user_code import call, load_code

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}
"""Losses with one target per output."""


def _margin(
    lengths_NC: Tensor,
    classes_N: Tensor,
    positive: float = 0.9,
    negative: float = 0.1,
    weight: float = 0.5,
) -> Tensor:
    """Return the margin loss, summed over all answers that are not ignored."""
    right_NC = F.one_hot(classes_N.clamp(min=0), lengths_NC.shape[1]).bool()
    present = F.relu(positive - lengths_NC).square()
    absent = weight * F.relu(lengths_NC - negative).square()
    return (torch.where(right_NC, present, absent).sum(1) * (classes_N != IGNORED)).sum()


class _CrossEntropyInLNS(torch.autograd.Function):
    """The cross-entropy of LNS logits: its value in float32, its gradient in LNS."""

    @staticmethod
    def forward(ctx: Any, logits_NC: LNSTensor, classes_N: Tensor) -> Tensor:
        """Return the sum over the answers."""
        asked_N1 = (classes_N != IGNORED).unsqueeze(1)
        one_hot_NC = F.one_hot(classes_N.clamp(min=0), logits_NC.shape[1]).float()
        probability_NC = logits_NC.softmax(1)
        ctx.fmt = logits_NC.fmt
        # compute 1 - p of the right class as the sum of the others, because p near 1 is rounded
        others_NC = probability_NC.masked_fill(one_hot_NC.bool(), 0.0)
        total_N1 = others_NC.sum(1, keepdim=True)
        difference_NC = others_NC - total_N1 * LNSTensor.from_float(one_hot_NC, ctx.fmt)
        asked_NC = asked_N1.float().expand_as(one_hot_NC)
        ctx.save_for_backward(difference_NC * LNSTensor.from_float(asked_NC, ctx.fmt))
        return F.cross_entropy(logits_NC.to_float(), classes_N, reduction="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return ``(softmax(logits) - one_hot) grad``."""
        (difference_NC,) = ctx.saved_tensors
        return difference_NC * LNSTensor.from_float(grad, ctx.fmt), None


class Loss:
    """The loss of a trial.

    Args:
        config: config of the loss.
        scale: power of two that multiplies its gradient; the model's parameters must divide by it
            (:class:`lns_ops.LossScale`).

    Raises:
        ValueError: the user's factory cannot be loaded or called, or returns nothing callable.
    """

    def __init__(self, config: LossConfig, scale: float = 1.0) -> None:
        self.config, self.scale = config, LossScale(scale)
        if not config.own:
            return
        where = f"loss.name={config.name!r}"
        factory = load_code("loss.name", config.name, config.code)
        self._own = call("loss.name", config.name, factory, config.args)
        if not callable(self._own):
            raise ValueError(
                f"{where}: returned a {type(self._own).__name__}; return a function or module that"
                " is called as loss(outputs, targets)"
            )

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the answers, a float32 scalar."""
        return self.scale(self._summed(outputs, targets))

    def _summed(self, outputs: Tensor, targets: Tensor) -> Tensor:
        config = self.config
        if config.own:
            found: Tensor = self._own(plain(outputs), targets)
            if not isinstance(found, Tensor):
                raise ValueError(
                    f"loss.name={config.name!r}: returned a {type(found).__name__}; return a tensor"
                    " computed from the outputs"
                )
            known = found.mean() * len(targets)
            return torch.where(plain(outputs).isnan().any(), torch.nan, known)
        if config.in_lns:
            if not isinstance(outputs, LNSTensor):
                raise ValueError(
                    f"loss.args={config.args} with float outputs: its softmax is of LNS numbers;"
                    " use an LNS precision.format with precision.scope=everywhere, or leave it out"
                )
            logits, classes = by_answer(outputs, targets)
            apply: Callable[..., Tensor] = _CrossEntropyInLNS.apply
            return apply(logits, classes)
        if config.name == "margin":
            lengths, classes = by_answer(plain(outputs), targets)
            return _margin(lengths, classes, **config.args)
        if config.name == "cross_entropy":
            return F.cross_entropy(*by_answer(outputs, targets), reduction="sum", **config.args)
        outputs = outputs.reshape(targets.shape)
        return FUNCTIONS[config.name](outputs, targets, reduction="sum", **config.args)

    def wrong(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of wrong answers, int64; 0 for losses without right or wrong answers.

        Outputs that are not finite count as wrong.
        """
        if self.config.chooses:
            logits, classes = by_answer(outputs, targets)
            chosen = logits.argmax(1)  # of a NaN, if there is one
            wrong = chosen != classes
            if not isinstance(logits, LNSTensor):  # LNS codes are always finite
                wrong |= ~logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite()
            return (wrong if targets.dim() == 1 else wrong & (classes != IGNORED)).sum()
        if self.config.name == "binary_cross_entropy":
            logits = plain(outputs).reshape(targets.shape)
            return (((logits > 0) != (targets > 0.5)) | ~logits.isfinite()).sum()
        return torch.zeros((), dtype=torch.int64, device=targets.device)

    def answers(self, targets: Tensor) -> Tensor | int:
        """Return the number of answers that are not ignored."""
        if self.config.chooses and targets.dim() > 1:
            return (targets != IGNORED).sum()
        return len(targets) * self.answers_each(targets)

    def answers_each(self, targets: Tensor) -> int:
        """Return the number of answers per example."""
        return 1 if self.config.own else targets[0].numel()

    def fit(self, name: str, data: Dataset) -> Dataset:
        """Return ``data`` with targets in the loss's data type.

        Args:
            name: name of the data, for error messages.
            data: all splits.

        Raises:
            ValueError: the targets do not fit the loss.
        """
        if self.config.own:
            return data
        fit = partial(self._fitting, name)
        return Dataset(*(split.map(fit) for split in data))

    def _fitting(self, name: str, split: Split) -> Split:
        """Return examples with targets in the loss's data type."""
        y = split.y
        found = f"data.name={name!r} with loss.name={self.config.name}: its targets are"
        if self.config.chooses:
            if y.is_floating_point() or bool((y[y != IGNORED] if y.dim() > 1 else y).lt(0).any()):
                kind = "float32" if y.is_floating_point() else f"whole numbers from {int(y.min())}"
                raise ValueError(
                    f"{found} {kind}, and classes are whole numbers from 0; return such classes, or"
                    " use another loss.name, for example mse"
                )
            return Split(split.x, y[:, 0]) if _is_column(split) else split
        if self.config.name == "binary_cross_entropy" and not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(
                f"{found} not all 0 or 1; return such labels, or use loss.name=cross_entropy for"
                " classes, loss.name=mse for numbers"
            )
        return Split(split.x, y.float())


def _is_column(split: Split) -> bool:
    """Return whether classes are a column ``[B, 1]``, one per example, and not steps of
    sequences."""
    x, y = split
    return y.shape[1:] == (1,) and not (x.dim() > 1 and x.shape[1] == 1)


def by_answer(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits ``[N, C]`` and classes ``[N]``, one row per answer.

    If the class dimension is ambiguous, ``[B, T, T]``, it is the last one.
    """
    if targets.dim() == 1:
        return outputs, targets
    logits = outputs if outputs.shape[:-1] == targets.shape else outputs.movedim(1, -1)
    return logits.flatten(0, -2), targets.flatten()


def plain(outputs: Tensor) -> Tensor:
    """Return outputs as float32."""
    return outputs.to_float() if isinstance(outputs, LNSTensor) else outputs.float()


CROSS_ENTROPY = Loss(LossConfig())
"""The default loss of a trial."""
