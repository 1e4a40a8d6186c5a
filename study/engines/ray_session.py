"""Ray sessions: the cluster at ``address``, a Ray that is started on this machine for the study, or
a session that exists already.

The process that drives a study joins its Ray. If the node that it has joined dies, the driver joins
again. If the control store is silent for 30 s (:data:`SILENT_SECONDS`), the driver ends the study
cleanly. Ray would end the process after 60 s (:func:`study._compat.joined_for_good`).

If a Ray that we started (:mod:`study.engines.ray.own_ray`) dies, it is started and joined again.
The running trials then resume from their checkpoints.

Every client of a Ray cluster can run code as its user. A cluster that requires no token is refused
unless ``insecure=true``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from study._compat import (
    RAY_WORKERS_AT_START,
    cluster_use,
    draining_nodes,
    forget_control_store,
    joined_for_good,
    joined_on_loopback,
)
from study.config import StudyConfig
from study.engines.ray.own_ray import OwnRay
from study.engines.ray_token import asks_nobody, check_token, keep_token
from study.engines.user_files import collected_files
from study.errors import UserError
from study.plan.resources import local_cpus

ENVIRONMENT = {
    # Train polls its workers this often; the default adds 2 s to every report
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # by default one process per CPU; a study needs one per machine
    RAY_WORKERS_AT_START: "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # since 2.60 `ray start --block` waits 30 s at SIGTERM for Serve's replicas to move elsewhere; a
    # Ray of the study's own has no other node, and its trials have ended
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_DEDUP_LOGS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Variables set before Ray starts, unless the user set them; Ray's processes inherit them."""
LOOK_SECONDS = 1.0
"""Seconds between looks at a cluster."""
LATE_SECONDS = 5.0
"""Seconds without an answer after which nothing more is asked of a cluster."""
SILENT_SECONDS = 30.0
"""Seconds for which a control store may be silent before the study ends."""


class Use(NamedTuple):
    """How much of a cluster is in use.

    Attributes:
        free: free CPUs and GPUs by Ray's node id.
        requests: CPUs and GPUs of each pending task or actor.
        groups: CPUs and GPUs of each pending placement group.
        mine: CPUs and GPUs in the placement groups of this process's job.
    """

    free: dict[str, tuple[float, float]]
    requests: list[tuple[float, float]]
    groups: list[tuple[float, float]]
    mine: tuple[float, float]


class Session:
    """A Ray that another process keeps alive.

    Attributes:
        address: address of its control store.
        silent: description of a part of Ray that does not answer now but may recover, or "". Ray is
            not called meanwhile, because the call would block.
        lost: reason why Ray must be renewed; "" while Ray is alive.
    """

    silent = lost = ""

    def __init__(self, address: str) -> None:
        self.address = address

    def look(self) -> None:
        """Set ``silent`` and ``lost``.

        Raises:
            UserError: Ray has been silent for too long.
        """

    def renew(self) -> bool:
        """Start or join Ray again after it was lost; return whether that worked."""
        return False

    def resources(self) -> dict[str, float]:
        """Return the total ``CPU`` and ``GPU`` of all nodes that are not draining."""
        there = [
            node["Resources"] for node in self.nodes() if node["Alive"] and not node["Draining"]
        ]
        return {name: sum(each.get(name, 0.0) for each in there) for name in ("CPU", "GPU")}

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes in the form of ``ray.nodes()``, with ``Draining`` beside ``Alive``."""
        return _nodes()

    def use(self) -> Use:
        """Return free resources and pending requests."""
        return _use()

    def ask(self, bundles: list[dict[str, float]]) -> None:
        """Request resources for these workers from an autoscaler; this session has none."""

    def close(self) -> None:
        """Leave the session."""


class Joined(Session):
    """A cluster that this process has joined.

    Args:
        address: address as the user gave it.
        insecure: whether to join a cluster that requires no token.
        files: folder that Ray sends to the nodes, onto ``sys.path`` of what runs there; or None.

    Raises:
        UserError: no cluster answers there, it requires no token, or not one that we have.
    """

    def __init__(self, address: str, insecure: bool, files: Path | None = None) -> None:
        self._given, self._insecure = address, insecure
        self._environment = {"py_modules": [str(files)]} if files else None
        self._wanted: list[dict[str, float]] | None = None
        """What the autoscaler is to be asked for; None if it knows."""
        keep_token(Path.home() / ".ray" / "auth_token")
        try:
            self._join()
        except UserError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"address={address!r}: this process cannot join it ({error}); Ray and Python must"
                " have the cluster's versions"
            ) from None
        except (ConnectionError, ValueError) as error:
            raise UserError(
                f"address={address!r}: no Ray cluster answers ({error}); start one with `ray start"
                " --head`, correct the address, or use address=null for this machine alone"
            ) from None

    def _join(self) -> None:
        """Join the cluster, and start a thread that asks for its nodes.

        A call to a control store that has just died waits for ever.
        """
        import ray

        check_token(self._given, self._insecure)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        with joined_for_good():
            ray.init(
                address=self._given,
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env=self._environment,
            )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler aborts the process
            signal.signal(signal.SIGCONT, self._go_on)
        context = ray.get_runtime_context()
        self.address, self._node = str(context.gcs_address), context.get_node_id()
        self._nodes, self._use = _nodes(), _use()
        self._answered = time.monotonic()
        self._left = threading.Event()
        threading.Thread(target=self._ask, args=(self._left,), daemon=True, name="nodes").start()

    def _ask(self, left: threading.Event) -> None:
        """Ask for the nodes again and again, and for more, until this cluster is left."""
        while not left.wait(LOOK_SECONDS):
            # the cluster may be ending; look() notices that no answer comes
            with contextlib.suppress(Exception):
                self._request()
                nodes, use = _nodes(), _use()
                if not left.is_set():
                    self._nodes, self._use, self._answered = nodes, use, time.monotonic()

    def _go_on(self, *_: object) -> None:
        """Do not count the time for which this process was stopped (Ctrl-Z, SIGSTOP) as silence."""
        self._answered = time.monotonic()

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the last answer."""
        return self._nodes

    def use(self) -> Use:
        """Return free resources and pending requests as of the last answer."""
        return self._use

    def ask(self, bundles: list[dict[str, float]]) -> None:
        """Request resources for these workers from the cluster's autoscaler, if it has one.

        Returns at once: a thread makes the request, because the control store may be gone.
        """
        self._wanted = bundles

    def _request(self) -> None:
        from ray.autoscaler.sdk import request_resources

        if (wanted := self._wanted) is not None:
            request_resources(bundles=wanted)
            if self._wanted is wanted:
                self._wanted = None

    def look(self) -> None:
        """Check the age of the last answer and this machine's node, see :meth:`Session.look`."""
        answered, now = self._answered, time.monotonic()
        if now - answered > LATE_SECONDS:
            self.silent = f"its control store at {self.address} does not answer"
            if now - answered > SILENT_SECONDS:
                raise UserError(
                    f"Ray: {self.silent} for {SILENT_SECONDS:g} s; finished epochs are kept; "
                    "the same command continues once the cluster is back"
                )
            return
        self.silent = ""
        alive = {node["NodeID"] for node in self._nodes if node["Alive"]}
        self.lost = (
            ""
            if self._node in alive
            else (
                "this machine's node has left the cluster; `ray start --address ...` brings it back"
            )
        )

    def renew(self) -> bool:
        """Join the cluster again."""
        import ray

        self._left.set()
        ray.shutdown()
        try:
            self._join()
        except (ConnectionError, ValueError, RuntimeError) as error:
            if isinstance(error, UserError):
                raise
            with contextlib.suppress(ConnectionError):
                asks_nobody(self.address)  # it lacks this machine alone, and is not silent
                self._answered = time.monotonic()
            return False
        self.lost = ""
        return True

    def close(self) -> None:
        """Leave the cluster; a silent one is left when the process ends."""
        import ray

        self._left.set()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
        if not self.silent:
            with contextlib.suppress(Exception):  # the cluster may be ending
                self._request()
            ray.shutdown()
            return
        forget_control_store()
        if sys.excepthook.__module__.startswith("ray."):
            # Ray's hook first reports the error to the control store, and waits for an answer
            sys.excepthook = sys.__excepthook__


class JoinedOwn(Joined):
    """A Ray that this process has started and joined; it is started and joined again if it dies.

    Args:
        own: the processes of that Ray.

    Raises:
        UserError: it died while it started, or does not answer.
    """

    def __init__(self, own: OwnRay) -> None:
        self._own = own
        try:
            super().__init__(own.address, insecure=False)
        except UserError:
            own.look()  # `ray start` names an address before all parts of Ray have started
            if own.lost:
                raise own.failure() from None
            raise

    def look(self) -> None:
        """Check the processes of Ray, then the connection (:meth:`Joined.look`)."""
        self._own.look()
        if self._own.lost:
            self.lost = self._own.lost
        else:
            super().look()

    def ask(self, bundles: list[dict[str, float]]) -> None:
        """Do nothing: this Ray has no autoscaler."""

    def renew(self) -> bool:
        """Start Ray again, and join it."""
        import ray

        self._left.set()
        ray.shutdown()
        self._own.renew()
        self._given = self._own.address
        self._join()
        self.silent = self.lost = ""
        return True


@contextmanager
def ray_session(study: StudyConfig, *, gpus: int = 0, dashboard: bool = False) -> Iterator[Session]:
    """Provide Ray for the time of a study.

    It is the session that exists, the cluster at ``address``, or a Ray of this machine's own.

    Args:
        study: the config.
        gpus, dashboard: see :class:`~study.engines.ray.own_ray.OwnRay`.

    Raises:
        UserError: nothing answers at ``address``, or Ray does not start.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray: Any = sys.modules.get("ray")
    for logger in ("ray.tune", "ray.train"):
        # a trial's failure is in the ledger, not between the progress lines
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    if ray is not None and ray.is_initialized():
        yield Session(str(ray.get_runtime_context().gcs_address))
    elif study.address is not None:
        with (
            collected_files(study) as files,
            closing(Joined(study.address, study.insecure, files)) as session,
        ):
            yield session
    else:
        with (
            closing(OwnRay(local_cpus(study), gpus, dashboard)) as own,
            joined_on_loopback(),
            closing(JoinedOwn(own)) as session,
        ):
            yield session


def _nodes() -> list[dict[str, Any]]:
    """Return the nodes of the Ray that this process has joined, see :meth:`Session.nodes`."""
    import ray

    draining = draining_nodes()
    return [node | {"Draining": node["NodeID"] in draining} for node in ray.nodes()]


def _use() -> Use:
    """Return how much is in use of the Ray that this process has joined."""
    return Use(*cluster_use())
