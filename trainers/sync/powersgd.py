"""PowerSGD: a gradient matrix travels as two thin factors.

For a parameter of shape ``[O, I]`` every rank keeps its residue ``E_OI``, and all ranks share a
factor ``Q_IR`` of rank ``r``. A step is one power iteration on the sum over ranks, of which only
products with thin matrices travel::

    M = gradient + E
    P = orthonormal(all_reduce(M Q))          O r values
    Q = all_reduce(M^T P)                     I r values
    sum = P Q^T,   E = M - sum / N

so ``sum`` plus all residues is the sum of all M: nothing is lost for good. The bytes that a rank
sends are ``2 (N - 1) / N * 4 r (O + I)`` instead of ``2 (N - 1) / N * 4 O I``. Vectors, and
matrices whose factors would be no smaller, travel as float32.

Q starts from the trial's seed and the parameter's position, the same on every rank. Source: T.
Vogels, S. P. Karimireddy, M. Jaggi 2019, "PowerSGD" (arXiv:1905.13727).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lns_ops import LNSTensor
from trainers.comm.collectives import Collectives
from trainers.config.wire import WireConfig
from trainers.sync.all_reduce import flatten, unflatten_


class PowerSGD:
    """The sum over the ranks of gradients approximated with rank ``wire.rank``.

    Called as :class:`trainers.sync.all_reduce.GradientSync` is.
    """

    def __init__(self, wire: WireConfig, collectives: Collectives, seed: int = 0) -> None:
        self._factor_rank, self._feedback, self._collectives, self._seed = (
            wire.rank,
            wire.feedback,
            collectives,
            seed,
        )
        self._factors: dict[str, Tensor] = {}
        self._residues: dict[str, Tensor] = {}

    def __call__(self, parameters: Iterable[Tensor], *, finite: bool = True) -> bool:
        """Replace each gradient by (nearly) its sum over all ranks.

        Return whether all ranks were finite; if not, no gradient is changed.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        finite = finite and all(
            bool(g.isfinite().all()) for g in gradients if not isinstance(g, LNSTensor)
        )
        if not self._collectives.all_true(finite):
            return False
        exact = [g for g in gradients if not self._factors_are_smaller(g)]
        if exact:
            unflatten_(exact, self._collectives.all_reduce_(flatten(exact)))
        for place, gradient in enumerate(gradients):
            if self._factors_are_smaller(gradient):
                gradient.copy_(self._sum(str(place), flatten([gradient]).view(gradient.shape)))
        return True

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residues and factors by name."""
        parts = (("residue", self._residues), ("factor", self._factors))
        return {f"{kind}/{name}": value for kind, values in parts for name, value in values.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the tensors that :meth:`state` returned."""
        for path, value in state.items():
            kind, name = path.split("/")
            (self._residues if kind == "residue" else self._factors)[name] = value

    def _factors_are_smaller(self, gradient: Tensor) -> bool:
        """Return whether the factors of a gradient have fewer values than the gradient."""
        return gradient.dim() == 2 and self._factor_rank * sum(gradient.shape) < gradient.numel()

    def _sum(self, name: str, matrix_OI: Tensor) -> Tensor:
        """Return the sum of a matrix over the ranks from one power iteration."""
        if name in self._residues:
            matrix_OI = matrix_OI + self._residues[name]
        q_IR = self._factors.get(name)
        if q_IR is None:
            generator = torch.Generator().manual_seed(self._seed * 1_000 + int(name))
            q_IR = torch.randn(matrix_OI.shape[1], self._factor_rank, generator=generator).to(
                matrix_OI.device
            )
        p_OR = torch.linalg.qr(self._collectives.all_reduce_(matrix_OI @ q_IR)).Q.contiguous()
        q_IR = self._collectives.all_reduce_(matrix_OI.t() @ p_OR)
        total_OI: Tensor = p_OR @ q_IR.t()
        self._factors[name] = q_IR
        if self._feedback:
            self._residues[name] = matrix_OI - total_OI / self._collectives.size
        return total_OI
