"""The table of a report in LaTeX."""

from __future__ import annotations

import re

from study.ledger.state import StudyState
from study.report.tables import table_of
from study.results.summary import summarise
from study.text import printable

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}
"""Escapes of the characters that have a meaning in LaTeX."""


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
