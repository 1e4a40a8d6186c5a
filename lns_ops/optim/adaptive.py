"""Optimizers that adapt to each weight's gradients: RMSprop, Adagrad, Adadelta, Rprop, and ASGD.

Equations are evaluated in the order written. For LNS parameters each operation is one LNS
operation, for float parameters a torch operation. ``root(v)`` is the root of a second moment,
stored with 16 more bits below the ulp; ``eps`` is at least the format's smallest magnitude.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack

import torch

from lns_ops.optim import moments
from lns_ops.optim.backend_codes import Codes
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import Rounding, check_range
from lns_ops.optim.composed import ComposedOptimizer


def _check_eps(eps: float) -> None:
    if not 0 < eps < math.inf:
        raise ValueError(f"eps={eps}: must be positive and finite, for example 1e-8")


class RMSprop(ComposedOptimizer):
    """RMSprop, plain or centred, with or without momentum; the update is torch.optim.RMSprop's.

    ::

        g = grad + weight_decay w
        root = root(alpha v + (1 - alpha) g^2)
        centered: mean = alpha mean + (1 - alpha) g;  root = sqrt(root - |mean|) sqrt(root + |mean|)
        direction = g / (root + eps)
        momentum: buffer = direction = momentum buffer + direction
        w += -lr direction

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        alpha: decay of the averages, in [10^-6, 1).
        eps: positive.
        weight_decay: at least 0, added to the gradient.
        momentum: in [0, 1).
        centered: divide by the deviation instead of the root mean square.
        rounding: ``kahan_sum``, ``stochastic_rounding``, ``seed``, ``arithmetic``, ``maximize``:
            :class:`lns_ops.optim.base.Rounding`.

    State: ``step``; ``square_avg`` (float parameters) or ``root_square_avg`` and its residue;
    ``grad_avg``, ``momentum_buffer``.

    Raises:
        ValueError: a value is out of range or underflows in a parameter's format, or ``momentum``
            (or ``alpha`` with ``centered``) rounds to 1 in it.

    Source: T. Tieleman, G. Hinton, lecture 6.5, 2012; A. Graves 2013 (arXiv:1308.0850) for the
    centred form.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
        weight_decay: float = 0.0, momentum: float = 0.0, centered: bool = False,
        **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        check_range("alpha", alpha, 1e-6, 1, "0.99")
        check_range("momentum", momentum, 0, 1, "0.9")
        _check_eps(eps)
        options = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, options, rounding)

    def _decays(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum": group["momentum"]} | (
            {"alpha": group["alpha"]} if group["centered"] else {}
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        grad = x.decayed(group["weight_decay"])
        root = x.root_average("square_avg", grad, group["alpha"])
        if group["centered"]:
            mean = x.absolute(x.average("grad_avg", grad, group["alpha"]))
            root = x.mul(x.sqrt(x.sub(root, mean)), x.sqrt(x.add(root, mean)))
        direction = x.div(
            grad, x.add(root, x.at_least_smallest(torch.tensor(group["eps"], dtype=torch.float64)))
        )
        if group["momentum"]:
            decayed = x.mul(x.number(group["momentum"], "momentum"), x.get("momentum_buffer"))
            direction = x.put("momentum_buffer", x.add(decayed, direction))
        x.descend(direction, group["lr"])

    def _fused(self, x: Codes, group: dict[str, Any]) -> bool:
        if group["centered"]:
            return False
        table, eps = (
            moments.mean_square(group["alpha"], x.fmt.fraction_bits),
            torch.tensor(group["eps"], dtype=torch.float64),
        )
        x.descend(
            x.normed("square_avg", table, eps, group["weight_decay"]),
            group["lr"],
            group["momentum"],
        )
        return True


class Adagrad(ComposedOptimizer):
    """Adagrad; the update is torch.optim.Adagrad's.

    ::

        g = grad + weight_decay w
        root = root(v + g^2)                     v begins with initial_accumulator_value
        w += -lr ((g / (root + eps)) / (1 + (t - 1) lr_decay))

    As ``v`` grows, one more square becomes less than half an ulp of it (at f = 6 after 45 steps).
    The bits below the ulp keep such squares.

    Args:
        params, lr, eps, weight_decay, rounding: as for :class:`RMSprop`.
        lr_decay: at least 0.
        initial_accumulator_value: at least 0.

    State: ``step``; ``sum`` (float parameters) or ``root_sum`` and its residue.

    Raises:
        ValueError: a value out of range, or one that underflows in a parameter's format.

    Source: J. Duchi, E. Hazan, Y. Singer 2011 (jmlr.org/papers/v12/duchi11a.html).
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        check_range("lr_decay", lr_decay, 0, math.inf, "0.01")
        check_range("initial_accumulator_value", initial_accumulator_value, 0, math.inf, "0.1")
        _check_eps(eps)
        options = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(
            params, options | {"initial_accumulator_value": initial_accumulator_value}, rounding
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        grad = x.decayed(group["weight_decay"])
        root = x.root_sum("sum", grad, group["initial_accumulator_value"])
        direction = x.div(
            grad, x.add(root, x.at_least_smallest(torch.tensor(group["eps"], dtype=torch.float64)))
        )
        if group["lr_decay"]:
            direction = x.mul(direction, x.scalar(1 / (1 + (x.steps - 1) * group["lr_decay"])))
        x.descend(direction, group["lr"])

    def _fused(self, x: Codes, group: dict[str, Any]) -> bool:
        if group["lr_decay"] or group["initial_accumulator_value"]:
            return False
        table, eps = (
            moments.sum_square(x.fmt.fraction_bits),
            torch.tensor(group["eps"], dtype=torch.float64),
        )
        x.descend(x.normed("sum", table, eps, group["weight_decay"]), group["lr"])
        return True


class Adadelta(ComposedOptimizer):
    """Adadelta; the update is torch.optim.Adadelta's.

    ::

        g = grad + weight_decay w
        root = root(rho v + (1 - rho) g^2)
        delta = (hypot(root(d), sqrt(eps)) / hypot(root, sqrt(eps))) g
        d = rho d + (1 - rho) delta^2
        w += -lr delta

    ``hypot`` is one operation, rounded once.

    Args:
        params, lr, eps, weight_decay, rounding: as for :class:`RMSprop`.
        rho: decay of both averages, in [10^-6, 1).

    State: ``step``; ``square_avg`` and ``acc_delta`` (float parameters) or their roots and
    residues.

    Raises:
        ValueError: a value out of range, or one that underflows in a parameter's format.

    Source: M. Zeiler 2012 (arXiv:1212.5701).
    """

    def __init__(
        self, params: Any, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6,
        weight_decay: float = 0.0, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        check_range("rho", rho, 1e-6, 1, "0.9")
        _check_eps(eps)
        super().__init__(
            params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}, rounding
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        grad, rho, floor = x.decayed(group["weight_decay"]), group["rho"], math.sqrt(group["eps"])
        below = x.hypotenuse(x.root_average("square_avg", grad, rho), floor)
        delta = x.mul(x.div(x.hypotenuse(x.root("acc_delta"), floor), below), grad)
        x.root_average("acc_delta", delta, rho)
        x.descend(delta, group["lr"])


class Rprop(ComposedOptimizer):
    """Resilient backpropagation, for whole batches; the update is torch.optim.Rprop's.

    ::

        agree = sign(grad) sign(previous)
        size = clamp(size (etaplus, 1 or etaminus for agree = 1, 0, -1), step_sizes)
        g = grad, 0 where agree = -1;  previous = g
        w += -sign(g) size

    ``size`` begins with lr.

    Args:
        params, lr, rounding: as for :class:`RMSprop`.
        etas: (etaminus, etaplus), with 0 < etaminus < 1 < etaplus.
        step_sizes: smallest and largest size; in LNS the smallest is at least the format's smallest
            magnitude.

    State: ``step``, ``prev``, ``step_size``.

    Raises:
        ValueError: a value out of range, or one that underflows in a parameter's format.

    Source: M. Riedmiller, H. Braun 1993 (doi:10.1109/ICNN.1993.298623).
    """

    takes_rate_tensor = False
    _factors: ClassVar[tuple[str, ...]] = ("lr",)

    def __init__(
        self, params: Any, lr: float = 1e-2, etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0), **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        if not 0 < etas[0] < 1 < etas[1] < math.inf:
            raise ValueError(
                f"etas={etas}: must be a factor below 1 and one above it, for example (0.5, 1.2)"
            )
        if not 0 < step_sizes[0] < step_sizes[1] < math.inf:
            raise ValueError(
                f"step_sizes={step_sizes}: must be positive and ascending, for example (1e-6, 50)"
            )
        super().__init__(params, {"lr": lr, "etas": etas, "step_sizes": step_sizes}, rounding)

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        agree = x.mul(x.sign(x.grad), x.sign(x.get("prev")))
        down, up = (x.plain(eta, "etas") for eta in group["etas"])
        factor = torch.where(agree > 0, up, torch.where(agree < 0, down, x.plain(1.0))).to(
            x.weight.dtype
        )
        low, high = (
            x.at_least_smallest(torch.tensor(size, dtype=torch.float64))
            for size in group["step_sizes"]
        )
        size = x.mul(x.first(x.plain(group["lr"], "lr"), x.get("step_size")), factor)
        size = x.put("step_size", x.clamp(size, low, high))
        grad = x.put("prev", torch.where(agree < 0, 0, x.grad))
        x.descend(x.mul(x.sign(grad), size), 1.0)


class ASGD(ComposedOptimizer):
    """SGD with an average of the weights; the update is torch.optim.ASGD's.

    ::

        eta = lr / (1 + lambd lr (t - 1))^alpha,  mu = 1 / max(1, t - 1 - t0)
        g = (grad + weight_decay w) + lambd w
        w += -lr (g (eta / lr))
        ax += mu (w - ax)                                    with Kahan compensation in LNS; w
                                                             itself while mu = 1

    Args:
        params, lr, weight_decay, rounding: as for :class:`RMSprop`.
        lambd: decay, at least 0.
        alpha: how fast the rate falls, at least 0.
        t0: number of steps before averaging starts.

    State: ``step``, ``ax`` (the average), ``ax_compensation`` of LNS parameters.

    Raises:
        ValueError: a value out of range, or one that underflows in a parameter's format.

    Source: B. Polyak, A. Juditsky 1992 (doi:10.1137/0330046).
    """

    _factors: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "lambd")

    def __init__(
        self, params: Any, lr: float = 1e-2, lambd: float = 1e-4, alpha: float = 0.75,
        t0: float = 1e6, weight_decay: float = 0.0, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        for name, value in (("lambd", lambd), ("alpha", alpha), ("t0", t0)):
            check_range(name, value, 0, math.inf, "1e-4")
        options = {"lr": lr, "lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay}
        super().__init__(params, options, rounding)

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        lr, lambd = group["lr"], group["lambd"]
        direction = x.decayed(group["weight_decay"])
        if lambd:
            direction = x.add(direction, x.mul(x.number(lambd, "lambd"), x.weight))
            direction = x.mul(
                direction, x.scalar((1 + lambd * lr * (x.steps - 1)) ** -group["alpha"])
            )
        x.descend(direction, lr)
        x.follow("ax", x.weight, 1 / (x.steps - 1 - group["t0"]).clamp_min(1))
