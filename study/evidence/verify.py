"""Verification of a report: recomputes every figure and compares it to the last printed digit.

The figures of ``figures.json`` and of the printed page are recomputed from two sources, the
ledger's events and MLflow's metrics, with SciPy instead of the report's own code. Each difference
is reported in a sentence. The checks cover:

- the statement's digest, from the first plan;
- the trials behind each row (for a searched row, chosen by seeds, constraints and the first
  objective);
- each row's mean, spread and interval, as numbers and as printed;
- figure, interval and verdict of ``value``, ``difference`` and ``no_row_beats`` claims. Other
  claims are judged again by the report's own code; functions of the study run only on request;
- in MLflow, every trial's final figure, each row's mean and spread, and the tags of the claims;
  also every point, param and status of every trial (:mod:`study.tracking.reconcile`), because an
  altered validation figure changes which configuration is chosen;
- everything else in ``figures.json``, the pages, the pictures and ``configurations.csv``, made
  again by the report's own code (:mod:`study.evidence.verify_pages`).

If the ledger is damaged, only the damage is reported.

Limits: losses that diverged are compared as printed. An attacker who alters the ledger, its
checksums, the report and MLflow consistently is not detected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from study.config import StudyConfig
from study.config.claims import BOUNDS, digest
from study.config.metric import DERIVED
from study.config.search import broken
from study.evidence.judge import LIKE, judge
from study.evidence.record import FILE, read_record, record
from study.evidence.statement import statement_of
from study.evidence.verdict import ENOUGH
from study.evidence.verify_pages import has_form_of, verify_pages, verify_record
from study.ledger.events import Event
from study.ledger.log import read_ledger
from study.ledger.state import StudyState, fold
from study.ledger.storage import fetch_report
from study.ledger.studies import placed, read
from study.report.claims import markdown_cell
from study.results.objectives import SPENT, objective
from study.results.summary import summarise
from study.results.ties import compared
from study.tracking.address import OFF, store_of
from study.tracking.mlflow_runs import own_runs
from study.tracking.names import sanitise
from study.tracking.payload import claim_tags
from study.tracking.reconcile import audit
from study.tracking.writer import connect
from study.tracking.writer_supervisor import check_tracking
from trainers.files import MOST_JSON, read_own

ALPHA = 0.05


class Source:
    """The final figures of a study's trials, from the events of its ledger.

    Args:
        folder: folder of the study.
    """

    def __init__(self, folder: Path) -> None:
        self.events = read_ledger(folder)
        plans = [event for event in self.events if event["event"] == "planned"]
        self.plan = plans[-1]
        study = StudyConfig.from_dict(self.plan["study"])
        self.metric = study.primary_metric
        self.objective, self.mode = next(iter(study.search.objectives.items()))
        self.constraints, self.known = study.search.constraints, fold(self.events).known
        self.alone = study.seeds if study.search.per_seed else []
        begin = ("started", "report")
        started = [n for n, event in enumerate(self.events) if event["event"] in begin]
        before = self.events[: started[0]] if started else self.events
        self.stated = [event for event in before if event["event"] == "planned"][-1]
        added = [event["planned"] for event in self.events if event["event"] == "added"]
        kept = {trial["id"]: trial for trial in [*self.plan["trials"], *added]}
        self.trials = kept
        self.finals: dict[str, float] = {}
        self.reports: dict[str, tuple[int, Mapping[str, float]]] = {}
        for event in self.events:
            self._take(event)

    def _take(self, event: Event) -> None:
        if event["event"] == "report":
            trial = event["trial"]
            epoch, before = self.reports.get(trial, (0, {}))
            if event["epoch"] > epoch:
                sums = {
                    name: event["metrics"].get(name, math.nan)
                    + before.get(name, math.nan if epoch else 0.0)
                    for name in SPENT
                    if name in event["metrics"] or name in before
                }
                self.reports[trial] = (event["epoch"], {**event["metrics"], **sums})
        elif event["event"] == "finished":
            trial = event["trial"]
            values = {**self.reports.get(trial, (0, {}))[1], **event["metrics"]}
            if self.metric.test_name in values:
                self.finals[trial] = self.scale * float(values[self.metric.test_name])

    @property
    def scale(self) -> float:
        """Factor from reported to printed figures."""
        return 100.0 if self.metric.name.endswith("/error") else 1.0

    def diverged(self, ids: Sequence[str]) -> bool:
        """Return whether a loss, the metric or the objective of one of the trials is not finite."""
        names = "train/loss", "validation/loss", self.objective, self.metric.name
        last = (self.reports[id_][1] for id_ in ids if id_ in self.reports)
        return not all(math.isfinite(found.get(name, 0.0)) for found in last for name in names)

    def of_row(self, label: str) -> list[str]:
        """Return the ids of the trials behind a row's figures.

        For a searched row these are the trials of the configuration with the best mean of the first
        objective, the first of equal ones; with ``search.per_seed``, of each seed's best.
        """
        mine = [trial for trial in self.trials.values() if trial["row"] == label]
        groups: dict[tuple[int | None, str], list[str]] = {}
        for trial in mine:
            params = json.dumps(trial.get("params", {}), sort_keys=True)
            groups.setdefault((trial.get("number"), params), []).append(trial["id"])
        if all(number is None for number, _ in groups):
            return [trial["id"] for trial in mine]
        sign = 1.0 if self.mode == "min" else -1.0
        in_order = [groups[of] for of in sorted(groups, key=lambda of: of[0] or 0)]
        last = [ids for ids in in_order if not any(map(self._is_early, ids))]
        whole = [ids for ids in last if all(id_ in self.finals for id_ in ids)]
        means = [(-len(ids), sign * self._mean(self.objective, ids), ids) for ids in whole]
        usable = [
            entry
            for entry in means
            if math.isfinite(entry[1])
            and not self.diverged(entry[2])
            and not broken(self.constraints, {m: self._mean(m, entry[2]) for m in self.constraints})
        ]
        usable.sort(key=lambda entry: entry[:2])  # equals keep their order
        if not self.alone:
            return usable[0][2] if usable else []
        first = {self.trials[ids[0]]["seed"]: ids for *_, ids in reversed(usable)}
        lacks = any(seed not in first for seed in self.alone)
        return [] if lacks else [id_ for seed in self.alone for id_ in first[seed]]

    def _is_early(self, id_: str) -> bool:
        """Return whether a trial belongs to a round before the search's last one."""
        asked = self.trials[id_].get("asked", {})
        return bool(asked.get("round", 0) + 1 < asked.get("rounds", 1))

    def _mean(self, metric: str, ids: Sequence[str]) -> float:
        """Return the mean of a metric over trials, rounded for comparisons."""
        values = [self.reports[id_][1].get(metric, math.nan) for id_ in ids]
        if metric in DERIVED:  # computed from the config and the events' times
            found = [objective(self.known[id_], metric) for id_ in ids]
            values = [math.nan if value is None else value for value in found]
        return compared(float(np.mean(values)))

    def by_seed(self, ids: Sequence[str]) -> dict[int, float]:
        """Return the final figures of finished trials by seed."""
        return {self.trials[id_]["seed"]: self.finals[id_] for id_ in ids if id_ in self.finals}


def verify(
    folder: Path, tracking_uri: str | None = None, *, run_checks: bool = False
) -> Iterator[str]:
    """Yield the differences between a study's report and the recomputed one, one sentence each.

    Args:
        folder: folder of the study.
        tracking_uri: MLflow store to read; None for the study's own.
        run_checks: whether to run the claims' functions, which the ledger names; otherwise the
            report's own verdicts of these claims are used.

    Raises:
        ValueError: the study has no report with figures, or its ledger has no plan.
    """
    fetch_report(folder)
    figures = read_record(folder / "report")
    if not figures:
        raise ValueError(
            f"{folder / 'report' / FILE} does not exist, so nothing can be verified; write the"
            f" report first with `lns-study report {folder.name}`"
        )
    state = read(folder)
    if state.damage:
        yield state.damage
        return
    source, text = Source(folder), folder / "report" / "report.md"
    page = read_own(text, MOST_JSON).decode(errors="replace") if text.is_file() else ""
    summary = summarise(state)
    wanted = record(state, summary, judge(state, folder, run_checks=run_checks))
    if not has_form_of(figures, wanted):
        yield f"{FILE}: it is not of the form that this version writes"
        yield from verify_record(figures, wanted)
        yield from verify_pages(state, summary, wanted["claims"], folder / "report")
        return
    yield from _statement(figures, source)
    for row in figures["rows"]:
        yield from _row(row, source, page)
    again = {claim["name"]: claim for claim in wanted["claims"]}
    yield from _missing(figures, wanted)
    for claim in figures["claims"]:
        yield from _claim(claim, wanted["rows"], source, again.get(claim["name"], {}))
        if f"| {claim['outcome']} | {markdown_cell(claim['shown'])} |" not in page:
            yield f"claim {claim['name']}: report.md does not print {claim['shown']}"
    yield from verify_record(figures, wanted)
    yield from verify_pages(state, summary, wanted["claims"], folder / "report")
    uri = store_of(placed(StudyConfig.from_dict(source.plan["study"]), folder), tracking_uri)
    if uri != OFF:
        yield from _sent(uri, figures, source, state)


def _sent(uri: str, figures: Mapping[str, Any], source: Source, state: StudyState) -> Iterator[str]:
    check_tracking(uri)
    client = connect(uri)
    yield from _mlflow(client, figures, source)
    yield from (f"MLflow, {line}" for line in audit(client, state).differences())


def _statement(figures: Mapping[str, Any], source: Source) -> Iterator[str]:
    said = source.stated.get("stated")
    if said is None:
        return
    found, shown = digest(statement_of(source.stated)), figures["stated"]
    shown = shown and shown["digest"]
    if not found == said["digest"] == shown:
        yield (
            f"statement: the first plan's sha256 is {found}, the ledger notes {said['digest']}, the"
            f" report {shown}"
        )


def _missing(figures: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield missing or additional rows and claims, and changes of the statement it does not
    show."""
    for part, key in (("rows", "label"), ("claims", "name")):
        ours, theirs = ([entry[key] for entry in each[part]] for each in (figures, wanted))
        if ours != theirs:
            yield f"{part}: the report has {', '.join(ours)}, the study {', '.join(theirs)}"
    if figures["stated"] and figures["stated"]["changed"] != wanted["stated"]["changed"]:
        yield (
            f"statement: the report has as changed {figures['stated']['changed']}, the ledger"
            f" {wanted['stated']['changed']}"
        )


def _row(row: Mapping[str, Any], source: Source, page: str) -> Iterator[str]:
    place, ids = f"row {row['label']}", source.of_row(row["label"])
    if sorted(ids) != sorted(row["trials"]):
        yield f"{place}: the report's trials are {row['trials']}, the ledger's {ids}"
    values = list(source.by_seed(ids).values())
    mean = float(np.mean(values)) if values else None
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    whole = len(values) == len(ids)
    finite = bool(np.all(np.isfinite(values)))
    ends = _interval(values) if whole and finite and len(values) > 1 else None
    yield from _differ(f"{place}: mean", row["mean"], mean)
    yield from _differ(f"{place}: standard deviation", row["sd"], sd)
    for name, ours, theirs in zip(("low", "high"), row["interval"] or (), ends or (), strict=False):
        yield from _differ(f"{place}: {name} end of the interval", ours, theirs)
    if (row["interval"] is None) != (ends is None):
        yield f"{place}: the report's interval is {row['interval']}, the ledger's {ends}"
    printed = _printed(mean, sd, source)
    if row["printed"]["mean"] != printed:
        yield f"{place}: {FILE} prints {row['printed']['mean']}, the ledger gives {printed}"
    if f"| {markdown_cell(row['label'])} | {printed} |" not in page:
        yield f"{place}: report.md does not print {printed}"


def _printed(mean: float | None, sd: float | None, source: Source) -> str:
    if mean is None:
        return "-"
    figure, spread = ("z.2f", ".2f") if source.scale == 100.0 else ("z.4g", ".2g")
    return f"{mean:{figure}}" + (f" ± {sd:{spread}}" if sd is not None else "")


def _interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """Return the interval of a mean, by SciPy's t distribution; without spread, the mean twice."""
    from scipy import stats

    mean, error = float(np.mean(values)), float(stats.sem(values))
    if not error > 0:
        return mean, mean
    low, high = stats.t.interval(1 - alpha, len(values) - 1, loc=mean, scale=error)
    return float(low), float(high)


def _differ(what: str, ours: float | None, theirs: float | None) -> Iterator[str]:
    """Yield a sentence if the report's figure ``ours`` is not the recomputed one ``theirs``."""
    both = ours is not None and theirs is not None
    if both and (math.isclose(ours or 0, theirs or 0, rel_tol=LIKE, abs_tol=LIKE)):
        return
    nothing = {None} | ({theirs} if theirs is not None and not math.isfinite(theirs) else set())
    if (ours is None or not math.isfinite(ours)) and theirs in nothing:
        return
    yield f"{what}: the report has {ours}, computed again it is {theirs}"


def _claim(
    claim: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    source: Source,
    again: Mapping[str, Any],
) -> Iterator[str]:
    place = f"claim {claim['name']}"
    for key in ("outcome", "shown", "runs", "stated", "published", "arguments"):
        if claim[key] != again.get(key):
            yield f"{place}: the report has {key} {claim[key]}, judged again {again.get(key)}"
    kind, arguments = again.get("kind"), again.get("arguments", {})
    if again.get("low") is None or kind not in ("value", "difference", "no_row_beats"):
        return
    named = arguments.get("rows") or [arguments["row"]]
    first, *others = [source.by_seed(source.of_row(label)) for label in named]
    if kind == "no_row_beats":
        low, figure, high = _rival(
            first, [row["label"] for row in rows if row["label"] not in named], source
        )
    else:
        values = [
            value - (others[0][seed] if others else 0.0)
            for seed, value in first.items()
            if not others or seed in others[0]
        ]
        figure, (low, high) = float(np.mean(values)), _interval(values)
    for name, value in (("figure", figure), ("low", low), ("high", high)):
        yield from _differ(f"{place}: {name}", claim[name], value)
    outcome = _decided(arguments, low, high) if kind != "no_row_beats" else claim["outcome"]
    if claim["outcome"] not in (outcome, "undecided"):
        yield f"{place}: the report says {claim['outcome']}, its interval {outcome}"


def _decided(arguments: Mapping[str, Any], low: float, high: float) -> str:
    bound = next(key for key in BOUNDS if arguments.get(key) is not None)
    value = arguments[bound]
    least, most = {
        "at_most": (-math.inf, value), "at_least": (value, math.inf), "within": value,
    }[bound]  # fmt: skip
    least, most, low, high = map(compared, (least, most, low, high))
    if low >= least and high <= most:
        return "holds"
    return "fails" if low > most or high < least else "undecided"


def _rival(
    row: Mapping[int, float], others: Sequence[str], source: Source
) -> tuple[float, float, float]:
    """Return the largest advantage of any other row over ``row``, as ``(low, mean, high)``.

    The interval is corrected for the number of rows; it goes from the largest lower end to the
    largest upper end.
    """
    sign = 1.0 if source.metric.mode == "min" else -1.0
    gains = []
    for label in others:
        if source.diverged(source.of_row(label)):
            continue
        figures = source.by_seed(source.of_row(label))
        gains.append([sign * (row[seed] - figures[seed]) for seed in row if seed in figures])
    finite = [gain for gain in gains if np.all(np.isfinite(gain))]
    same = [gain for gain in finite if len(gain) < 2 or np.std(gain) <= LIKE * np.max(np.abs(gain))]
    tested = [gain for gain in finite if gain not in same]
    found = [(*_interval(gain, ALPHA / len(tested)), float(np.mean(gain))) for gain in tested]
    found += [(gain[0], gain[0], gain[0]) for gain in same if len(gain) >= ENOUGH]
    low, high, mean = (max(each) for each in zip(*found, strict=True))
    return low, mean, high


def _mlflow(client: Any, figures: Mapping[str, Any], source: Source) -> Iterator[str]:
    """Compare the report with MLflow's metrics and tags."""
    experiment = client.get_experiment_by_name(figures["study"])
    key = str(source.plan["ledger"])
    state = fold(source.events)
    runs = own_runs(client, experiment.experiment_id, state)[0] if experiment else dict[str, Any]()
    if key not in runs:
        yield f"MLflow has no parent run of {figures['study']}; `lns-study mlflow sync` sends it"
        return
    values: dict[str, float] = {}
    name = sanitise(source.metric.test_name)
    for trial in (id_ for row in figures["rows"] for id_ in row["trials"]):
        run = runs.get(f"{key}/{trial}")
        value = run.data.metrics.get(name) if run else None
        if run and source.metric.name in SPENT:
            history = client.get_metric_history(run.info.run_id, name)
            value = math.fsum(point.value for point in history)
        if value is not None:
            values[trial] = source.scale * value
        yield from _differ(
            f"MLflow, trial {trial}: {name}", source.finals.get(trial), values.get(trial)
        )
    for row in figures["rows"]:
        found = [values[trial] for trial in row["trials"] if trial in values]
        mean = float(np.mean(found)) if found else None
        yield from _differ(f"row {row['label']}: mean of MLflow's metrics", row["mean"], mean)
        suffix = source.metric.row_key
        sent = runs[key].data.metrics.get(sanitise(f"{row['label']}/{suffix}"))
        yield from _differ(f"MLflow, row {row['label']}: {suffix}", row["mean"], sent)
    tags = runs[key].data.tags
    for tag, text in claim_tags(figures).items():
        if tags.get(tag) != text:
            yield f"MLflow, tag {tag}: the report has {text!r}, MLflow {tags.get(tag)!r}"
