"""Training of one trial, epoch by epoch, from its config to its metrics.

The in-process executor and the Ray Train worker use it, and scripts can as well::

    training = Training(TrialConfig(epochs=3))
    while training.epoch < training.config.epochs:
        print(training.train_epoch())
    print(training.test())

The result only depends on the config: weights come from (seed, name), the data order from (seed,
epoch), so a restored run continues bit for bit. Divergence is a valid result: after a loss that is
not finite, training stops computing and reports NaN losses and errors for the remaining epochs.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from lns_ops import NonFiniteError, check_faults, cuda, matmul_accumulation
from trainers.config import TrialConfig
from trainers.config.schedule_changes import optimizer_at
from trainers.data import Examples
from trainers.data.augment import augment
from trainers.optim.lr import Rate
from trainers.telemetry.tally import Moment, Tally, faulty
from trainers.training import persistence
from trainers.training.build import build, make_trial_optimizer
from trainers.training.check import check
from trainers.training.format_analysis import analysis_metrics
from trainers.training.strategies import choose_step, seed_of

__all__ = ["Training", "check"]


class Training:
    """The state of one trial in one process.

    Args:
        config: the trial.
        rank, world_size: this worker's rank and the number of workers; with more than one, the
            default torch.distributed group must exist.

    Attributes:
        epoch: number of finished epochs.
        history: metrics of each finished epoch, as :meth:`train_epoch` returned them. They are part
            of the checkpoint, so that a record of the run can be completed after it was resumed.
        tested: last result of :meth:`test`, also part of the checkpoint; empty before.
        origin: description, by the caller, of who trains the trial and with which code;
            :meth:`save` stores it in checkpoints.
        profiler: profiler with the files of a profile
            (:meth:`trainers.telemetry.profiler.Profiler.take`).

    Raises:
        ValueError: the data cannot be loaded, or the config is invalid.
    """

    def __init__(self, config: TrialConfig, *, rank: int = 0, world_size: int = 1) -> None:
        self._components = components = build(config, rank, world_size)
        self._workers = components.workers
        if components.workers.device.type == "cuda":
            cuda.raise_only_when_asked()  # ranks ask together, see Workers.faultless
        self.config, self.rank, self.world_size, self.device = (
            config,
            rank,
            world_size,
            components.workers.device,
        )
        self.data, self.place, self.profiler = (
            components.data,
            components.place,
            components.profiler,
        )
        self.model, self.optimizer = components.model, components.optimizer
        self.pipeline, self.collectives = components.pipeline, components.collectives
        self.sync = components.synchroniser()
        self._step = choose_step(components)
        self._options = config.optimizer
        self._augmented = augment(config.data, self.data.train)
        self._steps_per_epoch = self.data.train.size // config.batch_size
        self._rate = Rate(config, self.optimizer, self._steps_per_epoch)
        self.epoch = self._step_number = 0
        self.history: list[dict[str, float]] = []
        self.tested: dict[str, float] = {}
        self.origin: dict[str, Any] = {}
        self.diverged = False

    def train_epoch(self) -> dict[str, float]:
        """Train one epoch, then evaluate on the validation split.

        Returns:
            ``epoch`` (number of finished epochs), ``train/loss`` and ``train/error`` (measured
                during the epoch), ``validation/loss`` and ``validation/error`` (losses in nats,
                errors as fractions; no errors if answers are numbers), ``validation/NAME`` of the
                configured metrics, ``samples_per_second`` (training only, all workers). With
                several workers also ``bytes/sent`` (bytes sent per worker while training this
                epoch, mean over the workers) and ``bytes/parameter_step`` (the same per parameter
                and step). Every ``analysis_every`` epochs ``analysis/LAYER/...``. With telemetry
                also :data:`trainers.telemetry.metrics.NAMES`.
        """
        self._change_options()
        components, telemetry = self._components, self._components.telemetry
        # The setting is process-wide, and the process also runs other trials.
        with matmul_accumulation(self.config.precision.sums_of_codes):
            telemetry.begin()
            self._step_number = 0
            start, before = time.perf_counter(), components.sent
            try:
                tally = self._train()
            finally:
                self.profiler.stop()
            self._step_number = 0
            seconds, sent = time.perf_counter() - start, components.sent - before
            costs = telemetry.metrics(seconds)
            self.epoch += 1
            total = self._summed_over_workers(tally)
            metrics = {
                "epoch": float(self.epoch),
                **total.metrics("train", self._components.loss.config.counts_errors),
                **self._evaluate(self.data.validation, "validation"),
            }
        metrics |= (
            self._traffic(sent, total.examples // self.config.batch_size)
            | self.sync.metrics()
            | costs
        )
        metrics["samples_per_second"] = total.examples / seconds
        metrics |= self._analysis_metrics()
        self.history.append(dict(metrics))
        return metrics

    def test(self) -> dict[str, float]:
        """Return ``test/loss``, ``test/error`` and ``test/NAME`` of the current weights, as
        :meth:`train_epoch` does for validation."""
        with matmul_accumulation(self.config.precision.sums_of_codes):
            self.tested = self._evaluate(self.data.test, "test")
        return dict(self.tested)

    def moment(self) -> Moment | None:
        """Return where this is within an epoch, for a display; None before the first step.

        Another thread may call it at any time. It reads what the training has on the CPU anyway, so
        training does not wait for it.
        """
        step, tally = self._step_number, self._step.tally
        if not step:
            return None
        loss = tally.loss / tally.answers if tally.answers else None
        return {"epoch": self.epoch + 1, "step": step, "steps": self._steps_per_epoch, "loss": loss}

    def save(self, folder: Path, *, parents: bool = True) -> None:
        """Write the state into ``folder`` atomically: it is complete or absent, even after a kill.

        A collective: rank 0 gathers the state of all workers and writes it.

        Args:
            folder: created if missing.
            parents: whether to create the folders above it too; otherwise they must exist.
        """
        if parents:
            folder.parent.mkdir(parents=True, exist_ok=True)
        progress = persistence.Progress(self.epoch, self.diverged, self.history, self.tested)
        persistence.save(self._components, self.sync, progress, self.origin, folder)

    def restore(self, folder: Path) -> None:
        """Resume from the state in ``folder``, with the same results as without an interruption.

        A checkpoint of another layout is accepted; the state of its single ranks (residues of error
        feedback, replicas' own weights and optimizer state) is then ignored.

        Raises:
            ValueError: the checkpoint is missing, damaged, or of another model or precision.
        """
        self._step.forget()
        progress = persistence.restore(self._components, self.sync, folder)
        self.epoch, self.diverged = progress.epoch, progress.diverged
        self.history, self.tested = progress.history, progress.tested

    def _change_options(self) -> None:
        """Set the optimizer options that ``changes`` has after this epoch.

        The optimizer's state is kept; a captured graph is discarded.
        """
        wanted = optimizer_at(self.config.optimizer, self.config.changes, self.epoch)
        if wanted == self._options:
            return
        self._options = wanted
        self._step.forget()
        changed = make_trial_optimizer(
            self.config, wanted, self._components.kept, self._components.answers, self.place.pp_rank
        )
        for group, new in zip(self.optimizer.param_groups, changed.param_groups, strict=True):
            group.update((name, value) for name, value in new.items() if name != "params")
        self._rate = Rate(self.config, self.optimizer, self._steps_per_epoch)

    def _train(self) -> Tally:
        """Train the epoch; do nothing if training has diverged before."""
        if self.diverged:
            return Tally()
        examples: Examples = self.data.train
        if self._augmented is not None:
            examples = self._augmented.draw(seed_of(f"images/{self.config.seed}/{self.epoch}"))
        tally, goes_on = self._step.train_epoch(examples, self.epoch, self.sync, self._before_step)
        self.diverged = not goes_on
        return tally

    def _before_step(self, step: int) -> None:
        """Notify the profiler of the next ``step``, and set its learning rate."""
        self._step_number = step + 1
        self.profiler.step(self.epoch * self._steps_per_epoch + step)
        self._rate.set(self.epoch, step)

    def _analysis_metrics(self) -> dict[str, float]:
        """Return the metrics of the format's analysis; empty in epochs without one."""
        every = self.config.analysis_every
        if not every or self.epoch % every or self.diverged:
            return {}
        with matmul_accumulation(self.config.precision.sums_of_codes), self.sync.evaluating():
            first = self.data.train.head(self.config.batch_size)
            return analysis_metrics(self.model, self.config, first, self._components.loss)

    def _traffic(self, sent: int, steps: int) -> dict[str, float]:
        """Return the bytes that the workers sent, as a mean over them."""
        if self.world_size == 1:
            return {}
        mean = self._workers.summed([float(sent)])[0] / self.world_size
        return {
            "bytes/sent": mean,
            "bytes/parameter_step": mean / (self._components.parameters * steps)
            if steps
            else math.nan,
        }

    def _evaluate(self, split: Examples, name: str) -> dict[str, float]:
        """Return ``name/loss``, ``name/error`` and other metrics on ``split``; a collective.

        The replicas share the examples where they can.
        """
        mine = slice(None) if self.sync.whole else slice(self.place.dp_rank, None, self.place.dp)
        examples = split.part(mine)
        like = math.ceil(split.size / self.place.dp) if self.sync.together else None
        loss, metrics = self._components.loss, self._components.metrics
        metrics.reset(alone=self.sync.whole)
        with self.sync.evaluating():
            try:
                tally = self._step.evaluate(examples, self.sync, like)
                check_faults(self.device)
            except NonFiniteError:
                tally = faulty(examples.size, self._components.answers)
        total = self._summed_over_workers(tally)
        found = total.metrics(name, loss.config.counts_errors)
        if self.diverged:  # the weights are from before the skipped update
            found[f"{name}/loss"] = math.nan
        finite = math.isfinite(found[f"{name}/loss"])
        return found | (metrics.compute(name) if finite else metrics.missing(name))

    def _summed_over_workers(self, tally: Tally) -> Tally:
        """Return the sum of ``tally`` over the workers.

        Of workers that computed the same examples together (tensor parallelism) only the first
        counts.
        """
        if self.place.tp_rank:
            tally = Tally()
        loss, wrong, examples, answers = self._workers.summed(
            [tally.loss, *map(float, (tally.wrong, tally.examples, tally.answers))]
        )
        return Tally(loss, int(wrong), int(examples), int(answers))
