"""Ray for the time of a study that needs it: the session there is, the cluster at ``address``, or a local one that ends with us."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def ray_session(study: StudyConfig, *, dashboard: bool = False) -> Iterator[str]:
    """Ray for the time of a study, and its address: the session there is, the cluster at ``address``, or a local one that ends with us.

    Args:
        study: the config.
        dashboard: serve the State API (part of Ray's dashboard, on 127.0.0.1): by it Ray Train notices that a killed driver's workers
            still hold their CPUs. Without it the restarted driver would wait for them for ever.

    Raises:
        UserError: nothing answers at ``address``.
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
            with _own_process_groups():
                ray.init(address="local", num_cpus=local_cpus(study), **quiet)
        else:
            ray.init(address=study.address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise UserError(
            f"address={study.address!r}: no Ray cluster answers ({error}); start one with `ray start --head`, or leave address "
            "out for a local one"
        ) from None


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
