"""LNS arithmetic on NVIDIA GPUs, through CuPy, equal to :mod:`lns_ops.reference` bit for bit.

The kernels are those of ``lns_ops/cuda/src``.

Functions take and return torch CUDA tensors of int16 codes, share memory with them and run on
torch's current stream, so they can be captured in a CUDA graph (after one call outside, which
compiles and uploads tables). Kernels are compiled by NVRTC for the device found and the format
asked for, once; CuPy keeps the machine code on disk (CUPY_CACHE_DIR).

Functions named ``quantize_...`` take float32 and return it, rounded to a number format.

Nothing here waits for the GPU. What LNS has no code for (a NaN to encode, a zero divisor, the root
of a negative) is counted on the device and becomes zero (an infinity the largest magnitude); the
host raises it soon after (:mod:`.faults`).

CuPy is optional. Without it, or without a device, :func:`unavailable` says why and every function
raises; nothing falls back.
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
