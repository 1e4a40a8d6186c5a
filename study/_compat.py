"""Private names of other libraries that this package uses, each with its reason and the version it
was seen with.

None has a public counterpart as fast. ``tests/study/test_compat.py`` fails for the name that a new
version has changed.
"""

from __future__ import annotations

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
"""Environment variables that MLflow's application reads, by their names in its constants.

The constants are those of :mod:`mlflow.server.constants`.

``mlflow server`` sets them too, but takes a second process and twice the time (MLflow 3.17).
"""
MLFLOW_SERVED_BY = "_MLFLOW_SGI_NAME"
"""Environment variable that tells MLflow's application which server runs it (MLflow 3.17)."""

RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable with the runtime environment of a job that was submitted to Ray, which takes
no second ``py_modules``; nothing public tells a program that it is one (Ray 2.60)."""
RAY_WORKERS_AT_START = "RAY_prestart_worker_first_driver"
"""Environment variable that says whether Ray starts a process per CPU for its first driver, before
it is asked for any; a public option has only how many CPUs there are (Ray 2.60)."""
RAY_FOR_NOBODY_ELSE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Environment variables by which all of Ray's processes listen on 127.0.0.1, as they do where Ray
has no clusters, and its agents and dashboard serve no metrics, for which they ask no token.

``--node-ip-address=127.0.0.1`` is replaced by the machine's address, and the dashboard has no other
setting than a port that cannot be (Ray 2.60).
"""


@contextmanager
def joined_on_loopback() -> Iterator[None]:
    """Have this process find a Ray at 127.0.0.1 that was started with
    :data:`RAY_FOR_NOBODY_ELSE`, though it imported Ray without that (Ray 2.60)."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


RAY_CURRENT = "ray_current_cluster"
"""File in Ray's temporary folder with the address of its control store, which ``ray start``
tells otherwise only in text for people (Ray 2.60)."""


def reread_ray_variables() -> None:
    """Have a Ray that this process has loaded read its variables of tokens again, as its own set-up
    of tokens does (Ray 2.60)."""
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def latest_metrics(run: Any) -> list[Any]:
    """Return the last point of each metric of an MLflow run, with its step.

    ``run.data.metrics`` has no steps, ``run.data.to_proto()`` takes fifty times as long (MLflow
    3.17).
    """
    return list(run.data._metric_objs)


def tracking_store(client: Any) -> Any:
    """Return the store behind an MLflow client.

    Only the store reads a metric of many runs at once (MLflow 3.17).
    """
    return client._tracking_client.store


def request_message(message: Any) -> Any:
    """Fill a message from flask's current request as MLflow's server does.

    So a guard checks the request that the server executes (MLflow 3.17).
    """
    from mlflow.server.handlers import _get_request_message

    return _get_request_message(message)


def is_login(user: str, password: str) -> bool:
    """Tell whether MLflow's server knows a user by a password; the cache of its own checks is used.

    Its public function takes flask's current request, for which the body has been read (MLflow
    3.17).
    """
    from mlflow.server import auth

    return auth._authenticate_cached(user, password) is not None


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that Ray drains; ``ray.nodes()`` does not tell (Ray 2.60)."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def search_space_transform(distributions: dict[str, Any]) -> Any:
    """Return Optuna's encoding of params as numbers, one column per category (Optuna 5.0)."""
    from optuna._transform import _SearchSpaceTransform

    return _SearchSpaceTransform(distributions)


def marginal_shares(evaluator: Any, columns: list[int]) -> list[float]:
    """Return the share of each tree's variance that params explain together.

    Optuna offers shares of single params only (Optuna 5.0).

    Args:
        evaluator: evaluator of fANOVA, after it has evaluated.
        columns: indices of the params among those that vary, sorted by name.
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
    """Return host and port of the head of a Ray cluster, for ``auto`` too, as ``ray.init`` does.

    Ray tells it in public only after it has joined (Ray 2.60).
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return str(canonicalize_bootstrap_address_or_die(address))


def ray_certificates() -> tuple[bytes, bytes, bytes]:
    """Return chain, key and authority of Ray's TLS, as bytes of the files that its variables name.

    Ray documents the variables, and has no public function that checks and reads them (Ray 2.60).
    """
    from ray._common.tls_utils import load_certs_from_env

    chain, key, authority = load_certs_from_env()
    return chain, key, authority


def ray_token_loader() -> Any:
    """Return what finds this process's token for Ray, in the order of places that Ray has.

    ``ray get-auth-token`` prints the token, which then every reader of its output has (Ray 2.60).
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    return AuthenticationTokenLoader.instance()


def evict_cached_actors(controller: Any) -> None:
    """Have a Tune controller end the actors that it keeps for a next trial.

    It keeps one when no trial waits, behind whose resources whoever else asks Ray waits for ever
    (Ray 2.60).
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
    """Return the free CPUs and GPUs of each node by Ray's id, those of each task or actor that
    waits, those of each placement group that waits, and those in this job's placement groups;
    ``ray status`` prints the same for people.

    A node has a resource ``CPU_group_ID`` for its bundles of a placement group, whose id ends with
    the id of the job that created it. All is of one moment on each node (Ray 2.60).
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
