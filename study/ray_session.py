"""Ray for the time of a study that needs it: the session there is, the cluster at ``address``, or a local one that ends with us.

Whoever may talk to Ray runs code as its user. Ray 2.60 asks for a token where one is set up: a local Ray's is the file
``~/.ray/auth_token``, which Ray would let every user of the machine read; a cluster that asks for none is refused unless ``insecure=true``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from study.config import StudyConfig
from study.errors import UserError
from study.preflight import local_cpus

ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # Train polls its workers this often; the default adds 2 s to every report
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process a CPU, of which a study needs one a machine
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Set before Ray starts, unless the user set them; Ray's processes inherit them."""
TOKEN_BYTES = 32
"""As many as Ray takes."""
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
ANSWER_SECONDS = 10.0


@contextmanager
def ray_session(study: StudyConfig, *, dashboard: bool = False) -> Iterator[str]:
    """Ray for the time of a study, and its address: the session there is, the cluster at ``address``, or a local one that ends with us.

    Args:
        study: the config.
        dashboard: serve the State API (part of Ray's dashboard, on 127.0.0.1): by it Ray Train notices that a killed driver's workers
            still hold their CPUs. Without it the restarted driver would wait for them for ever.

    Raises:
        UserError: nothing answers at ``address``, or what does asks nobody for a token.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    for logger in ("ray.tune", "ray.train"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # a trial's failure is in the ledger, not between the progress lines
    ours = not ray.is_initialized()
    if ours:
        on_sigterm = signal.getsignal(signal.SIGTERM)
        _start_ray(study, dashboard)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts in one that aborts the process
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        if ours:
            ray.shutdown()


def _start_ray(study: StudyConfig, dashboard: bool) -> None:
    import ray

    quiet = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "include_dashboard": dashboard,
        "dashboard_host": "127.0.0.1",
    }
    try:
        if study.address is None:
            keep_token(Path.home() / ".ray" / "auth_token")
            with _own_process_groups():
                ray.init(address="local", num_cpus=local_cpus(study), **quiet)
        else:
            ray.init(address=study.address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise UserError(
            f"address={study.address!r}: no Ray cluster answers ({error}); start one with `ray start --head`, or leave address "
            "out for a local one"
        ) from None
    if study.address is not None and not study.insecure and asks_nobody(str(ray.get_runtime_context().gcs_address)):
        ray.shutdown()
        raise UserError(
            f"address={study.address!r}: this Ray cluster asks nobody for a token, so whoever reaches it runs code as its user and reads "
            "the study's files; start it with RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes the token), or use insecure=true "
            "where only you reach it"
        )


def keep_token(path: Path) -> None:
    """Make Ray's token file if there is none, and keep it and its folder to its user; none is made where the environment names another."""
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # readable by its user only
            file.write(secrets.token_hex(TOKEN_BYTES))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)  # whole or not at all, and never over another's
    for place, mode in ((path.parent, 0o700), (path, 0o600)):
        if place.exists() and place.stat().st_uid == os.getuid():
            place.chmod(mode)


def asks_nobody(address: str) -> bool:
    """Whether the Ray at ``address``, host:port of its control store, answers without a token."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError:
            return False
    return True


_detach = threading.local()
"""``children``: whether processes that this thread forks go into process groups of their own."""


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Processes that this thread starts meanwhile do not hear the signals that are sent to our process group.

    A SIGTERM to the group (from ``timeout``, a batch system, a closed pipeline) would end Ray's own processes at once. We could then
    not end the trials in order, and Ray would make us wait 60 s for its control store. So the signal is ours alone, and we end Ray.
    Ray's processes still die with us: it sets their parent-death signal.
    """
    _detach.children = True
    try:
        yield
    finally:
        _detach.children = False


def _leave_group() -> None:
    if getattr(_detach, "children", False):
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)  # subprocess runs it too where it has a preexec_fn, as Ray's starts have
