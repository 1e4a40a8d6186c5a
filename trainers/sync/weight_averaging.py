"""Replicas that update independently and exchange weights every few steps.

(Synchronous replicas exchange gradients every step instead.) Every replica ``i`` of N updates by
the mean gradient of its own share of the batch. With ``x_i`` its weights, every ``period`` = H
steps:

- **local SGD** (S. Stich 2019, arXiv:1805.09767): ``x_i = mean(x)``.
- **DiLoCo** (A. Douillard et al. 2023, arXiv:2311.08105), an outer Nesterov step on what a round
  changed, with ``a`` the weights that all replicas began the round with: ``g = a - mean(x)``, ``v =
  mu v + g``, ``x_i = a - lr (g + mu v)``. Local SGD is DiLoCo with lr = 1 and mu = 0, in the code
  too.
- **elastic averaging** (S. Zhang et al. 2015, arXiv:1412.6651), replicas and a centre ``c`` pull
  each other: ``d_i = x_i - c``, ``x_i -= alpha d_i``, ``c += alpha sum(d)`` with ``alpha =
  moving_rate / N``. The trial's metrics are the centre's.
- **final average**: the replicas exchange nothing until the end, when ``x_i = mean(x)``. In earlier
  epochs, metrics are measured with the mean weights of the replicas at that time.
- **ensemble**: the replicas are never averaged. Metrics are measured with the mean of the replicas'
  predicted probabilities (B. Lakshminarayanan et al. 2017, arXiv:1612.01474; here every replica has
  seen its own share of the data). Only predictions are exchanged, during evaluation; the checkpoint
  has each replica's weights.

The replicas exchange ``x_i - a`` (or ``d_i``) in the trial's wire format: 4 / H bytes per
parameter, rank and step with two replicas and float32. With the first two methods the end of an
epoch also ends a round, so replicas are equal when a checkpoint is written.

*Low precision.* Means are computed in float32 from the decoded weights and rounded to nearest; only
the centre of elastic averaging stays in float32 between rounds. Kahan compensations of LNS weights
are included: the replicas exchange ``x = w + compensation``, and the difference between the mean
and the nearest weight becomes the new compensation. Optimizer state is not exchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lns_ops import LNSTensor
from lns_ops.tensor import storage_of
from trainers.checkpoint.state import load_model_tensors, model_tensors
from trainers.comm.codecs import make_codec
from trainers.comm.collectives import Collectives
from trainers.config import TrialConfig
from trainers.sync.all_reduce import ShardedSum, flatten, unflatten_
from trainers.sync.base import Synchroniser

REPLICA = "replica/"
"""Prefix of the names of one replica's weights and optimizer state in a checkpoint."""


class Averaging(Synchroniser):
    """The base of the methods that exchange weights.

    It reads and writes the weights, sums over the ranks, runs rounds and keeps state.

    Args:
        config: the trial; ``sync`` determines when weights are exchanged, ``wire`` how.
        model, optimizer: the replica.
        collectives: collectives of the replicas.
    """

    def __init__(
        self,
        config: TrialConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
    ) -> None:
        self._sync, self._model, self._optimizer, self._collectives = (
            config.sync,
            model,
            optimizer,
            collectives,
        )
        self._codec = make_codec(config.wire, None)
        self._sharded_sum = ShardedSum(collectives, feedback=config.wire.feedback)
        self._steps = 0

    def after_step(self, *, finite: bool) -> bool:
        """Run a round after every ``period`` steps; return whether training continues.

        In a round the ranks learn whether one of them has diverged.
        """
        self._steps += 1
        if self._steps % self._sync.period:
            return True
        return self._round_if_all_finite(finite)

    def end_epoch(self, *, finite: bool, last: bool = False) -> bool:
        """Run a round if there were steps since the last one, and reset the count of steps."""
        steps, self._steps = self._steps, 0
        return (
            self._round_if_all_finite(finite)
            if steps % self._sync.period
            else self._collectives.all_true(finite)
        )

    def state(self) -> dict[str, Tensor]:
        """Return the replica's own weights, its optimizer state, and the wire format's residues."""
        replica = {
            REPLICA + name: value
            for name, value in model_tensors(self._model, self._optimizer).items()
        }
        return replica | {
            f"residue/{leg}": value for leg, value in self._sharded_sum.residues.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the tensors that :meth:`state` returned.

        Without them (a checkpoint of other workers) all replicas begin with the model as it is.
        """
        replica = {
            name.removeprefix(REPLICA): value
            for name, value in state.items()
            if name.startswith(REPLICA)
        }
        if replica:
            load_model_tensors(self._model, self._optimizer, replica)
        self._sharded_sum.residues = {
            n.removeprefix("residue/"): v for n, v in state.items() if n.startswith("residue/")
        }

    @abstractmethod
    def _round(self, values: Tensor) -> None:
        """Exchange weights; ``values`` are the replica's, finite on every rank."""

    def _round_if_all_finite(self, finite: bool) -> bool:
        """Run a round if every rank's loss and weights are finite; return whether it ran."""
        values = self._read()
        if not self._collectives.all_true(finite and bool(values.isfinite().all())):
            return False
        self._round(values)
        return True

    def _sum(self, flat: Tensor) -> Tensor:
        """Return the sum of ``flat`` over the ranks, through the wire format."""
        return (
            self._collectives.all_reduce_(flat.clone())
            if self._codec is None
            else self._sharded_sum(flat, self._codec)
        )

    def _parameters(self) -> list[Tensor]:
        """Return the replica's parameters, detached."""
        return [p.detach() for p in self._model.parameters()]

    def _compensations(self) -> list[Tensor | None]:
        """Return the Kahan compensation of each parameter, or None.

        Only LNS parameters have one here. The compensation of a float32 parameter is below the
        resolution of a float32 sum, and is not exchanged.
        """
        states = ((p, self._optimizer.state.get(p, {})) for p in self._model.parameters())
        return [
            state.get("compensation") if isinstance(p, LNSTensor) else None for p, state in states
        ]

    @torch.no_grad()
    def _read(self) -> Tensor:
        """Return the replica's concatenated weights in float32, with compensations added."""
        flat = flatten(self._parameters())
        for parameter, part, compensation in self._split_by_parameter(flat):
            if compensation is not None:
                part.add_(flatten([compensation]).view(parameter.shape))
        return flat

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        """Make ``flat`` the replica's weights, rounded to their format.

        The rounding error becomes the compensation.
        """
        unflatten_(self._parameters(), flat)
        for parameter, part, compensation in self._split_by_parameter(flat):
            if compensation is not None:
                compensation.copy_(part - flatten([parameter]).view(parameter.shape))

    def _split_by_parameter(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield every parameter with its part of ``flat`` and its compensation."""
        parameters = self._parameters()
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part, compensation in zip(
            parameters, parts, self._compensations(), strict=True
        ):
            yield parameter, part.view(parameter.shape), compensation

    @contextmanager
    def _with_weights(self, flat: Tensor) -> Iterator[None]:
        """Set the replica's weights to ``flat`` within the context, then restore its own."""
        before = [storage_of(p).clone() for p in self._parameters()]
        unflatten_(self._parameters(), flat)
        try:
            yield
        finally:
            for parameter, codes in zip(self._parameters(), before, strict=True):
                storage_of(parameter).copy_(codes)


class OuterStep(Averaging):
    """Local SGD and DiLoCo: an outer step by the mean change of the replicas."""

    def __init__(
        self,
        config: TrialConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
    ) -> None:
        super().__init__(config, model, optimizer, collectives)
        diloco = config.sync.name == "diloco"
        self._lr, self._momentum = (
            (config.sync.outer_lr, config.sync.outer_momentum) if diloco else (1.0, 0.0)
        )
        self._anchor = self._read()
        self._velocity = torch.zeros_like(self._anchor)

    def _round(self, values: Tensor) -> None:
        """Update the common weights by the mean change, and give them to the replica."""
        gradient = self._sum(values - self._anchor).div_(-self._collectives.size)
        self._velocity.mul_(self._momentum).add_(gradient)
        self._write(self._anchor - self._lr * (gradient + self._momentum * self._velocity))
        self._anchor = self._read()

    def state(self) -> dict[str, Tensor]:
        """Return the state of the base and, with momentum, the outer step's velocity."""
        return super().state() | ({"velocity": self._velocity} if self._momentum else {})

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state``; the next round begins with the restored weights."""
        super().load_state(state)
        self._anchor = self._read()
        self._velocity = state.get("velocity", torch.zeros_like(self._anchor))


class Elastic(Averaging):
    """Elastic averaging: replicas and a centre that pull each other."""

    def __init__(
        self,
        config: TrialConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
    ) -> None:
        super().__init__(config, model, optimizer, collectives)
        self._alpha = config.sync.moving_rate / collectives.size
        self._centre = self._read()

    def end_epoch(self, *, finite: bool, last: bool = False) -> bool:
        """Return whether all ranks are finite; no round is run, and the replicas remain
        different."""
        self._steps = 0
        return self._collectives.all_true(finite)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the centre's weights within the context."""
        with self._with_weights(self._centre):
            yield

    def _round(self, values: Tensor) -> None:
        """Move the replica towards the centre, and the centre towards the replicas."""
        difference = values - self._centre
        total = self._sum(difference)
        self._write(values - self._alpha * difference)
        self._centre = self._centre + self._alpha * total

    def state(self) -> dict[str, Tensor]:
        """Return the state of the base and the centre."""
        return super().state() | {"centre": self._centre}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state``.

        Without a centre in it (a checkpoint of other workers) the centre is the model.
        """
        super().load_state(state)
        self._centre = state.get("centre", self._read())


class FinalAverage(Averaging):
    """Independent replicas, averaged at the end."""

    def after_step(self, *, finite: bool) -> bool:
        """Continue in any case, without communication."""
        return True

    def end_epoch(self, *, finite: bool, last: bool = False) -> bool:
        """Return whether all ranks are finite; after the last epoch, average the replicas."""
        if last:
            return self._round_if_all_finite(finite)
        return self._collectives.all_true(finite)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the mean of the replicas' present weights within the context."""
        with self._with_weights(self._mean(self._read())):
            yield

    def _round(self, values: Tensor) -> None:
        """Give the replica the mean of all replicas' weights."""
        self._write(self._mean(values))

    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over the replicas."""
        return self._sum(values).div_(self._collectives.size)


class Ensemble(FinalAverage):
    """Independent replicas that predict together."""

    whole = True

    def end_epoch(self, *, finite: bool, last: bool = False) -> bool:
        """Return whether all ranks are finite."""
        return self._collectives.all_true(finite)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let every replica evaluate with its own weights."""
        yield

    def combine(self, logits: Tensor) -> Tensor:
        """Return the logarithm of the mean of the replicas' probabilities.

        As logits, these give the mean probabilities again.
        """
        values = logits.to_float() if isinstance(logits, LNSTensor) else logits.float()
        return (self._collectives.all_reduce_(values.softmax(1)) / self._collectives.size).log()
