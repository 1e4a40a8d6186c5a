"""The ray engine: runs a study as a ``ray.tune.Tuner``."""
