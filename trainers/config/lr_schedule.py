"""The learning rate over a trial: linear scaling with the batch size, gradual warm-up, and decay.

With ``t`` the step, ``w`` the number of warm-up steps and ``T`` the number of steps of the trial::

    lr_t = lr * scale * (t + 1) / w                                   for t < w
    lr_t = lr * scale * (end + (1 - end) * f((t - w) / (T - w)))      after the warm-up

with ``f(u) = 1`` (constant), ``(1 - u)^power`` (polynomial; power 1 is linear) or ``(1 + cos(pi u))
/ 2`` (cosine), and ``scale = batch_size / reference_batch`` if a reference is given: with a batch k
times as large, the rate is k times as large.

The rate only depends on the step, so an interrupted trial continues with the same rate. In an LNS
update the rate is a code of the format: it changes in steps of an ulp and cannot go below the
format's smallest magnitude.

Sources: P. Goyal et al. 2017 (arXiv:1706.02677) for scaling and warm-up; I. Loshchilov, F. Hutter
2017 (arXiv:1608.03983) for cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainers.config.validation import at_least, finite, one_of, plain_values, require

DECAYS = ("constant", "polynomial", "cosine")


@plain_values
@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """How the learning rate changes during a trial; its full value is ``optimizer.lr``.

    Attributes:
        decay: ``constant``, ``polynomial`` or ``cosine``.
        warmup_epochs: epochs, possibly fractional, in which the rate rises to its full value.
        power: exponent of polynomial decay; 1 is linear.
        end: share of the full rate at which the decay ends.
        reference_batch: batch size for which ``optimizer.lr`` was chosen; None for the trial's.

    Example::

        >>> nanogpt = LRSchedule(decay="cosine", warmup_epochs=0.5, end=0.1)
    """

    decay: str = "constant"
    warmup_epochs: float = 0.0
    power: float = 1.0
    end: float = 0.0
    reference_batch: int | None = None

    def __post_init__(self) -> None:
        one_of("lr_schedule.decay", self.decay, DECAYS)
        finite("lr_schedule.warmup_epochs", self.warmup_epochs, 0.0, "0 begins with the full rate")
        finite("lr_schedule.power", self.power, 0.0, "1 is linear, 2 a parabola")
        finite("lr_schedule.end", self.end, 0.0, "0 decays to nothing")
        at_least(
            "lr_schedule.reference_batch",
            self.reference_batch,
            1,
            "leave it out where optimizer.lr is for this batch size",
        )
        require(
            f"lr_schedule.end={self.end}",
            self.end <= 1,
            "must be at most 1, it is a share of the full rate",
            "use for example 0.01",
        )
        for name, decays in (("power", ("polynomial",)), ("end", ("polynomial", "cosine"))):
            value = getattr(self, name)
            if value != getattr(LRSchedule, name) and self.decay not in decays:
                raise ValueError(
                    f"lr_schedule.{name}={value} with lr_schedule.decay={self.decay}: means nothing"
                    f" to it; leave it out, or use lr_schedule.decay={decays[0]}"
                )

    @property
    def varies(self) -> bool:
        """Whether the rate depends on the step."""
        return self.decay != "constant" or self.warmup_epochs > 0

    def scale(self, batch_size: int) -> float:
        """Return the factor on ``optimizer.lr`` for a batch of ``batch_size`` examples."""
        return batch_size / self.reference_batch if self.reference_batch else 1.0

    def factor(self, step: int, steps_per_epoch: int, epochs: int) -> float:
        """Return the share of the full rate at ``step`` (0 for the first step of the trial)."""
        warmup, total = round(self.warmup_epochs * steps_per_epoch), epochs * steps_per_epoch
        if step < warmup:
            return (step + 1) / warmup
        left = (step - warmup) / max(1, total - warmup)
        shape = {
            "constant": 1.0,
            "polynomial": max(0.0, 1 - left) ** self.power,
            "cosine": (1 + math.cos(math.pi * min(1.0, left))) / 2,
        }
        return self.end + (1 - self.end) * shape[self.decay] if self.decay != "constant" else 1.0
