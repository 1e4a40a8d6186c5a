"""Expected time of a trial, from the times of earlier trials like it.

The seconds per epoch are the median over trials that computed the same way: same model, data,
precision, optimizer, batch size, workers, threads and device. Seeds, learning rates and the number
of epochs change nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable

from study.ledger.log import readable_ledgers
from study.ledger.state import StudyState, TrialState, fold
from study.ledger.storage import study_folders
from study.plan.identity import pace_key
from study.plan.trials import PlannedTrial
from trainers.object_store import is_url


def seconds_an_epoch(states: Iterable[StudyState]) -> dict[str, float]:
    """Return the median seconds per epoch by :func:`pace_key`.

    Trials count once they have reported two epochs.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for state in states:
        for trial in state.known.values():
            if trial.epoch > 1:
                found[pace_key(trial.config)] += _epochs(trial)
    return {key: statistics.median(values) for key, values in found.items() if values}


def of_storage(storage: str) -> dict[str, float]:
    """Return the median seconds per epoch, by pace key, over all studies in a storage.

    See :func:`seconds_an_epoch`. Nothing is known of an object store that this machine does not
    reach, as the one that launches may not.
    """
    try:
        return seconds_an_epoch(fold(events) for events in readable_ledgers(study_folders(storage)))
    except ValueError:
        if is_url(storage):
            return {}
        raise


def _epochs(trial: TrialState) -> list[float]:
    """Return the seconds of each epoch but the first, which includes the start."""
    return [seconds for epoch, seconds in sorted(trial.took.items()) if epoch > 1 and seconds > 0]


def expected_seconds(trial: PlannedTrial, seconds: dict[str, float]) -> float:
    """Return the expected seconds of a trial; infinity if no earlier trial was like it.

    Args:
        trial: the trial.
        seconds: seconds per epoch from :func:`seconds_an_epoch`.
    """
    return trial.config.epochs * seconds.get(trial.pace, math.inf)
