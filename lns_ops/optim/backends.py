"""Which ParameterMath a parameter takes: of floats, of codes, or of codes in float32."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lns_ops.optim.backend_codes import Codes, Decoded
from lns_ops.optim.backend_float import Floats
from lns_ops.optim.parameter_math import ParameterMath
from lns_ops.tensor import LNSTensor


def math_of(parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None) -> ParameterMath:
    """The numbers of a parameter that has a gradient."""
    if not isinstance(parameter, LNSTensor):
        return Floats(parameter, state, group, key)
    return (Decoded if group["arithmetic"] == "float32" else Codes)(parameter, state, group, key)
