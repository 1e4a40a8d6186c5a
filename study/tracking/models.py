"""The best model of each row as an MLflow LoggedModel: safetensors and JSON without pickle, so
that loading it runs no code.

It is the newest remaining checkpoint of the row's best finished trial, by the study's metric after
the last epoch. A model is identified by its source run, so none is logged twice.

Limits: checkpoints of a user's own training loop are not logged, because they can contain anything;
neither are checkpoints larger than :data:`MOST_BYTES`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.config import Metric
from study.ledger.state import FINISHED, StudyState, TrialState
from study.results.objectives import diverged, last_value
from study.results.summary import summarise
from study.tracking.artifacts import Artifacts
from study.tracking.names import sanitise
from trainers.checkpoint.manifest import STATE, file_digests, read_state
from trainers.checkpoint.remote import fetched
from trainers.files import has_links, regular_files
from trainers.object_store import is_url, place_of

MOST_BYTES = 200 * 2**20
MODEL_TYPE = "lns-study checkpoint (safetensors)"


def log_models(
    client: Any,
    artifacts: Artifacts,
    experiment: str,
    state: StudyState,
    runs: dict[str, str],
    storage: Path,
) -> None:
    """Log each row's best model unless the store has it.

    Args:
        client: an ``MlflowClient``.
        artifacts: the store's artifacts.
        experiment: id of the study's experiment.
        state: state of the study.
        runs: run ids by trial id.
        storage: parent of the study's folder. Checkpoints outside of it are not logged, because an
            untrusted ledger could name any file.
    """
    summary = summarise(state)
    best = {
        trial.id: trial
        for row in summary.rows
        if (trial := _best(row.trials, summary.metric)) is not None and not trial.own_loop
    }
    wanted = {runs[id_]: trial for id_, trial in best.items() if id_ in runs}
    folders = {
        run: folder
        for run, trial in wanted.items()
        if (left := trial.checkpoints_left()) and (folder := _checkpoint(left[0], storage))
    }
    have = _sources(client, experiment) if folders else {}
    for run in folders.keys() & have.keys():
        if have[run].tags.get("row") != wanted[run].row:  # the row was renamed since
            client.set_logged_model_tags(have[run].model_id, {"row": wanted[run].row})
    for run, folder in folders.items():
        files = _files(folder)
        if run not in have and sum(file.stat().st_size for file in files) <= MOST_BYTES:
            _log_model(client, artifacts, experiment, run, wanted[run], folder)


def _best(trials: Iterable[TrialState], metric: Metric) -> TrialState | None:
    done = [
        (metric.sign * value, trial)
        for trial in trials
        if trial.status == FINISHED
        and (value := last_value(trial, metric)) is not None
        and math.isfinite(value)
        and not diverged(trial, metric.name)
    ]
    return min(done, key=lambda pair: pair[0], default=(0.0, None))[1]


def _checkpoint(place: str, storage: Path) -> Path | None:
    """Return the folder of a checkpoint that the ledger names.

    Returns None if it is not a checkpoint, contains links, or is outside the storage.
    """
    if is_url(place):
        inside = place.startswith(f"{place_of(storage).rstrip('/')}/")
    else:
        inside = Path(os.path.realpath(place)).is_relative_to(os.path.realpath(storage))
    if not inside or ".." in place.split("/"):
        return None
    folder = fetched(place)
    with suppress(ValueError):
        if not has_links(folder):
            read_state(folder)
            return folder
    return None


def _files(folder: Path) -> list[Path]:
    """Return the files listed in a checkpoint's manifest, and the manifest."""
    names = {STATE, *file_digests(read_state(folder))}
    return [file for file in regular_files(folder) if file.name in names]


def _sources(client: Any, experiment: str) -> dict[str, Any]:
    """Return the experiment's completely uploaded models, by source run id."""
    found: dict[str, Any] = {}
    token = None
    while True:
        page = client.search_logged_models([experiment], page_token=token)
        found |= {model.source_run_id: model for model in page if str(model.status) == "READY"}
        token = page.token
        if not token:
            return found


def _log_model(
    client: Any, artifacts: Artifacts, experiment: str, run: str, trial: TrialState, folder: Path
) -> None:
    name = "".join(
        character if character.isalnum() or character in "-_ " else "-"
        for character in f"{trial.row} seed {trial.seed}"
    )
    tags = {
        "row": trial.row,
        "trial": trial.id,
        "epoch": str(trial.epoch),
        "checkpoint": str(folder),
    }
    params = {"precision.format": str(trial.config["precision"]["format"]), "seed": str(trial.seed)}
    model = client.create_logged_model(
        experiment,
        name=name[:200],
        source_run_id=run,
        tags={sanitise(key): value for key, value in tags.items()},
        params=params,
        model_type=MODEL_TYPE,
    )
    artifacts.put(model.artifact_location, f"model {model.model_id}", _files(folder))
    client.finalize_logged_model(model.model_id, "READY")
