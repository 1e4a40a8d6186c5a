"""Losses: what a trial minimises, from a model's outputs and the data's targets.

An *answer* is one element of the targets ``y``; an example has one, or several (a text one for each
token). With B examples:

- ``cross_entropy``: classes ``[B]``, or ``[B, ...]`` with -100 where no answer is asked for; logits
  ``[B, ..., C]``, or ``[B, C, ...]`` as torch has them. Answers are right or wrong.
- ``margin``: classes as above; outputs from 0 to 1, such as the lengths of capsules. With the
  length ``v_k`` of class k, over all classes, ``max(0, positive - v_k)^2`` of the right one and
  ``weight max(0, v_k - negative)^2`` of the others (0.9, 0.1 and 0.5 where nothing is said; S.
  Sabour et al. 2017, arXiv:1710.09829, equation 4).
- ``binary_cross_entropy``: labels 0 or 1, ``[B, ...]``; as many logits. Answers are right or wrong.
- ``mse``, ``l1``, ``huber``: numbers ``[B, ...]``; as many outputs.
- your own, ``loss(outputs, targets)``: gets float32 outputs, whatever the format, and returns a
  mean over the examples, as torch's losses do, or losses that are averaged. One answer an example.

``cross_entropy`` with ``softmax: lns`` has the gradient ``softmax(logits) - one_hot`` of LNS
operations alone, so its bits are the contract's on every device; in float32 its last bit is that of
the device's ``exp``. One minus a probability near 1 is the sum of the others, as a rounded
probability is no finer than the format.

An output that is no number is a wrong answer, whatever the targets: a class whose logit is NaN or
infinite, a label whose logit is. A loss of your own is NaN where an output is. With the loss, all
other metrics of those examples are NaN (:meth:`trainers.training.trainer.Training.test`).

The mean over all answers is minimised. The gradient is that of their *sum*, and the optimizer
divides (:mod:`trainers.optim.build`), because gradients of a mean underflow in narrow formats. It
divides by the same number in every step, so that answers not asked for make a step smaller.
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
"""Losses of targets that are as many as the outputs."""


def _margin(
    lengths_NC: Tensor,
    classes_N: Tensor,
    positive: float = 0.9,
    negative: float = 0.1,
    weight: float = 0.5,
) -> Tensor:
    """Return the margin loss, summed over the answers that are asked for."""
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
        # 1 - p of the class itself is the sum of the others: p near 1 has been rounded
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
        config: names the loss.
        scale: power of two by which its gradient is larger; the model's parameters must divide by
            it (:class:`lns_ops.LossScale`).

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
        """Return the number of wrong answers, int64; 0 where answers are not right or wrong.

        What is no finite number answers nothing and is wrong.
        """
        if self.config.chooses:
            logits, classes = by_answer(outputs, targets)
            chosen = logits.argmax(1)  # of a NaN, if there is one
            wrong = chosen != classes
            if not isinstance(logits, LNSTensor):  # whose codes are all numbers
                wrong |= ~logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite()
            return (wrong if targets.dim() == 1 else wrong & (classes != IGNORED)).sum()
        if self.config.name == "binary_cross_entropy":
            logits = plain(outputs).reshape(targets.shape)
            return (((logits > 0) != (targets > 0.5)) | ~logits.isfinite()).sum()
        return torch.zeros((), dtype=torch.int64, device=targets.device)

    def answers(self, targets: Tensor) -> Tensor | int:
        """Return the number of answers that are asked for."""
        if self.config.chooses and targets.dim() > 1:
            return (targets != IGNORED).sum()
        return len(targets) * self.answers_each(targets)

    def answers_each(self, targets: Tensor) -> int:
        """Return the number of answers of an example."""
        return 1 if self.config.own else targets[0].numel()

    def fit(self, name: str, data: Dataset) -> Dataset:
        """Return ``data`` with targets of the type that the loss takes.

        Args:
            name: name of the data, for errors.
            data: all splits.

        Raises:
            ValueError: the targets are not of the loss's kind.
        """
        if self.config.own:
            return data
        fit = partial(self._fitting, name)
        return Dataset(*(split.map(fit) for split in data))

    def _fitting(self, name: str, split: Split) -> Split:
        """Return examples with targets in the type that the loss takes."""
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
    """Tell whether classes are one an example in a column ``[B, 1]``, and of no sequence's step."""
    x, y = split
    return y.shape[1:] == (1,) and not (x.dim() > 1 and x.shape[1] == 1)


def by_answer(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits ``[N, C]`` and classes ``[N]``, one a line for each answer.

    Where the logits' classes could be in either place, ``[B, T, T]``, they are in the last.
    """
    if targets.dim() == 1:
        return outputs, targets
    logits = outputs if outputs.shape[:-1] == targets.shape else outputs.movedim(1, -1)
    return logits.flatten(0, -2), targets.flatten()


def plain(outputs: Tensor) -> Tensor:
    """Return outputs as float32."""
    return outputs.to_float() if isinstance(outputs, LNSTensor) else outputs.float()


CROSS_ENTROPY = Loss(LossConfig())
"""The loss of a trial that names none."""
