"""The base class of optimizers that are composed of the operations of
:mod:`lns_ops.optim.backends`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from lns_ops.optim.backend_codes import Codes, decay_codes, math_of
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import LNSOptimizer, Rounding, scalar_code
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference_updates import check_adam

ROUNDING: Rounding = {
    "kahan_sum": False,
    "stochastic_rounding": False,
    "seed": 0,
    "arithmetic": "lns",
    "maximize": False,
}
"""The defaults of :class:`Rounding`."""


def complete(rounding: Rounding) -> dict[str, Any]:
    """Return ``rounding`` with defaults for the missing options.

    Raises:
        TypeError: an unknown option.
    """
    if unknown := sorted(rounding.keys() - ROUNDING.keys()):
        raise TypeError(
            f"unexpected arguments {', '.join(unknown)}: optimizers here also take"
            f" {', '.join(sorted(ROUNDING))}"
        )
    return {**ROUNDING, **rounding}


class ComposedOptimizer(LNSOptimizer):
    """An optimizer written as a sequence of operations, the same for LNS and float parameters.

    On an LNS parameter every operation is an LNS operation, with the same bits on any device, or
    with ``arithmetic="float32"`` a float32 operation on decoded codes. The sum of weight and update
    is rounded as in :class:`~lns_ops.optim.SGD`.
    """

    _factors: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    """Options that the update multiplies by. They must not underflow in the parameter's format."""

    def __init__(self, params: Any, options: dict[str, Any], rounding: Rounding) -> None:
        if not 0 <= options.get("weight_decay", 0.0) < float("inf"):
            raise ValueError(
                f"weight_decay={options['weight_decay']}: must be finite and at least 0, for"
                " example 0.01"
            )
        super().__init__(params, options | complete(rounding))

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        if group["arithmetic"] == "float32":
            return
        for name in self._factors:
            scalar_code(name, float(group.get(name, 0.0)), fmt)
        for name, decay in self._decays(group).items():
            if decay:
                decay_codes(decay, name, fmt)

    def _decays(self, group: dict[str, Any]) -> dict[str, float]:
        """Return the decays of averages of signed numbers; these must not round to 1."""
        return {}

    def _update(
        self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        x = math_of(parameter, state, group, key)
        x.step.add_(1)
        if not (isinstance(x, Codes) and x.fused and self._fused(x, group)):
            self._step(x, group)

    def _fused(self, x: Codes, group: dict[str, Any]) -> bool:
        """Run :meth:`_step` with fused kernels, which give the same bits.

        Returns False if no kernel supports the group's options.
        """
        return False

    @abstractmethod
    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        """Update the weight of ``x``."""


class WithBetas(ComposedOptimizer):
    """A composed optimizer with two ``betas``, as in Adam: the decays of the gradient's average and
    of a second average.
    """

    def __init__(
        self, params: Any, betas: tuple[float, float], options: dict[str, Any], rounding: Rounding
    ) -> None:
        if len(betas) != 2:
            raise ValueError(f"betas={betas}: must be two decays, for example (0.9, 0.999)")
        check_adam(*betas, options.get("eps", 1e-8))
        super().__init__(params, options | {"betas": betas}, rounding)

    def _decays(self, group: dict[str, Any]) -> dict[str, float]:
        return {"beta1": group["betas"][0]}


def adam_direction(x: ParameterMath, grad: Tensor, group: dict[str, Any]) -> Tensor:
    """Return ``correction (exp_avg / (root + eps_hat))`` of :class:`lns_ops.optim.Adam`.

    With ``amsgrad`` the root is the largest so far.
    """
    beta1, beta2 = group["betas"]
    average, root = x.average("exp_avg", grad, beta1), x.root_average("exp_avg_sq", grad, beta2)
    if group.get("amsgrad"):
        root = x.largest("max_root", root, 1.0)
    unbiased = (1 - beta2**x.steps).sqrt()
    quotient = x.div(average, x.add(root, x.at_least_smallest(group["eps"] * unbiased)))
    return x.mul(quotient, x.scalar(unbiased / x.gain(beta1)))
