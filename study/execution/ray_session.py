"""Ray for the time of a study that needs it: the session there is, the cluster at ``address``, or
one of this machine's own.

A Ray of our own is made of processes of their own (``ray start --block``), and the process that
drives the study does not join it: where a part of Ray dies, ``ray start`` ends all of it, we see
that within a second and start it again, and only trials are lost, which begin again from their
checkpoints. A process that has joined would be ended by Ray with its control store.

Of a cluster the driver must be a part. Where the node that it has joined has died, it joins again;
where the control store is silent, it ends in order before Ray would end it, after 60 s
(``RAY_gcs_rpc_server_reconnect_timeout_s``).

Whoever may talk to Ray runs code as its user. A Ray of our own asks for a token that our processes
alone inherit; a cluster that asks nobody for one is refused unless ``insecure=true``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.errors import UserError
from study.plan.resources import local_cpus
from trainers.workers.fork_server import PR_SET_PDEATHSIG

ENVIRONMENT = {
    # Train polls its workers this often; the default adds 2 s to every report
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # a process a CPU, of which a study needs one a machine
    "RAY_prestart_worker_first_driver": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Set before Ray starts, unless the user set them; Ray's processes inherit them."""
TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
"""By these a Ray of our own lets in our processes alone; they inherit them."""
TOKEN_BYTES = 32
"""As many as Ray takes."""
CURRENT = "ray_current_cluster"
"""In Ray's temporary folder: the address of its control store."""
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 10.0
START_SECONDS = 120.0
LOOK_SECONDS = 1.0
"""How often a cluster is looked at."""
LATE_SECONDS = 5.0
"""After so long without an answer nothing more is asked of a cluster."""
SILENT_SECONDS = 30.0
"""For so long a control store may be silent before the study ends."""


_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec of a process with threads nothing may be."""


class Session:
    """A Ray that somebody else keeps alive.

    Attributes:
        address: of its control store.
        silent: what does not answer now and may come back by itself; nothing may be asked of Ray
            meanwhile, since we would wait. Else "".
        lost: why Ray must be renewed; "" while it is there.
    """

    silent = lost = ""

    def __init__(self, address: str) -> None:
        self.address = address

    def look(self) -> bool:
        """Set ``silent`` and ``lost``; whether that is as of now, so that Ray may be asked for
        more.

        Raises:
            UserError: Ray has been silent for too long.
        """
        return True

    def renew(self) -> bool:
        """Have Ray again after it was lost; whether that worked."""
        return False

    def resources(self) -> dict[str, float]:
        """``CPU`` and ``GPU`` of all nodes."""
        import ray

        return dict(ray.cluster_resources())

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes, as ``ray.nodes()`` has them."""
        import ray

        return list(ray.nodes())

    def close(self) -> None:
        """Leave it."""


class OwnRay(Session):
    """A Ray of this machine, which ends with us.

    Args:
        cpus, gpus: that it has.
        dashboard: serve the State API (part of Ray's dashboard): by it Ray Train notices that a
            killed driver's workers still hold their CPUs. Without it the restarted driver would
            wait for them for ever.

    Raises:
        UserError: it does not start.
    """

    def __init__(self, cpus: float, gpus: int, dashboard: bool) -> None:
        self._resources = {"CPU": cpus, "GPU": gpus}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._before = {name: os.environ.get(name) for name in TOKEN}
        if not any(self._before.values()):
            os.environ.update(zip(TOKEN, ("token", secrets.token_hex(TOKEN_BYTES)), strict=True))
        self._options = [
            f"--num-cpus={cpus:g}",
            f"--num-gpus={gpus}",
            f"--include-dashboard={dashboard}",
            "--dashboard-host=127.0.0.1",
        ]
        self.renew()

    def look(self) -> bool:
        """See :class:`Session`."""
        self.lost = "" if self._process.poll() is None else "one of its processes died"
        return True

    def resources(self) -> dict[str, float]:
        """See :class:`Session`."""
        return self._resources

    def renew(self) -> bool:
        """Start it."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        start = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--port=0",
            "--disable-usage-stats",
        ]
        with (folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*start, *self._options, f"--temp-dir={folder}"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # out of reach of signals to our process group, such as Ctrl-C
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        until = time.monotonic() + START_SECONDS
        while not (address := _text(folder / CURRENT)):
            if self._process.poll() is not None or time.monotonic() > until:
                said = _text(folder / "start.log")[-500:]
                self.close()
                raise UserError(
                    f"Ray does not start on this machine: {said}; `ray start --head --block`"
                    " shows why"
                )
            time.sleep(0.05)
        self.address = address
        return True

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its processes, then itself
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)


class Joined(Session):
    """A cluster that this process has joined.

    Args:
        address: as the user gave it.
        insecure: join it even if it asks nobody for a token.

    Raises:
        UserError: nothing answers there, or what does asks nobody for a token.
    """

    def __init__(self, address: str, insecure: bool) -> None:
        self._given = address
        _keep_token(Path.home() / ".ray" / "auth_token")
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._join()
        except (ConnectionError, ValueError) as error:
            raise UserError(
                f"address={address!r}: no Ray cluster answers ({error}); start one with `ray start"
                " --head`, or leave address out for this machine alone"
            ) from None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts in one that aborts the process
        if not insecure and asks_nobody(self.address):
            self.close()
            raise UserError(
                f"address={address!r}: this Ray cluster asks nobody for a token, so whoever reaches"
                " it runs code as its user and reads the study's files; start it with"
                " RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes the token), or use"
                " insecure=true where only you reach it"
            )

    def _join(self) -> None:
        """Become a part of the cluster, and have a thread ask for its nodes: who asks a control
        store that has just died waits for ever."""
        import ray

        ray.init(address=self._given, logging_level=logging.ERROR, log_to_driver=False)
        context = ray.get_runtime_context()
        self.address, self._node = str(context.gcs_address), context.get_node_id()
        self._nodes: list[dict[str, Any]] = ray.nodes()
        self._answered = self._seen = time.monotonic()
        self._left = threading.Event()
        threading.Thread(target=self._ask, args=(self._left,), daemon=True, name="nodes").start()

    def _ask(self, left: threading.Event) -> None:
        """Ask for the nodes again and again, until this cluster is left."""
        import ray

        while not left.wait(LOOK_SECONDS):
            # of a cluster that ends; that nothing comes is noticed
            with contextlib.suppress(Exception):
                nodes = ray.nodes()
                if not left.is_set():
                    self._nodes, self._answered = nodes, time.monotonic()

    def nodes(self) -> list[dict[str, Any]]:
        """See :class:`Session`; as they last were."""
        return self._nodes

    def look(self) -> bool:
        """See :class:`Session`."""
        answered, now = self._answered, time.monotonic()
        if now - answered > LATE_SECONDS:
            self.silent = f"its control store at {self.address} does not answer"
            if now - answered > SILENT_SECONDS:
                raise UserError(
                    f"Ray: {self.silent} for {SILENT_SECONDS:g} s; finished epochs are kept; "
                    "the same command goes on once the cluster is back"
                )
            return False
        self.silent = ""
        alive = {node["NodeID"] for node in self._nodes if node["Alive"]}
        self.lost = (
            ""
            if self._node in alive
            else (
                "this machine's node has left the cluster; `ray start --address ...` brings it back"
            )
        )
        fresh, self._seen = answered > self._seen, answered
        return fresh

    def renew(self) -> bool:
        """Join again."""
        import ray

        self._left.set()
        ray.shutdown()
        try:
            self._join()
        except (ConnectionError, ValueError, RuntimeError):
            return False
        self.lost = ""
        return True

    def close(self) -> None:
        """Leave it; a silent one is left by ending."""
        import ray

        self._left.set()
        if not self.silent:
            ray.shutdown()
        elif sys.excepthook.__module__.startswith("ray."):
            # Ray's tells the control store of an error first, and waits for its answer
            sys.excepthook = sys.__excepthook__


@contextmanager
def ray_session(study: StudyConfig, *, gpus: int = 0, dashboard: bool = False) -> Iterator[Session]:
    """Ray for the time of a study: the session there is, the cluster at ``address``, or one of this
    machine's own.

    Args:
        study: the config.
        gpus, dashboard: see :class:`OwnRay`.

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
        return
    session: Session = (
        OwnRay(local_cpus(study), gpus, dashboard)
        if study.address is None
        else Joined(study.address, study.insecure)
    )
    try:
        yield session
    finally:
        session.close()


def asks_nobody(address: str) -> bool:
    """Whether the Ray at ``address``, host:port of its control store, answers without a token."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError:
            return False
    return True


def _keep_token(path: Path) -> None:
    """Ray's token file, which Ray lets every user of the machine read, is its user's alone."""
    for place, mode in ((path.parent, 0o700), (path, 0o600)):
        if place.exists() and place.stat().st_uid == os.getuid():
            place.chmod(mode)


def _text(path: Path) -> str:
    """What a file holds; "" if there is none."""
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _end_with_parent() -> None:
    """In a child: SIGTERM once whoever started it has died."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
