"""How one trial runs under Ray Tune: in one process, packed with others, or as a gang (by Ray Train: :mod:`study.train_trial`).

*In process* (``workers: 1``): a class Trainable whose step is one epoch. Tune keeps the process for the next trial (``reuse_actors``),
which saves the seconds that importing torch costs; everything that decides a result is made anew from the config, so nothing leaks from
one trial to the next.

*Packed* (``workers: 1``, ``executor: packed``): the same Trainable hands the work to :class:`trainers.host.Host`, one process a GPU
that trains several trials at once.

*Gang* (``workers > 1``): the same Trainable drives :class:`trainers.gang.Gang`, whose processes are kept likewise. The driver
takes no CPU and the placement group has a bundle for every rank, so that a gang gets all its CPUs or waits without holding any. It loads
no torch, and nothing of ours that does, so that the ranks load theirs the sooner.

All end with a report that holds ``test/loss`` and ``test/error``. All continue after their last checkpoint and end with the same bits as
without a break.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import tune

from study.outcomes import DAMAGED, OUT_OF_MEMORY, REFUSED, last_line
from trainers.bundles import Shape
from trainers.gang import Gang, step, write_files
from trainers.out_of_memory import is_out_of_memory
from trainers.records import DETERMINISTIC, HISTORY, Beginning

if TYPE_CHECKING:
    from trainers.leftovers import Leftovers

CHECKPOINTS_KEPT = 2
"""The newest, and the one before it for a newest that is damaged."""


class Executor(Protocol):
    """Trains one trial after another."""

    def begin(self, values: dict[str, Any], checkpoints: list[str]) -> Beginning:
        """Build the trial of ``TrialConfig.to_dict()``, continued from the first whole checkpoint."""

    def step(self) -> dict[str, Any]:
        """One epoch's metrics; ``done`` after the last, with the test's."""

    def save(self, folder: Path) -> None:
        """Write the trial's state."""

    def profile(self) -> dict[str, bytes]:
        """The files of a profile that the last step completed, by name, of all ranks."""

    def close(self) -> None:
        """Give processes back."""


class InProcess:
    """Trains in this very process."""

    def begin(self, values: dict[str, Any], checkpoints: list[str]) -> Beginning:
        """See :class:`Executor`."""
        from trainers.config import TrialConfig
        from trainers.restore import begin

        self._training, beginning = begin(TrialConfig.from_dict(values), checkpoints)
        return beginning

    def step(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return step(self._training)

    def save(self, folder: Path) -> None:
        """See :class:`Executor`."""
        self._training.save(folder)

    def profile(self) -> dict[str, bytes]:
        """See :class:`Executor`."""
        return self._training.profiler.take()

    def close(self) -> None:
        """Nothing to give back."""


class StudyTrial(tune.Trainable):  # type: ignore[misc]
    """One trial after another in one Ray actor; ``step`` trains one epoch.

    The Tune config has two keys: ``id``, and ``plan``, JSON of ``config`` (``TrialConfig.to_dict()``), ``checkpoints`` (folder of the
    trial's own, by epoch), ``profile`` (folder of its profile), ``checkpoint_every`` (epochs), ``resume_from`` (checkpoint folders that
    the ledger names, newest first) and ``packed_in`` (the study whose one-worker trials share processes; None where each has its own).
    JSON, since Tune copies and flattens what is nested, for every trial.

    Checkpoints are written here, in the step, and not by Tune, which would ask for each in a call of its own and copy its files. A
    trial that is started again finds them by itself. One may be newer than the last report that anybody has heard of, so the first result
    after a restart has the metrics of all epochs before it, under ``HISTORY``.

    What is :data:`~trainers.records.DETERMINISTIC`, above all a ``ValueError``, says what cannot work, so a second try would not either: it
    ends the trial with a result that has the message under :data:`REFUSED`, where an exception would make Tune start the trial again.
    Likewise memory that ran out, under :data:`OUT_OF_MEMORY`: Tune would start the trial again as it was.
    """

    _refusal = ""
    _exhausted = ""
    _first: dict[str, Any]
    _executor: Executor | None = None
    _leftovers: Leftovers | None = None
    _broken: Exception | None = None
    _wanted: tuple[Any, ...] = ()

    def setup(self, config: dict[str, Any]) -> None:
        """Build the trial, continued from its newest whole checkpoint."""
        self._id, self._plan = str(config["id"]), json.loads(config["plan"])
        if self._leftovers is None and self._plan["config"]["workers"] == 1:
            from trainers.leftovers import Leftovers

            self._leftovers = Leftovers()
        self._begin([])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial in this process, as clean as before the first.

        Where that cannot be, the first step raises: Tune gives a trial up whose reset raises, and starts one again whose step does.
        """
        try:
            if self._leftovers is not None:
                self._leftovers.clear()
            self.setup(new_config)
        except Exception as error:
            self._broken = error
        return True

    def step(self) -> dict[str, Any]:
        """Train one epoch; after the last, test. A trial restored after its last epoch only tests."""
        if self._broken is not None:
            raise self._broken
        first, self._first = self._first, {}
        if self._exhausted:
            return {"done": True, OUT_OF_MEMORY: self._exhausted}
        try:
            if self._refusal:
                return first | {"done": True, REFUSED: self._refusal}
            metrics = self._executor_().step()
            self._keep_profile()
            return first | metrics | self._keep(metrics)
        except DETERMINISTIC as error:
            self._refuse(error)
            return first | {"done": True, REFUSED: self._refusal}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return first | self._give_up_memory(error)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the trial's whole state, for a scheduler that pauses it."""
        if not self._refusal and not self._exhausted:
            self._executor_().save(Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Continue from a checkpoint that :meth:`save_checkpoint` wrote; from an older one if that is damaged."""
        self._begin([checkpoint])

    def cleanup(self) -> None:
        """Give the ranks' processes back."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _begin(self, checkpoints: list[str]) -> None:
        self._refusal, self._exhausted, self._first = "", "", {}
        own = [str(path) for path in checkpoints_in(Path(self._plan["checkpoints"]))]
        try:
            paths = list(dict.fromkeys([*checkpoints, *own, *self._plan["resume_from"]]))
            beginning = self._ready_executor().begin(self._plan["config"], paths)
        except DETERMINISTIC as error:
            self._refuse(error)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._give_up_memory(error)
            return
        self._first = {DAMAGED: beginning.damaged} if beginning.damaged else {}
        if beginning.history:
            self._first[HISTORY] = beginning.history

    def _keep(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Write a checkpoint if one is due, and drop those before the last two."""
        epoch = int(metrics["epoch"])
        if not metrics["done"] and epoch % int(self._plan["checkpoint_every"]):
            return {}
        folder = Path(self._plan["checkpoints"])
        path = folder / f"{epoch:06d}"
        self._executor_().save(path)
        for old in checkpoints_in(folder)[CHECKPOINTS_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
        return {"checkpoint_path": str(path)}

    def _keep_profile(self) -> None:
        """Write what the epoch recorded."""
        if self._plan["config"].get("profile", {}).get("steps"):
            write_files(Path(self._plan["profile"]), self._executor_().profile())

    def _ready_executor(self) -> Executor:
        """The one there is, if it serves the trial of the plan."""
        shape = Shape.of(self._plan["config"])
        packed_in = self._plan["packed_in"] if shape.workers == 1 else None
        wanted = (*shape, packed_in and self._id)
        if self._executor is None or self._wanted != wanted:
            self.cleanup()
            self._executor, self._wanted = self._make_executor(shape, packed_in), wanted
        return self._executor

    def _make_executor(self, shape: Shape, packed_in: str | None) -> Executor:
        if shape.workers > 1:
            return Gang(shape, ray.util.get_current_placement_group())
        if packed_in is None:
            return InProcess()
        from trainers.config import TrialConfig
        from trainers.host import Lane

        return Lane(TrialConfig.from_dict(self._plan["config"]), packed_in, self._id)

    def _executor_(self) -> Executor:
        assert self._executor is not None
        return self._executor

    def _refuse(self, error: Exception) -> None:
        """Note why the trial cannot work; a gang in which one rank raised is not used again."""
        name = type(error).__name__.removeprefix("RayTaskError(").removesuffix(")")
        said = last_line(str(error)).removeprefix(f"{name}: ")
        self._refusal = said if isinstance(error, ValueError) else f"{name}: {said}"
        if isinstance(self._executor, Gang):
            self.cleanup()

    def _give_up_memory(self, error: Exception) -> dict[str, Any]:
        """Let go of the trial, whose memory the next one may want; the result that says why."""
        self._exhausted = last_line(str(error)) or type(error).__name__
        error.__traceback__ = None  # its frames hold tensors
        self.cleanup()
        return {"done": True, OUT_OF_MEMORY: self._exhausted}


def checkpoints_in(folder: Path) -> list[Path]:
    """A trial's checkpoints by epoch, the newest first."""
    return sorted((path for path in folder.glob("[0-9]*") if path.is_dir()), reverse=True)


def trial_resources(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    """What a trial's processes take: one bundle, or an empty one for the driver and one for every rank."""
    shape = Shape.of(json.loads(config["plan"])["config"])
    return tune.PlacementGroupFactory([{}, *shape.bundles] if shape.workers > 1 else shape.bundles)
