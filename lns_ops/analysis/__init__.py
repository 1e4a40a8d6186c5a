"""Analysis of the effect of a number format on each layer of a network.

:func:`analyze` measures it, and :class:`Analysis` prints and plots it.
"""

from lns_ops.analysis.analyze import analyze
from lns_ops.analysis.result import Analysis, Grid, LayerAnalysis, Values, decibels

__all__ = ["Analysis", "Grid", "LayerAnalysis", "Values", "analyze", "decibels"]
