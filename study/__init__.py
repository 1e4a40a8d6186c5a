"""Studies: a config becomes trials, worker processes train them, a ledger records every event, and
MLflow and a report show the results.

The package imports ``trainers``, and is the only one that uses Ray Tune, MLflow and OmegaConf. Its
steps, one folder or module each::

    compose -> config -> plan -> preflight -> runner (agenda, scheduler, engine)
            -> ledger -> tracking (MLflow), report, progress

In Python and in notebooks, :func:`run`, :func:`create` and :func:`load` return a :class:`Study`,
and the dataclasses make up a config. All names are imported on first use, so ``import study`` is
fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from study.api import Study, create, load, run, tuner
    from study.config import (
        AmendmentConfig,
        ClaimConfig,
        LimitsConfig,
        RowConfig,
        SearchConfig,
        StudyConfig,
    )
    from study.engines.ask_tell import Suggestion
    from study.engines.ray.scripts import LedgerCallback, StudySearcher, tune_trainable
    from trainers.config import (
        DataConfig,
        Layout,
        LossConfig,
        LRSchedule,
        MemoryConfig,
        MetricConfig,
        ModelConfig,
        OptimizerConfig,
        PrecisionConfig,
        ProfileConfig,
        SyncConfig,
        TrainableConfig,
        TrialConfig,
        WireConfig,
    )

__all__ = [
    "AmendmentConfig",
    "ClaimConfig",
    "DataConfig",
    "LRSchedule",
    "Layout",
    "LedgerCallback",
    "LimitsConfig",
    "LossConfig",
    "MemoryConfig",
    "MetricConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RowConfig",
    "SearchConfig",
    "Study",
    "StudyConfig",
    "StudySearcher",
    "Suggestion",
    "SyncConfig",
    "TrainableConfig",
    "TrialConfig",
    "WireConfig",
    "create",
    "load",
    "run",
    "tune_trainable",
    "tuner",
]

_PLACES = {
    "study.api": ("Study", "create", "load", "run", "tuner"),
    "study.engines.ask_tell": ("Suggestion",),
    "study.engines.ray.scripts": ("LedgerCallback", "StudySearcher", "tune_trainable"),
    "study.config": (
        "AmendmentConfig",
        "ClaimConfig",
        "LimitsConfig",
        "RowConfig",
        "SearchConfig",
        "StudyConfig",
    ),
}
"""Exported names by module; all other names are in ``trainers.config``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = next((key for key, names in _PLACES.items() if name in names), "trainers.config")
    return getattr(importlib.import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
