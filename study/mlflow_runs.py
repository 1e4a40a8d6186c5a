"""One ledger's runs in one MLflow store. Every method may be repeated: after a lost reply, by another process, years later.

What makes it repeatable: a run is found by its tag ``lns_study.key`` before it is made (``create_run`` is not idempotent; twins that
a lost reply left are deleted, the oldest stays); a metric with the same run, key, step, value and timestamp is the same row in MLflow, and
timestamps are the ledger's. The store itself is the cursor: the last step that a run has says which epochs it lacks, so a database that
was swapped or set back is completed as well.

Layout: one experiment a study; one parent run a ledger with config, plan, environment and report; one child run a trial with params, tags,
data sets, metrics. More seeds or rows keep the runs there are: keys are made of the ledger's id and the trial's, not of the plan.
Requests: four a trial and one a file of its profile (make, params and metrics, data set, end) and one a batch of what came meanwhile.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study.ledger import Event
from study.mlflow_names import SETTING, TAG_LENGTH, nonfinite_tags, sanitise, settings_of
from study.space import describe
from study.state import ENDED, FAILED, FINISHED, PLANNED, RUNNING, STOPPED, StudyState, TrialState, flatten, name_of

KEY_TAG = "lns_study.key"
PARENT_TAG = "mlflow.parentRunId"
KIND_TAG = "mlflow.experimentKind"
PROFILE = "profile"
"""Among a trial's artifacts: what ``trial.profile.steps`` recorded. Sent before the run's end, so once; sent again it is the same files."""
BATCH = 1000
MOST_TAGS = 100
TEXT = 5000
"""Characters kept of an error or a description in a tag."""

MLFLOW_STATUS = {RUNNING: "RUNNING", FINISHED: "FINISHED", STOPPED: "FINISHED", FAILED: "FAILED", PLANNED: "KILLED"}
"""A trial that a scheduler ended early did what it was to do; the tag ``stopped_by`` tells it apart."""


@dataclass(kw_only=True)
class _Known:
    """What the store has of one run.

    Attributes:
        last: the last epoch of which it has a metric; that one may be incomplete.
    """

    run: str
    status: str = "RUNNING"
    end: int | None = None
    last: int = 0
    params: frozenset[str] = frozenset()
    settings: bool = False
    inputs: bool = False
    sent: set[int] = field(default_factory=set)


class Runs:
    """One plan's runs.

    Args:
        client: an ``MlflowClient``.
        plan: the ledger's last ``planned`` event.
        artifacts: folder for artifacts of a new experiment; None leaves it to the store.
        folder: of the study, where the profiles of its trials lie.
    """

    def __init__(self, client: Any, plan: Event, artifacts: Path | None, folder: Path) -> None:
        self._client, self.plan, self._folder = client, plan, folder
        self._name = plan["study"]["name"]
        self._key = str(plan["ledger"])
        self._experiment = self._ensure_experiment(artifacts)
        self._known = self._runs_of_ledger()
        self._parent = self._ensure_parent()

    @property
    def parent_ids(self) -> tuple[str, str]:
        """Experiment id and parent run id."""
        return self._experiment, self._parent

    def run_ids(self) -> dict[str, str]:
        """Run id of every trial that the store knows, by trial id."""
        return {key.partition("/")[2]: known.run for key, known in self._known.items() if "/" in key}

    def push(self, trial: TrialState) -> None:
        """Send what the run of a trial lacks, and its end if it has ended."""
        known = self._ensure_run(trial)
        if self._is_complete(known, trial):
            return
        if known.status != "RUNNING":
            self._client.update_run(known.run, status="RUNNING")
            known.status = "RUNNING"
        fresh = {
            epoch: event for epoch, event in sorted(trial.reports.items()) if epoch not in known.sent and epoch >= known.last
        }
        metrics = [] if known.settings else list(_settings_metrics(trial, self.plan))
        metrics += [metric for epoch, event in fresh.items() for metric in _report_metrics(epoch, event)]
        metrics += _end_metrics(trial)
        params = [(name, value) for name, value in _params(trial.config) if name not in known.params]
        self._log(known.run, metrics, params, _result_tags(trial, fresh))
        known.params, known.settings = known.params | {name for name, _ in params}, True
        known.sent |= set(fresh)
        self._log_inputs(known, trial)
        if trial.status in ENDED:
            for profile in profiles(self._folder, trial):
                self._client.log_artifacts(known.run, str(profile), PROFILE)
            self._end(known, MLFLOW_STATUS[trial.status], trial.ended)

    def forget(self, trial: TrialState) -> None:
        """Take nothing of what the store has of a trial for complete: the next :meth:`push` sends all of it."""
        known = self._known.get(f"{self._key}/{trial.id}")
        if known is not None:
            self._known[f"{self._key}/{trial.id}"] = _Known(run=known.run, status=known.status)

    def settle(self, trial: TrialState) -> None:
        """Close the run of a trial that stopped without an end: the study was interrupted."""
        known = self._known.get(f"{self._key}/{trial.id}")
        if known is not None and known.status == "RUNNING":
            self._end(known, "KILLED", trial.last_heard or trial.started)

    def finish(self, state: StudyState, report: Path | None) -> None:
        """Attach the report, write each row's mean and spread, keep the best models, close the parent run."""
        from study.mlflow_models import log_models

        time_ = max((trial.ended or 0.0 for trial in state.trials), default=0.0)
        self._log(self._parent, list(_metrics(_row_figures(state), 0, time_)))
        if report is not None and report.exists():
            self._client.log_artifacts(self._parent, str(report), "report")
        log_models(self._client, self._experiment, state, self.run_ids())
        outcome = {"finished": "FINISHED", "failed": "FAILED"}.get(state.outcome, "KILLED")
        self._end(self._known[self._key], outcome, time_ or None)

    def describe(self, view: str) -> None:
        """Give the experiment its saved view and the parent run its config, plan and environment; each once a plan."""
        from study.mlflow_view import view_tag

        name, value = view_tag(self.plan, view)
        self._client.set_experiment_tag(self._experiment, name, value)
        self._client.set_experiment_tag(self._experiment, KIND_TAG, "custom_model_development")
        for file, text in _documents(self.plan).items():
            self._client.log_text(self._parent, text, file)

    # ------------------------------------------------------------------------------------------------------------- finding and making

    def _ensure_experiment(self, artifacts: Path | None) -> str:
        found = self._client.get_experiment_by_name(self._name)
        if found is None:
            location = (artifacts / re.sub(r"\W+", "-", self._name)).as_uri() if artifacts else None
            return str(self._client.create_experiment(self._name, artifact_location=location))
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _ensure_parent(self) -> str:
        known = self._known.get(self._key)
        if known is None:
            known = self._known[self._key] = self._make(self._key, self._name, self.plan["time"], _parent_tags(self.plan))
        elif known.status != "RUNNING":
            self._client.update_run(known.run, status="RUNNING")
            known.status = "RUNNING"
        return known.run

    def _runs_of_ledger(self) -> dict[str, _Known]:
        """What the store has of every run of this ledger, by key; of twins the oldest, the others deleted."""
        found: dict[str, _Known] = {}
        for run in runs_with_key(self._client, self._experiment, self._key):
            key = run.data.tags[KEY_TAG]
            if key in found:
                self._client.delete_run(run.info.run_id)
            else:
                found[key] = _known(run)
        return found

    def _ensure_run(self, trial: TrialState) -> _Known:
        key = f"{self._key}/{trial.id}"
        if key not in self._known:
            tags = _trial_tags(trial, self.plan) | {PARENT_TAG: self._parent}
            self._known[key] = self._make(key, name_of(trial), trial.started or self.plan["time"], tags)
        return self._known[key]

    def _make(self, key: str, name: str, started: float, tags: Mapping[str, str]) -> _Known:
        """A new run. After a lost reply it may be there already, so whoever repeats this looks first (:class:`Runs` is made anew)."""
        run = self._client.create_run(
            self._experiment, start_time=int(started * 1000), tags={KEY_TAG: key, **tags}, run_name=name
        )
        return _Known(run=run.info.run_id)

    # ------------------------------------------------------------------------------------------------------------------------ sending

    def _is_complete(self, known: _Known, trial: TrialState) -> bool:
        """Whether the run ended as the trial did: its end is written last, so everything before it is there."""
        if trial.status not in ENDED or trial.ended is None:
            return False
        return known.status == MLFLOW_STATUS[trial.status] and known.end == int(trial.ended * 1000)

    def _end(self, known: _Known, status: str, ended: float | None) -> None:
        end = int((ended or time.time()) * 1000)
        self._client.set_terminated(known.run, status, end_time=end)
        known.status, known.end = status, end

    def _log_inputs(self, known: _Known, trial: TrialState) -> None:
        datasets = [] if known.inputs else list(_datasets(self.plan, trial))
        if datasets:
            self._client.log_inputs(known.run, datasets=datasets)
        known.inputs = True

    def _log(
        self,
        run: str,
        metrics: list[Any],
        params: Sequence[tuple[str, str]] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """One request a thousand entries, params and tags a hundred at a time."""
        from mlflow.entities import Param, RunTag

        params_ = [Param(name, value) for name, value in params]
        tags_ = [RunTag(name, value) for name, value in (tags or {}).items()]
        while metrics or params_ or tags_:
            first = (params_[:MOST_TAGS], tags_[:MOST_TAGS])
            room = BATCH - len(first[0]) - len(first[1])
            self._client.log_batch(run, metrics=metrics[:room], params=first[0], tags=first[1])
            metrics, params_, tags_ = metrics[room:], params_[MOST_TAGS:], tags_[MOST_TAGS:]


def runs_with_key(client: Any, experiment: str, key: str) -> Iterator[Any]:
    """Every run of a ledger, parent and children, oldest first; one question a thousand."""
    for condition in (f"= '{key}'", f"LIKE '{key}/%'"):
        token = None
        while True:
            page = client.search_runs(
                [experiment],
                f"tags.`{KEY_TAG}` {condition}",
                max_results=BATCH,
                order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                break


def _known(run: Any) -> _Known:
    steps = [metric.step for metric in run.data._metric_objs if not metric.key.startswith((SETTING, "test/"))]
    return _Known(
        run=run.info.run_id,
        status=run.info.status,
        end=run.info.end_time,
        last=max(steps, default=0),
        params=frozenset(run.data.params),
        settings=any(metric.key.startswith(SETTING) for metric in run.data._metric_objs),
        inputs=bool(run.inputs and run.inputs.dataset_inputs),
    )


# ------------------------------------------------------------------------------------------------------------ what a ledger says of a run


def expected_points(trial: TrialState, plan: Event) -> set[tuple[str, int, int, float | None]]:
    """Every metric point that the run of a trial should have: name, step, timestamp, value (None for NaN)."""
    metrics = list(_settings_metrics(trial, plan))
    metrics += [metric for epoch, event in trial.reports.items() for metric in _report_metrics(epoch, event)]
    metrics += _end_metrics(trial)
    return {point_of(metric) for metric in metrics}


def point_of(metric: Any) -> tuple[str, int, int, float | None]:
    """A metric of MLflow's as it compares: NaN is None."""
    return metric.key, metric.step, metric.timestamp, None if math.isnan(metric.value) else metric.value


def expected_params(trial: TrialState) -> dict[str, str]:
    """The params that the run of a trial should have."""
    return dict(_params(trial.config))


def _report_metrics(epoch: int, event: Event) -> Iterator[Any]:
    """An epoch's metrics; settings that changed while the trial ran (``params`` of the event) are metrics too, since params are
    immutable."""
    yield from _metrics(event["metrics"], epoch, event["time"])
    if event.get("params"):
        yield from _metrics(settings_of(event["params"]), epoch, event["time"])


def _settings_metrics(trial: TrialState, plan: Event) -> Iterator[Any]:
    """Numeric settings and the width of the number format: MLflow compares and plots metrics only."""
    from study.objectives import bits_of

    yield from _metrics({**settings_of(trial.config), "bits": bits_of(trial.config)}, 0, trial.started or plan["time"])


def _end_metrics(trial: TrialState) -> Iterator[Any]:
    """The test figures and the seconds of training, where the trial has ended."""
    from study.objectives import objective

    if trial.status in ENDED and trial.ended is not None:
        yield from _metrics({**trial.test, "seconds": objective(trial, "seconds")}, trial.epochs, trial.ended)


def _metrics(values: Mapping[str, Any], epoch: int, seconds: float) -> Iterator[Any]:
    """MLflow's metrics; infinite ones are left out, a tag names them."""
    from mlflow.entities import Metric

    for name, value in values.items():
        if name != "epoch" and value is not None and not math.isinf(value):
            yield Metric(sanitise(name), float(value), int(seconds * 1000), epoch)


def _params(config: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """A nested config as flat params, ``precision.format`` and so on."""
    return [(sanitise(name), str(value)) for name, value in flatten(dict(config)).items()]


def _row_figures(state: StudyState) -> dict[str, float]:
    from study.results import summarise

    figures: dict[str, float | None] = {}
    for row in summarise(state).rows:
        figures |= {f"{row.label}/test_error_percent": row.mean, f"{row.label}/test_error_percent_sd": row.sd}
    return {name: value for name, value in figures.items() if value is not None}


def _result_tags(trial: TrialState, fresh: Mapping[int, Event]) -> dict[str, str]:
    """What is known of a trial once it has ended, and where its metrics were infinite."""
    tags: dict[str, str] = {}
    if any(math.isinf(value) for event in fresh.values() for value in event["metrics"].values()):
        tags |= nonfinite_tags({epoch: event["metrics"] for epoch, event in trial.reports.items()})
    infinite = {name: value for name, value in trial.test.items() if math.isinf(value)}
    tags |= nonfinite_tags({trial.epochs: infinite})
    if trial.status in ENDED:
        ended = {"restarts": str(trial.restarts), "stopped_by": trial.stopped_by, "error": trial.error[:TEXT]}
        tags |= {"status": trial.status, **{name: value for name, value in ended.items() if value}}
    return tags


def _datasets(plan: Event, trial: TrialState) -> Iterator[Any]:
    """The data set of a trial, with its digest and sizes."""
    import json

    from mlflow.entities import Dataset, DatasetInput, InputTag

    for entry in plan["data"]:
        if entry["name"] == trial.config["data"]["name"]:
            sizes = {key: entry[key] for key in ("train", "validation", "test") if key in entry}
            source = json.dumps({"source": entry["source"]})
            profile = json.dumps({"examples": sizes, "sha256": entry["digest"]})
            dataset = Dataset(entry["name"], entry["digest"][:36], "local", source, profile=profile)
            yield DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "train, validation, test")])


def _documents(plan: Event) -> dict[str, str]:
    """The parent run's files: config, plan, environment."""
    import yaml

    def dump(values: Any) -> str:
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    trials = [{key: trial[key] for key in ("id", "row", "seed", "number", "params") if key in trial} for trial in plan["trials"]]
    environment = {**plan["provenance"], "hardware": plan.get("hardware", {}), "data": plan["data"]}
    return {"config.yaml": dump(plan["study"]), "plan.yaml": dump(trials), "environment.yaml": dump(environment)}


def _code_tags(plan: Event) -> dict[str, str]:
    code = plan["provenance"]
    versions = {f"version.{name}": version for name, version in code["versions"].items()}
    return {"git.commit": str(code["commit"]), "git.dirty": str(code["dirty"]), "python": code["python"], **versions}


def _parent_tags(plan: Event) -> dict[str, str]:
    question = {"mlflow.note.content": plan["study"]["question"][:TAG_LENGTH]} if plan["study"]["question"] else {}
    data = "; ".join(f"{entry['source']} (sha256 {entry['digest'][:12]})" for entry in plan["data"])
    return {"study": plan["study"]["name"], "kind": "study", "data": data[:TEXT], **question, **_code_tags(plan)}


def _trial_tags(trial: TrialState, plan: Event) -> dict[str, str]:
    names = {"study": plan["study"]["name"], "kind": "trial", "row": trial.row, "seed": str(trial.seed), "trial": trial.id}
    config = trial.config
    names |= {"format": config["precision"]["format"], "workers": str(config["workers"]), "layout": layout_of(config)}
    if trial.number is not None:
        names |= {"configuration": str(trial.number), "sampled": describe(trial.params)[:TEXT]}
    return names | _code_tags(plan)


def profiles(folder: Path, trial: TrialState) -> list[Path]:
    """Where the profile of a trial lies, if it has one: executors of their own storage keep it with that."""
    return [path for path in (folder / "profiles" / trial.id, folder / "train" / trial.id / "profile") if path.is_dir()]


def layout_of(config: Mapping[str, Any]) -> str:
    """How a trial is spread: ``1 worker``, ``dp 2``, ``dp 2 x pp 2``, ``tp 2``, ``dp 2 sharded``."""
    layout = config.get("layout", {})
    workers, pp, tp = int(config["workers"]), int(layout.get("pp") or 1), int(layout.get("tp") or 1)
    if workers == 1:
        return "1 worker"
    degrees = {"dp": workers // (pp * tp), "pp": pp, "tp": tp}
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return " x ".join(parts) + (" sharded" if layout.get("fsdp") else "")
