"""Which of the equations of :mod:`trainers.models.lstm` a variant has, and where its sums lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

GATES = {"nig": "fo", "nfg": "io", "nog": "if", "cifg": "io"}
"""The gates of the variants that do not have all three."""


@dataclass(frozen=True)
class Equations:
    """A variant's equations, and which columns of the sums are whose.

    Attributes:
        variant: ``vanilla`` or what differs from it.
        width: units, H.
    """

    variant: str
    width: int

    @cached_property
    def gates(self) -> str:
        """The gates that the variant computes, of i, f and o."""
        return GATES.get(self.variant, "ifo")

    @cached_property
    def early(self) -> str:
        """The gates that see the cell as it was before the step."""
        return self.gates.removesuffix("o")

    def of(self, values: Tensor, names: str) -> Tensor:
        """Return the columns of neighbours among z and the gates, a view ``[..., G, H]``."""
        first = ("z" + self.gates).index(names)
        columns = values.narrow(-1, first * self.width, len(names) * self.width)
        blocks: Tensor = columns.unflatten(-1, (len(names), self.width))
        return blocks

    def each(self, values_TBK: Tensor, name: str) -> tuple[Tensor, ...]:
        """Return z or a gate at each step, views ``[B, H]``; of an open gate nothing."""
        if name not in "z" + self.gates:
            return ()
        return self.of(values_TBK, name).squeeze(-2).unbind(0)
