"""LNS arithmetic on NVIDIA GPUs, through CuPy, equal to :mod:`lns_ops.reference` bit for bit.

The kernels are in ``lns_ops/cuda/src``.

Functions take and return torch CUDA tensors of int16 codes, share memory with them and run on
torch's current stream. So they can be captured in a CUDA graph, after one call outside that
compiles kernels and uploads tables. NVRTC compiles each kernel once for a device and a format; CuPy
caches the machine code on disk (CUPY_CACHE_DIR).

Functions named ``quantize_...`` take float32 tensors and round them to a number format.

Nothing here waits for the GPU. Values without an LNS code (a NaN to encode, a zero divisor, the
root of a negative number) are counted on the device as faults and become zero (an infinity becomes
the largest magnitude). The host raises an error soon after (:mod:`.faults`).

CuPy is optional. Without CuPy or a device every function raises, and :func:`unavailable` returns
the reason. Nothing falls back to the CPU.
"""

from lns_ops.cuda.elementwise import add, decode, div, encode, mul, sqrt, sub
from lns_ops.cuda.faults import check_faults, count_faults_apart, raise_only_when_asked, raise_seen
from lns_ops.cuda.formats import (
    quantize_floats,
    quantize_integers,
    quantize_listed,
    quantize_logarithms,
    random_bits,
)
from lns_ops.cuda.gemm import TILES, Tile, linear, matmul
from lns_ops.cuda.normalization import normalize, normalize_backward
from lns_ops.cuda.rounded_sums import rounded_product
from lns_ops.cuda.runtime import REPLICATED_FRACTION_BITS, kernel_info, unavailable
from lns_ops.cuda.sums import sum
from lns_ops.cuda.updates import (
    adam_update_,
    adam_update_float32_,
    sgd_update_,
    sgd_update_float32_,
)

__all__ = [
    "REPLICATED_FRACTION_BITS", "TILES", "Tile", "adam_update_", "adam_update_float32_", "add",
    "check_faults", "count_faults_apart", "decode", "div", "encode", "kernel_info", "linear",
    "matmul", "mul", "normalize", "normalize_backward", "quantize_floats", "quantize_integers",
    "quantize_listed", "quantize_logarithms", "raise_only_when_asked", "raise_seen",
    "random_bits", "rounded_product", "sgd_update_", "sgd_update_float32_", "sqrt", "sub",
    "sum", "unavailable",
]  # fmt: skip
