"""Loss scaling: gradients that are larger on their way back, and as they were where they arrive.

A narrow format has a smallest magnitude, 2^-16 in lns12, and many gradients of a deep network's
outputs are smaller. Where the gradient of the loss is S times larger, so are they; the gradient of
a parameter is divided by S as it arrives. So optimizers, clipping and all-reduce see the gradients
that they would see without, and what would have underflowed on the way.

S is a power of two, so that in LNS both products are exact: a logarithm moves by whole octaves. It
is constant, as LNS has no infinities by which a scale that is too large could be found; gradients
beyond the largest magnitude saturate. :attr:`lns_ops.Analysis.loss_scale` is one that fits.

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
    """The identity, whose gradient is multiplied by a factor."""

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
"""The number of the last backward pass that went through a scale."""
_scaled = in_two_forms(_Scaled)


class LossScale:
    """A constant factor on all gradients between a loss and the parameters.

    ::

        scale = lns_ops.LossScale(256)
        scale.unscale_(net)                # once
        scale(loss).backward()             # p.grad is that of loss.backward(), with less underflow

    What is added to ``p.grad`` is divided, so ``loss.backward()`` without ``scale`` leaves
    gradients that are too small by the factor. What ``torch.autograd.grad`` returns for parameters
    is divided if it is asked for ``scale(loss)``: it is the gradient of ``loss`` with ``scale`` and
    without. A loss that is scaled in compiled code or under ``torch.func`` gets no such division:
    divide what those return by ``scale.factor``. Scaled gradients saturate at the largest value of
    a format without a warning: in lns12 a factor of 512 clips every gradient beyond 127, and
    nothing checks it while training; ``lns_ops.analyze`` names a factor that fits. In a mean over
    many terms gradients underflow where they arrive, too: sum the loss.

    Args:
        factor: a power of two, 1 or more.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, factor: float) -> None:
        if not (math.isfinite(factor) and factor >= 1 and math.frexp(factor)[0] == 0.5):
            raise ValueError(
                f"factor={factor}: must be a power of two, 1 or more, so that logarithms move by"
                " whole octaves; use for example 256"
            )
        self.factor = float(factor)

    def __call__(self, loss: Tensor) -> Tensor:
        """Return ``loss``, whose value stays and whose gradient is ``factor`` times larger."""
        if self.factor == 1:
            return loss
        return _scaled(loss, self.factor)

    def unscale_(self, module: _Module) -> _Module:
        """Divide the gradient of each parameter by ``factor`` as it arrives, from now on.

        Before every forward pass of ``module`` those of its parameters are found that came since:
        of a copy, a loaded state, or thawed.

        Returns:
            ``module``.

        Raises:
            ValueError: ``1 / factor`` underflows in the format of a layer, or there is another
                factor already.
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
                    f" and with it every gradient; use at most {fmt.most_scale:.0f}"
                )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Have the gradients of all parameters divided, once.

        Raises:
            ValueError: they are divided by another factor.
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

    ``torch.func.functional_call`` puts such weights in a module, as MAML does. A gradient that goes
    on to the parameters is divided there. Only where ``torch.autograd.grad`` returns the weight's
    own gradient it is divided here.
    """

    owner: LossScale
    weight: weakref.ref[Tensor]

    @property
    def factor(self) -> float:
        """The factor of the owner."""
        return self.owner.factor

    @unserializable_hook  # type: ignore[untyped-decorator]
    def divide(self, gradient: Tensor) -> Tensor:
        """Return the gradient divided by the factor if the backward pass ends at the weight."""
        weight = self.weight()
        if weight is None or current_pass() != _scaled_pass or goes_on_after(weight):
            return gradient
        return gradient * (1 / self.factor)
