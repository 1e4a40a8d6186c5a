"""Studies: a config becomes trials, worker processes train them, a ledger records what happens,
MLflow and a report show it.

Imports ``trainers``; the only package that uses Ray Tune, MLflow and OmegaConf. The flow, one
folder or module per step::

    compose -> config -> plan -> preflight -> runner (agenda, scheduler, engine)
            -> ledger -> tracking (MLflow), report, progress

In Python and in notebooks: :func:`run`, :func:`create` and :func:`load` give a :class:`Study`, the
dataclasses make a config. They are imported when they are first used, so that ``import study`` is
quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from study.config import (
        AmendmentConfig,
        ClaimConfig,
        LimitsConfig,
        RowConfig,
        SearchConfig,
        StudyConfig,
    )
    from study.execution.ask_tell import Suggestion
    from study.execution.tune.scripts import LedgerCallback, StudySearcher, tune_trainable
    from study.handle import Study, create, load, run, tuner
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
    "study.handle": ("Study", "create", "load", "run", "tuner"),
    "study.execution.ask_tell": ("Suggestion",),
    "study.execution.tune.scripts": ("LedgerCallback", "StudySearcher", "tune_trainable"),
    "study.config": (
        "AmendmentConfig",
        "ClaimConfig",
        "LimitsConfig",
        "RowConfig",
        "SearchConfig",
        "StudyConfig",
    ),
}
"""Modules that have the names; the others are in ``trainers.config``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = next((key for key, names in _PLACES.items() if name in names), "trainers.config")
    return getattr(importlib.import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
