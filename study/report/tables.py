"""Tables and text of a report, computed from the ledger state: for the terminal, Markdown, CSV and
the HTML page.

Labels and names come from configs, so the HTML template escapes everything; the only raw values are
pictures and the scripts of :mod:`study.report.interactive`.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from study.config import StudyConfig
from study.config.keys import is_number
from study.config.space import describe, show
from study.evidence.statement import stated
from study.ledger.state import ENDED, FAILED, STOPPED, StudyState, name_of
from study.report.claims import claims_markdown, markdown_table, markdown_text
from study.report.export import write_csv
from study.results.answer import answer, sentences
from study.results.configurations import configurations, table
from study.results.objectives import diverged, lacking
from study.results.summary import Row, Summary, summarise
from study.text import CELL, counted, duration, one_line, when

HEADINGS = ("row", "{figure}", "seeds", "published", "minus {baseline}", "required", "verdict")
MOST_FAILURES = 3
"""Maximum number of failures listed one by one above the table; the rest are counted."""
LEAST_LABEL, LEAST_HEAD = 12, 9
"""Minimum number of characters to which a row's label, and a column heading, are cut on a narrow
terminal."""
BEST = "best of {count}, by {metric}"


def render_text(state: StudyState, width: int | None = None) -> str:
    """Return the answer, the table and the remarks about it for a terminal.

    Args:
        state: state of the study.
        width: columns of the terminal; None for unwrapped lines, as for a pipe or a file.
    """
    summary = summarise(state)
    said = [one_line(sentence) for sentence in sentences(state, summary)]
    notes = [one_line(remark) for remark in remarks(state, summary)]
    lines = [[one_line(cell, CELL) for cell in line] for line in table_of(state, summary)]
    if width is None:
        return "\n".join([*said, "", *_align(lines), "", *notes])
    fitted, below = fit_table(lines, width)
    said, below, notes = (
        [line for text in texts for line in _wrapped(text, width)] for texts in (said, below, notes)
    )
    return "\n".join([*said, "", *_align(fitted), *below, "", *notes])


def render_markdown(
    state: StudyState, summary: Summary, notes: list[str], claims: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the table, the claims and the remarks as Markdown.

    ``notes`` are further sentences: how the slots were used, and which parts could not be made.
    """
    names, *rows = table_of(state, summary)
    lines = markdown_table(names, rows)
    notices = (*remarks(state, summary), *facts(state).values(), *notes)
    return "\n".join(
        [
            f"# {markdown_text(state.config.name)}",
            "",
            markdown_text(state.config.question),
            "",
            f"**{markdown_text(answer(state, summary))}**",
            "",
            *lines,
            "",
            *claims_markdown(claims),
            *(f"- {markdown_text(notice)}" for notice in notices),
            "",
        ]
    )


def render_csv(state: StudyState) -> str:
    """Return all configurations as CSV, best first.

    The columns are row, number, sampled values, objectives, state.
    """
    objectives = state.config.search.objectives
    found = configurations(state.trials, objectives, state.config.search.constraints)
    lines = table(found, objectives)
    names = list(dict.fromkeys(name for line in lines for name in line))
    buffer = io.StringIO()
    plain = (
        {
            name: json.dumps(value) if isinstance(value, dict | list) else value
            for name, value in line.items()
        }
        for line in lines
    )
    write_csv(buffer, names, plain)
    return buffer.getvalue()


def table_of(state: StudyState, summary: Summary) -> list[list[str]]:
    """Return the table, headings first, without columns that are empty in every row."""
    table = [headings(state, summary), *(cells(row, summary) for row in summary.rows)]
    shown = shown_columns(summary)
    return [[line[place] for place in shown] for line in table]


def shown_columns(summary: Summary) -> list[int]:
    """Return the indices of the first three columns and of all columns that are not empty."""
    lines = [cells(row, summary) for row in summary.rows]
    return [
        place
        for place in range(max(map(len, lines), default=3))
        if place < 3 or any(line[place] != "-" for line in lines)
    ]


def headings(state: StudyState, summary: Summary) -> list[str]:
    """Return the table's column headings; one more if rows were searched."""
    study, metric = state.config, summary.metric
    counts = sorted({row.searched for row in summary.rows})
    count = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "0"
    if summary.searches > 1:
        count += f" that {summary.searches} searches tried"
    found = [BEST.format(count=count, metric=study.search.first.name)] if summary.searched else []
    named = {"figure": metric.heading(metric.test_words), "baseline": study.baseline or "baseline"}
    return [*(heading.format(**named) for heading in HEADINGS), *found]


def cells(row: Row, summary: Summary) -> list[str]:
    """Return one row of the table: errors in per cent, gaps in percentage points, two decimals.

    Published figures and requirements are shown only if the study is comparable with the published
    one.
    """
    metric = summary.metric
    mean = metric.mean(row.mean, row.sd) if row.mean is not None else "-"
    seeds = f"{row.finished}" if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
    seeds += f", {row.diverged} diverged" if row.diverged else ""
    beside = row.published if summary.comparable else None
    published = metric.figure(beside) if beside is not None else "-"
    gap = "-" if row.gap is None or math.isnan(row.gap) else metric.difference(row.gap)
    rule = row.rule if summary.comparable else ""
    several = "one of each seed" if summary.searches > 1 and row.trials else "-"
    found = [describe(row.params) or several] if summary.searched else []
    return [row.label, mean, seeds, published, gap, rule or "-", row.verdict or "-", *found]


def remarks(state: StudyState, summary: Summary) -> list[str]:
    """Return warnings about the table, one sentence each: damage, divergence, failures etc."""
    texts = [f"DAMAGED: {state.damage}; figures may lack what it had."] if state.damage else []
    said = stated(state)
    if said and (said.changed or said.claims):
        texts.append(said.sentence)
    if summary.departures:
        texts.append(
            "SMALL BUDGET, not comparable with the published figures, so no verdicts:"
            f" {'; '.join(summary.departures)}."
        )
    unfinished = sum(trial.status not in ENDED for trial in state.trials)
    early = sum(trial.status == STOPPED for trial in state.trials)
    if note := _infeasible(state):
        texts.append(note)
    texts += _without_figures(state, summary) + _at_an_end(state, summary)
    if early:
        texts.append(
            f"{early} of {len(state.trials)} trials were ended early by"
            f" {state.config.search.scheduler}; they have no"
            f" {summary.metric.final_words}."
        )
    texts += lacking(state)
    if unfinished:
        texts.append(
            f"INCOMPLETE: {unfinished} of {len(state.trials)} trials have not finished;"
            " if no process is running them, repeat the command to continue."
        )
    for trial in (trial for trial in state.trials if trial.relief):
        texts.append(
            f"{name_of(trial)} ran out of memory, and then ran with {describe(trial.relief)}."
        )
    failed = [trial for trial in state.trials if trial.status == FAILED]
    texts += [
        f"FAILED: {trial.row}, seed {trial.seed}: {trial.error}" for trial in failed[:MOST_FAILURES]
    ]
    if len(failed) > MOST_FAILURES:
        texts.append(
            f"FAILED: {len(failed) - MOST_FAILURES} more; `lns-study show {state.config.slug}"
            " TRIAL` and the report have their causes."
        )
    commits = {commit for trial in state.trials for commit in trial.commits}
    if len(commits) > 1:
        texts.append(
            f"MIXED CODE: trials ran at {len(commits)} commits: {', '.join(sorted(commits))}."
        )
    return texts


def _without_figures(state: StudyState, summary: Summary) -> list[str]:
    """List the rows with diverged trials, and the searched rows without a best configuration."""
    texts, metric = [], summary.metric
    ended = Counter(trial.row for trial in state.trials if trial.status in ENDED)
    lost = Counter(trial.row for trial in state.trials if diverged(trial, metric.name))
    if lost:
        figures = "loss" if metric.short == "loss" else f"loss or {metric.words}"
        listed = ", ".join(f"{row}: {count} of {ended[row]}" for row, count in lost.items())
        texts.append(
            f"DIVERGED: {lost.total()} of {counted(len(state.trials), 'trial')}, whose last"
            f" {figures} is not finite ({listed}); their configurations are left out of selections,"
            " tests, pictures and importance, but count in the mean of a row without a search."
        )
    if without := [row.label for row in summary.rows if not row.trials]:
        search = "the search" if summary.searches < 2 else "the search of one seed or more"
        texts.append(
            f"NO FIGURE: {', '.join(without)}: {search} has no configuration whose trials all"
            " finished and satisfy the constraints; claims about the row stay undecided."
        )
    return texts


def _at_an_end(state: StudyState, summary: Summary) -> list[str]:
    """Warn about optimizer settings whose best value is the smallest or largest one tried, because
    the optimum may be beyond it."""
    texts = []
    for domain in state.config.parsed_space.domains:
        if not (domain.key.startswith("optimizer.") and domain.categorical):
            continue
        numbers = sorted({value for value in domain.values if is_number(value)})
        if len(numbers) < 2:
            continue
        chosen = [row.params[domain.key] for row in summary.rows if domain.key in row.params]
        for end, words in ((numbers[0], "least"), (numbers[-1], "largest")):
            if count := chosen.count(end):
                texts.append(
                    f"AT AN END: {domain.key} is {show(end)}, the {words} that was tried, in"
                    f" {count} of {counted(len(chosen), 'row')}; values beyond it may do better."
                )
    return texts


def _infeasible(state: StudyState) -> str:
    """Describe how many configurations break a constraint; "" if all satisfy them."""
    search = state.config.search
    found = configurations(state.trials, search.objectives, search.constraints)
    count = sum(bool(entry.broken) for entry in found)
    bounds = ", ".join(f"{metric} {bound}" for metric, bound in search.constraints.items())
    return (
        f"INFEASIBLE: {count} of {len(found)} configurations break a constraint ({bounds}) and"
        " cannot be chosen as the best."
        if count
        else ""
    )


def protocol(state: StudyState) -> str:
    """Describe how the figures were obtained, in a few sentences."""
    sizes = "; ".join(
        f"{data_name(d)}: {d['train']:,} train, {d['validation']:,} validation, {d['test']:,} test"
        for d in state.plan["data"]
    )
    seeds = ", ".join(map(str, state.config.seeds))
    return (
        _choice(state.config) + "The recipe is fixed in the config before anything runs. The"
        f" {state.config.primary_metric.test_words} is measured after the last epoch, for every"
        f" seed ({seeds}); spread is the"
        " sample standard deviation. Any choice uses the validation split, the last examples of"
        f" the training set, which no trial trains on ({sizes})." + _differences(state.config)
    )


def _differences(study: StudyConfig) -> str:
    """Describe how rows are compared; "" without a reference row."""
    if study.baseline is None:
        return ""
    return (
        f" Rows are compared with {study.baseline} seed by seed; the 95 % intervals of these"
        " differences are simultaneous (Student's t, Bonferroni's correction)."
    )


def data_name(entry: Mapping[str, Any]) -> str:
    """Return a data set's name and arguments."""
    return f"{entry['name']} {entry.get('args') or ''}".rstrip()


def _choice(study: StudyConfig) -> str:
    """Describe how a search chose the configurations in the report; "" without a search."""
    if not study.space:
        return ""
    search = study.search
    method = search.algorithm + " search"
    if search.scheduler != "none":
        method += f" with {search.scheduler}"
    best = f"best {search.first.name} after the last epoch"
    bounds = ",".join(f" {metric} {bound}" for metric, bound in search.constraints.items())
    if search.per_seed:
        return (
            f"Each row is searched in the same way ({method}), separately for every seed; its"
            f" figures come from each seed's configuration with the {best}"
            + (f", subject to{bounds}. " if bounds else ". ")
        )
    return (
        f"Each row is searched in the same way ({method}); its figures come from the configuration"
        f" with the {best}, mean over seeds"
        + (f", subject to{bounds}. " if bounds else ". ")
        + "Gaps between rows are exploratory, because they include the luck of this choice. "
    )


def facts(state: StudyState) -> dict[str, str]:
    """Return the provenance of the figures by heading: statement, data, code, machine, time."""
    code = state.plan["provenance"]
    ended = [trial.ended for trial in state.trials if trial.ended]
    began = [trial.started for trial in state.trials if trial.started]
    restarts = sum(trial.restarts for trial in state.trials)
    seconds = sum(trial.spent for trial in state.trials)
    said = stated(state)
    return {
        **({"Statement": said.sentence} if said else {}),
        **amended(state.config),
        "Data": "; ".join(
            f"{entry['source']}, sha256 {entry['digest'][:16]}" for entry in state.plan["data"]
        )
        or "what the study's own code takes",
        "Code": (
            ", ".join(sorted({commit for trial in state.trials for commit in trial.commits}))
            or "nothing trained yet"
        ),
        "Machine": f"{code['platform']}, Python {code['python']}",
        "Time": (
            f"{when(min(began))} to {when(max(ended))}, {duration(seconds)} of trial time"
            if began and ended
            else "not finished"
        ),
        "Failures": (
            f"{sum(trial.status == FAILED for trial in state.trials)} trials failed,"
            f" {counted(restarts, 'restart')}"
        ),
    }


def amended(study: StudyConfig) -> dict[str, str]:
    """Return the amendments of a study as text, by heading; empty without amendments."""
    said = " ".join(each.sentence for each in study.amendments)
    return {"Amendments": said} if said else {}


def fit_table(table: list[list[str]], width: int) -> tuple[list[list[str]], list[str]]:
    """Return a table that fits into ``width`` columns, and the texts that moved below it.

    Text columns move below the table, the widest first, until the rest fits; if that is not enough,
    long headings and labels are cut.
    """
    heads, *rows = [list(line) for line in table]
    below: list[str] = []
    while _width([heads, *rows]) > width:
        words = [place for place in range(1, len(heads)) if _is_words(rows, place)]
        if not words:
            break
        widest = max(words, key=lambda place: max(len(line[place]) for line in [heads, *rows]))
        listed = [f"{line[0]}: {line[widest]}" for line in rows if line[widest] != "-"]
        below[:0] = ["", f"{heads[widest]}:", *(f"  {text}" for text in listed)]
        for line in (heads, *rows):
            del line[widest]
    for place in range(1, len(heads)):
        if _width([heads, *rows]) > width:
            least = max(LEAST_HEAD, *(len(line[place]) for line in rows))
            heads[place] = _cut(heads[place], least)
    over = _width([heads, *rows]) - width
    if over > 0:
        longest = max(len(line[0]) for line in [heads, *rows])
        for line in rows:
            line[0] = _cut(line[0], max(LEAST_LABEL, longest - over))
    return [heads, *rows], below


def _cut(text: str, most: int) -> str:
    """Cut a text to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _width(table: list[list[str]]) -> int:
    return max(map(len, _align(table)))


def _is_words(rows: list[list[str]], place: int) -> bool:
    """Return whether a column has text instead of figures; the first three columns never do."""
    return place > 2 and any(line[place][:1].isalpha() for line in rows)


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text into lines of at most ``width`` columns; a line that fits is unchanged."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _align(table: list[list[str]]) -> list[str]:
    """Return a table's lines with padded columns, text left-aligned and figures right-aligned."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    left = {0, *(place for place in range(1, len(table[0])) if _is_words(table[1:], place))}
    rows = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return [rows[0].rstrip(), "-" * max(map(len, rows)), *(row.rstrip() for row in rows[1:])]
