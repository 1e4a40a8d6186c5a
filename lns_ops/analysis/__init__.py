"""Analysis of what a number format does to each layer of a network.

:func:`analyze` measures it, :class:`Analysis` shows it.
"""

from lns_ops.analysis.analyze import analyze
from lns_ops.analysis.result import Analysis, Grid, LayerAnalysis, Values, decibels

__all__ = ["Analysis", "Grid", "LayerAnalysis", "Values", "analyze", "decibels"]
