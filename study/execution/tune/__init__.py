"""The ray engine: a study's trials as those of a ``ray.tune.Tuner``."""
