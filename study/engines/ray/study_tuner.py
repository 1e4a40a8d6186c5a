"""A study as a ``ray.tune.Tuner``, for people who live in Ray Tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import tune

from study.engines.ray.options import TuneOptions
from study.engines.ray.result_grid import StudyResults
from study.errors import UserError

OURS = ("failure_config", "checkpoint_config", "sync_config", "stop")
"""Fields of a ``RunConfig`` that the study's config decides."""


class StudyTuner(tune.Tuner):  # type: ignore[misc]
    """A study's Tuner: :meth:`fit` runs the unfinished trials and writes the ledger.

    Args:
        run: runs the study with the given options, and returns its handle.
        run_config: callbacks, ``name``, ``storage_path`` and ``verbose`` for Tune, or None.

    Raises:
        UserError: the ``run_config`` sets a field that the study's config decides.
    """

    def __init__(
        self, run: Callable[[TuneOptions], Any], run_config: tune.RunConfig | None = None
    ) -> None:
        plain = tune.RunConfig()
        for name in OURS:
            value = getattr(run_config, name, None)
            if run_config is not None and value != getattr(plain, name):
                raise UserError(
                    f"run_config.{name}={value!r}: a study decides that itself, by its config"
                    " (max_failures, checkpoint_every, search.scheduler, limits); leave it out"
                )
        self._run, self._options = run, TuneOptions(run_config)
        self._results: StudyResults | None = None

    def fit(self) -> tune.ResultGrid:
        """Run the unfinished trials of the study.

        Returns:
            All trials that have ended, in this run or an earlier one.

        Raises:
            UserError: the study cannot start; nothing was changed.
            KeyboardInterrupt: the user interrupted the study; ledger, MLflow runs and report are
                complete.
        """
        ran = self._run(self._options)
        self._results = StudyResults(ran.state, ran.folder)
        return self._results

    def get_results(self) -> tune.ResultGrid:
        """Return the result of :meth:`fit`.

        Raises:
            RuntimeError: :meth:`fit` has not been called.
        """
        if self._results is None:
            raise RuntimeError("nothing has run: call fit() first")
        return self._results
