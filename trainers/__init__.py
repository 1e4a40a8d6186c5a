"""Train one trial: its models, data, precision, training step, workers and checkpoints.

Imports ``lns_ops`` and Ray Train; knows nothing of Ray Tune, MLflow or OmegaConf, which belong to
``study``.
"""
