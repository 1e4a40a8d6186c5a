"""The files of a report, each written atomically (a new file renamed over the old)::

report.html            everything, pictures inside; light and dark; nothing fetched
report.md              the table, the claims and the protocol
figures.json           the figures and verdicts as data (:mod:`study.evidence.record`)
differences.png        the answer: difference of each row from the reference row
error_per_epoch.png    the study's metric per epoch, validation error or another
test_error.png         final figures on the test set beside the published ones
pareto.png ...         the pictures of :mod:`study.report.pictures`, if there is something to
                       show
configurations.csv     every configuration of a search, best first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study.evidence.judge import judge
from study.evidence.record import record, write_record
from study.ledger.state import StudyState
from study.ledger.storage import REPORT
from study.ledger.studies import read
from study.report.export import export
from study.report.html import render_html
from study.report.latex import render_latex
from study.report.pictures import TITLES, Links, Parts, links, parts
from study.report.tables import render_csv, render_markdown
from study.results.idle_time import sentences
from study.results.summary import Summary, summarise
from study.text import printable
from trainers.files import check_own_folder, write_whole

PICTURES = tuple(f"{name}.png" for name in TITLES)
"""File names of all pictures that a report may have."""


def write_report(
    state: StudyState, folder: Path, study: Path | None = None, *, run_checks: bool = False
) -> Path:
    """Write the report's files into ``folder`` and return it.

    Args:
        state: the study's state.
        folder: folder of the report.
        study: folder of the study, for the checks of its claims; None for the parent of ``folder``.
        run_checks: whether to run the functions of its claims, see
            :func:`study.evidence.judge.judge`.

    Raises:
        ValueError: the folder of the report is a symbolic link.
    """
    check_own_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(state)
    verdicts = judge(state, study or folder.parent, run_checks=run_checks)
    figures = record(state, summary, verdicts)
    made, where = parts(state, summary, sentences(state)), links(state, folder.parent)
    files = render_files(state, summary, made, where, figures["claims"])
    for file in set(PICTURES) - files.keys():
        (folder / file).unlink(missing_ok=True)  # left by an earlier report
    for file, content in files.items():
        write_whole(folder / file, content)
    write_record(figures, folder)
    return folder


def rewrite_report(folder: Path) -> Path | None:
    """Rewrite the report of the study in ``folder`` if it has one, and return the report's folder.

    The study may come from an untrusted source, so functions of claims are not run and nothing is
    sent to MLflow.
    """
    report = folder / REPORT
    if not report.exists():
        return None
    state = read(folder)
    state.outcome = state.outcome or "interrupted"
    return write_report(state, report)


def render_files(
    state: StudyState,
    summary: Summary,
    made: Parts,
    where: Links,
    claims: Sequence[Mapping[str, Any]],
) -> dict[str, bytes]:
    """Return the contents of a report's files by name, without ``figures.json``."""
    files = {picture.file: picture.light for picture in made.pictures}
    if state.config.space:
        files["configurations.csv"] = printable(render_csv(state)).encode()
    remarks = [*sentences(state), *made.failed]
    files["report.md"] = printable(render_markdown(state, summary, remarks, claims)).encode()
    files["report.html"] = render_html(state, summary, made, where, claims).encode()
    return files


def write_format(state: StudyState, folder: Path, form: str) -> Path:
    """Write the results into a report's folder in another format; return the file's path.

    Args:
        state: state of the study.
        folder: folder of the report (:func:`write_report`).
        form: ``csv``, ``parquet`` or ``latex``; or ``md`` or ``html``, which every report already
            has.
    """
    if form in ("csv", "parquet"):
        path = folder / f"trials.{form}"
        export(state, path, form)
        return path
    if form in ("md", "html"):
        return folder / f"report.{form}"
    write_whole(path := folder / "table.tex", render_latex(state).encode())
    return path
