"""Measure the effect of a number format on a network, layer by layer: :func:`analyze`.

The results help to choose a format. The model runs forward and backward on one batch twice, in
float32 and in the format (:func:`lns_ops.convert_`). For each layer the analysis reports

- the *range* of its weights, outputs and gradients (in octaves: log2 of the smallest and largest
  magnitude), and how many of its float32 values the format would lose by *underflow* (to zero) and
  by *saturation* (beyond the largest magnitude);
- the *signal-to-noise ratio* of its outputs (forward) and of the gradients of its outputs and
  weights (backward), ``10 log10(sum x^2 / sum (x - x_format)^2)`` dB. It includes the errors of all
  layers between the input (or, for gradients, the loss) and this layer;
- the *updates lost*: the fraction of nonzero updates u of weights w for which ``w + u = w`` in the
  format, because |u / w| is below about half an ulp or u underflows. Kahan summation and stochastic
  rounding keep such updates.

>>> import torch, lns_ops
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
>>> images, labels = torch.randn(16, 4), torch.arange(16) % 3
>>> analysis = lns_ops.analyze(model, (images, labels), "lns12", lr=0.1)
>>> [layer.name for layer in analysis.layers], analysis.layers[0].format
(['0', '1', '2'], 'lns12')

``print(analysis)`` shows a table. One batch is one sample. The gradient's scale, and therefore its
underflow, depends on the loss (a mean over the batch or its sum) and changes during training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import functional as lns
from lns_ops.analysis.result import Analysis, Grid, LayerAnalysis, Values, decibels
from lns_ops.formats import Logarithmic, NumberFormat, parse
from lns_ops.nn import Filter, convert_, revert_
from lns_ops.nn.simulate import refuse_lazy
from lns_ops.optim import SGD
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_MOVES = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Layers that only move or drop values."""


class _Trace:
    """The outputs and gradients of every layer in one forward and backward pass, float tensors."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        self.formats: dict[str, LNSFormat] = {}
        self.model = model
        handles = [
            layer.register_forward_hook(self._watch(name)) for name, layer in layers_of(model)
        ]
        model.zero_grad(set_to_none=True)
        try:
            x, y = batch
            loss(_run(model, x), y).backward()
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
                first.register_hook(
                    lambda grad: self.gradients.setdefault(name, []).append(as_float(grad))
                )

        return hook

    def weights(self, name: str) -> list[nn.Parameter]:
        """Return the layer's own parameters that have gradients."""
        return [
            p
            for p in self.model.get_submodule(name).parameters(recurse=False)
            if p.grad is not None
        ]


def _run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from _tensors(each)


def as_float(x: Tensor) -> Tensor:
    """Return the values as a float32 copy."""
    return lns.decode(x.codes, x.fmt) if isinstance(x, LNSTensor) else x.detach().float().clone()


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers to analyze, by name.

    These are the modules that have parameters of their own or no submodules, except for layers that
    only move values.
    """
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
    """Return the first update of every weight, in float64, so that rounding loses none here."""
    copies = [nn.Parameter(p.detach().double()) for p in weights]
    for own, p in zip(copies, weights, strict=True):
        assert p.grad is not None
        own.grad = p.grad.detach().double()
    make(copies).step()
    return [own.detach() - p.detach().double() for own, p in zip(copies, weights, strict=True)]


def _lost(weight: Tensor, update: Tensor, grid: Grid) -> tuple[int, float]:
    """Count the nonzero updates, and return the fraction that does not change the weight."""
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
    name: str,
    kind: str,
    grid: Grid,
    exact: _Trace,
    rounded: _Trace,
    updates: Mapping[nn.Parameter, Tensor] | None,
) -> LayerAnalysis:
    mine, theirs = exact.weights(name), rounded.weights(name)
    grads = [
        [as_float(p.grad) for p in weights if p.grad is not None] for weights in (mine, theirs)
    ]
    pairs = {
        "output": (_joined(exact.outputs.get(name, [])), _joined(rounded.outputs.get(name, []))),
        "gradient": (
            _joined(exact.gradients.get(name, [])),
            _joined(rounded.gradients.get(name, [])),
        ),
        "weight_gradient": (_joined(grads[0]), _joined(grads[1])),
    }
    values = {key: None if x is None else Values.of(x, grid) for key, (x, _) in pairs.items()}
    ratios = {
        key: None if x is None or y is None or x.shape != y.shape else decibels(x, y)
        for key, (x, y) in pairs.items()
    }
    weight = _joined(p.detach() for p in mine)
    moved = (
        None
        if updates is None or weight is None
        else _lost(weight, torch.cat([updates[p].reshape(-1) for p in mine]), grid)
    )
    return LayerAnalysis(
        name=name or "(root)", kind=kind, format=grid.name,
        weight=None if weight is None else Values.of(weight, grid), **values,
        forward_db=ratios["output"], backward_db=ratios["gradient"],
        weight_gradient_db=ratios["weight_gradient"], updates=None if moved is None else moved[0],
        updates_lost=None if moved is None else moved[1],
    )  # fmt: skip


def _twice(
    model: nn.Module, batch: Any, format: Any, loss: Loss, scope: str, filter_fn: Filter | None
) -> tuple[_Trace, _Trace]:
    """Run copies of the model in float32 and in the format, with the same random numbers (dropout).

    The caller's random generators are not changed.
    """
    for name, layer in model.named_modules():
        refuse_lazy(name, layer)
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
    """Measure the effect of ``format`` on every layer of ``model``, on one batch.

    :mod:`lns_ops.analysis.analyze` describes the results and has an example. The model is not
    changed.

    Args:
        model: any torch module that :func:`lns_ops.convert_` accepts, in float32 or already
            converted (its weights are decoded then).
        batch: pair of inputs and targets, on the model's device. If the inputs are a tuple or a
            dict, they are the positional or keyword arguments of the model's forward.
        format: an LNS format, its name, or names by patterns of layer names, as for ``convert_``;
            or any other format of :mod:`lns_ops.formats` (``bfloat16``, ``int8/channel``), which is
            simulated. Gradients of weights are not rounded then.
        loss: ``loss(model(inputs), targets)``, the scalar that training minimises.
        lr: learning rate of a plain SGD update, for ``updates_lost``.
        optimizer: alternative to ``lr``: a function from parameters to the optimizer whose first
            update is measured, such as
            ``lambda parameters: lns_ops.optim.AdamW(parameters, lr=1e-3)``.
        scope, filter_fn: as for ``convert_``.

    Raises:
        ValueError: both ``lr`` and ``optimizer``, a batch that is not a pair, or a model that
            ``convert_`` rejects.
    """
    if lr is not None and optimizer is not None:
        raise ValueError(f"lr={lr} and an optimizer: both define the update; pass one of them")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"batch of type {type(batch).__name__}: must be a pair of inputs and targets; pass"
            " (inputs, targets), and several inputs as ((first, second), targets)"
        )
    if lr is not None:
        optimizer = lambda parameters: SGD(parameters, lr=lr)  # noqa: E731
    exact, rounded = _twice(model, batch, format, loss, scope, filter_fn)
    updates = None
    if optimizer is not None:
        parameters = [p for p in exact.model.parameters() if p.grad is not None]
        updates = dict(zip(parameters, _updates(parameters, optimizer), strict=True))
    return _compared(exact, rounded, _grids(rounded, format), updates)


def _compared(
    exact: _Trace,
    rounded: _Trace,
    grids: Mapping[str, Grid],
    updates: Mapping[nn.Parameter, Tensor] | None,
) -> Analysis:
    """Return the analysis of the layers that ran or have gradients of weights."""
    kinds = {name: type(layer).__name__ for name, layer in layers_of(exact.model)}
    met = [
        *exact.outputs,
        *(name for name in kinds if name not in exact.outputs and exact.weights(name)),
    ]
    analysed = [
        _layer(name, kinds[name], grids[name], exact, rounded, updates)
        for name in met
        if name in grids
    ]
    spans = {grid.span for grid in grids.values()}
    limits = next(iter(spans)) if len(spans) == 1 else None
    span = None if limits is None else (math.log2(limits[0]), math.log2(limits[1]))
    return Analysis(", ".join(dict.fromkeys(grid.name for grid in grids.values())), span, analysed)


def _common(format: Any) -> LNSFormat | NumberFormat | None:
    """Return the format of all layers; None if they have different formats."""
    if isinstance(format, Mapping):
        return None
    if not isinstance(format, str):
        made: LNSFormat | NumberFormat = format
        return made
    named = parse(format)
    return named.lns if isinstance(named, Logarithmic) else named


def _grids(rounded: _Trace, format: Any) -> dict[str, Grid]:
    """Return the format of every layer except float32 ones.

    It is the format of the layer's outputs, otherwise of its conversion, otherwise ``format``.
    """
    common, grids = _common(format), {}
    for name, layer in layers_of(rounded.model):
        conversion = getattr(layer, "lns_conversion", None)
        own = rounded.formats.get(name) or (conversion.fmt if conversion is not None else common)
        if own is not None:
            grids[name] = Grid(own)
    return grids
