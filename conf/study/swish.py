"""The figure of ``swish`` that no row says: Swish's worst disadvantage in logarithms."""

from __future__ import annotations

import math
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
            found[block] = [swish[seed] - relu[seed] for seed in swish if seed in relu]
    return worst(found, metric.points.strip())


def worst(differences: dict[str, list[float]], unit: str) -> dict[str, Any]:
    """Return the largest mean of several differences, with its simultaneous interval.

    The largest of the means lies between the largest lower and the largest upper end of their
    intervals, which have one correction; so a data set with a wide interval keeps the claim open
    although another one's mean is larger.

    Args:
        differences: by data set, a figure a seed.
        unit: unit of the differences.
    """
    found = {block: paired(values, "seeds") for block, values in differences.items()}
    if untested := [block for block, each in found.items() if each is None]:
        note = f"{untested[0]} has one seed, the same difference at every seed, or diverged"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    tested = {
        block: replace(each, tests=len(found)) for block, each in found.items() if each is not None
    }
    largest = max(tested, key=lambda block: tested[block].difference)
    return {
        "figure": tested[largest].difference,
        "low": max(each.difference - each.half for each in tested.values()),
        "high": max(each.difference + each.half for each in tested.values()),
        "unit": unit,
        "note": f"worst on {largest}",
    }
