"""What a number format does to a network, layer by layer: :func:`analyze`, the table that tells which format to try.

The model runs forward and backward on one batch twice, in float32 and in the format (:func:`lns_ops.convert_`), and each layer is asked

- which *range* its weights, outputs and gradients use (octaves: log2 of the smallest and largest magnitude), and how many of its float32
  values the format would lose: *underflow* (to zero) and *saturation* (beyond the largest magnitude);
- the *signal-to-noise ratio* of its outputs (forward) and of the gradients of its outputs and weights (backward),
  ``10 log10(sum x^2 / sum (x - x_format)^2)`` dB: everything lost from the input (or the loss) up to there, of this layer and those before;
- the *updates lost*: the share of nonzero updates u of weights w with ``w + u = w`` in the format, for which |u / w| is under about half an
  ulp (or u underflows). Kahan summation and stochastic rounding keep them.

One batch is one sample: the gradient's scale, and so what underflows, depends on the loss (a mean over the batch or its sum) and moves as
training goes on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import functional as lns
from lns_ops.format import LNSFormat
from lns_ops.formats import Logarithmic, NumberFormat, parse
from lns_ops.nn import Filter, convert_, revert_
from lns_ops.optim import SGD
from lns_ops.tensor import LNSTensor

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_MOVES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
"""Layers that only move or drop values."""


@dataclass(frozen=True)
class Grid:
    """The values of a format, as far as losing others goes."""

    format: LNSFormat | NumberFormat

    @property
    def name(self) -> str:
        """The format's name."""
        return str(self.format)

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest magnitude; None where values share a scale, which moves both."""
        if isinstance(self.format, LNSFormat):
            return self.format.smallest, self.format.largest
        error = self.format.error
        return None if error.scaled else (error.smallest, error.largest)

    def quantize(self, x: Tensor) -> Tensor:
        """The nearest values, float64."""
        if isinstance(self.format, LNSFormat):
            return lns.decode(lns.encode(x, self.format), self.format, torch.float64)
        return self.format.quantize(x.float()).double()


@dataclass(frozen=True, kw_only=True)
class Values:
    """What a layer's float32 values would be in a format.

    Attributes:
        count: how many there are.
        zeros: how many of them are zero.
        low, high: log2 of the smallest and the largest nonzero magnitude, octaves; NaN where all are zero.
        underflow, saturated: how many nonzero ones the format makes zero, how many lie beyond its largest magnitude.
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
        """Of a float tensor."""
        x = x.detach().double().reshape(-1)
        magnitude = x[x != 0].abs()
        low, high = (float(v.log2()) for v in (magnitude.min(), magnitude.max())) if magnitude.numel() else (math.nan, math.nan)
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
    """One layer. ``None``: the layer has no such values (no weights, no gradient).

    Attributes:
        name, kind: dotted path and class; ``format``: the format's name.
        weight, output, gradient, weight_gradient: its parameters, its outputs, the gradients of outputs and of parameters.
        forward_db, backward_db, weight_gradient_db: signal-to-noise ratios of ``output``, ``gradient`` and ``weight_gradient``.
        updates, updates_lost: nonzero updates, and the share of them that the format loses.
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
        """One row: ``output.low`` and so on by dotted names; what the layer has not is left out."""
        row: dict[str, Any] = {}
        for key, value in asdict(self).items():
            if isinstance(value, dict):
                row |= {f"{key}.{name}": number for name, number in value.items()}
            elif value is not None:
                row[key] = value
        return row


def decibels(x: Tensor, y: Tensor) -> float:
    """``10 log10(sum x^2 / sum (x - y)^2)``; infinite where y is x, NaN where x is zero throughout."""
    x, y = x.detach().double(), y.detach().double()
    signal, noise = float((x * x).sum()), float(((x - y) ** 2).sum())
    if signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


_HEADROOM = 2
"""Octaves that :attr:`Analysis.loss_scale` leaves above the largest gradient, for batches to come."""
_COLUMNS = (
    ("layer", 0), ("kind", 0), ("weights", 1), ("outputs", 1), ("gradients", 1), ("underflow %", 2), ("saturated %", 2), ("forward dB", 2),
    ("backward dB", 2), ("updates lost %", 2),
)  # fmt: skip


@dataclass(frozen=True)
class Analysis:
    """The layers of a model in a format, in the order of the forward pass; ``print`` shows the table.

    Attributes:
        format: name of the format.
        span: its smallest and largest magnitude, octaves; None where layers or scales have different ones.
        layers: one entry a layer.
    """

    format: str
    span: tuple[float, float] | None
    layers: list[LayerAnalysis] = field(default_factory=list)

    @property
    def loss_scale(self) -> float:
        """The power of two to multiply the loss by, so that the gradients of outputs underflow least and none saturates; 1 if none does.

        It costs nothing in LNS: logarithms move by a whole number of octaves. Adam and others that divide by the gradient's size take the
        same rate, SGD one that is divided by it.
        """
        met = [v for layer in self.layers if (v := layer.gradient) is not None and not math.isnan(v.low)]
        if self.span is None or not any(v.underflow for v in met):
            return 1.0
        wanted = self.span[0] - min(v.low for v in met)
        room = self.span[1] - max(v.high for v in met) - _HEADROOM
        return float(2.0 ** max(0, min(math.ceil(wanted), math.floor(room))))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """One dict of numbers and names a layer, under the layer's name."""
        return {layer.name: layer.flat() for layer in self.layers}

    def to_pandas(self) -> Any:
        """A DataFrame, one row a layer (pandas must be installed)."""
        import pandas

        return pandas.DataFrame([layer.flat() for layer in self.layers]).set_index("name")

    def __str__(self) -> str:
        rows = [tuple(title for title, _ in _COLUMNS), *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        aligned = [[cell.rjust(w) if kind == 2 else cell.ljust(w) for cell, w, (_, kind) in zip(row, widths, _COLUMNS, strict=True)]
                   for row in rows]  # fmt: skip
        reach = "" if self.span is None else f", 2^{self.span[0]:.1f} .. 2^{self.span[1]:.1f}"
        lines = [f"{self.format}{reach}; ranges in octaves", *("  ".join(cells).rstrip() for cells in aligned)]
        if self.loss_scale > 1:
            lines.append(f"gradients underflow: multiply the loss by {self.loss_scale:g} (and divide the rate of SGD by it)")
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> Any:
        """Ranges beside the format's, signal-to-noise ratios and lost updates, as a matplotlib figure (saved to ``path`` if given)."""
        from lns_ops.analysis_plot import draw

        return draw(self, path)


def _row(layer: LayerAnalysis) -> tuple[str, ...]:
    met = [v for v in (layer.weight, layer.output, layer.gradient, layer.weight_gradient) if v is not None]
    count = max(1, sum(v.count - v.zeros for v in met))

    def reach(values: Values | None) -> str:
        return "-" if values is None or math.isnan(values.low) else f"{values.low:.1f} .. {values.high:.1f}"

    def number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
        return "-" if value is None or math.isnan(value) else f"{value * scale:.{digits}f}"

    lost, above = sum(v.underflow for v in met) / count, sum(v.saturated for v in met) / count
    return (
        layer.name, layer.kind, reach(layer.weight), reach(layer.output), reach(layer.gradient), number(lost, 100, 2),
        number(above, 100, 2), number(layer.forward_db), number(layer.backward_db), number(layer.updates_lost, 100),
    )  # fmt: skip


class _Trace:
    """Outputs and gradients of every layer in one forward and backward pass, as float tensors."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        self.formats: dict[str, LNSFormat] = {}
        self.model = model
        handles = [layer.register_forward_hook(self._watch(name)) for name, layer in layers_of(model)]
        model.zero_grad(set_to_none=True)
        try:
            x, y = batch
            loss(model(x), y).backward()
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next((t for t in _tensors(output) if t.dtype.is_floating_point), None)
            if first is None:
                return
            if isinstance(first, LNSTensor):
                self.formats[name] = first.fmt
            self.outputs.setdefault(name, []).append(as_float(first))
            if first.requires_grad:
                first.register_hook(lambda grad: self.gradients.setdefault(name, []).append(as_float(grad)))

        return hook

    def weights(self, name: str) -> list[nn.Parameter]:
        """The layer's own parameters that have gradients."""
        return [p for p in self.model.get_submodule(name).parameters(recurse=False) if p.grad is not None]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from _tensors(each)


def as_float(x: Tensor) -> Tensor:
    """The values, a float32 copy."""
    return lns.decode(x.codes, x.fmt) if isinstance(x, LNSTensor) else x.detach().float().clone()


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have parameters of their own or no modules inside, but for those that only move values."""
    found = []
    for name, module in model.named_modules():
        owns = any(True for _ in module.parameters(recurse=False))
        if owns or (not any(True for _ in module.children()) and not isinstance(module, _MOVES)):
            found.append((name, module))
    return found


def _joined(tensors: Iterable[Tensor]) -> Tensor | None:
    flat = [t.reshape(-1) for t in tensors]
    return torch.cat(flat) if flat else None


def _updates(weights: list[nn.Parameter], make: MakeOptimizer) -> list[Tensor]:
    """The first update of every weight, in float64, so that none is lost here."""
    copies = [nn.Parameter(p.detach().double()) for p in weights]
    for own, p in zip(copies, weights, strict=True):
        assert p.grad is not None
        own.grad = p.grad.detach().double()
    make(copies).step()
    return [own.detach() - p.detach().double() for own, p in zip(copies, weights, strict=True)]


def _lost(weight: Tensor, update: Tensor, grid: Grid) -> tuple[int, float]:
    """Nonzero updates, and the share of them that leaves the weight where it is."""
    weight, update = weight.detach().double().reshape(-1), update.reshape(-1)
    moving = update != 0
    if isinstance(grid.format, LNSFormat):
        w, u = lns.encode(weight, grid.format), lns.encode(update, grid.format)
        still = lns.add(w, u, grid.format) == w
    else:
        w = grid.quantize(weight)
        still = grid.quantize(w + grid.quantize(update)) == w
    count = int(moving.sum())
    return count, float((moving & still).sum()) / count if count else math.nan


def _layer(
    name: str, kind: str, grid: Grid, exact: _Trace, rounded: _Trace, updates: Mapping[nn.Parameter, Tensor] | None
) -> LayerAnalysis:
    mine, theirs = exact.weights(name), rounded.weights(name)
    grads = [[as_float(p.grad) for p in weights if p.grad is not None] for weights in (mine, theirs)]
    pairs = {
        "output": (_joined(exact.outputs.get(name, [])), _joined(rounded.outputs.get(name, []))),
        "gradient": (_joined(exact.gradients.get(name, [])), _joined(rounded.gradients.get(name, []))),
        "weight_gradient": (_joined(grads[0]), _joined(grads[1])),
    }
    values = {key: None if x is None else Values.of(x, grid) for key, (x, _) in pairs.items()}
    ratios = {key: None if x is None or y is None or x.shape != y.shape else decibels(x, y) for key, (x, y) in pairs.items()}
    weight = _joined(p.detach() for p in mine)
    moved = None if updates is None or weight is None else _lost(weight, torch.cat([updates[p].reshape(-1) for p in mine]), grid)
    return LayerAnalysis(
        name=name or "(root)", kind=kind, format=grid.name, weight=None if weight is None else Values.of(weight, grid), **values,
        forward_db=ratios["output"], backward_db=ratios["gradient"], weight_gradient_db=ratios["weight_gradient"],
        updates=None if moved is None else moved[0], updates_lost=None if moved is None else moved[1],
    )  # fmt: skip


def _twice(model: nn.Module, batch: Any, format: Any, loss: Loss, scope: str, filter_fn: Filter | None) -> tuple[_Trace, _Trace]:
    """The float32 run and that in the format, of copies, with the same random numbers (dropout); the caller's generators stay."""
    exact = revert_(copy.deepcopy(model))
    if any(p.dtype != torch.float32 for p in exact.parameters()):
        exact = exact.float()
    rounded = convert_(copy.deepcopy(exact), format, scope=scope, filter_fn=filter_fn)
    devices = sorted({p.get_device() for p in model.parameters() if p.is_cuda})
    traces = []
    for each in (exact, rounded):
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(0)
            traces.append(_Trace(each, batch, loss))
    return traces[0], traces[1]


def analyze(
    model: nn.Module,
    batch: tuple[Any, Any],
    format: LNSFormat | NumberFormat | str | Mapping[str, LNSFormat | str],
    *,
    loss: Loss = F.cross_entropy,
    lr: float | None = None,
    optimizer: MakeOptimizer | None = None,
    scope: str = "everywhere",
    filter_fn: Filter | None = None,
) -> Analysis:
    """What ``format`` does to every layer of ``model`` on one batch; see the head of this file. The model stays as it is.

    Args:
        model: any torch module that :func:`lns_ops.convert_` takes, in float32 or converted already (its weights are decoded then).
        batch: inputs and targets, on the model's device.
        format: an LNS format, its name, or names by patterns of layer names, as for ``convert_``; or any other of
            :mod:`lns_ops.formats` (``bfloat16``, ``int8/channel``), which is simulated. Gradients of weights are then not rounded.
        loss: ``loss(model(inputs), targets)``, the scalar that training minimises.
        lr: of a plain SGD update, for ``updates_lost``.
        optimizer: instead of ``lr``, a function of parameters that makes the optimizer whose first update is asked for, as
            ``lambda parameters: lns_ops.optim.AdamW(parameters, lr=1e-3)``.
        scope, filter_fn: as for ``convert_``.

    Raises:
        ValueError: both ``lr`` and ``optimizer``, a batch that is no pair, or what ``convert_`` refuses.

    >>> print(lns_ops.analyze(net, (images, labels), "lns12", lr=0.1))
    """
    if lr is not None and optimizer is not None:
        raise ValueError(f"lr={lr} and an optimizer: both say what an update is; pass one of them")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"batch of type {type(batch).__name__}: must be a pair of inputs and targets; pass (inputs, targets)")
    if lr is not None:
        optimizer = lambda parameters: SGD(parameters, lr=lr)  # noqa: E731
    exact, rounded = _twice(model, batch, format, loss, scope, filter_fn)
    updates = None
    if optimizer is not None:
        parameters = [p for p in exact.model.parameters() if p.grad is not None]
        updates = dict(zip(parameters, _updates(parameters, optimizer), strict=True))
    grids = _grids(rounded, format)
    kinds = {name: type(layer).__name__ for name, layer in layers_of(exact.model)}
    met = [*exact.outputs, *(name for name in kinds if name not in exact.outputs and exact.weights(name))]
    analysed = [_layer(name, kinds[name], grids[name], exact, rounded, updates) for name in met if name in grids]
    spans = {grid.span for grid in grids.values()}
    limits = next(iter(spans)) if len(spans) == 1 else None
    span = None if limits is None else (math.log2(limits[0]), math.log2(limits[1]))
    return Analysis(", ".join(dict.fromkeys(grid.name for grid in grids.values())), span, analysed)


def _common(format: Any) -> LNSFormat | NumberFormat | None:
    """The format of all layers; None where each has its own."""
    if isinstance(format, Mapping):
        return None
    if not isinstance(format, str):
        made: LNSFormat | NumberFormat = format
        return made
    named = parse(format)
    return named.lns if isinstance(named, Logarithmic) else named


def _grids(rounded: _Trace, format: Any) -> dict[str, Grid]:
    """The format of every layer: that of its outputs, else of its conversion, else the one that was asked for; float32 ones have none."""
    common, grids = _common(format), {}
    for name, layer in layers_of(rounded.model):
        conversion = getattr(layer, "lns_conversion", None)
        own = rounded.formats.get(name) or (conversion.fmt if conversion is not None else common)
        if own is not None:
            grids[name] = Grid(own)
    return grids
