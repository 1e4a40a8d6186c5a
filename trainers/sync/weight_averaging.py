"""Replicas that step by themselves and exchange weights now and then, instead of gradients every
step.

Every replica ``i`` of N updates by the mean gradient of its own share of the batch. With ``x_i``
its weights, every ``period`` = H steps:

- **local SGD** (S. Stich 2019, arXiv:1805.09767): ``x_i = mean(x)``.
- **DiLoCo** (A. Douillard et al. 2023, arXiv:2311.08105), an outer Nesterov step on what the rounds
  changed, ``a`` the weights that all began the round with: ``g = a - mean(x)``, ``v = mu v + g``,
  ``x_i = a - lr (g + mu v)``. Local SGD is DiLoCo with lr = 1 and mu = 0, in the code too.
- **elastic averaging** (S. Zhang et al. 2015, arXiv:1412.6651), replicas and a centre ``c`` pull
  each other: ``d_i = x_i - c``, ``x_i -= alpha d_i``, ``c += alpha sum(d)`` with ``alpha =
  moving_rate / N``. The trial's figures are the centre's.
- **final average**: the replicas never exchange anything; at the end ``x_i = mean(x)``. Figures of
  earlier epochs are those of the mean so far.
- **ensemble**: the same without an end: the trial's figures are those of the mean of the replicas'
  predicted probabilities (B. Lakshminarayanan et al. 2017, arXiv:1612.01474; here every replica has
  seen its own share of the data). Predictions travel while figures are taken, weights never; each
  replica's are in the checkpoint.

What travels is ``x_i - a`` (or ``d_i``) through the trial's wire format: 4 / H bytes a parameter,
rank and step with two replicas and float32. Rounds of the first two also end with the epoch, so
that replicas are equal where a checkpoint is written.

*Low precision.* Means are taken in float32 of the decoded weights and encoded to nearest; nothing
is kept in float32 between rounds but elastic averaging's centre. A Kahan compensation is part of an
LNS weight's value here: ``x = w + compensation`` is what travels, and what the mean has beyond the
nearest weight becomes the new compensation. Optimizer state stays with its replica.
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
"""In a checkpoint's names: weights and optimizer state of one replica."""


class Averaging(Synchroniser):
    """What the ways to exchange weights share: reading and writing them, summing over the ranks,
    rounds, state.

    Args:
        config: the trial; its ``sync`` says when, its ``wire`` how.
        model, optimizer: the replica.
        collectives: of the replicas.
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
        codec = make_codec(config.wire, None)
        self._sharded = (
            ShardedSum(collectives, codec, config.wire.feedback) if codec is not None else None
        )
        self._steps = 0

    def after_step(self, finite: bool) -> bool:
        """A round after every ``period`` steps; there the ranks learn whether one has diverged."""
        self._steps += 1
        if self._steps % self._sync.period:
            return True
        return self._agreed_round(finite)

    def end_epoch(self, finite: bool, last: bool = False) -> bool:
        """A round for the steps since the last one, if any; steps are counted anew."""
        steps, self._steps = self._steps, 0
        return (
            self._agreed_round(finite)
            if steps % self._sync.period
            else self._collectives.all_true(finite)
        )

    def state(self) -> dict[str, Tensor]:
        """The replica's own weights and optimizer state, and residues of the wire format."""
        replica = {
            REPLICA + name: value
            for name, value in model_tensors(self._model, self._optimizer).items()
        }
        return replica | {
            f"residue/{leg}": value
            for leg, value in (self._sharded.residues if self._sharded else {}).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue with what :meth:`state` gave; without it (a checkpoint of other workers) all
        begin with the model as it is."""
        replica = {
            name.removeprefix(REPLICA): value
            for name, value in state.items()
            if name.startswith(REPLICA)
        }
        if replica:
            load_model_tensors(self._model, self._optimizer, replica)
        if self._sharded is not None:
            self._sharded.residues = {
                n.removeprefix("residue/"): v for n, v in state.items() if n.startswith("residue/")
            }

    @abstractmethod
    def _round(self, values: Tensor) -> None:
        """Exchange; ``values`` are the replica's weights, finite on every rank."""

    def _agreed_round(self, finite: bool) -> bool:
        values = self._read()
        if not self._collectives.all_true(finite and bool(values.isfinite().all())):
            return False
        self._round(values)
        return True

    def _sum(self, flat: Tensor) -> Tensor:
        """Over the ranks, through the wire format."""
        return (
            self._collectives.all_reduce_(flat.clone())
            if self._sharded is None
            else self._sharded(flat)
        )

    def _parameters(self) -> list[Tensor]:
        return [p.detach() for p in self._model.parameters()]

    def _compensations(self) -> list[Tensor | None]:
        """Of LNS parameters; a float32 one's is below what float32 sums keep, and stays where it
        is."""
        states = ((p, self._optimizer.state.get(p, {})) for p in self._model.parameters())
        return [
            state.get("compensation") if isinstance(p, LNSTensor) else None for p, state in states
        ]

    @torch.no_grad()
    def _read(self) -> Tensor:
        """The replica's weights end to end, float32, compensations added."""
        flat = flatten(self._parameters())
        for parameter, part, lost in self._with_parts(flat):
            if lost is not None:
                part.add_(flatten([lost]).view(parameter.shape))
        return flat

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        """Make ``flat`` the replica's weights, rounded to their format; what rounding lost goes to
        the compensation."""
        unflatten_(self._parameters(), flat)
        for parameter, part, lost in self._with_parts(flat):
            if lost is not None:
                lost.copy_(part - flatten([parameter]).view(parameter.shape))

    def _with_parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Every parameter, its part of ``flat`` and its compensation."""
        parameters = self._parameters()
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part, lost in zip(parameters, parts, self._compensations(), strict=True):
            yield parameter, part.view(parameter.shape), lost

    @contextmanager
    def _holding(self, flat: Tensor) -> Iterator[None]:
        """The replica's weights are ``flat`` while inside, then what they were."""
        before = [storage_of(p).clone() for p in self._parameters()]
        unflatten_(self._parameters(), flat)
        try:
            yield
        finally:
            for parameter, codes in zip(self._parameters(), before, strict=True):
                storage_of(parameter).copy_(codes)


class OuterStep(Averaging):
    """Local SGD and DiLoCo: an outer step on the mean of what the replicas changed."""

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
        gradient = self._sum(values - self._anchor).div_(-self._collectives.size)
        self._velocity.mul_(self._momentum).add_(gradient)
        self._write(self._anchor - self._lr * (gradient + self._momentum * self._velocity))
        self._anchor = self._read()

    def state(self) -> dict[str, Tensor]:
        """With the outer step's velocity."""
        return super().state() | ({"velocity": self._velocity} if self._momentum else {})

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The weights that the next round begins with are the restored ones."""
        super().load_state(state)
        self._anchor = self._read()
        self._velocity = state.get("velocity", torch.zeros_like(self._anchor))


class Elastic(Averaging):
    """Replicas and a centre that pull each other."""

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

    def end_epoch(self, finite: bool, last: bool = False) -> bool:
        """No round of its own: the replicas remain apart."""
        self._steps = 0
        return self._collectives.all_true(finite)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The figures are the centre's."""
        with self._holding(self._centre):
            yield

    def _round(self, values: Tensor) -> None:
        difference = values - self._centre
        total = self._sum(difference)
        self._write(values - self._alpha * difference)
        self._centre = self._centre + self._alpha * total

    def state(self) -> dict[str, Tensor]:
        """With the centre."""
        return super().state() | {"centre": self._centre}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Without a centre (a checkpoint of other workers) it is the model."""
        super().load_state(state)
        self._centre = state.get("centre", self._read())


class FinalAverage(Averaging):
    """Independent replicas, averaged at the end."""

    def after_step(self, finite: bool) -> bool:
        """Nothing travels."""
        return True

    def end_epoch(self, finite: bool, last: bool = False) -> bool:
        """The ranks learn whether one has diverged; after the last epoch they average."""
        if last:
            return self._agreed_round(finite)
        return self._collectives.all_true(finite)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The figures are those of the mean of the replicas as they are."""
        with self._holding(self._mean(self._read())):
            yield

    def _round(self, values: Tensor) -> None:
        self._write(self._mean(values))

    def _mean(self, values: Tensor) -> Tensor:
        return self._sum(values).div_(self._collectives.size)


class Ensemble(FinalAverage):
    """Independent replicas that predict together."""

    whole = True

    def end_epoch(self, finite: bool, last: bool = False) -> bool:
        """The ranks learn whether one has diverged."""
        return self._collectives.all_true(finite)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Every replica evaluates with its own weights."""
        yield

    def combine(self, logits: Tensor) -> Tensor:
        """The logarithm of the mean of the replicas' probabilities, which as logits stand for
        themselves."""
        values = logits.to_float() if isinstance(logits, LNSTensor) else logits.float()
        return (self._collectives.all_reduce_(values.softmax(1)) / self._collectives.size).log()
