"""Replicas of a converted module, by torch's DistributedDataParallel with the contract's sums.

torch's wrapper keeps a module's parameters equal on all processes: backward takes the mean of the
gradients over the N processes. Its own mean is one of float32 values, 4 bytes a value on the wire.
Here LNS gradients travel as codes, 2 bytes a value: every process sends each other one its part of
them (all-to-all), takes the contract's mean of what it received, in rank order, and sends that to
all (all-gather), ``2 (N - 1) / N`` times the codes in all. Gradients of float32 parameters (scope
``matmul``, layers left out) are added by torch's all-reduce.

*Bits.* A mean over a power of two divides exactly within the range. So where every process has 64
examples, the number of terms that the contract adds first, N processes end with the bits of one
that has all examples: it adds the same blocks in the same order (:mod:`lns_ops.spec.reference`).
Other numbers give other bits, the same ones on every process.

Limits: the exchange of a bucket is waited for, it does not overlap the rest of backward; buckets
are float32 memory beside the gradients; a loss that is summed over a batch must be multiplied by N,
as with torch's own wrapper.

Source: S. Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
"""

from typing import Any  # no annotations as text: torch compares those of the hook with types

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor, storage_of

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed the function; the old name warns since."""


def distributed_data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a converted module by torch's DistributedDataParallel, with the contract's sums.

    Parameters and buffers become those of the group's first process.

    >>> model = lns_ops.convert_(net, "lns16", scope="everywhere")
    >>> model = lns_ops.distributed_data_parallel(model)

    Args:
        module: on every process the same but for its values; float layers may be among its layers.
        options: those of DistributedDataParallel, such as ``process_group`` and ``device_ids``.

    Raises:
        ValueError: ``gradient_as_bucket_view=True`` or LNS buffers, of which
            DistributedDataParallel would take float32 values.
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
    """Refuse options with which DistributedDataParallel would replace LNS values by float32."""
    if options.get("gradient_as_bucket_view"):
        raise ValueError(
            "gradient_as_bucket_view=True: gradients of LNS parameters would become views of"
            " float32 memory; leave it False"
        )
    buffers = [name for name, b in module.named_buffers() if isinstance(b, LNSTensor)]
    if buffers and options.get("broadcast_buffers", True):
        raise ValueError(
            f"broadcast_buffers=True with LNS buffers ({', '.join(buffers[:3])}): every forward"
            " pass would send them as float32 values; pass broadcast_buffers=False, with which"
            " they are sent once, now"
        )


@torch.no_grad()
def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all processes the tensors of the group's first, as bytes."""
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
