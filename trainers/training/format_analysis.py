"""The effect of a trial's format on each layer, as metrics of an epoch.

They come from :func:`lns_ops.analyze` on the first batch of training examples. Every analysis uses
the same batch, and a new optimizer with the trial's options. The model is copied, and the random
numbers of training are not used, so a trial with analyses trains the same bits as one without.
"""

from __future__ import annotations

import math

from torch import nn

from lns_ops import NonFiniteError
from lns_ops.analysis import LayerAnalysis, analyze
from trainers.config import PrecisionConfig, TrialConfig
from trainers.data import Split
from trainers.models.loss import Loss
from trainers.optim.build import make_optimizer

_SHARES = ("underflow", "saturated")


def analysis_metrics(
    model: nn.Module, config: TrialConfig, batch: Split, loss: Loss
) -> dict[str, float]:
    """Return ``analysis/LAYER/NAME`` of every layer.

    NAME is ``forward_db``, ``backward_db``, ``weight_gradient_db`` (signal-to-noise against
    float32), ``underflow``, ``saturated`` (shares of the layer's nonzero weights, outputs and
    gradients) and ``updates_lost`` (share of nonzero updates). Values that are not finite are left
    out, and all values where the network overflows.
    """
    precision = config.precision
    scope = "everywhere" if precision.simulated else precision.scope
    scale = config.lr_schedule.scale(config.batch_size)
    try:
        analysis = analyze(
            model, batch, precision.format, loss=loss, scope=scope,
            optimizer=lambda weights: make_optimizer(
                nn.ParameterList(weights), config.optimizer, PrecisionConfig(),
                config.update_examples * loss.answers_each(batch.y), scale=scale
            ),
        )  # fmt: skip
    except NonFiniteError:
        return {}
    metrics = {
        f"analysis/{layer.name}/{name}": value
        for layer in analysis.layers
        for name, value in _figures(layer).items()
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _figures(layer: LayerAnalysis) -> dict[str, float]:
    """Return one layer's metrics, as far as they are known."""
    values = [
        v
        for v in (layer.weight, layer.output, layer.gradient, layer.weight_gradient)
        if v is not None
    ]
    count = sum(v.count - v.zeros for v in values)
    figures = (
        {name: sum(getattr(v, name) for v in values) / count for name in _SHARES} if count else {}
    )
    ratios = {
        name: getattr(layer, name)
        for name in ("forward_db", "backward_db", "weight_gradient_db", "updates_lost")
    }
    return figures | {name: value for name, value in ratios.items() if value is not None}
