"""One all-reduce for every wire format.

After backward, every rank ends with the sum of the gradients over all ranks. The gradients are laid
end to end and cut into one shard a rank. Every rank encodes the shards and sends each to its owner
(all-to-all); the owner adds up what it received in rank order, encodes the sum and sends it to all
(all-gather), so all ranks decode the same bits. A rank sends ``2 (N - 1) / N`` times the encoded
gradient: with two ranks 4 bytes a parameter and step in float32, 2 in the 16-bit formats, 1 in the
8-bit ones.

*Native* LNS gradients travel as their own codes and are added with the contract's sum. With 64
examples a rank this is the order in which one process adds its blocks of 64, so the result is the
same bits as without data parallelism. Native float32 gradients are summed by one all-reduce.

*Error feedback*: a format of 8 bits or less loses too much in one step. What it lost of this rank's
gradient, and of the sum that this rank owns, is kept and added to the values of the next step, so
nothing is lost for good: ``sent = encode(g + e)``, ``e = g + e - decode(sent)``. Both residues are
float32 and belong to the rank's state. Source: S. P. Karimireddy et al. 2019 (arXiv:1901.09847);
for feedback in both directions: H. Tang et al. 2019, "DoubleSqueeze" (arXiv:1905.05957).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lns_ops import LNSTensor
from trainers.comm.codecs import Codec, FloatCodec, make_codec
from trainers.comm.collectives import Collectives
from trainers.config.wire import WireConfig
from trainers.sync.pairwise import pairwise


class ShardedSum:
    """The sum over ranks of one flat float32 tensor a rank, through a codec.

    Args:
        collectives: collectives of the ranks.
        codec: the wire format.
        feedback: whether what the codec loses is kept for the next call, whose tensor must have the
            same length.
        tree: whether ranks, a power of two, are added in pairs (:mod:`trainers.sync.pairwise`)
            instead of in their order.

    Attributes:
        residues: ``own`` (what was lost of this rank's values, ``[N, M]``) and ``owned`` (what was
            lost of the sums of its shard, ``[M]``); empty without feedback or before the first
            call.
    """

    def __init__(
        self, collectives: Collectives, codec: Codec, *, feedback: bool = False, tree: bool = False
    ) -> None:
        self._collectives, self._codec, self._feedback = collectives, codec, feedback
        self._tree = tree
        self.residues: dict[str, Tensor] = {}

    def __call__(self, flat: Tensor) -> Tensor:
        """Return the sum of all ranks' ``flat`` (finite values); the same bits on every rank."""
        ranks = self._collectives.size
        shard = -(-flat.numel() // ranks)
        rows_NM = torch.nn.functional.pad(flat, (0, ranks * shard - flat.numel())).view(
            ranks, shard
        )
        received = self._collectives.all_to_all(self._encode("own", rows_NM))
        total_1M = self._add_up(received, shard).unsqueeze(0)
        gathered = self._collectives.all_gather(self._encode("owned", total_1M).view(-1))
        return self._codec.decode(gathered, shard).view(-1)[: flat.numel()]

    def _add_up(self, payload_NB: Tensor, values: int) -> Tensor:
        """Return the sum of encoded rows, float32 ``[values]``."""
        if not self._tree:
            return self._codec.sum(payload_NB, values)

        def add(a_1B: Tensor, b_1B: Tensor) -> Tensor:
            total = self._codec.sum(torch.cat([a_1B, b_1B]), values)
            return self._codec.encode(total.unsqueeze(0))

        return self._codec.decode(pairwise(payload_NB.split(1), add), values).view(-1)

    def _encode(self, leg: str, x_NM: Tensor) -> Tensor:
        """Encode ``x_NM``; with feedback, add the residue of ``leg`` first and keep the new one."""
        if not self._feedback:
            return self._codec.encode(x_NM)
        if leg in self.residues:
            x_NM = x_NM + self.residues[leg]
        sent = self._codec.encode(x_NM)
        self.residues[leg] = x_NM - self._codec.decode(sent, x_NM.shape[1])
        return sent


class GradientSync:
    """The sum of the gradients of one model over the ranks, step after step.

    Args:
        wire: the wire format; ``powersgd`` has a class of its own.
        collectives: collectives of the replicas.
        tree: whether replicas are added in pairs; native float32 gradients then travel twice
            instead of through one all-reduce, whose order is the backend's.
    """

    def __init__(self, wire: WireConfig, collectives: Collectives, *, tree: bool = False) -> None:
        self._wire, self._collectives, self._tree = wire, collectives, tree
        self._sums: dict[str, ShardedSum] = {}

    def __call__(self, parameters: Iterable[Tensor], *, finite: bool = True) -> bool:
        """Replace each parameter's gradient by its sum over all ranks.

        Args:
            parameters: parameters of the model, the same on every rank.
            finite: False on a rank whose loss is not finite, which may have no gradients.

        Returns:
            Whether all ranks were finite; where one was not, no gradient is changed. For encoded
                formats the gradients themselves must be finite too, since none of them can carry a
                NaN.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._wire.name != "native":
            finite = finite and all(
                bool(g.isfinite().all()) for g in gradients if not isinstance(g, LNSTensor)
            )
        if not self._collectives.all_true(finite):
            return False
        for name, members in self._segments(gradients).items():
            self._sum_segment_(name, members)
        return True

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residues by name; empty where the format keeps none."""
        return {
            f"{name}/{leg}": value
            for name, total in self._sums.items()
            for leg, value in total.residues.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the residues that :meth:`state` returned."""
        for path, value in state.items():
            name, leg = path.split("/")
            self._sharded_sum(name, make_codec(self._wire, None)).residues[leg] = value

    def _segments(self, gradients: list[Tensor]) -> dict[str, list[Tensor]]:
        """Return the gradients that travel together: all, but native codes apart from floats."""
        if self._wire.name != "native":
            return {"all": gradients} if gradients else {}
        codes: list[Tensor] = [g for g in gradients if isinstance(g, LNSTensor)]
        floats = [g for g in gradients if not isinstance(g, LNSTensor)]
        return {
            name: members for name, members in (("codes", codes), ("floats", floats)) if members
        }

    def _sum_segment_(self, name: str, gradients: list[Tensor]) -> None:
        """Replace the gradients of segment ``name`` by their sum over the ranks."""
        first = gradients[0]
        codec = make_codec(self._wire, first.fmt if isinstance(first, LNSTensor) else None)
        if self._tree and codec is None:
            codec = FloatCodec()
        flat = flatten(gradients)
        total = (
            self._collectives.all_reduce_(flat)
            if codec is None
            else self._sharded_sum(name, codec)(flat)
        )
        unflatten_(gradients, total)

    def _sharded_sum(self, name: str, codec: Codec | None) -> ShardedSum:
        """Return the sharded sum of segment ``name``, making it at the first call."""
        if name not in self._sums:
            assert codec is not None
            self._sums[name] = ShardedSum(
                self._collectives, codec, feedback=self._wire.feedback, tree=self._tree
            )
        return self._sums[name]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of ``tensors`` end to end, float32."""
    return torch.cat(
        [(t.to_float() if isinstance(t, LNSTensor) else t).reshape(-1) for t in tensors]
    )


@torch.no_grad()
def unflatten_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Write the values of ``flat``, laid end to end, into ``tensors``.

    LNS tensors take the nearest codes.
    """
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
