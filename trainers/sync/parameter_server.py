"""A shard of the parameter server.

All weights are concatenated and cut into equal slices, one per shard. Every shard is a separate
process (a Ray actor). It has its slice of the weights, the slice's optimizer and optimizer state,
the staleness bound, a *version* (number of updates so far) and a *clock* for every replica (number
of steps whose gradients it has received). A replica at clock ``c`` pulls the weights, computes,
pushes its gradient and is then at ``c + 1``.

- **Staleness bound s** (Q. Ho et al. 2013, "stale synchronous parallel"): a pull at clock ``c``
  waits until every replica's clock is at least ``c - s``. Without a bound (None) it never waits.
- **s = 0** is bulk synchronous: the gradients of a clock are added up in the order of ranks, as in
  synchronous training, and make one update.
- **Otherwise** every gradient is an update at once, in order of arrival. It is the sum over the
  replica's share of the batch and the learning rate is divided by the whole batch, so N pushes move
  the weights as far as one synchronous step; momentum decays with every push.
- **Staleness-aware** (``sync.staleness_aware``): the learning rate of an update is divided by
  ``max(1, version lag)`` of its gradient, so that old gradients count less (W. Zhang et al. 2016,
  arXiv:1511.05950).

Recorded: *version lag*, the number of updates between a replica's pull and its push, which its
gradient does not include; *clock gap*, the number of steps by which a replica that begins a step is
ahead of the slowest.

Limits: the order of arrival matters, so with s > 0 a run is not repeatable bit for bit. A
checkpoint is exact, but a resumed run takes another course.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lns_ops import LNSTensor
from lns_ops import functional as lns
from lns_ops.tensor import storage_of
from trainers.config import TrialConfig
from trainers.optim.build import make_optimizer

Values = NDArray[Any]
"""A slice of weights or gradients: int16 codes or float32."""


class Shard:
    """One slice of the weights and its optimizer.

    The methods are asynchronous, so that other replicas are served while a pull waits.

    Args:
        values: the slice.
        config: ``TrialConfig.to_dict()``.
    """

    def __init__(self, values: Values, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        trial = TrialConfig.from_dict(config)
        self._fmt = trial.precision.lns_format if values.dtype == np.int16 else None
        self._replicas, self._bound = trial.layout.replicas(trial.workers), trial.sync.staleness
        holder = nn.Module()
        holder.weight = nn.Parameter(self._tensor(values))
        self._weight: Tensor = holder.weight
        scale = trial.lr_schedule.scale(trial.batch_size)
        self._optimizer = make_optimizer(
            holder, trial.optimizer, trial.precision, trial.update_examples, trial.seed, scale
        )
        self._staleness_aware, self._lr = (
            trial.sync.staleness_aware,
            float(self._optimizer.param_groups[0]["lr"]),
        )
        # the least learning rate; the optimizer would refuse one that underflows
        self._smallest = self._fmt.smallest if self._fmt is not None else 0.0
        self._version = 0
        self._failed = False
        self._changed = asyncio.Condition()
        self._pulled: dict[int, int] = {}
        self._restart()

    async def restart(self) -> None:
        """Reset all clocks and records; called before an epoch."""
        self._restart()

    async def pull(self, replica: int, clock: int) -> Values | None:
        """Return the weights once the bound lets ``replica`` begin step ``clock``.

        Return None where a replica has given up.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._failed or self.may_start(clock))
            self._pulled[replica] = self._version
            self._gaps[clock - min(self._clocks)] += 1
            return None if self._failed else self._values()

    async def push(self, replica: int, gradient: Values) -> None:
        """Take a gradient that ``replica`` computed from the weights that it pulled last."""
        async with self._changed:
            lag = self._version - self._pulled[replica]
            self._lags[lag] += 1
            self._clocks[replica] += 1
            if self._bound == 0:
                self._waiting[replica] = gradient
                if len(self._waiting) == self._replicas:
                    self._update(self._sum())
            else:
                self._update(self._tensor(gradient), lag if self._staleness_aware else 1)
            self._changed.notify_all()

    async def give_up(self) -> None:
        """Stop all replicas and end all waits, because one replica's loss is not finite."""
        async with self._changed:
            self._failed = True
            self._changed.notify_all()

    async def take(self) -> int:
        """Return the next number from 0: the part of the epoch that the caller shall compute."""
        self._taken += 1
        return self._taken - 1

    async def recorded(self) -> tuple[dict[int, int], dict[int, int], list[int]]:
        """Return how often each version lag and each clock gap occurred, and the replicas' clocks.

        All count from the restart.
        """
        return dict(self._lags), dict(self._gaps), list(self._clocks)

    async def state(self) -> dict[str, Values]:
        """Return the slice as ``weight``, and its optimizer state.

        LNS values are ``codes/KEY``, others ``plain/KEY``.
        """
        states = self._optimizer.state.get(self._weight, {})
        named = {
            f"{'codes' if isinstance(value, LNSTensor) else 'plain'}/{key}": value
            for key, value in states.items()
        }
        return {"weight": self._values()} | {
            name: storage_of(value).numpy().copy() for name, value in named.items()
        }

    async def load_state(self, state: dict[str, Values]) -> None:
        """Continue from what :meth:`state` returned, also where shards had other sizes."""
        self._failed = False
        with torch.no_grad():
            self._weight.copy_(self._tensor(state["weight"]))
        self._optimizer.state.clear()
        for name, values in state.items():
            kind, _, key = name.partition("/")
            if key:
                value = self._tensor(values) if kind == "codes" else torch.from_numpy(values.copy())
                self._optimizer.state[self._weight][key] = value

    def may_start(self, clock: int) -> bool:
        """Return whether the bound lets a replica begin step ``clock``."""
        return self._bound is None or clock - min(self._clocks) <= self._bound

    def _restart(self) -> None:
        """Reset clocks, records and waiting gradients."""
        self._clocks = [0] * self._replicas
        self._waiting: dict[int, Values] = {}
        self._taken = 0
        self._lags: Counter[int] = Counter()
        self._gaps: Counter[int] = Counter()

    def _values(self) -> Values:
        """Return a copy of the slice: codes or float32 values."""
        values: Values = storage_of(self._weight.detach()).numpy().copy()
        return values

    def _tensor(self, values: Values) -> Tensor:
        """Return ``values`` as a tensor in the format of the weights."""
        tensor = torch.from_numpy(values.copy())
        return tensor if self._fmt is None else LNSTensor(tensor, self._fmt)

    def _sum(self) -> Tensor:
        """Return the sum of the waiting gradients, in rank order and in their own arithmetic."""
        rows = [torch.from_numpy(self._waiting.pop(rank)) for rank in range(self._replicas)]
        if self._fmt is not None:
            return LNSTensor(lns.sum(torch.stack(rows), [0], self._fmt), self._fmt)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    def _update(self, gradient: Tensor, lag: int = 1) -> None:
        """Update the slice by ``gradient``, its learning rate divided by ``lag``."""
        self._weight.grad = gradient
        group = self._optimizer.param_groups[0]
        group["lr"] = max(self._lr / max(1, lag), self._smallest)
        self._optimizer.step()
        self._version += 1


def slices(values: int, shards: int) -> list[slice]:
    """Return ``shards`` contiguous parts of ``values`` values, with lengths equal to within one."""
    bounds = [values * i // shards for i in range(shards + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]
