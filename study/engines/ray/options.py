"""What a caller adds to the Tuner of a study. Loads no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TuneOptions:
    """What a caller adds.

    Attributes:
        run_config: a ``ray.tune.RunConfig`` with callbacks, name, storage and verbosity, or None.
    """

    run_config: Any = None
