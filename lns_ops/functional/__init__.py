"""LNS operations on int16 codes as torch operators: the interface between tensors and kernels.

Every operator takes codes and a format as two integers (``bits``, ``fraction_bits``), has a fake
kernel (shape and dtype, for ``torch.compile`` and FakeTensor) and a kernel per device. They are
registered through ``torch.library.Library.define/impl`` rather than ``custom_op``, which costs a
few microseconds less a call.

What needs no kernel is plain torch on codes: sign, magnitude and order can be read off a code, so
``neg``, ``absolute``, ``relu`` and the comparisons run on any device as they are.

Shapes follow torch's broadcasting; results are contiguous. Errors are ``ValueError``; none leaves a
result half written.
"""

from lns_ops.functional.elementwise import (
    absolute,
    add,
    decode,
    div,
    encode,
    encode_number,
    from_key,
    logarithm_beyond,
    mul,
    neg,
    number_code,
    order_key,
    relu,
    select,
    shifted,
    sign,
    sqrt,
    square,
    sub,
    within,
)
from lns_ops.functional.reductions import linear, matmul, mean, norm, sum
from lns_ops.functional.updates import (
    adam_update_,
    adam_update_float32_,
    sgd_update_,
    sgd_update_float32_,
)

__all__ = [
    "absolute", "adam_update_", "adam_update_float32_", "add", "decode", "div", "encode",
    "encode_number", "from_key", "linear", "logarithm_beyond", "matmul", "mean", "mul", "neg",
    "norm", "number_code", "order_key", "relu", "select", "sgd_update_",
    "sgd_update_float32_", "shifted", "sign", "sqrt", "square", "sub", "sum", "within",
]  # fmt: skip
