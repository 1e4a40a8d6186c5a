"""Weight updates in any number format, around an ordinary optimizer.

:func:`quantize_updates_` adds hooks to an optimizer, so that each step

1. rounds the gradients to their format (and undoes loss scaling),
2. computes the update in float32, as the optimizer does,
3. rounds the new weights to their format, in one of three ways::

    plain        w = q(w + u)
    Kahan        new = q(w + (c + u));  c = q_c((c + u) - (new - w));  w = new
    stochastic   w = q(w + u), up or down at random with the exact sum as its expected value

where ``u`` is the update. ``q_c`` rounds to :attr:`~lns_ops.formats.NumberFormat.compensation`.
With ``master_format`` the optimizer and the three lines work on *master* copies of the weights in
that format, which are kept in the optimizer's state. The model holds their values rounded to its
own format (P. Micikevicius et al., "Mixed precision training", 2018, arXiv:1710.03740). The
optimizer's moments are float32.

Additional optimizer state, included in ``state_dict``: ``compensation``, ``master``,
``rounding_step``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lns_ops.formats import NumberFormat, parse, random_bits
from lns_ops.nn.simulate import Simulation, update_loss_scale_


def quantize_updates_(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    *,
    kahan_sum: bool = False,
    stochastic_rounding: bool = False,
    seed: int = 0,
    master_format: NumberFormat | str | None = None,
) -> torch.optim.Optimizer:
    """Keep the parameters of ``module`` in their number formats when ``optimizer`` steps, in place.

    >>> import torch, lns_ops
    >>> model = lns_ops.simulate_(torch.nn.Linear(4, 2), "float8_e4m3fn")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = quantize_updates_(optimizer, model, kahan_sum=True)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()

    Args:
        optimizer: any optimizer with torch's interface; it computes in float32 and is called
            without a closure.
        module: result of :func:`~lns_ops.nn.simulate.simulate_`.
        kahan_sum: keep a compensation for each parameter.
        stochastic_rounding: round weights at random; the bits depend only on (seed, parameter,
            step).
        seed: seed of the random rounding, 0 to 2^31 - 1.
        master_format: format of more precise copies of the weights; None for no copies.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: no parameter of ``module`` has a number format, ``master_format`` is unknown, or
            both ways of rounding are selected.
    """
    if kahan_sum and stochastic_rounding:
        raise ValueError(
            "kahan_sum=True, stochastic_rounding=True: both save the part of an update that"
            " rounding would lose, so one is enough; choose one"
        )
    master = parse(master_format) if isinstance(master_format, str) else master_format
    updates = _Updates(optimizer, module, kahan_sum, seed if stochastic_rounding else None, master)
    optimizer.register_step_pre_hook(updates.before)
    optimizer.register_step_post_hook(updates.after)
    return optimizer


class _Updates:
    """The two hooks of a step, and the values that the first leaves for the second."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        kahan_sum: bool,
        seed: int | None,
        master: NumberFormat | None,
    ) -> None:
        self._kahan_sum, self._seed, self._master = kahan_sum, seed, master
        owners: dict[Tensor, Simulation] = {}
        for layer in module.modules():
            if isinstance(simulation := getattr(layer, "simulation", None), Simulation):
                owners |= dict.fromkeys(layer.parameters(recurse=False), simulation)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters: list[tuple[int, Tensor, Simulation]] = [
            (index, p, owners[p]) for index, p in enumerate(stepped) if p in owners
        ]
        if not self._parameters:
            raise ValueError(
                "module has no parameter in a number format that the optimizer steps; call"
                " lns_ops.nn.simulate.simulate_ first"
            )
        self._old: dict[Tensor, Tensor] = {}
        self._finite: Tensor | None = None
        if master is not None:
            for _, parameter, _ in self._parameters:
                optimizer.state[parameter]["master"] = master.quantize(parameter.detach())

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Round gradients to their grid and copy master weights into the parameters."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError(
                "step(closure): gradients are rounded before the step, but a closure computes them"
                " during it; call backward() before step()"
            )
        active = [(p, simulation) for _, p, simulation in self._parameters if p.grad is not None]
        for parameter, simulation in active:
            assert parameter.grad is not None
            parameter.grad.copy_(simulation.gradient(parameter.grad))
        self._guard(active)
        for parameter, _ in active:
            if self._master is not None:
                state = optimizer.state[parameter]
                if "master" not in state:  # loaded from a checkpoint without it
                    state["master"] = self._master.quantize(parameter)
                parameter.copy_(state["master"])
            self._old[parameter] = parameter.detach().clone()

    def _guard(self, active: list[tuple[Tensor, Simulation]]) -> None:
        """Note whether a scaled gradient overflowed; if so, set the gradients to zero."""
        gradients = [p.grad for p, simulation in active if simulation.scaled and p.grad is not None]
        self._finite = (
            torch.stack([grad.isfinite().all() for grad in gradients]).all() if gradients else None
        )
        if self._finite is not None:
            for grad in gradients:
                grad.copy_(torch.where(self._finite, grad, 0))

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Round new weights to their formats."""
        for index, parameter, simulation in self._parameters:
            if (old := self._old.pop(parameter, None)) is None:
                continue
            state, fmt = optimizer.state[parameter], self._master or simulation.format
            stepped = (
                parameter if self._finite is None else torch.where(self._finite, parameter, old)
            )
            new = self._rounded(index, fmt, old, stepped, state)
            if self._master is not None:
                state["master"].copy_(new)
                new = simulation.format.quantize(new)
            parameter.copy_(new)
        if self._finite is not None:
            update_loss_scale_(self._parameters[0][2].root, self._finite)

    def _rounded(
        self, index: int, fmt: NumberFormat, old: Tensor, new: Tensor, state: dict[str, Any]
    ) -> Tensor:
        """Round ``new``, computed from ``old`` in float32, to ``fmt``."""
        if self._kahan_sum:
            if "compensation" not in state:
                state["compensation"] = torch.zeros_like(old)
            carried = state["compensation"] + (new - old)
            rounded = fmt.quantize(old + carried)
            state["compensation"].copy_(fmt.compensation.quantize(carried - (rounded - old)))
            return rounded
        if self._seed is None:
            return fmt.quantize(new)
        if "rounding_step" not in state:
            state["rounding_step"] = torch.zeros((), dtype=torch.int64, device=old.device)
        # torch's load_state_dict converts it to float
        step = state["rounding_step"].add_(1).to(torch.int64)
        return fmt.quantize(new, random_bits(new, self._seed << 32 | index, step))
