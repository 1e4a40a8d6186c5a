"""What Ray's autoscaler is asked for, by trials that Ray Train places."""

from __future__ import annotations

import math
import threading
from typing import Any

from study.execution.leases import OfRay


class Idle:
    """A node on which nothing happens."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def events(self, seconds: float) -> list[Any]:
        self._ended.wait(0.01)
        return []

    def call(self, calls: list[Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._ended.set()


def test_a_waiting_trial_is_asked_for_beyond_those_that_run_until_none_waits() -> None:
    asked: list[list[dict[str, float]]] = []
    have = {"CPU": 0.0, "GPU": 0.0}
    idle: Any = Idle()
    of_ray = OfRay(idle, lambda *what: None, lambda: have, (2.0, 0.0), 2, asked.append)
    bundle = {"CPU": 2.0}

    def look(waiting: bool) -> None:
        of_ray._asked = -math.inf  # a second has passed
        of_ray.poll(waiting)

    look(True)
    look(True)  # the same is asked for once
    assert asked == [[bundle] * 2]
    have["CPU"] = 4.0
    look(True)
    of_ray.leases[0].free -= 4.0  # both workers run, and another trial waits
    look(True)
    assert asked[1:] == [[bundle] * 4]
    look(False)
    of_ray.close()
    assert asked[2:] == [[]]
