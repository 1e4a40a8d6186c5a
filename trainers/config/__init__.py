"""The configuration of a trial: frozen dataclasses that refuse combinations that cannot work.

``study`` builds them from YAML; a script can build them directly::

    precision = PrecisionConfig(format="lns12", scope="everywhere", kahan_sum=True)
    TrialConfig(precision=precision, epochs=3)

Importing this package loads neither process groups nor the training loop.
"""

from trainers.config.compatibility import TrialConfig
from trainers.config.data import DATASETS
from trainers.config.layout import Layout
from trainers.config.loss import LOSSES, LossConfig, MetricConfig
from trainers.config.lr_schedule import LRSchedule
from trainers.config.memory import AUTOCASTS, MemoryConfig
from trainers.config.model import MODELS
from trainers.config.optimizer import OptimizerConfig
from trainers.config.precision import FLOAT_FORMATS, SCOPES, PrecisionConfig
from trainers.config.sync import SyncConfig
from trainers.config.trial import (
    DEVICES,
    EPOCHS,
    DataConfig,
    ModelConfig,
    ProfileConfig,
    TrainableConfig,
)
from trainers.config.wire import WireConfig

__all__ = [
    "AUTOCASTS",
    "DATASETS",
    "DEVICES",
    "EPOCHS",
    "FLOAT_FORMATS",
    "LOSSES",
    "MODELS",
    "SCOPES",
    "DataConfig",
    "LRSchedule",
    "Layout",
    "LossConfig",
    "MemoryConfig",
    "MetricConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "SyncConfig",
    "TrainableConfig",
    "TrialConfig",
    "WireConfig",
]
