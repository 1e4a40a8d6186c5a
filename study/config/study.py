"""Definition of a study: a base trial, rows that change it, a search space, seeds, and its storage.

A study compares several *rows* (for the table: four arithmetics). Every row is the base trial with
a few overrides, and runs once per seed: ``rows x seeds`` trials in total. With a *space*, every row
is searched for its own best configuration, with the same number of configurations: ``rows x
configurations x seeds`` trials. Configurations are chosen by the validation split, never by the
test set.

The dataclasses are frozen and validated on construction. :mod:`study.config.compose` builds them
from YAML and ``key=value``.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from study.config.claims import PICTURES, AmendmentConfig, ClaimConfig, check_claims
from study.config.keys import flatten
from study.config.metric import DERIVED, MODES, VALIDATION, Metric, check_reported
from study.config.search import OBJECTIVES, SearchConfig, unique
from study.config.space import Space, parse_space
from study.tracking_uri import hide, without_password
from trainers.config import TrialConfig
from trainers.config.schedule_changes import CHANGEABLE
from trainers.config.validation import as_dict, at_least, finite, one_of, plain_values, require
from trainers.object_store import check_place, is_url, local_folder

ALERTS = ("finished", "failed", "best")
EXECUTORS, ENGINES = ("auto", "packed"), ("auto", "local", "ray")
GANGS = ("auto", "train", "forked")
TRACKING_SCHEMES = (
    "sqlite:///",
    "http://",
    "https://",
    "postgresql://",
    "postgresql+psycopg2://",
    "mysql+pymysql://",
)


@plain_values
@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """One row of the study's table: the base trial with ``overrides``.

    Attributes:
        label: name of the row in tables, pictures and MLflow.
        overrides: trial keys to change, nested (``{precision: {scope: matmul}}``) or dotted
            (``{precision.scope: matmul}``).
        published: published test figure of the study's metric, to print beside ours; errors in per
            cent; None without one.
        within: requirement: the row's mean test figure differs from the baseline row's by at most
            this much; percentage points for errors.
        worse_by: requirement: the row's mean test figure is worse than the baseline row's by at
            least this much; percentage points for errors.
        comparable: values that the row's trials must have for its figures to be comparable with the
            published ones, in addition to the study's ``comparable``.

    Example::

        >>> row = RowConfig(label="12 bits", overrides={"precision.format": "lns12"})
    """

    label: str = ""
    overrides: Any = None
    published: float | None = None
    within: float | None = None
    worse_by: float | None = None
    comparable: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        row, given = f"row {self.label!r}", f"rows: label={self.label!r}"
        require(given, bool(self.label.strip()), "every row needs a label", "add `label: my row`")
        finite(f"{row}: within", self.within, 0.0, "use for example within: 0.2, percentage points")
        finite(f"{row}: worse_by", self.worse_by, float("-inf"), "leave it out for none")
        finite(f"{row}: published", self.published, float("-inf"), "leave it out for none")


@plain_values
@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Limits at which a study stops by itself, as with ``lns-study stop``; None for unlimited.

    Running trials then finish, and no further trials start.

    Attributes:
        trials: number of finished and failed trials, including earlier runs.
        hours: wall time of this run and, with ``run --job``, of the runs that it continues.
        gpu_hours: sum over all trials of hours times the number or share of GPUs.
        joules: GPU energy of all trials, scaled by each trial's GPU share (``trial.gpus``); needs
            ``trial.telemetry=true``.
        failures: number of failed trials.

    Example::

        >>> one_night = LimitsConfig(hours=8, failures=5)
    """

    trials: int | None = None
    hours: float | None = None
    gpu_hours: float | None = None
    joules: float | None = None
    failures: int | None = None

    def __post_init__(self) -> None:
        at_least("limits.trials", self.trials, 1, "leave it out for no limit")
        finite("limits.hours", self.hours, 0.0, "leave it out for no limit")
        finite("limits.gpu_hours", self.gpu_hours, 0.0, "leave it out for no limit")
        finite("limits.joules", self.joules, 0.0, "leave it out for no limit")
        at_least("limits.failures", self.failures, 1, "leave it out for no limit")


@plain_values
@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """The complete config of a study.

    Attributes:
        name: name of the study's folder, its MLflow experiment and its report.
        question: the study's question, in one or two sentences for the report.
        trial: base trial that the rows change.
        rows: rows to compare; if empty, one row named like the study.
        seeds: random seeds; every row, and every configuration of a searched row, runs once per
            seed.
        space: search space (:mod:`study.config.space`); nothing is searched if empty.
        search: how the space is searched.
        metric: reported name of the figure in tables, pictures, tests and answers:
            ``validation/loss``, ``validation/NAME`` with NAME among ``trial.metrics``, or
            ``accuracy``. For ``validation/NAME`` tables show the last ``test/NAME``, for a metric
            without a split its last value. None for ``validation/error``, or for
            ``validation/loss`` if the trial's loss does not count errors.
        mode: whether lower (``min``) or higher (``max``) values of the metric are better.
        limits: limits at which the study stops by itself.
        digits: trial keys, and ``seeds``, to change if the data are digits, a set 40 times smaller
            than MNIST: by name, or because ``data.name=auto`` did not find MNIST.
        baseline: label of the row with which the others are compared; None for no comparison.
        comparable: dotted trial keys and the values they must have for figures to be comparable
            with the published ones.
        comparable_seeds: number of seeds that a row needs for its figures to be comparable.
        claims: claims that the study decides (:mod:`study.config.claims`).
        amendments: changes of its design or claims after results were seen, with dates and reasons.
        picture: picture of the study on the page of claims; None to choose one by the claims.
        small: changes that make the study's small form, by dotted key, as on the command line; {}
            for none.
        storage: folder of all studies, or s3://bucket/prefix or gs://bucket/prefix: ledgers,
            checkpoints, reports, the default tracking database (for a URL, in its local cache).
        tracking_uri: MLflow tracking server or database; None for ``sqlite`` in ``storage``,
            ``none`` to send nothing. A password in it is removed and kept only in this process
            (:mod:`study.tracking_uri`).
        tensorboard: whether to write TensorBoard event files into the study's folder
            (:mod:`study.tracking.tensorboard_alerts`).
        alerts: shell commands by event: ``finished`` (a run of the study ends, successfully or
            not), ``failed`` (a trial is given up) and ``best`` (a configuration is better than all
            earlier ones). Environment variables ``LNS_STUDY_...`` describe the event.
        address: Ray cluster to join: ``auto`` on one of its nodes, or host:port; None to use only
            this machine.
        insecure: whether to join a cluster that does not require a token
            (:mod:`study.engines.ray_session`).
        cpus: CPUs of this machine that trials may use; may exceed the actual number; None for all.
        max_concurrent: maximum number of concurrent trials; None for as many as fit.
        engine: ``local``: processes on this machine; ``ray``: Ray Tune, at ``address`` or on a Ray
            started here; ``auto``: ``ray`` for clusters, Ray Train, parameter servers, else local.
        executor: processes for trials with one worker. ``auto``: processes are reused by later
            trials, and several small trials on a GPU share one
            (:func:`trainers.workers.resources.packs`). ``packed``: one process per GPU (at most 32
            trials), or one per machine on CPUs; not for trials that run the user's code.
        gang: how the workers of a multi-worker trial start. ``train``: Ray Train's ``TorchTrainer``
            (needs Ray); ``forked``: forked processes, which start in milliseconds; ``auto``: Ray
            Train on a cluster unless the trial is short (:mod:`study.plan.gangs`), else forked.
        checkpoint_every: number of epochs between checkpoints.
        max_failures: maximum number of restarts of a trial from its last checkpoint, after its
            process or machine died; counted since its last new epoch.
        heartbeat: seconds without a report after which a trial counts as hung: its processes are
            killed and it is restarted as after a crash. Must be longer than the longest epoch and
            the starts of the trials that share a process. None waits forever, and reports silent
            trials (:mod:`study.engines.silence`).

    Example::

        >>> config = StudyConfig(
        ...     name="two formats",
        ...     trial=TrialConfig(epochs=4),
        ...     rows=[
        ...         RowConfig(label="float32"),
        ...         RowConfig(label="lns12", overrides={"precision.format": "lns12"}),
        ...     ],
        ...     seeds=[0, 1, 2],
        ... )  # study.run(config) trains it
    """

    name: str = "study"
    question: str = ""
    trial: TrialConfig = field(default_factory=TrialConfig)
    rows: list[RowConfig] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    space: dict[str, Any] = field(default_factory=dict)
    search: SearchConfig = field(default_factory=SearchConfig)
    metric: str | None = None
    mode: str = "min"
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    digits: dict[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    comparable: dict[str, Any] = field(default_factory=dict)
    comparable_seeds: int = 1
    claims: list[ClaimConfig] = field(default_factory=list)
    amendments: list[AmendmentConfig] = field(default_factory=list)
    picture: str | None = None
    small: dict[str, Any] = field(default_factory=dict)
    storage: str = "studies"
    tracking_uri: str | None = None
    tensorboard: bool = False
    alerts: dict[str, str] = field(default_factory=dict)
    address: str | None = None
    insecure: bool = False
    cpus: int | None = None
    max_concurrent: int | None = None
    engine: str = "auto"
    executor: str = "auto"
    gang: str = "auto"
    checkpoint_every: int = 1
    max_failures: int = 3
    heartbeat: float | None = None

    def __post_init__(self) -> None:
        self._check_name()
        unique("rows", [row.label for row in self.rows], "give every row its own label")
        few = "use for example seeds=[0,1,2]"
        require("seeds=[]", bool(self.seeds), "must have at least one entry", few)
        unique("seeds", self.seeds, few)
        unique("search.confirm_seeds", self.search.confirm_seeds, "name each once")
        for seed in [*self.seeds, *self.search.confirm_seeds]:
            at_least("seeds", seed, 0, few)
        at_least(
            "comparable_seeds", self.comparable_seeds, 1, "1 asks for no more than every study has"
        )
        at_least("cpus", self.cpus, 1, "leave it out to use all")
        at_least("max_concurrent", self.max_concurrent, 1, "leave it out to run as many as fit")
        require(
            f"address={self.address!r}",
            not str(self.address).startswith("ray://"),
            "Ray Client has no part in a cluster's nodes",
            "use `ray job submit --address http://HEAD:8265 --working-dir . -- lns-study run CONFIG"
            " address=auto`, or address=auto on a node of the cluster",
        )
        one_of("engine", self.engine, ENGINES)
        check_executor(self.executor)
        one_of("gang", self.gang, GANGS)
        one_of("picture", self.picture or PICTURES[0], PICTURES)
        self._check_storage()
        at_least("checkpoint_every", self.checkpoint_every, 1, "1 checkpoints every epoch")
        finite("heartbeat", self.heartbeat, 1.0, "leave it out to wait for ever")
        at_least("max_failures", self.max_failures, 0, "3 survives a killed worker")
        self._check_telemetry()
        self._check_alerts()
        self._check_baseline()
        check_claims(self.claims, [row.label for row in self.rows] or [self.name])
        self._check_metric()
        self._check_space()
        check_tracking_uri(self.tracking_uri)
        shown = self.tracking_uri and hide(self.tracking_uri)
        object.__setattr__(self, "tracking_uri", shown)
        if self.search.objectives == OBJECTIVES:
            object.__setattr__(self, "search", replace(self.search, objectives=self._objectives))
        self._check_objectives()

    def _check_telemetry(self) -> None:
        if self.trial.telemetry:
            return
        if self.limits.joules is not None:
            raise ValueError(
                f"limits.joules={self.limits.joules:g}: trials do not report energy; set"
                " trial.telemetry=true"
            )
        for metric in (*self.search.objectives, *self.search.constraints):
            if metric.startswith("telemetry/") and not self.trial.own_loop:
                raise ValueError(
                    f"search: {metric}: trials do not report it; set trial.telemetry=true"
                )

    def _check_alerts(self) -> None:
        example = "use for example alerts={finished: 'echo $LNS_STUDY_OUTCOME'}"
        for event, command in self.alerts.items():
            known = f"must be one of {', '.join(ALERTS)}"
            require(f"alerts={event!r}", event in ALERTS, known, example)
            runs = isinstance(command, str) and bool(command.strip())
            require(f"alerts.{event}={command!r}", runs, "must be a shell command", example)

    def _check_metric(self) -> None:
        """Check that the metric is not a test metric and that the base trial reports it.

        Raises:
            ValueError: it is, or does not.
        """
        one_of("mode", self.mode, MODES)
        name = self.primary_metric.name
        split, _, figure = name.rpartition("/")
        require(
            f"metric={name}",
            not name.startswith("test/"),
            "nothing may be chosen by the test set",
            f"use metric={VALIDATION}{figure}, whose test figures are in the tables",
        )
        if self.mode == "max" and figure in ("error", "loss") and split:
            raise ValueError(
                f"mode=max with metric={name}: is better the lower; leave mode out, or name another"
                " metric, for example metric=validation/r2"
            )
        require(
            f"metric={name!r}",
            bool(figure) and name not in DERIVED,
            "must be the name of a figure that trials report after an epoch",
            f"use for example metric=validation/loss ({' and '.join(DERIVED)} can be objectives of"
            " a search)",
        )
        if name.startswith(VALIDATION) and not self.trial.own_loop:
            check_reported(f"metric={name}", name, self.trial)

    def _check_objectives(self) -> None:
        """Check that trials report the objectives and constraints of the search.

        This is unknown, and not checked, if rows or the space change loss, metrics or training
        loop.

        Raises:
            ValueError: a figure is not reported.
        """
        search, first = self.search, next(iter(self.search.objectives))
        if search.ends_early and first in DERIVED:
            raise ValueError(
                f"search.scheduler={search.scheduler} with search.objectives={search.objectives}:"
                f" it compares trials by {first} after each epoch, which no trial reports; name"
                f" another first, for example {self.primary_metric.name}"
            )
        changed = [self.space, *(row.overrides for row in self.rows)]
        found = [flatten(values) for values in changed if isinstance(values, dict)]
        parts = {str(key).split(".")[0] for values in found for key in values}
        if self.trial.own_loop or parts & {"loss", "metrics", "trainable"}:
            return
        for name in {**search.objectives, **search.constraints}:
            if name not in (*DERIVED, self.primary_metric.name):
                check_reported(f"search: {name}", name, self.trial)

    @property
    def primary_metric(self) -> Metric:
        """The metric of the study."""
        usual = "error" if self.trial.loss.counts_errors else "loss"
        name = f"{VALIDATION}{usual}" if self.metric is None else self.metric
        return Metric(name=name, mode=self.mode)

    @property
    def _objectives(self) -> dict[str, str]:
        """Default objectives of the search."""
        return {self.primary_metric.name: self.mode}

    def _check_space(self) -> None:
        space = self.parsed_space
        if space and self.search.algorithm == "grid":
            space.all_points()
        if not space and self.search not in (
            SearchConfig(),
            SearchConfig(objectives=self._objectives),
        ):
            raise ValueError(
                "search: the study has no space to search; add for example space: {optimizer.lr:"
                " {loguniform: [0.001, 1.0]}}, or leave search out (search={} on the command line)"
            )
        if both := sorted({*self.search.confirm_seeds} & {*self.seeds}):
            raise ValueError(
                f"search.confirm_seeds: {both[0]} is among the study's seeds; use others, for"
                " example 101, 102, 103"
            )
        if self.search.adaptive and not space.sampled:
            given = f"search.algorithm={self.search.algorithm}: the space has grids only, which are"
            remedy = "multiplied out; use search.algorithm=grid, or choice instead of grid"
            raise ValueError(f"{given} {remedy}")
        if self.search.population:
            self._check_population(space)
        for name, alone in (("scheduler", "halving"), ("per_seed", True)):
            if getattr(self.search, name) == alone and not space.sampled:
                raise ValueError(
                    f"search.{name}={str(alone).lower()}: the space has grids only, each point a"
                    " search of its own; use choice instead of grid"
                )
        categorical = [domain.key for domain in space.sampled if domain.categorical]
        if self.search.algorithm == "cmaes" and categorical:
            raise ValueError(
                f"search.algorithm=cmaes: space.{categorical[0]} is a choice, which has no"
                " distances; use {grid: ...} for it, or search.algorithm=tpe"
            )

    def _check_population(self, space: Space) -> None:
        """Check that a population only searches keys that can change during training.

        Raises:
            ValueError: another key is searched, or changes or a decay are configured as well.
        """
        scheduler = f"search.scheduler={self.search.scheduler}"
        for domain in space.domains:
            if domain.kind != "grid" and domain.key not in CHANGEABLE:
                raise ValueError(
                    f"space.{domain.key} with {scheduler}: cannot change in the middle of a trial;"
                    " use {grid: ...} for it, which makes a population for each value; keys that"
                    f" can change: {', '.join(CHANGEABLE)}"
                )
        if self.trial.changes or any(
            domain.key in ("epochs", "changes") for domain in space.domains
        ):
            raise ValueError(
                f"{scheduler} with changes or epochs of its own: the population decides on both;"
                " leave them out"
            )
        if self.trial.lr_schedule.decay != "constant":
            raise ValueError(
                f"{scheduler} with trial.lr_schedule.decay={self.trial.lr_schedule.decay}: a"
                " generation would decay to its own end; use trial.lr_schedule.decay=constant, the"
                " population finds its own schedule"
            )

    @property
    def parsed_space(self) -> Space:
        """Search space; empty if nothing is searched."""
        return parse_space(self.space)

    def _check_name(self) -> None:
        require(
            f"name={self.name!r}",
            bool(self.slug),
            "needs a letter of A to Z or a digit, it names a folder",
            "use for example name=table",
        )
        require(
            f"name={self.name!r}",
            ".." not in self.name and not self.name.startswith("/"),
            "must not hold .. or begin with /, it names one folder in the storage",
            f"use for example name={self.slug}, and storage=... for another place",
        )

    def _check_storage(self) -> None:
        check_place("storage", self.storage)
        if self.gang == "train" and is_url(self.storage):
            raise ValueError(
                f"gang=train with storage={self.storage!r}: Ray Train's checkpoints are not"
                " fetched from an object store; use gang=auto, or a folder that all nodes see"
            )

    def _check_baseline(self) -> None:
        labels = [row.label for row in self.rows]
        require(
            f"baseline={self.baseline!r}",
            self.baseline is None or self.baseline in labels,
            f"must be the label of a row ({', '.join(labels) or 'there are none'})",
            "correct it, or use baseline=null for no comparison",
        )

    @property
    def slug(self) -> str:
        """Name of the study's folder: letters, digits, dot, dash and underscore."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.")

    @property
    def folder(self) -> Path:
        """Absolute path of the folder of this study's ledger, checkpoints and report.

        If the storage is a URL, it is the local cache.
        """
        return local_folder(self.storage) / self.slug

    @property
    def tracking(self) -> str:
        """Effective MLflow tracking URI."""
        return self.tracking_uri or default_tracking_uri(self.storage)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain nested dict of JSON values; :meth:`from_dict` reads it back."""
        return as_dict(self)

    def to_change(self) -> dict[str, Any]:
        """Return :meth:`to_dict`, but reset default objectives so that they follow a new metric."""
        values = self.to_dict()
        if self.search.objectives == self._objectives:
            values["search"]["objectives"] = OBJECTIVES.copy()
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StudyConfig:
        """Return the config from the result of :meth:`to_dict`, including older versions'.

        Raises:
            ValueError: a value is outside its range.
        """
        if values.get("executor") == "train":  # the name of gang=train until 0.1
            values = {**values, "executor": "auto", "gang": "train"}
        parts = {
            "trial": TrialConfig.from_dict(values.get("trial", {})),
            "rows": [RowConfig(**row) for row in values.get("rows", [])],
            "search": SearchConfig(**values.get("search", {})),
            "limits": LimitsConfig(**values.get("limits", {})),
            "claims": [ClaimConfig(**claim) for claim in values.get("claims", [])],
            "amendments": [AmendmentConfig(**each) for each in values.get("amendments", [])],
        }
        return StudyConfig(**{**values, **parts})


def check_executor(executor: str) -> None:
    """Check the executor's name; the old name of ``gang=train`` has its own error.

    Raises:
        ValueError: the executor is unknown.
    """
    require(
        "executor=train", executor != "train", "is called gang=train since 0.1", "use gang=train"
    )
    one_of("executor", executor, EXECUTORS)


def check_tracking_uri(uri: str | None) -> None:
    """Check the form of an MLflow tracking URI; None means the default database.

    Raises:
        ValueError: the scheme is unknown (the message lists the known ones), or the host and port
            of a server's address are malformed.
    """
    shown = without_password(str(uri))
    require(
        f"tracking_uri={re.sub('//.*', '//...', shown, flags=re.DOTALL)!r}",
        not re.search(r"\s", str(uri)),
        "must hold no space",
        "write it as %20",
    )
    require(
        f"tracking_uri={shown!r}",
        uri in (None, "none") or str(uri).startswith(TRACKING_SCHEMES),
        f"must start with one of {', '.join(TRACKING_SCHEMES)}",
        "for a local file use sqlite:///path/mlflow.db, for a server http://127.0.0.1:5000, to send"
        " nothing none",
    )
    try:
        _ = str(uri).startswith("http") and urllib.parse.urlsplit(str(uri)).port
    except ValueError:
        raise ValueError(
            f"tracking_uri={shown!r}: must be http://host:port or http://user:password@host:port;"
            " in a password write / as %2F, ? as %3F and # as %23"
        ) from None


def default_tracking_uri(storage: str) -> str:
    """Return the URI of the SQLite database in a storage folder."""
    return f"sqlite:///{local_folder(storage) / 'mlflow.db'}"
