"""A check before every optimizer step that the module still has the optimizer's parameters.

It also rejects LNS parameters in torch's own optimizers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lns_ops.functional.library import is_distributed, refuse_distributed
from lns_ops.optim.adam import Adam, AdamW
from lns_ops.optim.adam_variants import Adamax, Lion, NAdam, RAdam
from lns_ops.optim.adaptive import ASGD, Adadelta, Adagrad, RMSprop, Rprop
from lns_ops.optim.base import LNSOptimizer
from lns_ops.optim.layerwise import LAMB, LARS
from lns_ops.optim.multiplicative import HybridMul, Madam, Mul, SignMul
from lns_ops.optim.sgd import SGD
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor

_OFFERED: tuple[type[LNSOptimizer], ...] = (
    ASGD, LAMB, LARS, SGD, Adadelta, Adagrad, Adam, AdamW, Adamax, HybridMul, Lion, Madam, Mul,
    NAdam, RAdam, RMSprop, Rprop, SignMul,
)  # fmt: skip
_NAMES = [kind.__name__ for kind in _OFFERED]


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Reject a step on replaced parameters, and a torch optimizer's step on LNS parameters.

    Raises:
        ValueError: a parameter was replaced by ``convert_`` or ``revert_``; or a parameter is LNS
            and ``lns_ops.optim`` has an optimizer of the same name; or an LNS parameter is sharded
            over processes.
    """
    if torch.compiler.is_compiling():
        return
    ours = isinstance(optimizer, LNSOptimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, "lns_replaced"):
                raise ValueError(
                    f"parameter of shape {tuple(parameter.shape)} was replaced when its module was"
                    " converted or reverted, so this step would not reach the module: create the"
                    " optimizer after convert_ or revert_. If it was created afterwards, a layer"
                    " outside the converted module still has the parameter: convert the module"
                    " that contains all layers that share it"
                )
            if is_distributed(parameter) and isinstance(parameter.detach().to_local(), LNSTensor):
                refuse_distributed(parameter)
            if not ours and isinstance(parameter, LNSTensor):
                _refuse_stranger(type(optimizer), parameter.fmt)


def _refuse_stranger(kind: type[torch.optim.Optimizer], fmt: LNSFormat) -> None:
    why = (
        f"steps {fmt} parameters, in which a decay such as 0.999 becomes 1 and an update below half"
        " an ulp is lost"
    )
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _NAMES:
        raise ValueError(
            f"torch.optim.{kind.__name__} {why}: use lns_ops.optim.{kind.__name__}(...,"
            " kahan_sum=True)"
        )
    warnings.warn(
        f"{kind.__name__} {why}: prefer an optimizer of lns_ops.optim ({', '.join(_NAMES)})",
        stacklevel=4,
    )


register_optimizer_step_pre_hook(_check_step)
