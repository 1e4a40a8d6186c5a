"""Exports of the results beside the page: a LaTeX table, csv and parquet of the trials."""

from __future__ import annotations

import re
from pathlib import Path

from study.ledger.state import StudyState
from study.manage.export import export
from study.report.tables import table_of
from study.results.summary import summarise
from study.text import printable
from trainers.files import write_whole

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}
"""Escapes of the characters that have a meaning in LaTeX."""


def write_format(state: StudyState, folder: Path, form: str) -> Path:
    """Write the results into a report's folder in another format; return the file's path.

    Args:
        state: state of the study.
        folder: folder of the report (:func:`study.report.write.write_report`).
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


def render_latex(state: StudyState) -> str:
    """Return the table in LaTeX; it needs the package ``booktabs``."""
    summary = summarise(state)
    lines = table_of(state, summary)
    body = [" & ".join(map(escape, line)) + r" \\" for line in lines]
    columns = "l" + "r" * (len(lines[0]) - 1)
    title = escape(state.config.question or state.config.name)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{title} Mean \(\pm\) standard deviation over seeds.}}",
            r"\end{table}",
            "",
        ]
    )


def escape(text: str) -> str:
    """Escape text for LaTeX."""
    text = re.sub(r"[\\~^&%$#_{}]", lambda match: SPECIAL[match[0]], printable(text))
    return text.replace("±", r"\(\pm\)")
