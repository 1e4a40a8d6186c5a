"""The files of a report, each written whole (a new file renamed over the old)::

report.html            everything, pictures inside; light and dark; nothing fetched
report.md              the table, the claims and the protocol
figures.json           the figures and verdicts as data (:mod:`study.claims.record`)
error_per_epoch.png    the study's metric per epoch, validation error or another
test_error.png         its final figures on the test set beside the published ones
pareto.png ...         the pictures of :mod:`study.report.pictures`, if there is something to
                       show
configurations.csv     of a search: every configuration, ranked
"""

from __future__ import annotations

from pathlib import Path

from study.claims.record import record, write_record
from study.claims.verdicts import judge
from study.ledger.state import StudyState
from study.report.html import render_html
from study.report.pictures import TITLES, links, parts
from study.report.tables import render_csv, render_markdown
from study.results.idle_time import sentences
from study.results.summary import summarise
from trainers.files import write_whole


def write_report(state: StudyState, folder: Path, study: Path | None = None) -> Path:
    """Write the report's files into ``folder`` and return it.

    Args:
        state: the study's state.
        folder: folder of the report.
        study: folder of the study, for the checks of its claims; None if the report lies in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(state)
    use = sentences(state)
    figures = record(state, summary, judge(state, study or folder.parent))
    made = parts(state, summary, use)
    for file in {f"{name}.png" for name in TITLES} - {picture.file for picture in made.pictures}:
        (folder / file).unlink(missing_ok=True)  # left by an earlier report
    for picture in made.pictures:
        write_whole(folder / picture.file, picture.light)
    if state.config.space:
        write_whole(folder / "configurations.csv", render_csv(state).encode())
    write_whole(
        folder / "report.md",
        render_markdown(state, summary, [*use, *made.failed], figures["claims"]).encode(),
    )
    write_whole(
        folder / "report.html",
        render_html(state, summary, made, links(state, folder.parent), figures["claims"]).encode(),
    )
    write_record(figures, folder)
    return folder
