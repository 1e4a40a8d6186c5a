"""Gradients sent bucket by bucket while backward still runs.

Backward computes the last layer's gradients first. With ``wire.bucket_cap_mb``, parameters are
grouped in that order into buckets of about that many megabytes of float32 values. As soon as all
gradients of a bucket are ready (in the last micro-batch's backward), it is summed over the replicas
by the same code that :class:`~trainers.sync.all_reduce.GradientSync` runs after backward: on a CPU
by a second thread, on a GPU in a second stream. The step waits for all buckets before it updates,
so only the last bucket, and transfers that backward did not overlap, cost time.

- **Same bits.** A bucket's sum only depends on its own gradients, so the result equals the result
  for the same buckets sent after backward (``wire.overlap=false``). It also equals the result of a
  single bucket if a format treats every value alike. Exceptions are int8, lns8 and top-k, whose
  blocks and choices are per bucket, and float32 all-reduces of more than two replicas, whose order
  of addition depends on the position.
- **Same order on all ranks.** Buckets are sent in a fixed order, independent of the order in which
  their gradients become ready.
- **Divergence.** Buckets are sent before any rank knows whether every replica is finite. A replica
  whose forward or backward raised an error sends zeros for missing gradients, and values that are
  not finite are sent as zeros if the format cannot represent them. At the end all ranks exchange a
  flag, and discard the sums if one replica was not finite.

Source: S. Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704), section 3.2.3.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from trainers.comm.codecs import CodesCodec, LNSCodec, make_codec
from trainers.comm.collectives import Collectives
from trainers.config.wire import WireConfig
from trainers.sync.all_reduce import GradientSync, as_taken, flatten, format_of, unflatten_

MEGABYTE = 1 << 20


def buckets(parameters: Sequence[Tensor], cap_mb: float) -> list[list[Tensor]]:
    """Return ``parameters`` from the last to the first, in buckets of ``cap_mb`` megabytes.

    A bucket ends where it reaches ``cap_mb`` megabytes of float32 values. Its parameters have the
    same format, because native gradients of different formats travel differently.
    """
    found: list[list[Tensor]] = []
    size = 0.0
    for parameter in reversed(parameters):
        new = (
            not found
            or size >= cap_mb * MEGABYTE
            or format_of(found[-1][0]) != format_of(parameter)
        )
        if new:
            found.append([])
            size = 0.0
        found[-1].append(parameter)
        size += 4 * parameter.numel()
    return found


class BucketSync(GradientSync):
    """The sum of gradients over the ranks, bucket by bucket.

    Called as :class:`trainers.sync.all_reduce.GradientSync` is. With ``wire.overlap`` buckets are
    sent by themselves between :meth:`begin_step` and the call.

    Args:
        wire: the wire format, with ``bucket_cap_mb``.
        collectives: collectives of the replicas; nothing else may use their group in between.
        parameters: parameters of the model, in its order.
    """

    def __init__(
        self, wire: WireConfig, collectives: Collectives, parameters: Iterable[Tensor]
    ) -> None:
        assert wire.bucket_cap_mb is not None
        # The sums have collectives of their own: what runs beside backward is not exposed time, and
        # its bytes are counted when all buckets are back.
        super().__init__(wire, Collectives(collectives.group, collectives.device))
        self._agreement = collectives
        self._buckets = buckets([p for p in parameters if p.requires_grad], wire.bucket_cap_mb)
        self._remaining: list[int] = []
        self._next = 0
        self._sent: list[Future[bool] | Tensor] = []
        cuda = torch.device(collectives.device).type == "cuda"
        self._stream = torch.cuda.Stream() if cuda and wire.overlap else None
        self._thread = (
            ThreadPoolExecutor(max_workers=1, initializer=torch.set_num_threads, initargs=(1,))
            if wire.overlap
            else None
        )
        if wire.overlap:
            self._register_hooks()

    def begin_step(self, micro_batches: int) -> None:
        """Expect ``micro_batches`` gradients of every parameter; called before forward."""
        self._remaining = [micro_batches * len(bucket) for bucket in self._buckets]
        self._next, self._sent = 0, []

    def __call__(self, parameters: Iterable[Tensor], *, finite: bool = True) -> bool:
        """Send the remaining buckets, wait for all, and return whether all ranks were finite.

        Same arguments and result as :meth:`trainers.sync.all_reduce.GradientSync.__call__`.
        """
        self._send_until(len(self._buckets))
        with self._agreement.spans("communication", "wait for buckets"):
            if self._stream is not None:  # before a sum is read
                torch.cuda.current_stream().wait_stream(self._stream)
            finite_here = [self._was_finite(sent) for sent in self._sent]
        self._remaining = []
        self._agreement.sent += self._collectives.sent
        self._collectives.sent = 0
        return self._agreement.all_true(finite and all(finite_here))

    def _register_hooks(self) -> None:
        """Register hooks that count gradients, without a reference to this object.

        This object refers to the parameters and they to their hooks; Python cannot collect the
        cycle that a reference from the hooks to this object would close.
        """
        this = weakref.ref(self)
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(_accumulated, this, number))

    def _gradient_added(self, number: int) -> None:
        """Count one more gradient of bucket ``number``, and send the buckets that are complete."""
        if self._remaining:
            self._remaining[number] -= 1
            if number == self._next and not self._remaining[number]:
                self._send_until(
                    next(
                        (i for i in range(number, len(self._buckets)) if self._remaining[i]),
                        len(self._buckets),
                    )
                )

    def _send_until(self, end: int) -> None:
        """Send the buckets before ``end`` that have not been sent."""
        for number in range(self._next, end):
            members = self._buckets[number]
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    self._sent.append(self._sum_bucket(number, members))
            elif self._thread is not None:
                self._sent.append(self._thread.submit(self._sum_bucket_on_cpu, number, members))
            else:
                self._sent.append(self._sum_bucket(number, members))
        self._next = max(self._next, end)

    def _sum_bucket_on_cpu(self, number: int, members: list[Tensor]) -> bool:
        """Sum a bucket, and return whether its values were finite as a bool."""
        return bool(self._sum_bucket(number, members))

    @torch.no_grad()
    def _sum_bucket(self, number: int, members: list[Tensor]) -> Tensor:
        """Replace the members' gradients by their sums; return whether this rank's could be sent.

        The result is a tensor, so that the host does not wait for a GPU.
        """
        codec = make_codec(self._wire, format_of(members[0]))
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        if isinstance(codec, CodesCodec) and {format_of(g) for g in gradients} != {codec.fmt}:
            codec = LNSCodec(codec)  # a hook left floats, which become codes as they are sent
        held = as_taken(gradients, codec)
        flat = flatten(held)
        sendable = torch.ones((), dtype=torch.bool)
        if codec is not None:  # a plain float sum carries values that are not finite
            finite = flat.isfinite()
            flat, sendable = flat.where(finite, 0), finite.all()
        unflatten_(held, self._sum(str(number), flat, codec))
        return sendable

    def _was_finite(self, sent: Future[bool] | Tensor) -> bool:
        """Wait for a bucket, and tell whether its values were finite on this rank."""
        return bool(sent if isinstance(sent, Tensor) else sent.result())


def _accumulated(sync: weakref.ref[BucketSync], number: int, _parameter: Tensor) -> None:
    """Count a gradient of bucket ``number``, if its :class:`BucketSync` still exists."""
    if (alive := sync()) is not None:
        alive._gradient_added(number)
