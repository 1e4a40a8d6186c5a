"""The equations of :mod:`trainers.models.lstm` that a variant has, and the places of its sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

GATES = {"nig": "fo", "nfg": "io", "nog": "if", "cifg": "io"}
"""Gates of the variants without all three gates."""


@dataclass(frozen=True)
class Equations:
    """A variant's equations, and the assignment of columns to sums.

    Attributes:
        variant: name of the variant, such as ``vanilla``.
        width: number of units, H.
    """

    variant: str
    width: int

    @cached_property
    def gates(self) -> str:
        """The gates among i, f and o that the variant computes."""
        return GATES.get(self.variant, "ifo")

    @cached_property
    def early(self) -> str:
        """The gates whose peepholes see the cell before the step."""
        return self.gates.removesuffix("o")

    def of(self, values: Tensor, names: str) -> Tensor:
        """Return the columns of consecutive ones of z and the gates, as a view ``[..., G, H]``."""
        first = ("z" + self.gates).index(names)
        columns = values.narrow(-1, first * self.width, len(names) * self.width)
        blocks: Tensor = columns.unflatten(-1, (len(names), self.width))
        return blocks

    def each(self, values_TBK: Tensor, name: str) -> tuple[Tensor, ...]:
        """Return z or a gate at each step, as views ``[B, H]``; empty for a gate that is always
        open."""
        if name not in "z" + self.gates:
            return ()
        return self.of(values_TBK, name).squeeze(-2).unbind(0)
