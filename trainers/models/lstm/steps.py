"""The steps of an LSTM variant: one by one, or all as one node of autograd's graph.

:mod:`trainers.models.lstm` has the equations. Autograd would record some thirty small operations
per step, and compute the recurrent weights' gradient step by step. Here a step takes ten operations
in forward and five in backward, and a weight's gradient is one product over all steps. On a GPU all
steps are one kernel in forward and one in backward (:mod:`trainers.models.lstm.kernels`).

In backward, dx is the loss's derivative with respect to x, and s_x is the sum from which z or a
gate is computed. Values of step t + 1 are zero at the last step. Factors in capital letters are
computed for all steps at once::

    dy_t    = (given) + R^T ds_{t+1}
    dc_t    = dy_t o* Y_t + C_{t+1} o* dc_{t+1}      Y = o o* h'(c) + p_o o* U
    ds_o,t  = dy_t o* U_t                            U = h(c) o* o (1 - o)
    ds_z,t  = dc_t o* Z_t                            Z = i o* g'(s_z)
    ds_i,t  = dc_t o* I_t                            I = z o* i (1 - i), cifg (z - c_{t-1}) o* ...
    ds_f,t  = dc_t o* F_t                            F = c_{t-1} o* f (1 - f)
                                                     C = f + p_i o* I + p_f o* F

With ``fgr`` the derivative with respect to a gate x also has its part of G^T ds_{t+1}, which enters
ds_x multiplied by x (1 - x).

Source: K. Greff et al. 2015, "LSTM: A Search Space Odyssey" (arXiv:1503.04069), appendix A.

Shape suffixes: B sequences; T steps; H units; K sums of all units, z first; J sums of the gates
only; G gates; S steps, including a step of zeros before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainers.models.lstm import kernels
from trainers.models.lstm.equations import Equations


def step_by_step(
    equations: Equations,
    sums_BTK: Tensor,
    from_output: Callable[[Tensor], Tensor],
    p_GH: Tensor | None,
    from_gates: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the outputs of all steps, by operations that autograd records and LNS supports.

    Args:
        equations: equations of the variant.
        sums_BTK: W x + b of all steps.
        from_output: the product with R.
        p_GH: the peepholes.
        from_gates: the product with G, for ``fgr``.
    """
    width = equations.width
    y_BH = cell_BH = torch.zeros_like(sums_BTK[:, 0, :width])
    gates = torch.zeros_like(sums_BTK[:, 0, width:])
    outputs = []
    for sums_BK in sums_BTK.unbind(1):
        sums_BK = sums_BK + from_output(y_BH)
        if from_gates is not None:
            z_BH, rest = sums_BK.split([width, 3 * width], -1)
            sums_BK = torch.cat([z_BH, rest + from_gates(gates)], -1)
        y_BH, cell_BH, gates = _step(equations, sums_BK, cell_BH, p_GH)
        outputs.append(y_BH)
    return torch.stack(outputs, 1)


def _step(
    equations: Equations, sums_BK: Tensor, cell_BH: Tensor, p_GH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the cell, and for ``fgr`` the gates i, f, o side by side."""
    variant = equations.variant
    z_BH, *rest = sums_BK.chunk(1 + len(equations.gates), -1)
    sums = dict(zip(equations.gates, rest, strict=True))

    def gate(name: str, cell: Tensor) -> Tensor | None:
        if name not in sums:
            return None
        if p_GH is None:
            return torch.sigmoid(sums[name])
        return torch.sigmoid(sums[name] + p_GH[equations.gates.index(name)] * cell)

    z_BH = z_BH if variant == "niaf" else torch.tanh(z_BH)
    i_BH, f_BH = gate("i", cell_BH), gate("f", cell_BH)
    if variant == "cifg":
        assert i_BH is not None
        f_BH = 1 - i_BH
    cell_BH = _passed(z_BH, i_BH) + _passed(cell_BH, f_BH)
    o_BH = gate("o", cell_BH)
    shown = cell_BH if variant == "noaf" else torch.tanh(cell_BH)
    gates = cell_BH
    if variant == "fgr":
        gates = torch.cat([each for each in (i_BH, f_BH, o_BH) if each is not None], -1)
    return _passed(shown, o_BH), cell_BH, gates


def _passed(value: Tensor, gate: Tensor | None) -> Tensor:
    """Return a value multiplied by a gate; an always open gate changes nothing."""
    return value if gate is None else value * gate


def all_steps(
    equations: Equations, sums_BTK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_JJ: Tensor | None
) -> Tensor:
    """Return the outputs of all steps as one node of autograd's graph.

    Args:
        equations: equations of the variant.
        sums_BTK: W x + b of all steps, in floating point.
        R_KH: weights from outputs to sums; all tensors have the same dtype.
        p_GH: the peepholes.
        G_JJ: weights from gates to gates, for ``fgr``.
    """
    arguments = (sums_BTK.contiguous(), R_KH, p_GH, G_JJ, equations)
    y_BTH: Tensor = _Steps.apply(*arguments)  # type: ignore[no-untyped-call]
    return y_BTH


class _Steps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sums_BTK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_JJ: Tensor | None,
        equations: Equations,
    ) -> Tensor:  # fmt: skip
        """Return the outputs of all steps."""
        forward = kernels.forward if kernels.fits(sums_BTK, equations) else _forward
        y_BTH, kept = forward(equations, sums_BTK, R_KH, p_GH, G_JJ)
        ctx.save_for_backward(sums_BTK, R_KH, p_GH, G_JJ, *kept)
        ctx.equations = equations
        return y_BTH

    @staticmethod
    def backward(ctx: Any, grad_BTH: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the sums, R, the peepholes and G."""
        sums_BTK, R_KH, p_GH, G_JJ, *kept = ctx.saved_tensors
        equations: Equations = ctx.equations
        if torch.is_grad_enabled():  # for second derivatives
            return *_recorded(equations, grad_BTH, sums_BTK, R_KH, p_GH, G_JJ), None
        backward = kernels.backward if kernels.fits(sums_BTK, equations) else _backward
        return *backward(equations, grad_BTH, tuple(kept), R_KH, p_GH, G_JJ), None


def _recorded(
    equations: Equations, grad_BTH: Tensor, *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the sums, R, the peepholes and G, in a differentiable form."""
    sums_BTK, R_KH, p_GH, G_JJ = inputs
    assert sums_BTK is not None
    assert R_KH is not None
    from_gates = None if G_JJ is None else partial(linear, weight=G_JJ)
    y_BTH = step_by_step(equations, sums_BTK, partial(linear, weight=R_KH), p_GH, from_gates)
    wanted = [each for each in inputs if each is not None and each.requires_grad]
    found = iter(torch.autograd.grad(y_BTH, wanted, grad_BTH, create_graph=True))
    return tuple(
        next(found) if each is not None and each.requires_grad else None for each in inputs
    )


def _forward(
    equations: Equations, sums_BTK: Tensor, R_KH: Tensor, p_GH: Tensor | None, G_JJ: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of all steps, and the saved values for :func:`_backward`."""
    sums_TBK = sums_BTK.transpose(0, 1).contiguous()
    steps, sequences, _ = sums_TBK.shape
    y_SBH, c_SBH = sums_TBK.new_zeros(2, steps + 1, sequences, equations.width).unbind()
    values_TBK = torch.empty_like(sums_TBK)
    z, i, f, o = (equations.each(values_TBK, name) for name in "zifo")
    early = equations.of(values_TBK, equations.early).unbind()
    gates = values_TBK[..., equations.width :].unbind()
    values, y, c = (array.unbind() for array in (values_TBK, y_SBH, c_SBH))
    shown, R_HK = torch.empty_like(c[0]), R_KH.t()
    for t, sums_BK in enumerate(sums_TBK.unbind()):
        torch.addmm(sums_BK, y[t], R_HK, out=values[t])
        if G_JJ is not None and t:
            torch.addmm(gates[t], gates[t - 1], G_JJ.t(), out=gates[t])
        if p_GH is not None:
            early[t].addcmul_(p_GH[: len(equations.early)], c[t].unsqueeze(1))
        early[t].sigmoid_()
        if equations.variant != "niaf":
            z[t].tanh_()
        if equations.variant == "cifg":
            torch.lerp(c[t], z[t], i[t], out=c[t + 1])
        elif i and f:
            torch.mul(z[t], i[t], out=c[t + 1]).addcmul_(c[t], f[t])
        else:
            torch.addcmul(*((c[t], z[t], i[t]) if i else (z[t], c[t], f[t])), out=c[t + 1])
        if o and p_GH is not None:
            o[t].addcmul_(p_GH[-1], c[t + 1])
        cell = c[t + 1] if equations.variant == "noaf" else torch.tanh(c[t + 1], out=shown)
        if o:
            torch.mul(cell, o[t].sigmoid_(), out=y[t + 1])
        else:
            y[t + 1].copy_(cell)
    y_BTH = y_SBH[1:].transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return y_BTH, (values_TBK, y_SBH, c_SBH)


def _backward(
    equations: Equations, grad_BTH: Tensor, kept: tuple[Tensor, ...], R_KH: Tensor,
    p_GH: Tensor | None, G_JJ: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of the sums, R, the peepholes and G."""
    values_TBK, y_SBH, c_SBH = kept
    grad_TBH = grad_BTH.transpose(0, 1)
    ds_TBK = _of_sums(equations, grad_TBH, values_TBK, c_SBH, R_KH, p_GH, G_JJ)
    later = ds_TBK[1:].flatten(0, 1)
    dR = later.t() @ y_SBH[1:-1].flatten(0, 1)
    dp = dG = None
    if p_GH is not None:
        dp = (equations.of(ds_TBK, equations.early) * c_SBH[:-1].unsqueeze(-2)).sum((0, 1))
        if "o" in equations.gates:
            late = (equations.of(ds_TBK, "o") * c_SBH[1:].unsqueeze(-2)).sum((0, 1))
            dp = torch.cat([dp, late])
    if G_JJ is not None:
        gates = values_TBK[:-1, :, equations.width :].flatten(0, 1)
        dG = later[:, equations.width :].t() @ gates
    return ds_TBK.transpose(0, 1), dR, dp, dG


def _of_sums(
    equations: Equations, grad_TBH: Tensor, values_TBK: Tensor, c_SBH: Tensor, R_KH: Tensor,
    p_GH: Tensor | None, G_JJ: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradients of the sums of all steps."""
    width = equations.width
    D, Y, U, C = (a.unbind() for a in _factors(equations, values_TBK, c_SBH, p_GH))
    ds_TBK = torch.empty_like(values_TBK)
    ds, by_o = ds_TBK.unbind(), equations.each(ds_TBK, "o")
    early = equations.of(ds_TBK, "z" + equations.early).unbind()
    gates_TBK = values_TBK[..., width:]
    slopes = (gates_TBK * (1 - gates_TBK)).unbind() if G_JJ is not None else ()
    dc_BH = torch.zeros_like(c_SBH[0])
    for t in reversed(range(len(ds))):
        dy_BH, of_gates = grad_TBH[t], None
        if t + 1 < len(ds):
            dy_BH = torch.addmm(dy_BH, ds[t + 1], R_KH)
            if G_JJ is not None:
                of_gates = torch.mm(ds[t + 1][:, width:], G_JJ).mul_(slopes[t])
        dc_BH.addcmul_(dy_BH, Y[t])
        if by_o:
            torch.mul(dy_BH, U[t], out=by_o[t])
        if of_gates is not None and p_GH is not None:
            by_o[t].add_(of_gates[:, 2 * width :])
            dc_BH.addcmul_(of_gates[:, 2 * width :], p_GH[2])
        torch.mul(dc_BH.unsqueeze(1), D[t], out=early[t])
        dc_BH.mul_(C[t])
        if of_gates is not None and p_GH is not None:
            ds[t][:, width : 3 * width].add_(of_gates[:, : 2 * width])
            dc_BH.add_((of_gates[:, : 2 * width].unflatten(1, (2, width)) * p_GH[:2]).sum(1))
    return ds_TBK


def _factors(
    equations: Equations, values_TBK: Tensor, c_SBH: Tensor, p_GH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Z, I and F side by side, [T, B, G, H]; Y; U, empty without it; and C, [T, B, H]."""
    gates = {name: equations.of(values_TBK, name).squeeze(-2) for name in "z" + equations.gates}
    z, i, f, o = (gates.get(name) for name in "zifo")
    assert z is not None
    before, c = c_SBH[:-1], c_SBH[1:]
    p = dict(zip(equations.gates, [0.0] * 3 if p_GH is None else p_GH, strict=False))
    side = [torch.ones_like(z) if equations.variant == "niaf" else 1 - z * z]
    C = torch.ones_like(z) if f is None else f
    if i is not None:
        coupled = equations.variant == "cifg"
        side[0] = side[0] * i
        side.append((z - before if coupled else z) * i * (1 - i))
        C = (1 - i if coupled else C) + p["i"] * side[-1]
    if f is not None:
        side.append(before * f * (1 - f))
        C = C + p["f"] * side[-1]
    shown = c if equations.variant == "noaf" else torch.tanh(c)
    Y, U = torch.ones_like(c) if equations.variant == "noaf" else 1 - shown * shown, c[:0]
    if o is not None:
        U = shown * o * (1 - o)
        Y = Y * o + p["o"] * U
    return torch.stack(side, -2), Y, U, C
