"""The public names of the package, which :mod:`lns_ops` binds once torch is imported."""

from lns_ops import cpu, cuda, formats, optim, serialization
from lns_ops.analysis import Analysis, analyze
from lns_ops.cuda import check_faults
from lns_ops.functional import decode, encode, flops
from lns_ops.functional.accumulation import (
    get_gradient_accumulation,
    get_matmul_accumulation,
    matmul_accumulation,
    set_gradient_accumulation,
    set_matmul_accumulation,
)
from lns_ops.nn import Conversion, convert_, revert_, summary
from lns_ops.nn.data_parallel import distributed_data_parallel
from lns_ops.nn.float8_linear import product_kind
from lns_ops.nn.graphs import cuda_graph
from lns_ops.nn.loss_scale import LossScale
from lns_ops.nn.own_products import float32_products
from lns_ops.nn.simulate import simulate_
from lns_ops.optim.quantized_updates import quantize_updates_
from lns_ops.spec.format import LNSFormat, NonFiniteError, lns8, lns12, lns16
from lns_ops.tensor import LNSTensor
from lns_ops.tensor import ops as handlers
from lns_ops.tensor.fallback import allow_float_fallback

__all__ = [
    "Analysis",
    "Conversion",
    "LNSFormat",
    "LNSTensor",
    "LossScale",
    "NonFiniteError",
    "allow_float_fallback",
    "analyze",
    "backends",
    "check_faults",
    "convert_",
    "cuda_graph",
    "decode",
    "distributed_data_parallel",
    "encode",
    "float32_products",
    "flops",
    "formats",
    "get_gradient_accumulation",
    "get_matmul_accumulation",
    "handlers",
    "lns8",
    "lns12",
    "lns16",
    "matmul_accumulation",
    "optim",
    "quantize_updates_",
    "revert_",
    "serialization",
    "set_gradient_accumulation",
    "set_matmul_accumulation",
    "simulate_",
    "summary",
]


def backends() -> dict[str, object]:
    """Return which kernels are in use on each device, and why.

    For example ``{"cpu": {"kernel": "simd avx512bw+vbmi", "reason": ...}, "cuda": ...}``.
    """
    return {
        "cpu": {**cpu.kernel_info(), "float8_products": product_kind("cpu")},
        "cuda": {
            **cuda.kernel_info(),
            **({} if cuda.unavailable() else {"float8_products": product_kind("cuda")}),
        },
    }


backends.__module__ = "lns_ops"  # where it is public
