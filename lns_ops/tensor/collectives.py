"""Reject torch.distributed on LNSTensors, and name the alternatives.

Collectives read memory and add values in their own order. From an LNSTensor they would read float32
memory that does not exist (:mod:`lns_ops.tensor.ops.structure`), and their sums would differ from
the contract. ``DistributedDataParallel`` puts gradients into float32 buffers, ``fully_shard`` cuts
and gathers parameters, tensor parallelism scatters them. Each raises where it starts, with an
alternative that keeps the contract's bits. Codes are ordinary int16 tensors and can be sent as
bytes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lns_ops.tensor.promotion import takes_floats
from lns_ops.tensor.registry import aten, handles

SHARDS = (
    "fully_shard of LNS parameters: FSDP gathers float32 parameters and adds up float32 gradients;"
    " use lns_ops.distributed_data_parallel, where every process has whole layers of 2 bytes a"
    " value, or convert_(model, fmt, scope='matmul'), whose parameters are float32"
)


def refuse(name: str) -> NoReturn:
    """Reject a collective operator.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{name} of an LNSTensor: torch.distributed would read float32 values instead of codes, and"
        " add them in another order. To train replicas, wrap the model by"
        " lns_ops.distributed_data_parallel instead of DistributedDataParallel; FSDP and tensor"
        " parallelism have no LNS form (fully_shard works with scope='matmul'); to send a tensor,"
        " send x.codes.view(torch.uint8) or x.to_float()"
    )


@handles(aten.mul.out)
def _into_bucket(func: Any, x: Any, y: Any, *, out: Any) -> NoReturn:
    """Reject the write to a gradient bucket by DistributedDataParallel without our hook."""
    refuse("DistributedDataParallel's mean")


takes_floats(aten.mul.out)  # a new bucket contains arbitrary values, also NaN: do not encode it
