"""LNS operations on int16 codes as torch operators: the interface between tensors and kernels.

Every operator takes codes, and a format as two integers (``bits``, ``fraction_bits``). It has a
kernel per device and a fake kernel (shape and dtype, for ``torch.compile`` and FakeTensor).
Operators are registered with ``torch.library.Library.define/impl`` instead of ``custom_op``, which
saves a few microseconds a call.

>>> import torch
>>> from lns_ops import functional, lns12
>>> x = functional.encode(torch.tensor([1.0, 3.0]), lns12)
>>> functional.decode(functional.add(x, x, lns12), lns12)
tensor([2.0000, 5.9716])

Some operations need no kernel, because sign, magnitude and order can be read from a code: ``neg``,
``absolute``, ``relu`` and the comparisons are plain torch operations on any device.

Shapes follow torch's broadcasting; results are contiguous. Errors are ``ValueError``, and are
raised before any result is written.
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
