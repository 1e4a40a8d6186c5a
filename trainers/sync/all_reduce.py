"""One all-reduce for every wire format.

After backward, every rank ends with the sum of the gradients over all ranks. The gradients are laid
end to end and cut into one shard a rank. Every rank encodes the shards and sends each to its owner
(all-to-all); the owner adds up what it received in rank order and sends the encoded sum to all
(all-gather), so all ranks decode the same bits. A rank sends ``2 (N - 1) / N`` times the encoded
gradient: with two ranks 4 bytes a parameter and step in float32, 2 in the 16-bit formats, 1 in the
8-bit ones.

*Native* LNS gradients are codes from backward to update: they are laid end to end, sent, added with
the contract's sum and written back as codes, and nothing is encoded or decoded. With 64 examples a
rank this is the order in which one process adds its blocks of 64, so the result is the same bits as
without data parallelism. Native float32 gradients are summed by one all-reduce.

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

from lns_ops import LNSFormat, LNSTensor
from lns_ops.tensor import storage_of
from trainers.comm.codecs import Codec, CodesCodec, FloatCodec, make_codec, sum_rows
from trainers.comm.collectives import Collectives
from trainers.config.wire import WireConfig
from trainers.sync.pairwise import pairwise


class ShardedSum:
    """The sum over ranks of one flat tensor per rank, through a codec.

    Args:
        collectives: collectives of the ranks.
        feedback: whether a codec's encoding errors are added to the tensor of the next call, which
            must have the same length.
        tree: whether ranks, a power of two, are added in pairs (:mod:`trainers.sync.pairwise`)
            instead of in their order.

    Attributes:
        residues: encoding errors ``own`` (of this rank's values, ``[N, M]``) and ``owned`` (of the
            sums of its shard, ``[M]``); empty without feedback or before the first call.
    """

    def __init__(
        self, collectives: Collectives, *, feedback: bool = False, tree: bool = False
    ) -> None:
        self._collectives, self._feedback, self._tree = collectives, feedback, tree
        self.residues: dict[str, Tensor] = {}

    def __call__(self, flat: Tensor, codec: Codec) -> Tensor:
        """Return the sum of all ranks' ``flat``, the same bits on every rank.

        Args:
            flat: finite values that ``codec`` takes, ``[M]``: float32, or int16 codes. The sum is
                of the same type and length.
            codec: the wire format.
        """
        ranks = self._collectives.size
        shard = -(-flat.numel() // ranks)
        rows_NM = torch.nn.functional.pad(flat, (0, ranks * shard - flat.numel())).view(
            ranks, shard
        )
        received = self._collectives.all_to_all(self._encode(codec, "own", rows_NM))
        gathered = self._collectives.all_gather(self._add_up(codec, received, shard).view(-1))
        return codec.decode(gathered, shard).view(-1)[: flat.numel()]

    def _add_up(self, codec: Codec, payload_NB: Tensor, values: int) -> Tensor:
        """Return the encoded sum of encoded rows, uint8 ``[1, B]``."""
        if self._feedback:
            return self._encode(codec, "owned", sum_rows(codec.decode(payload_NB, values)))
        if not self._tree:
            return codec.sum(payload_NB, values)
        rows: tuple[Tensor, ...] = payload_NB.split(1)
        return pairwise(rows, lambda *pair_1B: codec.sum(torch.cat(pair_1B), values))

    def _encode(self, codec: Codec, leg: str, x_NM: Tensor) -> Tensor:
        """Encode ``x_NM``; with feedback, add the residue of ``leg`` first and keep the new one."""
        if not self._feedback:
            return codec.encode(x_NM)
        if leg in self.residues:
            x_NM = x_NM + self.residues[leg]
        sent = codec.encode(x_NM)
        self.residues[leg] = x_NM - codec.decode(sent, x_NM.shape[1])
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
            Whether all ranks were finite; if not, no gradient is changed. With encoded formats the
                gradients themselves must be finite as well, because codes cannot represent NaN.
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
            self._sharded_sum(name).residues[leg] = value

    def _segments(self, gradients: list[Tensor]) -> dict[str, list[Tensor]]:
        """Return the gradients that travel together, by name.

        Where gradients may travel as their own codes, each LNS format travels apart.
        """
        segments: dict[str, list[Tensor]] = {}
        for gradient in gradients:
            fmt = format_of(gradient) if self._wire.name in ("native", "lns16") else None
            segments.setdefault("all" if fmt is None else str(fmt), []).append(gradient)
        return segments

    def _sum_segment_(self, name: str, gradients: list[Tensor]) -> None:
        """Replace the gradients of segment ``name`` by their sum over the ranks."""
        codec = make_codec(self._wire, format_of(gradients[0]))
        if self._tree and codec is None:
            codec = FloatCodec()
        held = as_taken(gradients, codec)
        unflatten_(held, self._sum(name, flatten(held), codec))

    def _sum(self, name: str, flat: Tensor, codec: Codec | None) -> Tensor:
        """Return the sum over the ranks of what segment ``name`` holds."""
        if codec is None:
            return self._collectives.all_reduce_(flat)
        return self._sharded_sum(name)(flat, codec)

    def _sharded_sum(self, name: str) -> ShardedSum:
        """Return the sharded sum of segment ``name``, making it at the first call."""
        if name not in self._sums:
            self._sums[name] = ShardedSum(
                self._collectives, feedback=self._wire.feedback, tree=self._tree
            )
        return self._sums[name]


def format_of(tensor: Tensor) -> LNSFormat | None:
    """Return the format of an LNS tensor, None for another."""
    return tensor.fmt if isinstance(tensor, LNSTensor) else None


def as_taken(tensors: Sequence[Tensor], codec: Codec | None) -> Sequence[Tensor]:
    """Return ``tensors`` as ``codec`` takes them: their codes, or the tensors themselves.

    The codes share memory with the tensors. A :class:`~trainers.comm.codecs.CodesCodec` takes LNS
    tensors of its format only.
    """
    return [storage_of(t) for t in tensors] if isinstance(codec, CodesCodec) else tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of ``tensors`` end to end: float32, or the codes of int16 tensors."""
    return torch.cat(
        [(t.to_float() if isinstance(t, LNSTensor) else t).reshape(-1) for t in tensors]
    )


@torch.no_grad()
def unflatten_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Write the values of ``flat``, laid end to end, into ``tensors``.

    LNS tensors take the nearest codes, int16 tensors the codes in ``flat``.
    """
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
