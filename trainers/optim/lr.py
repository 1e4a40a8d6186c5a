"""The learning rate of every step, set on the optimizer's parameter groups."""

from __future__ import annotations

import torch

from trainers.config import TrialConfig


class Rate:
    """The learning rate of ``optimizer`` over the steps of a trial, as its schedule says."""

    def __init__(
        self, config: TrialConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
    ) -> None:
        self._schedule, self._epochs, self._steps = (
            config.lr_schedule,
            config.epochs,
            steps_per_epoch,
        )
        self._groups, self._full = (
            optimizer.param_groups,
            [group["lr"] for group in optimizer.param_groups],
        )
        fmt, precision = config.precision.lns_format, config.precision
        codes = (
            fmt is not None
            and precision.scope == "everywhere"
            and precision.update_arithmetic == "lns"
        )
        self._smallest = fmt.smallest if codes and fmt is not None else 0.0

    def set(self, epoch: int, step: int) -> None:
        """Set the learning rate of step ``step`` of epoch ``epoch``, both counted from 0."""
        if not self._schedule.varies:
            return
        factor = self._schedule.factor(epoch * self._steps + step, self._steps, self._epochs)
        for group, full in zip(self._groups, self._full, strict=True):
            rate = max(full * factor, self._smallest)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def put_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep the learning rates on ``device``, where a captured step reads them."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64, device=device)
