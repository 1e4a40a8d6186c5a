"""Refusal of torch.distributed on LNSTensors, with what to use instead.

Collectives read memory, and add it up in an order of their own: of an LNSTensor they would take
float32 values that it has not (:mod:`lns_ops.tensor.ops.structure`), or sums that are not the
contract's. ``DistributedDataParallel`` puts gradients into float32 buffers, ``fully_shard`` cuts
and gathers parameters, tensor parallelism scatters them. Each is refused where it starts, with
what does the same with the contract's bits. Codes are ordinary int16 tensors, which may travel as
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
    """Refuse an operator between processes.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{name} of an LNSTensor: torch.distributed would read float32 values where there are"
        " codes, and add them in an order of its own. To train replicas, wrap the model by"
        " lns_ops.distributed_data_parallel instead of DistributedDataParallel; FSDP and tensor"
        " parallelism have no LNS form (fully_shard takes scope='matmul'); to send a tensor, send"
        " x.codes.view(torch.uint8) or x.to_float()"
    )


@handles(aten.mul.out)
def _into_bucket(func: Any, x: Any, y: Any, *, out: Any) -> NoReturn:
    """Refuse what DistributedDataParallel does to gradients without a hook of ours."""
    refuse("DistributedDataParallel's mean")


takes_floats(aten.mul.out)  # a bucket holds anything before, NaN too: nothing to encode
