"""Training of one trial: models, data, precision, the step, the Ray Train worker, checkpoints.

Imports ``lns_ops`` and Ray Train; knows nothing of Ray Tune, MLflow or OmegaConf, which belong to
``study``.
"""
