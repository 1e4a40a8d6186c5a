"""The events that the ledger takes of what the processes of trials report."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from study.ledger.events import Event, Finished, Report
from study.ledger.state import StudyState
from trainers.user_loop import RESERVED
from trainers.workers.messages import FINAL, HISTORY, Beginning


class Reports:
    """Converts the reports of running trials to events, and keeps test metrics until a trial ends.

    Args:
        state: state of the study, kept up to date.
    """

    def __init__(self, state: StudyState) -> None:
        self._state = state
        self._tests: dict[str, Finished] = {}
        self._repeated: defaultdict[str, float] = defaultdict(float)

    def take(self, trial: str, result: dict[str, Any]) -> list[Event]:
        """Return the events of a trial's report of an epoch.

        The last report also has the test metrics; a trial that was only tested reports nothing
        else. A loop of the user's own may name its metrics freely, and may repeat its last epoch.
        """
        epoch = metrics_of(result)
        test: dict[str, float] = result.get(FINAL, {})
        if result["done"] and FINAL not in result:
            test = {name: epoch.pop(name) for name in list(epoch) if name.startswith("test/")}
        if test or FINAL in result:
            self._tests[trial] = {"event": "finished", "trial": trial, "metrics": test}
        if FINAL in result:
            self._tests[trial]["epochs"] = int(result["epoch"])
        events = _past(trial, result.get(HISTORY, []))
        number = int(result["epoch"])
        report: Report = {
            "event": "report",
            "trial": trial,
            "epoch": number,
            "metrics": epoch,
            "pid": result["pid"],
            "host": result["host"],
            "seconds": result["seconds"],
        }
        if epoch and number in self._state.known[trial].reports:
            self._repeated[trial] += result["seconds"]
        elif epoch and (repeated := self._repeated.pop(trial, 0.0)):
            report["repeated"] = repeated
        if epoch:
            events.append(report)
        if result.get("checkpoint_path"):
            events.append(
                {
                    "event": "checkpoint",
                    "trial": trial,
                    "epoch": number,
                    "path": result["checkpoint_path"],
                }
            )
        return events

    def tested(self, trial: str) -> Finished | None:
        """Return and remove the event of a tested trial's end; None if it reported no test."""
        return self._tests.pop(trial, None)


def began(trial: str, beginning: Beginning) -> list[Event]:
    """Return the events of a trial that began.

    Its checkpoint may be newer than the last report; the ledger then gets the missing epochs.
    """
    events = _past(trial, beginning.history)
    if beginning.damaged:
        events.insert(0, {"event": "damaged", "trial": trial, "error": beginning.damaged})
    return events


def _past(trial: str, history: list[dict[str, Any]]) -> list[Event]:
    """Return report events of earlier epochs; the ledger ignores duplicates.

    Their seconds are None, because they were not recorded.
    """
    return [
        {
            "event": "report",
            "trial": trial,
            "epoch": int(metrics["epoch"]),
            "metrics": metrics_of(metrics),
            "seconds": None,
        }
        for metrics in history
    ]


def metrics_of(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a result: its numbers without the message's own fields."""
    return {
        name: float(value)
        for name, value in result.items()
        if name != "epoch" and name not in RESERVED and isinstance(value, int | float)
    }
