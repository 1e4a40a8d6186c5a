"""Asynchronous data parallelism: a replica's side of the parameter server.

The server's side is :mod:`trainers.sync.parameter_server`. Rank 0 starts the shards as Ray actors
on its node, which reserve no CPU in Ray and end with rank 0; the others find them by name. After
every backward pass a replica pushes its gradient to all shards and pulls the weights for its next
step. With fixed work every replica takes its share of every batch, so all make the same number of
steps; with shared work a replica that is ready asks the first shard for the next share, so a slow
replica makes fewer. At the end of an epoch the replicas wait for each other, and evaluate the same
weights. Ray must be running in the process.

Bytes: a push and a pull, the whole model each: with float32 8 bytes a parameter, replica and step,
with LNS 4. What the server sends is counted for the replica that receives it.

The server keeps the weights and the optimizer's state; a checkpoint has both, end to end, so that
another number of shards can continue it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor, nn

from lns_ops.tensor import storage_of
from trainers.comm.collectives import Collectives
from trainers.config import TrialConfig
from trainers.sync.base import Synchroniser, Updater
from trainers.sync.parameter_server import Shard, Values, slices

SERVER = "server/"
"""The prefix of the parameter server's state in a checkpoint's names."""
BUCKETS = 4
"""The number of version lags reported one by one, from 0; longer ones are counted together."""


class Asynchronous(Synchroniser):
    """The synchroniser that sends gradients to the parameter server and gets weights back.

    Args:
        config: the trial.
        model: the replica.
        collectives: collectives of the replicas.
        shard: class of the server's shards.

    Raises:
        ValueError: Ray does not run in this process.
    """

    def __init__(
        self,
        config: TrialConfig,
        model: nn.Module,
        collectives: Collectives,
        shard: type[Shard] = Shard,
    ) -> None:
        if not ray.is_initialized():
            raise ValueError(
                "sync.name=asynchronous: the parameter server is made of Ray actors and Ray does"
                " not run here; call ray.init(), or run the trial through a study"
            )
        self._model, self._collectives = model, collectives
        values = self._flat([p.detach() for p in model.parameters()])
        self._slices = slices(len(values), config.sync.shards)
        self._shards = self._start(values, config, shard)
        self._clock, self._all_finite, self._work_is_shared = 0, True, config.sync.work == "shared"

    def shares(self, steps: int, part: int) -> Iterator[tuple[int, int]]:
        """Yield this replica's own shares or, with shared work, shares that are not taken yet."""
        if not self._work_is_shared:
            yield from super().shares(steps, part)
            return
        replicas = self._collectives.size
        while (number := ray.get(self._shards[0].take.remote())) < steps * replicas:
            yield divmod(number, replicas)

    def begin_epoch(self) -> None:
        """Reset the clocks; all replicas pull the same weights."""
        self._collectives.all_true(True)
        if self._collectives.rank == 0:
            ray.get([shard.restart.remote() for shard in self._shards])
        self._collectives.all_true(True)
        self._clock, self._all_finite = 0, True
        self._pull()

    def update(self, optimizer: Updater) -> bool:
        """Push the gradients and pull the weights of the next step.

        Return False where a replica has diverged.
        """
        gradient = self._flat([p.grad for p in self._model.parameters() if p.grad is not None])
        pushed = [
            s.push.remote(self._collectives.rank, gradient[part])
            for s, part in zip(self._shards, self._slices, strict=True)
        ]
        with self._collectives.spans("communication", "push"):
            ray.get(pushed)
        self._collectives.sent += gradient.nbytes
        self._clock += 1
        self._pull()
        return self._all_finite

    def after_step(self, *, finite: bool) -> bool:
        """Notify the server if this replica has diverged, so that other replicas do not wait for
        it.

        Training continues until the end of the epoch, which then ends the trial.
        """
        if not finite and self._all_finite:
            self._all_finite = False
            ray.get([shard.give_up.remote() for shard in self._shards])
        return True

    def end_epoch(self, *, finite: bool, last: bool = False) -> bool:
        """Wait for all replicas and read the weights; return whether all replicas are finite."""
        finite = self._collectives.all_true(finite and self._all_finite)
        if finite:
            self._write(ray.get([shard.state.remote() for shard in self._shards]))
        return finite

    def metrics(self) -> dict[str, float]:
        """Return the distribution of staleness, and the replicas' numbers of steps.

        ``staleness/version_lag`` (updates) and ``staleness/clock_gap`` (steps): mean, ``_max``, and
        the shares of 0, 1, 2 ...; ``staleness/steps_min`` and ``_max``: steps of the replicas with
        the fewest and the most.
        """
        recorded = ray.get([shard.recorded.remote() for shard in self._shards])
        self._collectives.all_true(True)
        lags, gaps = ([pair[i] for pair in recorded] for i in (0, 1))
        clocks = recorded[0][2]
        steps = {
            "staleness/steps_min": float(min(clocks)),
            "staleness/steps_max": float(max(clocks)),
        }
        return describe("version_lag", merged(lags)) | describe("clock_gap", merged(gaps)) | steps

    def state(self) -> dict[str, Tensor]:
        """Return the server's state on rank 0.

        The other ranks return their rank, since all ranks or none must have a state to gather.
        """
        if self._collectives.rank != 0:
            return {"rank": torch.tensor(self._collectives.rank)}
        states = ray.get([shard.state.remote() for shard in self._shards])
        return {
            SERVER + name: torch.from_numpy(_joined([state[name] for state in states]))
            for name in states[0]
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load the state into the server, from rank 0.

        Without the server's state (a checkpoint of another layout) the server takes the model's
        weights.
        """
        server = {
            name.removeprefix(SERVER): value.numpy()
            for name, value in state.items()
            if name.startswith(SERVER)
        }
        if self._collectives.rank == 0:
            server = server or {
                "weight": self._flat([p.detach() for p in self._model.parameters()])
            }
            parts = [
                {name: value[part] if value.ndim else value for name, value in server.items()}
                for part in self._slices
            ]
            ray.get(
                [
                    shard.load_state.remote(part)
                    for shard, part in zip(self._shards, parts, strict=True)
                ]
            )
        self._collectives.all_true(True)

    def _start(self, values: Values, config: TrialConfig, shard: type[Shard]) -> list[Any]:
        """Start the shards on rank 0, and return handles of them on every rank."""
        names = [f"lns-study-shard-{uuid.uuid4().hex}" for _ in self._slices]
        dist.broadcast_object_list(names, 0, self._collectives.group)
        if self._collectives.rank == 0:
            # a node of this study's versions, which others need not have
            here = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            actor = ray.remote(num_cpus=0, scheduling_strategy=here)(shard)
            started = [
                actor.options(name=name).remote(values[part], config.to_dict())
                for name, part in zip(names, self._slices, strict=True)
            ]
            ray.get([each.recorded.remote() for each in started])
        self._collectives.all_true(True)
        return started if self._collectives.rank == 0 else [ray.get_actor(name) for name in names]

    def _pull(self) -> None:
        """Pull the weights of the next step, once the bound on staleness allows it."""
        with self._collectives.spans("communication", "pull"):
            pulled = ray.get(
                [shard.pull.remote(self._collectives.rank, self._clock) for shard in self._shards]
            )
        self._all_finite = self._all_finite and all(part is not None for part in pulled)
        if self._all_finite:
            self._write([{"weight": part} for part in pulled])
            self._collectives.sent += sum(part.nbytes for part in pulled)

    @torch.no_grad()
    def _write(self, states: list[dict[str, Values]]) -> None:
        """Write the shards' slices of the weights into the model."""
        flat = torch.from_numpy(np.concatenate([state["weight"] for state in states]))
        parameters = [storage_of(p.detach()) for p in self._model.parameters()]
        for parameter, part in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.copy_(part.view(parameter.shape))

    def _flat(self, tensors: list[Tensor]) -> Values:
        """Return codes or float32 values end to end."""
        values: Values = torch.cat([storage_of(t).reshape(-1) for t in tensors]).numpy()
        return values


def _joined(parts: list[Values]) -> Values:
    """Return slices end to end; of a scalar, which is the same on all shards, return the first."""
    return np.concatenate(parts) if parts[0].ndim else parts[0]


def merged(counts: list[dict[int, int]]) -> dict[int, int]:
    """Return the sum of the counts of several shards."""
    return {
        key: sum(count.get(key, 0) for count in counts)
        for key in sorted({key for count in counts for key in count})
    }


def describe(name: str, counts: dict[int, int]) -> dict[str, float]:
    """Return the mean, the maximum and the shares of the small values of a histogram."""
    total = sum(counts.values()) or 1
    values = {
        "": sum(key * count for key, count in counts.items()) / total,
        "_max": float(max(counts, default=0)),
    }
    values |= {f"_{key}": counts.get(key, 0) / total for key in range(BUCKETS)}
    values[f"_{BUCKETS}_or_more"] = (
        sum(count for key, count in counts.items() if key >= BUCKETS) / total
    )
    return {f"staleness/{name}{suffix}": value for suffix, value in values.items()}
