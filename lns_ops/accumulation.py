"""The setting that decides how matrix products are summed.

It is defined in :mod:`lns_ops.functional.accumulation`.
"""

from lns_ops.functional.accumulation import (
    check_accumulation,
    get_gradient_accumulation,
    get_matmul_accumulation,
    matmul_accumulation,
    set_gradient_accumulation,
    set_matmul_accumulation,
)
from lns_ops.spec.reference import ACCUMULATIONS

__all__ = [
    "ACCUMULATIONS",
    "check_accumulation",
    "get_gradient_accumulation",
    "get_matmul_accumulation",
    "matmul_accumulation",
    "set_gradient_accumulation",
    "set_matmul_accumulation",
]
