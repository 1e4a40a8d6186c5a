"""Optimizers with multiplicative updates, which are exact additions in LNS.

``w *= 2^delta`` adds ``delta`` to ``log2 |w|``, so the update is one integer addition without
cancellation. In LNS ``delta`` is an integer in 2^-16 ulps. It is read from a table over the codes
of its argument (float64 on the host, rounded to nearest), so CPU and GPU give the same bits. The
part below one ulp is kept in ``weight_residue`` (int16) with ``kahan_sum=True``, rounded at random
with ``stochastic_rounding=True`` (the expected *logarithm* is exact), and lost otherwise.

A weight keeps its sign, and a zero weight stays zero. So initialize weights with both signs and
biases with nonzero values, or leave the other parameters to another optimizer. Magnitudes stay
within the format's range and above zero.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.optim import moments
from lns_ops.optim.backend_codes import Codes
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import Rounding, check_range, zeros
from lns_ops.optim.composed import ComposedOptimizer
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import FINE_BITS
from lns_ops.tensor import LNSTensor


class MultiplicativeOptimizer(ComposedOptimizer):
    """The base class of these optimizers: the bound on weights, and the residue of logarithms."""

    takes_rate_tensor = False
    _factors: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Any, options: dict[str, Any], rounding: Rounding) -> None:
        scale = options.get("p_scale")
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(
                f"p_scale={scale}: must be positive and finite, for example 3.0, or None for no"
                " bound"
            )
        super().__init__(params, options, rounding)

    def _limit(self, x: ParameterMath, group: dict[str, Any]) -> Tensor | None:
        """Return the bound on weights: ``p_scale`` times their initial root mean square.

        The root mean square is computed before the first step.
        """
        if group["p_scale"] is None:
            return None
        largest = x.get("max_weight")
        if x.weight.is_cuda or int(x.step) == 1:  # a captured graph runs the same code every step
            largest = x.put("max_weight", x.first(group["p_scale"] * x.root_mean_square(), largest))
        return x.at_least_smallest(largest)

    def _split(self, parameter: Tensor, value: Tensor) -> None:
        if not isinstance(parameter, LNSTensor):
            super()._split(parameter, value)
            return
        fmt, weight = parameter.fmt, lns.encode(value, parameter.fmt)
        zeros(self.state[parameter], parameter, "weight_residue")
        parameter.codes.copy_(weight)
        self.state[parameter]["weight_residue"].copy_(_residue(weight, value, fmt))


def _residue(code: Tensor, value: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the exact logarithm of a value minus its code's logarithm, in 2^-16 ulps.

    It is 0 for zeros and for saturated codes.
    """
    unit = 2.0**fmt.fraction_bits
    log = (code & fmt.field_mask).double() - fmt.bias
    lacks = (torch.where(value == 0, 1.0, value).abs().log2() * unit - log) * 2.0**FINE_BITS
    inside = (code & fmt.field_mask > 0) & (lacks.abs() <= 2.0 ** (FINE_BITS - 1))
    return torch.where(inside, lacks.round().clamp(-(2.0**15), 2.0**15 - 1), 0.0).to(torch.int16)


def _sign(weight: Tensor) -> Tensor:
    return torch.where(weight < 0, -1, 1)


class Madam(MultiplicativeOptimizer):
    """Madam, a multiplicative version of Adam; for LNS it is the weight update of LNS-Madam.

    ::

        root = root(beta v + (1 - beta) grad^2)
        n = clamp((grad / (root + eps c)) c, -g_bound, g_bound),   c = sqrt(1 - beta^t)
        w *= exp(-lr sign(w) n)
        |w| <= p_scale rms(w_0)

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size of the natural logarithm, at least 0.
        beta: decay of the second moment, in [10^-6, 1).
        eps: positive; in LNS at least the format's smallest magnitude.
        p_scale: bound on weights relative to their initial root mean square; None for no bound.
        g_bound: bound on the normalised gradient, positive.
        rounding: ``kahan_sum``, ``stochastic_rounding``, ``seed``, ``arithmetic``, ``maximize``:
            :class:`lns_ops.optim.base.Rounding`.

    State: ``step``, ``max_weight`` (float64); ``exp_avg_sq`` (float parameters) or its root and
    residue; ``weight_residue`` (LNS, with ``kahan_sum``) or ``compensation``.

    Raises:
        ValueError: a value out of range, or one that underflows in a parameter's format.

    Source: J. Bernstein et al. 2020 (arXiv:2006.14560); J. Zhao et al., "LNS-Madam", 2022
    (arXiv:2106.13914).

    >>> import lns_ops
    >>> model = lns_ops.convert_(torch.nn.Linear(4, 2, bias=False), "lns12", scope="everywhere")
    >>> optimizer = Madam(model.parameters(), lr=0.01, kahan_sum=True)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: float = 0.01, beta: float = 0.999, eps: float = 1e-8,
        p_scale: float | None = 3.0, g_bound: float = 10.0, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        check_range("beta", beta, 1e-6, 1, "0.999")
        if not 0 < eps < math.inf:
            raise ValueError(f"eps={eps}: must be positive and finite, for example 1e-8")
        if not 0 < g_bound < math.inf:
            raise ValueError(f"g_bound={g_bound}: must be positive and finite, for example 10")
        super().__init__(
            params,
            {"lr": lr, "beta": beta, "eps": eps, "p_scale": p_scale, "g_bound": g_bound},
            rounding,
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        limit, unbiased = self._limit(x, group), self._unbiased(x, group)
        root = x.root_average("exp_avg_sq", x.grad, group["beta"])
        normed = x.div(x.grad, x.add(root, x.at_least_smallest(group["eps"] * unbiased)))
        bound = group["g_bound"]
        normed = x.clamp(
            x.mul(normed, x.scalar(unbiased)),
            x.number(-bound, "g_bound"),
            x.number(bound, "g_bound"),
        )
        self._shrink(x, normed, limit, group)

    def _fused(self, x: Codes, group: dict[str, Any]) -> bool:
        limit, unbiased = self._limit(x, group), self._unbiased(x, group)
        table, eps = (
            moments.mean_square(group["beta"], x.fmt.fraction_bits),
            group["eps"] * unbiased,
        )
        normed = x.normed("exp_avg_sq", table, eps, factor=unbiased, bound=group["g_bound"])
        self._shrink(x, normed, limit, group)
        return True

    @staticmethod
    def _unbiased(x: ParameterMath, group: dict[str, Any]) -> Tensor:
        left: Tensor = 1 - group["beta"] ** x.steps
        return left.sqrt()

    @staticmethod
    def _shrink(
        x: ParameterMath, normed: Tensor, limit: Tensor | None, group: dict[str, Any]
    ) -> None:
        rate = group["lr"] * math.log2(math.e)
        x.shrink(normed, lambda value: rate * value, ("madam", rate), limit)


class Mul(MultiplicativeOptimizer):
    """Multiplicative gradient descent.

    ::

        use_pow: w *= 2^(-lr grad sign(w))
        else:    w *= (1 + lr |grad|)^(-sign(grad) sign(w))

    Args:
        params, lr, rounding: as for :class:`Madam`.
        use_pow: use the first update instead of the second.

    State: ``step``; ``weight_residue`` (LNS, with ``kahan_sum``) or ``compensation``.

    Raises:
        ValueError: a value out of range.

    Source: the optimizer of that name in xlnstorch 1.0; J. Kivinen, M. Warmuth 1997
    (doi:10.1006/inco.1996.2612) for the idea.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, use_pow: bool = False, **rounding: Unpack[Rounding]
    ) -> None:
        super().__init__(params, {"lr": lr, "use_pow": use_pow}, rounding)

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        lr, power = group["lr"], group["use_pow"]

        def change(grad: Tensor) -> Tensor:
            return lr * grad if power else grad.sign() * torch.log1p(lr * grad.abs()) / math.log(2)

        x.shrink(x.grad, change, ("mul", lr, power), None)


class SignMul(MultiplicativeOptimizer):
    """Multiply every weight by ``a`` or ``1 / a`` a step, depending on the gradient's sign.

    ::

        a = 2^lr (use_pow), else 1 + lr
        w *= a^(-sign(grad) sign(w))
        |w| <= p_scale rms(w_0)

    Args:
        params, lr, p_scale, rounding: as for :class:`Madam`.
        use_pow: use the first definition of ``a``.

    State: ``step``, ``max_weight`` (float64); ``weight_residue`` (LNS, with ``kahan_sum``) or
    ``compensation``.

    Raises:
        ValueError: a value out of range.

    Source: the optimizer of that name in xlnstorch 1.0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        p_scale: float | None = 10.0,
        use_pow: bool = False,
        **rounding: Unpack[Rounding],
    ) -> None:
        super().__init__(params, {"lr": lr, "p_scale": p_scale, "use_pow": use_pow}, rounding)

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        factor = group["lr"] if group["use_pow"] else math.log2(1 + group["lr"])
        limit = self._limit(x, group)
        x.shrink(x.grad, lambda grad: factor * grad.sign(), ("signmul", factor), limit)


class HybridMul(MultiplicativeOptimizer):
    """Multiplicative update if the gradient shrinks a weight, otherwise a gradient step.

    ::

        sign(w) = sign(grad), or |grad| < lr, or |w| < lr:  w /= 1 + lr |grad|
        else:                                                w *= max(2^lr, 1 + lr |grad / w|)

    Args:
        params, lr, rounding: as for :class:`Madam`.

    State: ``step``; ``weight_residue`` (LNS, with ``kahan_sum``) or ``compensation``.

    Raises:
        ValueError: a value out of range, or an lr that underflows in a parameter's format.

    Source: the optimizer of that name in xlnstorch 1.0.
    """

    _factors: ClassVar[tuple[str, ...]] = ("lr",)

    def __init__(self, params: Any, lr: float = 0.01, **rounding: Unpack[Rounding]) -> None:
        super().__init__(params, {"lr": lr}, rounding)

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        lr, rate = group["lr"], x.plain(group["lr"], "lr")
        grad, weight = x.absolute(x.grad), x.absolute(x.weight)
        shrink = (_sign(x.weight) == _sign(x.grad)) | (grad < rate) | (weight < rate)
        ratio = x.div(grad, torch.where(weight > 0, weight, x.plain(1.0)))
        less = x.octaves(grad, lambda value: -torch.log1p(lr * value) / math.log(2), ("less", lr))
        more = x.octaves(
            ratio, lambda value: (torch.log1p(lr * value) / math.log(2)).clamp_min(lr), ("more", lr)
        )
        x.multiply(torch.where(shrink, less, more), None)
