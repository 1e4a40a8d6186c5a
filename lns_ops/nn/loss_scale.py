"""Loss scaling: gradients are larger during the backward pass, and unscaled at the parameters.

A narrow format has a smallest magnitude, 2^-16 in lns12, and many activation gradients of a deep
network are smaller. If the loss is multiplied by S, all of them are S times larger. The gradient of
a parameter is divided by S when it arrives. So optimizers, clipping and all-reduce get the same
gradients as without scaling, but including the parts that would have underflowed on the way.

S is a power of two, so both multiplications are exact in LNS: the logarithm changes by a whole
number. S is constant, because a dynamic scale would need infinities to detect overflow, and LNS has
none; gradients beyond the largest magnitude saturate. :attr:`lns_ops.Analysis.loss_scale` suggests
a value.

Source: P. Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2, with a constant factor.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import unserializable_hook

from lns_ops._compat import current_pass, goes_on_after, is_accumulating, tensor_hooks
from lns_ops.nn.products.two_forms import in_two_forms
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor

_Module = TypeVar("_Module", bound=nn.Module)


class _Scaled(torch.autograd.Function):
    """The identity, with its gradient multiplied by a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loss: Tensor, factor: float) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        global _scaled_pass
        if not torch.compiler.is_compiling():
            _scaled_pass = current_pass()
        return gradient * ctx.factor, None


_scaled_pass = -1
"""The id of the last backward pass that went through a scale."""
_scaled = in_two_forms(_Scaled)


class LossScale:
    """A constant factor on all gradients between a loss and the parameters.

    >>> net = nn.Linear(2, 1)
    >>> scale = LossScale(256)
    >>> net = scale.unscale_(net)  # once
    >>> scale(net(torch.ones(1, 2)).sum()).backward()
    >>> net.weight.grad  # the gradient of the unscaled loss, with less underflow
    tensor([[1., 1.]])

    Every gradient that is added to ``p.grad`` is divided by the factor, so ``loss.backward()``
    without ``scale`` leaves gradients that are too small by the factor. For parameters
    ``torch.autograd.grad`` returns the gradients of ``loss``, with ``scale`` and without. In
    compiled code and under ``torch.func`` gradients are not divided; divide them by
    ``scale.factor``.

    Scaled gradients saturate at the format's largest value without a warning: in lns12 a factor of
    512 clips every gradient beyond 127. Nothing checks this during training; ``lns_ops.analyze``
    suggests a factor. In a mean over many terms gradients also underflow at the parameters, which
    scaling does not prevent: sum the loss instead.

    Args:
        factor: a power of two, 1 or more.

    Raises:
        ValueError: ``factor`` is not a power of two of at least 1.
    """

    def __init__(self, factor: float) -> None:
        if not (math.isfinite(factor) and factor >= 1 and math.frexp(factor)[0] == 0.5):
            raise ValueError(
                f"factor={factor}: must be a power of two, 1 or more, so that logarithms change by"
                " whole numbers; use for example 256"
            )
        self.factor = float(factor)

    def __call__(self, loss: Tensor) -> Tensor:
        """Return ``loss`` with the same value and a gradient that is ``factor`` times larger."""
        if self.factor == 1:
            return loss
        return _scaled(loss, self.factor)

    def unscale_(self, module: _Module) -> _Module:
        """Divide the gradient of each parameter by ``factor`` when it arrives, from now on.

        Before every forward pass of ``module``, parameters that were added since (by a copy, a
        loaded state, or unfreezing) are included.

        Returns:
            ``module``.

        Raises:
            ValueError: ``1 / factor`` underflows in the format of a layer, or the module has
                another factor already.
        """
        if self.factor == 1:
            return module
        for name, layer in module.named_modules():
            self._check(name or "the module", layer)
        self._watch(module)
        module.register_forward_pre_hook(self._before_forward)
        return module

    def _check(self, name: str, layer: nn.Module) -> None:
        fmt = getattr(layer, "fmt", None)  # of scope matmul
        formats = {fmt} if isinstance(fmt, LNSFormat) else set()
        formats |= {p.fmt for p in layer.parameters(recurse=False) if isinstance(p, LNSTensor)}
        for fmt in formats:
            if self.factor > fmt.most_scale:
                raise ValueError(
                    f"factor={self.factor:.0f} for {name} in {fmt}: its inverse underflows there,"
                    f" so every gradient would be zero; use at most {fmt.most_scale:.0f}"
                )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Add the division to the gradients of all parameters, once each.

        Raises:
            ValueError: the gradients are divided by another factor already.
        """
        for parameter in module.parameters():
            known = [
                owner.factor
                for hook in tensor_hooks(parameter)
                if isinstance(owner := getattr(hook, "__self__", None), LossScale | _DivideAtEnd)
            ]
            if known and known[0] != self.factor:
                raise ValueError(
                    f"factor={self.factor:.0f} for parameters whose gradients are divided by"
                    f" {known[0]:.0f} already: use one LossScale for a module"
                )
            if known or not parameter.requires_grad or is_lazy(parameter):
                continue
            if parameter.is_leaf:
                parameter.register_hook(self._divide)
            else:
                parameter.register_hook(_DivideAtEnd(self, weakref.ref(parameter)).divide)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _divide(self, gradient: Tensor) -> Tensor:
        if is_accumulating() or current_pass() == _scaled_pass:
            return gradient * (1 / self.factor)
        return gradient


@dataclass(frozen=True)
class _DivideAtEnd:
    """The division of the gradient of a weight that was computed from parameters.

    ``torch.func.functional_call`` puts such weights into a module, as MAML does. If the backward
    pass continues to the parameters, the gradient is divided there. It is divided here only if
    ``torch.autograd.grad`` returns the weight's own gradient.
    """

    owner: LossScale
    weight: weakref.ref[Tensor]

    @property
    def factor(self) -> float:
        """The factor of the owner."""
        return self.owner.factor

    @unserializable_hook  # type: ignore[untyped-decorator]
    def divide(self, gradient: Tensor) -> Tensor:
        """Return the gradient, divided by the factor if the backward pass ends at the weight."""
        weight = self.weight()
        if weight is None or current_pass() != _scaled_pass or goes_on_after(weight):
            return gradient
        return gradient * (1 / self.factor)
