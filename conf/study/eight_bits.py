"""The figures of ``eight_bits`` that no row says: by how much the loss of one format is above
another's."""

from __future__ import annotations

from typing import Any

from study import Study
from study.claims.verdict import of_mean
from study.config.metric import Metric
from study.results.summary import figures_by_seed, summarise

LOGARITHMS = "lns8 a block + kahan"


def logarithms_over_mxfp8(study: Study) -> dict[str, Any]:
    """Return the excess of the logarithms' test loss over that of mxfp8, in per cent."""
    return _excess(study, "mxfp8 + kahan")


def logarithms_over_float8(study: Study) -> dict[str, Any]:
    """Return the excess of the logarithms' test loss over float8's, in per cent."""
    return _excess(study, "float8 e4m3 + kahan")


def _excess(study: Study, other: str) -> dict[str, Any]:
    """Return ``100 (loss / other's loss - 1)``, the mean over the seeds that both have."""
    loss = Metric(name="validation/loss")
    losses = {row.label: figures_by_seed(row.trials, loss) for row in summarise(study.state).rows}
    ours, theirs = losses[LOGARITHMS], losses[other]
    excess = [100 * (ours[seed] / theirs[seed] - 1) for seed in sorted({*ours} & {*theirs})]
    if not excess:
        return {"figure": float("nan"), "verdict": "undecided", "note": "no seed has both rows"}
    return of_mean(excess, "%")
