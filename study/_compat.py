"""Private names of other libraries that this package uses, with the reason and the tested version.

No name has an equally fast public equivalent. ``tests/study/test_compat.py`` fails if a new version
changes one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MLFLOW_SERVER_VARIABLES = {
    "BACKEND_STORE_URI_ENV_VAR": "_MLFLOW_SERVER_FILE_STORE",
    "REGISTRY_STORE_URI_ENV_VAR": "_MLFLOW_SERVER_REGISTRY_STORE",
    "ARTIFACT_ROOT_ENV_VAR": "_MLFLOW_SERVER_ARTIFACT_ROOT",
    "ARTIFACTS_DESTINATION_ENV_VAR": "_MLFLOW_SERVER_ARTIFACT_DESTINATION",
    "SERVE_ARTIFACTS_ENV_VAR": "_MLFLOW_SERVER_SERVE_ARTIFACTS",
}
"""Environment variables of MLflow's application, by the constant's name in
:mod:`mlflow.server.constants`.

``mlflow server`` sets them too, but needs a second process and twice the time (MLflow 3.17).
"""
MLFLOW_SERVED_BY = "_MLFLOW_SGI_NAME"
"""Environment variable with the name of the server that runs MLflow's application (MLflow 3.17)."""

RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets in submitted jobs, with the runtime environment.

No public function returns whether a program runs as a job. A job must not set ``py_modules`` a
second time (Ray 2.60).
"""
RAY_WORKERS_AT_START = "RAY_prestart_worker_first_driver"
"""Environment variable that controls whether Ray starts one process per CPU in advance for its
first driver. Public options only set the number of CPUs (Ray 2.60)."""
RAY_FOR_NOBODY_ELSE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Environment variables that make all of Ray's processes listen on 127.0.0.1 only.

The first makes Ray behave as on platforms without support of clusters, because Ray replaces
``--node-ip-address=127.0.0.1`` by the machine's address. The others turn off the metrics of agents
and dashboard, which are served without a token; for the dashboard only an invalid port does that
(Ray 2.60).
"""


@contextmanager
def joined_on_loopback() -> Iterator[None]:
    """Let this process connect to a Ray that was started with :data:`RAY_FOR_NOBODY_ELSE`.

    It is needed if this process imported Ray without these variables (Ray 2.60).
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


RAY_CURRENT = "ray_current_cluster"
"""File in Ray's temporary folder with the address of its control store. ``ray start`` only prints
the address in text for people (Ray 2.60)."""


def reread_ray_variables() -> None:
    """Make Ray read its token variables again if this process has imported it already.

    Ray's own set-up of tokens does the same (Ray 2.60).
    """
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


RAY_RECONNECTS = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable with the seconds after which Ray ends a process whose control store is gone."""


@contextmanager
def joined_for_good() -> Iterator[None]:
    """Join a Ray that does not end this process 60 s after its control store has died.

    A call that waits for a dead control store outlives ``ray.shutdown()``. It ends the process even
    if the process has joined another Ray since (Ray 2.60). Processes that start within this context
    inherit the variable.
    """
    from ray._raylet import Config  # type: ignore[attr-defined]

    before = os.environ.get(RAY_RECONNECTS)
    os.environ[RAY_RECONNECTS] = before or str(10**9)
    Config.initialize("")  # Ray makes its first client with the values of its import
    try:
        yield
    finally:
        if before is None:
            del os.environ[RAY_RECONNECTS]


def forget_control_store() -> None:
    """Make this process end although Ray's control store is gone.

    When a process ends, Ray Tune deletes its trainables from the control store and waits for the
    answer, for ever in a process that has :func:`joined_for_good` (Ray 2.60).
    """
    from ray.experimental.internal_kv import _internal_kv_reset

    _internal_kv_reset()


def latest_metrics(run: Any) -> list[Any]:
    """Return the last point of each metric of an MLflow run, with its step.

    ``run.data.metrics`` has no steps, and ``run.data.to_proto()`` is fifty times slower (MLflow
    3.17).
    """
    return list(run.data._metric_objs)


def tracking_store(client: Any) -> Any:
    """Return the store behind an MLflow client.

    Only the store can read a metric of many runs in one call (MLflow 3.17).
    """
    return client._tracking_client.store


def request_message(message: Any) -> Any:
    """Fill a protobuf message from flask's current request with MLflow's own parser.

    So a guard checks exactly the request that the server executes (MLflow 3.17).
    """
    from mlflow.server.handlers import _get_request_message

    return _get_request_message(message)


def is_login(user: str, password: str) -> bool:
    """Return whether user name and password are valid on MLflow's server, using its cache.

    The public function takes flask's current request, which exists only after the body was read
    (MLflow 3.17).
    """
    from mlflow.server import auth

    return auth._authenticate_cached(user, password) is not None


def is_remembered_login(user: str, password: str) -> bool:
    """Return whether MLflow's server has found user name and password valid a moment ago.

    The public function checks the password if they are not in its cache (MLflow 3.17).
    """
    from mlflow.server import auth

    cache = auth._USER_AUTH_CACHE
    if cache is None:
        return False
    with auth._USER_AUTH_CACHE_LOCK:
        return auth._auth_cache_key(user, password) in cache


def draining_nodes() -> set[str]:
    """Return the ids of nodes that are draining; ``ray.nodes()`` does not show this (Ray 2.60)."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def search_space_transform(distributions: dict[str, Any]) -> Any:
    """Return Optuna's encoding of params as numbers, one column per category (Optuna 5.0)."""
    from optuna._transform import _SearchSpaceTransform

    return _SearchSpaceTransform(distributions)


def marginal_shares(evaluator: Any, columns: list[int]) -> list[float]:
    """Return the share of each tree's variance that several params explain together.

    Optuna's public function returns shares of single params only (Optuna 5.0).

    Args:
        evaluator: fANOVA evaluator, after ``evaluate``.
        columns: indices of the params in the list of varying params, sorted by name.
    """
    import numpy as np

    forest = evaluator._evaluator
    encoded = np.concatenate([forest._column_to_encoded_columns[column] for column in columns])
    return [
        tree.get_marginal_variance(encoded) / tree.variance
        for tree in forest._trees
        if tree.variance > 0
    ]


def ray_head(address: str) -> str:
    """Return host and port of a Ray cluster's head; ``auto`` is resolved as in ``ray.init``.

    The public functions need a connection to the cluster (Ray 2.60).
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return str(canonicalize_bootstrap_address_or_die(address))


def ray_certificates() -> tuple[bytes, bytes, bytes]:
    """Return Ray's TLS certificate chain, key and certificate authority, as file contents.

    Ray documents the environment variables with the paths, but no public function checks and reads
    them (Ray 2.60).
    """
    from ray._common.tls_utils import load_certs_from_env

    chain, key, authority = load_certs_from_env()
    return chain, key, authority


def ray_token_loader() -> Any:
    """Return Ray's token loader, which looks for this process's token in Ray's usual places.

    ``ray get-auth-token`` would expose the token in its output (Ray 2.60).
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    return AuthenticationTokenLoader.instance()


def evict_cached_actors(controller: Any) -> None:
    """Make a Tune controller end the idle actors that it keeps for a next trial.

    It keeps an actor and its resources even if no trial waits, so other requests to Ray would wait
    forever (Ray 2.60).
    """
    for actor in controller._actor_cache.flush_cached_objects(force_all=True):
        actor.set_on_stop(None)
        actor.set_on_error(None)
        controller._remove_actor(tracked_actor=actor)


def cluster_use() -> tuple[
    dict[str, tuple[float, float]],
    list[tuple[float, float]],
    list[tuple[float, float]],
    tuple[float, float],
]:
    """Return free, requested and own CPUs and GPUs of the Ray cluster.

    ``ray status`` only prints these numbers as text. A node has a resource ``CPU_group_ID`` for its
    bundles of a placement group, and the group's id ends with the id of the job that created it.
    The numbers of one node are consistent with each other (Ray 2.60).

    Returns:
        Pairs of CPUs and GPUs: the free ones by node id, the requests of waiting tasks and actors,
        the requests of waiting placement groups, and the total in this job's placement groups.
    """
    from ray._private.worker import global_worker
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    state = get_cluster_resource_state(global_worker.gcs_client)
    job, mine = global_worker.current_job_id.hex(), {"CPU": 0.0, "GPU": 0.0}
    free = {}
    for node in state.node_states:
        left = node.available_resources
        free[node.node_id.hex()] = left.get("CPU", 0.0), left.get("GPU", 0.0)
        for name, value in node.total_resources.items():
            kind, _, group = name.partition("_group_")
            if kind in mine and "_" not in group and group.endswith(job):
                mine[kind] += value
    found = [
        (
            each.request.resources_bundle.get("CPU", 0.0),
            each.request.resources_bundle.get("GPU", 0.0),
        )
        for each in state.pending_resource_requests
        if not any("_group_" in name for name in each.request.resources_bundle)
        for _ in range(each.count)
    ]
    groups = [
        (
            sum(each.resources_bundle.get("CPU", 0.0) for each in group.requests),
            sum(each.resources_bundle.get("GPU", 0.0) for each in group.requests),
        )
        for group in state.pending_gang_resource_requests
    ]
    return free, [each for each in found if any(each)], groups, (mine["CPU"], mine["GPU"])
