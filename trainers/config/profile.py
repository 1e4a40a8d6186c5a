"""The configuration of the profiler: which steps of which ranks are recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.config.validation import at_least, require


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The steps and ranks that torch's profiler records.

    Attributes:
        steps: the first step and the one after the last, counted from 0 over the whole trial; empty
            for none.
        ranks: ranks of the workers that record; empty for all.
    """

    steps: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in self.ranks:
            at_least("profile.ranks", rank, 0, "use for example profile.ranks=[0]")
        require(
            f"profile.steps={list(self.steps)}",
            not self.steps or (len(self.steps) == 2 and 0 <= self.steps[0] < self.steps[1]),
            "must be the first step and the one after the last, counted from 0",
            "use for example [10, 14]",
        )
