"""Definition of a study: frozen dataclasses, built from YAML files and ``key=value`` overrides."""

from study.config.claims import AmendmentConfig, ClaimConfig
from study.config.keys import OUTSIDE
from study.config.metric import MODES, Metric
from study.config.search import ADAPTIVE, ALGORITHMS, POPULATIONS, SCHEDULERS, SearchConfig
from study.config.study import (
    LimitsConfig,
    RowConfig,
    StudyConfig,
    check_tracking_uri,
    default_tracking_uri,
)

__all__ = [
    "ADAPTIVE",
    "ALGORITHMS",
    "MODES",
    "OUTSIDE",
    "POPULATIONS",
    "SCHEDULERS",
    "AmendmentConfig",
    "ClaimConfig",
    "LimitsConfig",
    "Metric",
    "RowConfig",
    "SearchConfig",
    "StudyConfig",
    "check_tracking_uri",
    "default_tracking_uri",
]
