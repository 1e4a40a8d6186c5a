"""Private names of other libraries still are what this package takes them for; each failure names
the library that changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from study import _compat


def test_mlflow_reads_the_variables_of_its_server() -> None:
    from mlflow.server import constants

    for name, variable in _compat.MLFLOW_SERVER_VARIABLES.items():
        assert getattr(constants, name, None) == variable, (
            f"MLflow: mlflow.server.constants.{name} is no longer {variable}"
        )
    sources = [path.read_text() for path in Path(constants.__file__).parent.glob("*.py")]
    assert any(_compat.MLFLOW_SERVED_BY in text for text in sources), (
        f"MLflow: its server reads no {_compat.MLFLOW_SERVED_BY}"
    )


def test_mlflow_runs_hold_the_steps_of_metrics() -> None:
    from mlflow.entities import Metric, Run, RunData, RunInfo

    info = RunInfo("id", "0", "user", "FINISHED", 0, 1, "active")
    found = _compat.latest_metrics(Run(info, RunData(metrics=[Metric("loss", 0.5, 1, 7)])))
    assert [(metric.key, metric.value, metric.step) for metric in found] == [("loss", 0.5, 7)], (
        "MLflow: RunData has other metrics"
    )


def test_mlflow_clients_hold_a_store_that_reads_a_metric_of_many_runs() -> None:
    from mlflow import MlflowClient
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = _compat.tracking_store(MlflowClient("http://127.0.0.1:9"))
    assert callable(store.get_host_creds), "MLflow: a server's store tells no credentials"
    assert callable(SqlAlchemyStore.get_metric_history_bulk), (
        "MLflow: a database's store reads one run at a time"
    )


def test_mlflow_reads_requests_into_messages() -> None:
    flask = pytest.importorskip("flask")
    from mlflow.protos.service_pb2 import CreateExperiment

    with flask.Flask("test").test_request_context(
        json={"name": "a", "artifact_location": "file:///b"}, method="POST"
    ):
        message = _compat.request_message(CreateExperiment())
    assert message.artifact_location == "file:///b", "MLflow: its server reads requests otherwise"


def test_mlflow_remembers_valid_logins() -> None:
    """From its source: importing it needs a database and a settings file."""
    spec = importlib.util.find_spec("mlflow.server.auth")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    for part in (
        "_USER_AUTH_CACHE: TTLCache[tuple[str, bytes], User] | None = (",
        "_USER_AUTH_CACHE_LOCK = threading.Lock()",
        "def _auth_cache_key(username: str, password: str) -> tuple[str, bytes]:",
        "def _authenticate_cached(username: str, password: str) -> User | None:",
    ):
        assert part in text, f"MLflow: its server remembers logins otherwise: {part}"


def test_mlflow_tables_have_the_indices_that_statistics_are_set_for() -> None:
    from mlflow.store.tracking.dbmodels.models import Base

    from study.tracking.sqlite import BY_KEY

    for table in BY_KEY:
        names = {index.name for index in Base.metadata.tables[table].indexes}
        assert f"index_{table}_run_uuid" in names, f"MLflow: table {table} has the indices {names}"


def test_optuna_encodes_params_and_splits_variance() -> None:
    import optuna

    distributions = {
        "a": optuna.distributions.FloatDistribution(0.0, 1.0),
        "b": optuna.distributions.CategoricalDistribution(["x", "y"]),
    }
    transform = _compat.search_space_transform(distributions)
    assert list(transform.transform({"a": 0.5, "b": "y"})) == [0.5, 0.0, 1.0], (
        "Optuna: params are encoded otherwise"
    )
    assert [list(columns) for columns in transform.column_to_encoded_columns] == [[0], [1, 2]], (
        "Optuna: columns lie otherwise"
    )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(
        lambda trial: (
            trial.suggest_float("a", 0, 1) + (trial.suggest_categorical("b", ["x", "y"]) == "x")
        ),
        n_trials=20,
    )
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=4, max_depth=5, seed=0)
    evaluator.evaluate(study)
    shares = _compat.marginal_shares(evaluator, [0, 1])
    assert shares == pytest.approx([1.0] * 4), (
        "Optuna: two params that are all explain less than all of the variance"
    )


def test_ray_tells_which_nodes_it_drains() -> None:
    from ray._private.state import state

    assert callable(state.get_draining_nodes), "Ray: draining nodes are reported differently"


def test_ray_finds_a_head_certificates_and_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _compat.ray_head("192.0.2.1:6379") == "192.0.2.1:6379", "Ray: heads are named otherwise"
    for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"):
        (tmp_path / name).write_text(f"made up {name}")
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / name))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert _compat.ray_certificates() == (
        b"made up SERVER_CERT", b"made up SERVER_KEY", b"made up CA_CERT"
    ), "Ray: certificates are read otherwise"  # fmt: skip
    loader = _compat.ray_token_loader()
    found = loader.has_token(ignore_auth_mode=True)
    header = loader.get_token_for_http_header(ignore_auth_mode=True) if found else {}
    assert isinstance(found, bool), "Ray: the existence of a token is reported differently"
    assert isinstance(header, dict), "Ray: a token is given otherwise"


def test_ray_reads_the_variables_and_writes_the_file_that_studies_name() -> None:
    import ray
    from ray._common.utils import get_ray_address_file
    from ray._private.ray_constants import ENABLE_RAY_CLUSTERS_ENV_VAR
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert RAY_JOB_CONFIG_JSON_ENV_VAR == _compat.RAY_JOB, "Ray: another variable identifies jobs"
    library = (Path(ray.__file__).parent / "_raylet.so").read_bytes()
    for variable in (_compat.RAY_WORKERS_AT_START, _compat.RAY_RECONNECTS):
        name = variable.removeprefix("RAY_")
        assert name.encode() in library, f"Ray: it reads no {variable}"
    assert ENABLE_RAY_CLUSTERS_ENV_VAR in _compat.RAY_FOR_NOBODY_ELSE, (
        "Ray: another variable has it listen on 127.0.0.1"
    )
    raylet = (Path(ray.__file__).parent / "core/src/ray/raylet/raylet").read_bytes()
    dashboard = (Path(ray.__file__).parent / "dashboard/consts.py").read_bytes()
    for name in _compat.RAY_FOR_NOBODY_ELSE.keys() - {ENABLE_RAY_CLUSTERS_ENV_VAR}:
        assert name.encode() in raylet + dashboard, f"Ray: it reads no {name}"
    assert Path(get_ray_address_file(None)).name == _compat.RAY_CURRENT, (
        "Ray: the address is in another file"
    )
