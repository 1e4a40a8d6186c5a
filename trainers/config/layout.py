"""The layout of a trial: how its workers share the model and the batches, and which rank does what.

``workers`` processes form a grid of ``pp`` pipeline stages by ``dp`` replicas, ``dp * pp =
workers``. Rank ``r`` holds stage ``r // dp`` of replica ``r % dp``. So neighbouring ranks are
replicas of the same stage, which exchange the most. With tensor parallelism, ``dp * tp = workers``,
and rank ``r`` holds part ``r % tp`` of replica ``r // tp``, because the parts of a replica exchange
more than the replicas do. Every replica takes ``batch_size / dp`` examples of a batch, divides them
into ``micro_batches`` equal parts and adds the parts' gradients in order. At ``pp=1`` this is
gradient accumulation; with several stages it lets them work at the same time.

Uneven micro-batches are refused. The summed loss would allow them, but the stages agree on the
shape of their messages only once, at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainers.config.validation import at_least, one_of, plain_values

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")
DEFERRING = ("zero_bubble", "zbv", "dualpipev")
"""The schedules that compute the gradients of weights later than the gradients of inputs."""
V_SHAPED = ("zbv", "dualpipev")
"""The schedules under which a worker holds the ``i``-th stage and the ``i``-th from the end."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of a trial's parallelism.

    Attributes:
        dp: replicas of the model; None for ``workers / (pp tp)``.
        pp: number of pipeline stages per replica, one worker each.
        schedule: order of a stage's work: ``1f1b`` (one forward, one backward in turn; holds the
            activations of at most ``pp`` micro-batches), ``gpipe`` (all forwards, then all
            backwards), ``interleaved`` (1f1b, every worker with ``virtual_stages`` stages), or a
            schedule that fills waiting time with gradients of weights
            (:mod:`trainers.parallel.pipeline_zero_bubble`): ``zero_bubble`` (1f1b or interleaved),
            ``zbv`` and ``dualpipev`` (two stages per worker; the first and the last stage are on
            the same worker). All schedules give the same gradients.
        micro_batches: number of equal parts into which a replica divides its share of a batch.
        virtual_stages: number of stages per worker; 1 with 1f1b and gpipe, 2 with zbv and
            dualpipev.
        fsdp: whether parameters, gradients and optimizer state are sharded over the replicas
            (:mod:`trainers.parallel.fsdp`); for float32 trials only.
        tp: number of workers over which each linear layer of a replica is split
            (:mod:`trainers.parallel.tensor_parallel`); for float32 trials only.
        pairwise: whether the gradients of all ``dp * micro_batches`` parts of a batch are added in
            pairs, as a balanced tree (:mod:`trainers.sync.pairwise`), instead of one after the
            other. The bits of the sum then only depend on the number of parts, not on ``dp`` and
            ``pp``.

    Example::

        >>> pipeline = Layout(pp=2, micro_batches=4, schedule="1f1b")
    """

    dp: int | None = None
    pp: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1
    fsdp: bool = False
    tp: int = 1
    pairwise: bool = False

    def __post_init__(self) -> None:
        at_least("layout.dp", self.dp, 1, "leave it out for workers / (pp tp)")
        for name in ("pp", "micro_batches", "virtual_stages", "tp"):
            at_least(
                f"layout.{name}",
                getattr(self, name),
                1,
                f"use for example layout.{name}={getattr(Layout, name)}",
            )
        one_of("layout.schedule", self.schedule, SCHEDULES)
        if self.pp > 1:
            self._check_schedule()
        if self.schedule in V_SHAPED and self.virtual_stages != 2:
            raise ValueError(
                f"layout.virtual_stages={self.virtual_stages} with layout.schedule={self.schedule}:"
                " every worker holds two stages; use layout.virtual_stages=2"
            )
        if (self.schedule in ("1f1b", "gpipe") and self.virtual_stages > 1) or (
            self.schedule == "interleaved" and self.virtual_stages == 1
        ):
            raise ValueError(
                f"layout.virtual_stages={self.virtual_stages} with layout.schedule={self.schedule}:"
                " interleaved needs two or more stages a worker, 1f1b and gpipe one; use"
                " layout.schedule=interleaved layout.virtual_stages=2, or 1f1b and 1"
            )
        if self.pairwise and self.schedule in DEFERRING:
            raise ValueError(
                f"layout.pairwise=true with layout.schedule={self.schedule}: it adds gradients of"
                " weights later, outside the sum in pairs; use layout.schedule=1f1b, gpipe or"
                " interleaved"
            )
        if self.pairwise and (self.fsdp or self.tp > 1):
            raise ValueError(
                f"layout.pairwise=true with layout.fsdp={self.fsdp}, layout.tp={self.tp}: pairs are"
                " of whole gradients; use layout.dp and layout.pp alone"
            )
        if self.schedule not in ("1f1b", "gpipe") and self.pp == 1:
            raise ValueError(
                f"layout.schedule={self.schedule} with layout.pp=1: there are no stages to"
                " schedule; use layout.pp=2"
            )

    def _check_schedule(self) -> None:
        """Refuse a number of micro-batches that the pipeline schedule cannot use."""
        if self.schedule == "1f1b" and self.micro_batches < self.pp:
            raise ValueError(
                f"layout.micro_batches={self.micro_batches}, layout.pp={self.pp}: 1f1b needs at"
                " least as many micro-batches as stages, or some never work; use"
                f" layout.micro_batches={self.pp}"
            )
        if self.schedule in ("interleaved", "zero_bubble") and self.micro_batches % self.pp:
            raise ValueError(
                f"layout.micro_batches={self.micro_batches}, layout.pp={self.pp}: {self.schedule}"
                f" takes micro-batches in rounds of pp; use a multiple of {self.pp}"
            )
        if self.schedule == "dualpipev" and self.micro_batches < self.stages:
            raise ValueError(
                f"layout.micro_batches={self.micro_batches}, layout.pp={self.pp}: dualpipev needs"
                f" at least as many micro-batches as stages; use layout.micro_batches={self.stages}"
            )

    @property
    def fixes_replicas(self) -> bool:
        """Whether the number of replicas may not change during a trial."""
        return self.pp > 1 or self.dp is not None or self.pairwise

    @property
    def stages(self) -> int:
        """The number of stages of a replica's model, over all its workers."""
        return self.pp * self.virtual_stages

    def owner(self, stage: int) -> int:
        """Return the pp_rank of the worker that holds ``stage``.

        Stages are assigned round-robin; with the V-shaped schedules every second round goes
        backwards.
        """
        lap, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.schedule in V_SHAPED and lap % 2 else place

    def replicas(self, workers: int) -> int:
        """Return ``dp``, or the number of replicas of ``workers`` workers if ``dp`` is None."""
        return self.dp or workers // (self.pp * self.tp)

    def check(self, *, workers: int, batch_size: int, layers: int) -> None:
        """Refuse a layout that does not divide the workers, the batch or the layers evenly.

        Args:
            workers: number of processes of the trial.
            batch_size: number of examples per step, over all workers together.
            layers: number of layers of the model's chain; a stage holds at least one.

        Raises:
            ValueError: an equation of the layout does not hold; the message shows it.
        """
        dp = self.replicas(workers)
        if dp * self.pp * self.tp != workers:
            cuts = f"pp {self.pp}" + (f" * tp {self.tp}" if self.tp > 1 else "")
            raise ValueError(
                f"dp {dp} * {cuts} != workers {workers}: every worker is one part of one replica;"
                f" use workers={max(dp, 1) * self.pp * self.tp}, or other degrees"
            )
        if batch_size % dp:
            raise ValueError(
                f"batch_size={batch_size}, workers={workers}: {batch_size} / {dp} is not a whole"
                f" number of examples per replica; use a multiple of {dp}"
            )
        if batch_size // dp % self.micro_batches:
            raise ValueError(
                f"batch_size={batch_size}, layout.micro_batches={self.micro_batches}: batch_size"
                f" {batch_size} / dp {dp} / micro_batches {self.micro_batches} is not a whole"
                " number of examples; use a batch_size that is a multiple of"
                f" {dp * self.micro_batches}"
            )
        parts = dp * self.micro_batches
        if self.pairwise and (dp & (dp - 1) or self.micro_batches & (self.micro_batches - 1)):
            raise ValueError(
                f"layout.pairwise=true with dp {dp} * micro_batches {self.micro_batches} = {parts}"
                " parts of a batch: pairs need powers of two; use for example workers=2"
                " layout.micro_batches=4"
            )
        if self.stages > layers:
            raise ValueError(
                f"layout.pp={self.pp}, layout.virtual_stages={self.virtual_stages}: {self.stages}"
                f" stages, but the model has {layers} layers and a stage holds one at least; use"
                " fewer stages or more layers (model.hidden, or layers or depth in model.args)"
            )
