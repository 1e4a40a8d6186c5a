"""What a study is: one base trial, rows that change it, seeds that repeat it, and where its files go.

A study asks one question of several *rows* (for the table: four arithmetics). Every row is the base trial with a few
overrides, and every row runs once per seed, so ``rows x seeds`` trials in all. The recipe is fixed here, before anything runs;
nothing is chosen by looking at the test set.

Frozen dataclasses, validated once, where they are made. :mod:`study.compose` makes them from YAML and ``key=value``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainers.config import TrialConfig, at_least, finite

TRACKING_SCHEMES = ("sqlite:///", "http://", "https://", "postgresql://", "postgresql+psycopg2://", "mysql+pymysql://")


def _unique(name: str, values: Sequence[object], remedy: str) -> None:
    if not values:
        raise ValueError(f"{name}=[]: must have at least one entry; {remedy}")
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"{name}: {', '.join(repeated)} appears more than once; {remedy}")


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """One row of the study's table: the base trial with ``overrides``.

    Attributes:
        label: the row's name in tables, pictures and MLflow.
        overrides: trial keys to change, nested (``{precision: {scope: matmul}}``) or dotted (``{precision.scope: matmul}``).
        published: a published test error to print beside ours, in per cent; None where there is none.
        within: the row passes if its mean test error is at most so many percentage points from the baseline row's.
        worse_by: the row passes if its mean test error is at least so many percentage points above the baseline row's.
        comparable: like the study's, for this row: what its trials must have for figures to be comparable.
    """

    label: str = ""
    overrides: Any = None
    published: float | None = None
    within: float | None = None
    worse_by: float | None = None
    comparable: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ValueError(f"rows: label={self.label!r}: every row needs a label; add `label: my row`")
        finite(f"row {self.label!r}: within", self.within, 0.0, "use for example within: 0.2, percentage points")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A study, complete.

    Attributes:
        name: names the study's folder, its MLflow experiment and its report.
        question: what the study asks, one or two sentences for the report.
        trial: the base trial; rows change it.
        rows: what is compared; one row named like the study if empty.
        seeds: every row runs once per seed.
        digits: trial keys to change where ``data.name=auto`` ends at digits, a set 40 times smaller than MNIST.
        baseline: label of the row the others are compared with; None for no comparison.
        comparable: dotted trial keys and the values they must have for figures to be comparable with the published ones.
        comparable_seeds: seeds a row needs for the same.
        storage: folder of all studies: ledgers, checkpoints, reports, the default tracking database.
        tracking_uri: MLflow tracking server or database; None for ``sqlite`` in ``storage``.
        address: Ray cluster to join; None starts a local one.
        cpus: CPUs of the local Ray; None for all.
        max_concurrent: trials at a time; None for as many as fit.
        checkpoint_every: epochs between checkpoints.
        max_failures: how often a trial whose worker died is restarted from its last checkpoint.
    """

    name: str = "study"
    question: str = ""
    trial: TrialConfig = field(default_factory=TrialConfig)
    rows: list[RowConfig] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    digits: dict[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    comparable: dict[str, Any] = field(default_factory=dict)
    comparable_seeds: int = 1
    storage: str = "studies"
    tracking_uri: str | None = None
    address: str | None = None
    cpus: int | None = None
    max_concurrent: int | None = None
    checkpoint_every: int = 1
    max_failures: int = 3

    def __post_init__(self) -> None:
        self._check_name()
        _unique("rows", [row.label for row in self.rows] or [self.name], "give every row its own label")
        _unique("seeds", self.seeds, "use for example seeds=[0,1,2]")
        for seed in self.seeds:
            at_least("seeds", seed, 0, "use for example seeds=[0,1,2]")
        at_least("comparable_seeds", self.comparable_seeds, 1, "1 asks for no more than every study has")
        at_least("cpus", self.cpus, 1, "leave it out to use all")
        at_least("max_concurrent", self.max_concurrent, 1, "leave it out to run as many as fit")
        at_least("checkpoint_every", self.checkpoint_every, 1, "1 checkpoints every epoch")
        at_least("max_failures", self.max_failures, 0, "3 survives a killed worker")
        self._check_baseline()
        check_tracking_uri(self.tracking_uri)

    def _check_name(self) -> None:
        if not self.slug:
            raise ValueError(f"name={self.name!r}: needs a letter or digit, it names a folder; use for example name=table")
        if ".." in self.name or self.name.startswith("/"):
            raise ValueError(
                f"name={self.name!r}: must not hold .. or begin with /, it names one folder in the storage; use for example "
                f"name={self.slug}, and storage=... for another place"
            )

    def _check_baseline(self) -> None:
        labels = [row.label for row in self.rows]
        if self.baseline is not None and self.baseline not in labels:
            raise ValueError(
                f"baseline={self.baseline!r}: must be the label of a row ({', '.join(labels) or 'there are none'}); correct it, or "
                "use baseline=null for no comparison"
            )

    @property
    def slug(self) -> str:
        """The name as a folder name: letters, digits, dot, dash and underscore."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name).strip("-.")

    @property
    def folder(self) -> Path:
        """Absolute folder of this study's ledger, checkpoints and report."""
        return Path(self.storage).expanduser().resolve() / self.slug

    @property
    def tracking(self) -> str:
        """The MLflow tracking URI in force."""
        return self.tracking_uri or default_tracking_uri(self.storage)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict of JSON values; :meth:`from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StudyConfig:
        """The config whose :meth:`to_dict` is ``values``.

        Raises:
            ValueError: a value is outside its range; the message names value, rule and remedy.
        """
        rows = [RowConfig(**row) for row in values.get("rows", [])]
        return StudyConfig(**{**values, "trial": TrialConfig.from_dict(values.get("trial", {})), "rows": rows})


def check_tracking_uri(uri: str | None) -> None:
    """Refuse what is no MLflow tracking URI; None, the default database, passes.

    Raises:
        ValueError: with the schemes there are.
    """
    if uri is not None and not uri.startswith(TRACKING_SCHEMES):
        raise ValueError(
            f"tracking_uri={uri!r}: must start with one of {', '.join(TRACKING_SCHEMES)}; for a local file use sqlite:///path/mlflow.db, "
            "for a server http://127.0.0.1:5000"
        )


def default_tracking_uri(storage: str) -> str:
    """The sqlite database in a storage folder."""
    return f"sqlite:///{Path(storage).expanduser().resolve() / 'mlflow.db'}"
