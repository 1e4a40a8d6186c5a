"""LNS arithmetic on the CPU: fast, and equal to :mod:`lns_ops.reference` bit for bit.

Arrays are numpy int16 codes of an :class:`~lns_ops.format.LNSFormat`; results are C-contiguous.
Operands may be strided, transposed or broadcast views. Kernels run on ``get_num_threads()`` threads
(OMP_NUM_THREADS, otherwise the number of the process's CPUs), outside the GIL; torch's thread count
is not changed.

Kernels are compiled by numba on first use and stored on disk
(:mod:`lns_ops.cpu.compiler.object_cache`), without a C compiler. Matrix products have three
kernels: 16-bit vectors with in-register tables (:mod:`lns_ops.cpu.simd.gemm`) for AVX-512 or AVX2,
and table gathers (:mod:`lns_ops.cpu.kernels.gather_gemm`) for other processors. :func:`kernel_info`
returns the current kernel and the reason. The environment variable ``LNS_OPS_CPU_KERNEL`` forces
one: ``gather``, ``avx2``, or ``simd`` for the better vector kernel.

Shape suffixes: M, K, N of a product; B a batch.
"""

from lns_ops.cpu.compiler.thread_pool import get_num_threads, set_num_threads
from lns_ops.cpu.elementwise import add, div, mul, repeat, sqrt, sub
from lns_ops.cpu.encoding import decode, encode, encode_stochastic, quantize_float, quantize_scaled
from lns_ops.cpu.gemm import matmul, matmul_batched
from lns_ops.cpu.kernel_choice import kernel_info
from lns_ops.cpu.rounded_sums import rounded_product
from lns_ops.cpu.sums import sum
from lns_ops.cpu.updates import (
    adam_update,
    adam_update_float32,
    random_bits,
    sgd_update,
    sgd_update_float32,
)

__all__ = [
    "adam_update", "adam_update_float32", "add", "decode", "div", "encode", "encode_stochastic",
    "get_num_threads", "kernel_info", "matmul", "matmul_batched", "mul", "quantize_float",
    "quantize_scaled", "random_bits", "repeat", "rounded_product", "set_num_threads", "sgd_update",
    "sgd_update_float32", "sqrt", "sub", "sum",
]  # fmt: skip
