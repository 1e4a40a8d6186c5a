"""What a caller adds to the Tuner of a study. Loads no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class TuneOptions:
    """What a caller adds, and what comes back.

    Attributes:
        run_config: a ``ray.tune.RunConfig`` with callbacks, name, storage and verbosity, or None.
        results: the ``ResultGrid`` of the last run.
    """

    run_config: Any = None
    results: Any = None
