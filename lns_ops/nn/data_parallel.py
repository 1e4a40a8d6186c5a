"""Data parallel training of converted modules: torch's DistributedDataParallel with LNS sums.

torch's wrapper keeps a module's parameters equal on all N processes: the backward pass computes the
mean of their gradients. torch's own mean is in float32 and sends 4 bytes a value. Here LNS
gradients are sent as codes, 2 bytes a value. Every process sends each other process its part
(all-to-all), computes the contract's mean of what it received, in rank order, and sends the result
to all (all-gather). In total it sends ``2 (N - 1) / N`` times the codes. Gradients of float32
parameters (scope ``matmul``, layers left out) use torch's all-reduce.

*Bits.* A mean over a power of two divides exactly within the range, and the contract first adds
blocks of 64 terms. So if every process has 64 examples, N processes compute the same bits as one
process with all examples, because the same blocks are added in the same order
(:mod:`lns_ops.spec.reference`). With other numbers of examples the bits differ from a single
process, but are the same on all processes.

Limits: the exchange of a bucket does not overlap with the rest of the backward pass; buckets are
float32 memory in addition to the gradients; if the loss is a sum over the batch, multiply it by N,
as with torch's own wrapper.

Source: S. Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
"""

from typing import Any  # annotations are objects: torch checks the types of the hook's parameters

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor, storage_of

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed the function; the old name has been warning since then."""


def distributed_data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a converted module in torch's DistributedDataParallel, with the contract's sums.

    Parameters and buffers of all processes get the values of the group's first process::

        model = lns_ops.convert_(net, "lns16", scope="everywhere")
        model = lns_ops.distributed_data_parallel(model)

    Args:
        module: the same module on every process, except for its values; some layers may be float.
        options: options of DistributedDataParallel, such as ``process_group`` and ``device_ids``.

    Raises:
        ValueError: ``gradient_as_bucket_view=True``, or LNS buffers with ``broadcast_buffers=True``
            (the default), because DistributedDataParallel would replace LNS values by float32.
    """
    parameters = list(module.parameters())
    if any(isinstance(p, LNSTensor) for p in parameters):
        _check(module, options)
    group = options.get("process_group")
    if options.get("init_sync", True):
        _broadcast([*parameters, *module.buffers()], group)
    wrapped = DistributedDataParallel(module, **{**options, "init_sync": False})
    wrapped.register_comm_hook(group, _mean_hook)
    return wrapped


def _check(module: nn.Module, options: dict[str, Any]) -> None:
    """Reject options with which DistributedDataParallel would replace LNS values by float32."""
    if options.get("gradient_as_bucket_view"):
        raise ValueError(
            "gradient_as_bucket_view=True: gradients of LNS parameters would become views of"
            " float32 memory; leave it False"
        )
    buffers = [name for name, b in module.named_buffers() if isinstance(b, LNSTensor)]
    if buffers and options.get("broadcast_buffers", True):
        raise ValueError(
            f"broadcast_buffers=True with LNS buffers ({', '.join(buffers[:3])}): every forward"
            " pass would send them as float32 values; pass broadcast_buffers=False to send them"
            " only once, now"
        )


@torch.no_grad()
def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the tensors of the group's first process to all processes, as bytes."""
    for tensor in tensors:
        memory = storage_of(tensor.detach())
        sent = memory.reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(sent, group=group, group_src=0)
        memory.copy_(sent.view(memory.dtype).view(memory.shape))


def _mean_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket, float32 ``[M]``, over the processes of ``group``."""
    kinds: dict[LNSFormat | None, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        kind = parameter.fmt if isinstance(parameter, LNSTensor) else None
        kinds.setdefault(kind, []).append(gradient)
    for fmt, gradients in kinds.items():
        flat_M = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if fmt is None:
            dist.all_reduce(flat_M, group=group)
            flat_M /= dist.get_world_size(group)
        else:
            flat_M = lns.decode(_mean_codes(lns.encode(flat_M, fmt), fmt, group), fmt)
        for gradient, mean in zip(
            gradients, flat_M.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(mean.view(gradient.shape))
    buffer = bucket.buffer()
    done: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    done.set_result(buffer)
    return done


def _mean_codes(codes_M: Tensor, fmt: LNSFormat, group: dist.ProcessGroup | None) -> Tensor:
    """Return the contract's mean of all processes' codes, in rank order."""
    processes = dist.get_world_size(group)
    part = -(-codes_M.numel() // processes)
    codes_NP = torch.nn.functional.pad(codes_M, (0, processes * part - codes_M.numel()))
    sent = codes_NP.view(torch.uint8)
    received, gathered = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean_P = lns.mean(received.view(torch.int16).view(processes, part), [0], fmt)
    _all_gather(gathered, mean_P.view(torch.uint8), group=group)
    return gathered.view(torch.int16)[: codes_M.numel()]
