"""The figure of ``swish`` that no row says: Swish's worst disadvantage in logarithms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from study import Study
from study.claims.analyses import chosen
from study.results.contrasts import paired
from study.results.summary import figures_by_seed

FORMAT = "lns12"
NAMES = ("activation swish", "activation relu")


def worst_in_lns(study: Study) -> dict[str, Any]:
    """Return the largest of Swish's errors minus ReLU's over the data sets, in percentage points.

    In each data set both have the learning rate that the validation split chose; the interval is
    paired by seed and corrected for the number of data sets.
    """
    state, metric = study.state, study.config.primary_metric
    cells = chosen(state, "model.args", ["data.name", "precision.format"])
    found = {}
    for block, cell in cells.items():
        if block.endswith(FORMAT):
            swish, relu = (figures_by_seed(cell[name], metric) for name in NAMES)
            found[block] = paired([swish[seed] - relu[seed] for seed in swish], "seeds")
    contrasts = {
        block: replace(each, tests=len(found)) for block, each in found.items() if each is not None
    }
    worst = max(contrasts, key=lambda block: contrasts[block].difference)
    each = contrasts[worst]
    return {
        "figure": each.difference,
        "low": each.difference - each.half,
        "high": each.difference + each.half,
        "unit": metric.points.strip(),
        "note": f"worst on {worst}",
    }
