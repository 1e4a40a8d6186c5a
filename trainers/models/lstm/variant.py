"""An LSTM layer in one of the nine variants by Greff et al. 2015 (:mod:`trainers.models.lstm`).

Shape suffixes: B sequences; T steps; I input features; H units; K sums of all units, z first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainers._compat import transformed, untouched
from trainers.models.init import normal_
from trainers.models.lstm.equations import Equations
from trainers.models.lstm.steps import all_steps, step_by_step

STD = 0.1
"""Standard deviation of the initial weights."""


class VariantLayer(nn.Module):
    """One layer of a variant and dropout after it, ``[B, T, inputs] -> [B, T, width]``.

    One product computes the input terms of all steps; its columns are the sums of z and the gates,
    in the order z, i, f, o.
    """

    def __init__(self, inputs: int, width: int, dropout: float, variant: str) -> None:
        super().__init__()
        self.equations = Equations(variant, width)
        gates = len(self.equations.gates)
        self.from_input = nn.Linear(inputs, (1 + gates) * width)
        normal_(self.from_input, weight=STD, bias=STD)
        self.from_output = nn.Linear(width, (1 + gates) * width, bias=False)
        normal_(self.from_output, weight=STD)
        if variant == "fgr":
            self.from_gates = nn.Linear(3 * width, 3 * width, bias=False)
            normal_(self.from_gates, weight=STD)
        if variant != "np":
            self.peepholes = nn.Parameter(torch.empty(gates, width))
            normal_(self, peepholes=STD)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        sums_BTK = self.from_input(x_BTI)
        variant = self.equations.variant
        p_GH = self.peepholes if variant != "np" else None
        from_gates = self.from_gates if variant == "fgr" else None
        if self._plain(sums_BTK):
            G_JJ = None if from_gates is None else from_gates.weight
            y_BTH = all_steps(self.equations, sums_BTK, self.from_output.weight, p_GH, G_JJ)
        else:
            y_BTH = step_by_step(self.equations, sums_BTK, self.from_output, p_GH, from_gates)
        outputs_BTH: Tensor = self.dropout(y_BTH)
        return outputs_BTH

    def _plain(self, sums: Tensor) -> bool:
        """Return whether the fused steps apply: one floating-point dtype, and unmodified layers.

        LNS, simulated formats, torch.func, hooks and replaced layers need calls of the layers.
        """
        width, kind, dtype = self.equations.width, sums.device.type, sums.dtype
        if type(sums) is not Tensor or kind not in ("cpu", "cuda") or transformed():
            return False
        if torch.is_autocast_enabled(kind) or torch.compiler.is_compiling():
            return False
        layers = {self.from_output: (sums.shape[-1], width)}
        if self.equations.variant == "fgr":
            layers[self.from_gates] = (3 * width, 3 * width)
        return all(
            type(p) is nn.Parameter and p.dtype == dtype and p.device == sums.device
            for p in self.parameters()
        ) and all(
            untouched(layer) and layer.bias is None and layer.weight.shape == shape
            for layer, shape in layers.items()
        )
