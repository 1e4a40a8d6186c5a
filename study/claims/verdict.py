"""A check function's result from the figures of seeds."""

from study.evidence.verdict import of_mean

__all__ = ["of_mean"]
