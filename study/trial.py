"""How one trial runs under Ray Tune: in one process, or as a gang of Ray Train workers.

*In process* (``workers: 1``): a class Trainable whose step is one epoch. Tune keeps the process for the next trial
(``reuse_actors``), which saves the seconds that importing torch costs; everything that decides a result is made anew from the
config, so nothing leaks from one trial to the next.

*Gang* (``workers > 1``): a function that drives ``trainers.worker.build_trainer(...).fit()``. It takes no CPU itself: a driver that
held one could take the last CPU that its own workers need and wait for ever. Metrics of rank 0 reach Tune through
``TuneReportCallback``. The Train run's name is the trial's id, so a driver that is started again continues the run.

Both end with a report that holds ``test/loss`` and ``test/error``. Both continue after their last checkpoint and end with the same bits as
without a break.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from trainers.config import TrialConfig
from trainers.training import Training

DRIVER_RESOURCES = {"node:__internal_head__": 0.001}
"""A sliver of the head node: places the driver without taking a CPU."""


class InProcessTrial(tune.Trainable):  # type: ignore[misc]
    """One trial in the process of one Ray actor; ``step`` trains one epoch.

    The Tune config has one key, ``plan``: ``id``, ``config`` (``TrialConfig.to_dict()``) and ``resume_from`` (a checkpoint
    folder of an earlier run of the study, or None).
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the trial, continued from ``resume_from`` if there is one."""
        plan = config["plan"]
        self._training = Training(TrialConfig.from_dict(plan["config"]))
        if plan["resume_from"] is not None:
            self._training.restore(Path(plan["resume_from"]))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial in this process."""
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train one epoch; after the last, test. A trial restored after its last epoch only tests."""
        epochs = self._training.config.epochs
        metrics: dict[str, Any] = self._training.train_epoch() if self._training.epoch < epochs else {"epoch": epochs}
        done = self._training.epoch >= epochs
        return {**metrics, **(self._training.test() if done else {}), "done": done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the trial's whole state."""
        self._training.save(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Continue from a checkpoint that :meth:`save_checkpoint` wrote."""
        self._training.restore(Path(checkpoint))


def gang_trial(config: dict[str, Any]) -> None:
    """Drive one data-parallel trial; ``config["plan"]`` as above, with ``storage`` for Ray Train's files."""
    from trainers.worker import build_trainer

    plan = config["plan"]
    trial = TrialConfig.from_dict(plan["config"])
    trainer = build_trainer(trial, storage_path=plan["storage"], name=plan["id"], callbacks=[TuneReportCallback()])
    result = trainer.fit()
    if result.metrics is not None:  # a run that was complete before this driver started reports nothing by itself
        tune.report(result.metrics)


def in_process_resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    """One process with the trial's threads."""
    return tune.PlacementGroupFactory([{"CPU": float(config["plan"]["config"]["threads"])}])
