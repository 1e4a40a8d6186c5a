"""The results of an analysis: ranges and losses of each layer, with a table and a plot."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.formats import NumberFormat
from lns_ops.spec.format import LNSFormat


@dataclass(frozen=True)
class Grid:
    """The values of a format, as needed to measure rounding errors."""

    format: LNSFormat | NumberFormat

    @property
    def name(self) -> str:
        """The format's name."""
        return str(self.format)

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest magnitude; None if a scale changes both."""
        if isinstance(self.format, LNSFormat):
            return self.format.smallest, self.format.largest
        error = self.format.error
        return None if error.scaled else (error.smallest, error.largest)

    def quantize(self, x: Tensor) -> Tensor:
        """Return the nearest values, float64."""
        if isinstance(self.format, LNSFormat):
            return lns.decode(lns.encode(x, self.format), self.format, torch.float64)
        return self.format.quantize(x.float()).double()


@dataclass(frozen=True, kw_only=True)
class Values:
    """The statistics of a layer's float32 values in a format.

    Attributes:
        count: number of values.
        zeros: number of zeros.
        low, high: log2 of the smallest and the largest nonzero magnitude, octaves; NaN if all
            values are zero.
        underflow, saturated: number of nonzero values that the format rounds to zero, and of values
            beyond its largest magnitude.
        rounding_db: signal-to-noise ratio of rounding these values alone.
    """

    count: int
    zeros: int
    low: float
    high: float
    underflow: int
    saturated: int
    rounding_db: float

    @staticmethod
    def of(x: Tensor, grid: Grid) -> Values:
        """Return the statistics of a float tensor."""
        x = x.detach().double().reshape(-1)
        magnitude = x[x != 0].abs()
        low, high = (
            (float(v.log2()) for v in (magnitude.min(), magnitude.max()))
            if magnitude.numel()
            else (math.nan, math.nan)
        )
        rounded, span = grid.quantize(x), grid.span
        return Values(
            count=x.numel(),
            zeros=x.numel() - magnitude.numel(),
            low=low,
            high=high,
            underflow=int(((x != 0) & (rounded == 0)).sum()),
            saturated=0 if span is None else int((magnitude > span[1]).sum()),
            rounding_db=decibels(x, rounded),
        )


@dataclass(frozen=True, kw_only=True)
class LayerAnalysis:
    """The analysis of one layer.

    ``None`` means that the layer has no such values (no weights, no gradient).

    Attributes:
        name, kind: dotted path and class; ``format``: the format's name.
        weight, output, gradient, weight_gradient: statistics of its parameters, its outputs, and
            the gradients of outputs and of parameters.
        forward_db, backward_db, weight_gradient_db: signal-to-noise ratios of ``output``,
            ``gradient`` and ``weight_gradient``.
        updates, updates_lost: number of nonzero updates, and the fraction that the format loses.
    """

    name: str
    kind: str
    format: str
    weight: Values | None
    output: Values | None
    gradient: Values | None
    weight_gradient: Values | None
    forward_db: float | None
    backward_db: float | None
    weight_gradient_db: float | None
    updates: int | None
    updates_lost: float | None

    def flat(self) -> dict[str, Any]:
        """Return one row with dotted names such as ``output.low``, without missing values."""
        row: dict[str, Any] = {}
        for key, value in asdict(self).items():
            if isinstance(value, dict):
                row |= {f"{key}.{name}": number for name, number in value.items()}
            elif value is not None:
                row[key] = value
        return row


def decibels(x: Tensor, y: Tensor) -> float:
    """Return ``10 log10(sum x^2 / sum (x - y)^2)``, a signal-to-noise ratio in dB.

    It is infinite if y equals x, and NaN if x is zero.
    """
    x, y = x.detach().double(), y.detach().double()
    signal, noise = float((x * x).sum()), float(((x - y) ** 2).sum())
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


_HEADROOM = 2
"""Octaves that :attr:`Analysis.loss_scale` leaves above the largest gradient for later batches."""
_COLUMNS = (
    ("layer", 0), ("kind", 0), ("weights", 1), ("outputs", 1), ("gradients", 1), ("underflow %", 2),
    ("saturated %", 2), ("forward dB", 2), ("backward dB", 2), ("updates lost %", 2),
)  # fmt: skip


_SERIES = (
    ("weight", "weights", "#4c72b0"),
    ("output", "outputs", "#55a868"),
    ("gradient", "gradients of outputs", "#c44e52"),
    ("weight_gradient", "gradients of weights", "#8172b3"),
)


@dataclass(frozen=True)
class Analysis:
    """The layers of a model in a format, in the order of the forward pass.

    ``print`` shows a table.

    Attributes:
        format: name of the format.
        span: its smallest and largest magnitude, octaves; None if layers or scales have different
            ones.
        layers: one entry a layer.
    """

    format: str
    span: tuple[float, float] | None
    layers: list[LayerAnalysis] = field(default_factory=list)

    @property
    def loss_scale(self) -> float:
        """The power of two by which to multiply the loss, so that fewest gradients underflow.

        It minimizes underflow in the gradients of outputs without saturating them or the gradients
        of weights; it is 1 if nothing underflows. Scaling costs nothing in LNS, because logarithms
        change by a whole number (:class:`lns_ops.LossScale`).
        """
        outputs, weights = (
            [v for v in values if v is not None and not math.isnan(v.low)]
            for values in (
                [layer.gradient for layer in self.layers],
                [layer.weight_gradient for layer in self.layers],
            )
        )
        if self.span is None or not any(v.underflow for v in outputs):
            return 1.0
        wanted = self.span[0] - min(v.low for v in outputs)
        room = self.span[1] - max(v.high for v in outputs + weights) - _HEADROOM
        inverse = -self.span[0]  # the inverse of the scale must not underflow
        return float(2.0 ** max(0, min(map(math.floor, (math.ceil(wanted), room, inverse)))))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return one dict of numbers and names per layer, under the layer's name."""
        return {layer.name: layer.flat() for layer in self.layers}

    def to_pandas(self) -> Any:
        """Return a DataFrame, one row per layer (pandas must be installed)."""
        import pandas

        return pandas.DataFrame([layer.flat() for layer in self.layers]).set_index("name")

    def __str__(self) -> str:
        rows = [tuple(title for title, _ in _COLUMNS), *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        aligned = [
            [
                cell.rjust(w) if kind == 2 else cell.ljust(w)
                for cell, w, (_, kind) in zip(row, widths, _COLUMNS, strict=True)
            ]
            for row in rows
        ]
        reach = "" if self.span is None else f", 2^{self.span[0]:.1f} .. 2^{self.span[1]:.1f}"
        lines = [
            f"{self.format}{reach}; ranges in octaves",
            *("  ".join(cells).rstrip() for cells in aligned),
        ]
        if self.loss_scale > 1:
            scale = f"lns_ops.LossScale({self.loss_scale:.0f})"
            lines.append(f"gradients underflow: scale the loss, {scale}")
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw three panels with a row per layer: ranges, signal-to-noise ratios, updates lost.

        The format's own range is shaded behind the layers'.

        Args:
            path: where to save it; the extension selects PNG, SVG or PDF.

        Returns:
            the matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = len(self.layers)
        figure = Figure(figsize=(12, 1.5 + 0.45 * max(2, rows)), layout="constrained")
        FigureCanvasAgg(figure)
        ranges, ratios, lost = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1.3, 1))
        _ranges(ranges, self)
        _ratios(ratios, self)
        for y, layer in enumerate(self.layers):
            if layer.updates_lost is not None and not math.isnan(layer.updates_lost):
                lost.barh(y, 100 * layer.updates_lost, color="#937860", height=0.6)
        lost.set(xlabel="updates lost, %", xlim=(0, 100))
        ranges.set_yticks(range(rows), [f"{layer.name} ({layer.kind})" for layer in self.layers])
        ranges.invert_yaxis()
        figure.suptitle(f"{self.format}: effect on each layer")
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _row(layer: LayerAnalysis) -> tuple[str, ...]:
    met = [
        v
        for v in (layer.weight, layer.output, layer.gradient, layer.weight_gradient)
        if v is not None
    ]
    count = max(1, sum(v.count - v.zeros for v in met))

    def reach(values: Values | None) -> str:
        return (
            "-"
            if values is None or math.isnan(values.low)
            else f"{values.low:.1f} .. {values.high:.1f}"
        )

    def number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
        return "-" if value is None or math.isnan(value) else f"{value * scale:.{digits}f}"

    lost, above = sum(v.underflow for v in met) / count, sum(v.saturated for v in met) / count
    return (
        layer.name, layer.kind, reach(layer.weight), reach(layer.output), reach(layer.gradient),
        number(lost, 100, 2), number(above, 100, 2), number(layer.forward_db),
        number(layer.backward_db), number(layer.updates_lost, 100),
    )  # fmt: skip


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
    unique = dict(zip(labels, handles, strict=True))  # one entry a series, not a layer
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
