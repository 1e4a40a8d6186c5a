"""The configuration of how a trial synchronises its replicas, and the keys of each method."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainers.config.validation import at_least, finite, one_of, plain_values, require

USES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "local_sgd": ("period",),
    "diloco": ("period", "outer_lr", "outer_momentum"),
    "elastic": ("period", "moving_rate"),
    "final_average": (),
    "ensemble": (),
    "asynchronous": ("staleness", "shards", "work", "staleness_aware"),
}
"""The methods with their keys, except ``straggler_seconds``, which all methods have."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """The method by which the replicas of a trial are synchronised, and its options.

    See :mod:`trainers.sync.weight_averaging` and :mod:`trainers.sync.async_client`.

    Attributes:
        name: ``synchronous`` (gradients, every step), ``local_sgd`` (weights, every ``period``
            steps), ``diloco`` (the same with an outer Nesterov step), ``elastic`` (replicas pulled
            towards a centre), ``final_average`` (weights, once, at the end), ``ensemble`` (no
            exchange; the mean of the replicas' predictions is evaluated) or ``asynchronous``
            (gradients to a parameter server, weights back, without waiting for all replicas).
        period: number of steps between two exchanges.
        outer_lr: learning rate of diloco's outer step.
        outer_momentum: momentum of diloco's outer step.
        moving_rate: share of the way that the centre of elastic averaging moves towards the
            replicas' mean at an exchange.
        staleness: number of steps that an asynchronous replica may be ahead of the slowest one; 0
            for bulk synchronous steps, None for no bound.
        shards: number of processes of the parameter server; each has an equal part of the weights.
        work: how asynchronous replicas divide an epoch: ``fixed`` (every replica takes its part of
            every batch, so an epoch lasts as long as the slowest replica) or ``shared`` (a replica
            that is ready takes the next part of the epoch; only without a bound on staleness, so
            that fast replicas do not wait for slow ones).
        staleness_aware: whether the parameter server divides the learning rate of a gradient by the
            number of updates between the replica's pull and push, at least 1; for asynchronous
            without a bound or with a bound above 0.
        straggler_seconds: seconds that the last replica sleeps in every step, to study stragglers.

    Example::

        >>> rare = SyncConfig(name="local_sgd", period=8)
    """

    name: str = "synchronous"
    period: int = 1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    moving_rate: float = 0.9
    staleness: int | None = 0
    shards: int = 1
    work: str = "fixed"
    staleness_aware: bool = False
    straggler_seconds: float = 0.0

    def __post_init__(self) -> None:
        one_of("sync.name", self.name, tuple(USES))
        at_least("sync.period", self.period, 1, "1 exchanges after every step")
        finite("sync.outer_lr", self.outer_lr, 0.0, "0.7 is a good start")
        finite("sync.outer_momentum", self.outer_momentum, 0.0, "0 turns it off")
        require(
            f"sync.outer_momentum={self.outer_momentum}",
            self.outer_momentum < 1,
            "must be below 1, or it grows without bound",
            "try 0.9",
        )
        require(
            f"sync.moving_rate={self.moving_rate}",
            0 < self.moving_rate <= 1,
            "must be above 0 and at most 1",
            "use for example 0.9",
        )
        at_least("sync.staleness", self.staleness, 0, "0 waits for all every step, null never")
        at_least("sync.shards", self.shards, 1, "1 keeps all weights in one process")
        one_of("sync.work", self.work, ("fixed", "shared"))
        if self.work == "shared" and self.staleness is not None:
            raise ValueError(
                f"sync.work=shared, sync.staleness={self.staleness}: a bound makes all replicas"
                " take as many steps as the slowest; use sync.staleness=null, or sync.work=fixed"
            )
        finite("sync.straggler_seconds", self.straggler_seconds, 0.0, "0 delays no replica")
        if self.staleness_aware and self.staleness == 0:
            raise ValueError(
                "sync.staleness_aware=true, sync.staleness=0: no gradient is stale; use"
                " sync.staleness=null or a bound above 0, or leave it out"
            )
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse a key that was set but that this method does not use."""
        for entry in fields(self):
            used = entry.name in ("name", "straggler_seconds", *USES[self.name])
            value = getattr(self, entry.name)
            if not used and value != entry.default:
                users = ", ".join(name for name, keys in USES.items() if entry.name in keys)
                raise ValueError(
                    f"sync.{entry.name}={value} with sync.name={self.name}: means nothing to it;"
                    f" leave it out, or use one of {users}"
                )

    @property
    def local(self) -> bool:
        """Whether a replica updates its weights with the mean gradient of its own examples."""
        return self.name not in ("synchronous", "asynchronous")
