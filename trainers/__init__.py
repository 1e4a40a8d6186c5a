"""Train one trial: its models, data, precision, training step, workers and checkpoints.

Imports ``lns_ops`` and Ray Train; knows nothing of Ray Tune, MLflow or OmegaConf, which belong to
``study``. The names here are for a training loop of your own (:mod:`trainers.user_loop`).
"""

from trainers.user_loop import LoopContext, get_checkpoint, report

__all__ = ["LoopContext", "get_checkpoint", "report"]
