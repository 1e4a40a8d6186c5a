"""The picture of :func:`lns_ops.analyze`.

It is the only file here that needs matplotlib, which is imported when the picture is drawn.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lns_ops.analysis.result import Analysis


_SERIES = (
    ("weight", "weights", "#4c72b0"),
    ("output", "outputs", "#55a868"),
    ("gradient", "gradients of outputs", "#c44e52"),
    ("weight_gradient", "gradients of weights", "#8172b3"),
)


def draw(analysis: Analysis, path: str | Path | None = None) -> Any:
    """Draw three panels with a row per layer: ranges, signal-to-noise ratios, updates lost.

    The format's own range is shaded behind the layers'.

    Args:
        analysis: what to draw.
        path: where to save it; by its ending PNG, SVG, PDF.

    Returns:
        the matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(analysis.layers)
    figure = Figure(figsize=(12, 1.5 + 0.45 * max(2, rows)), layout="constrained")
    FigureCanvasAgg(figure)
    ranges, ratios, lost = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1.3, 1))
    _ranges(ranges, analysis)
    _ratios(ratios, analysis)
    for y, layer in enumerate(analysis.layers):
        if layer.updates_lost is not None and not math.isnan(layer.updates_lost):
            lost.barh(y, 100 * layer.updates_lost, color="#937860", height=0.6)
    lost.set(xlabel="updates lost, %", xlim=(0, 100))
    ranges.set_yticks(range(rows), [f"{layer.name} ({layer.kind})" for layer in analysis.layers])
    ranges.invert_yaxis()
    figure.suptitle(f"{analysis.format}: what it does to each layer")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _ranges(axes: Any, analysis: Analysis) -> None:
    if analysis.span is not None:
        axes.axvspan(*analysis.span, color="0.92", label=f"range of {analysis.format}")
    for offset, (key, label, colour) in enumerate(_SERIES):
        for y, layer in enumerate(analysis.layers):
            values = getattr(layer, key)
            if values is not None and not math.isnan(values.low):
                place = y + 0.18 * (offset - 1.5)
                axes.plot(
                    [values.low, values.high],
                    [place, place],
                    color=colour,
                    linewidth=4,
                    solid_capstyle="butt",
                    label=label,
                )
    axes.set(xlabel="magnitudes, octaves (log2)")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))  # one entry a series, not one a layer
    axes.legend(unique.values(), unique.keys(), fontsize="small", loc="best")


def _ratios(axes: Any, analysis: Analysis) -> None:
    for key, label, colour, marker in (
        ("forward_db", "forward", "#55a868", "o"),
        ("backward_db", "backward", "#c44e52", "s"),
    ):
        points = [
            (getattr(layer, key), y)
            for y, layer in enumerate(analysis.layers)
            if getattr(layer, key) is not None
        ]
        finite = [(ratio, y) for ratio, y in points if math.isfinite(ratio)]
        axes.plot(
            [ratio for ratio, _ in finite],
            [y for _, y in finite],
            marker=marker,
            color=colour,
            label=label,
        )
    axes.set(xlabel="signal to noise, dB")
    axes.legend(fontsize="small", loc="best")
