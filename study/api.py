"""Studies in Python and in notebooks: run one, load it, read its results, ask and tell.

``import study`` provides these functions::

    import study

    first = study.run("quickstart", {"trial.epochs": 2}, name="first")
    first.trials                    # a DataFrame
    first.best.params
    first.figure("error_per_epoch")

All results come from the study's ledger, even while the study runs in another process.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from study.config import StudyConfig
from study.config.compose import as_overrides
from study.config.compose import load as load_config
from study.engines.ask_tell import Suggestion, ask, asked, tell
from study.engines.ray.options import TuneOptions
from study.errors import UserError, refusals
from study.evidence.judge import by_row, judge
from study.evidence.record import record
from study.ledger.log import FILE
from study.ledger.state import ALL, UNFINISHED, StudyState
from study.ledger.storage import refresh
from study.ledger.studies import condition, continued, find, placed, read
from study.lifecycle import Outcome, create_study, report_study, run_study
from study.plan.extend import extended
from study.program import STORAGE
from study.report.export import export_rows
from study.report.tables import table_of
from study.results.answer import answer
from study.results.configurations import Configuration, best, groups_of_seeds
from study.results.summary import summarise
from study.text import cut, printable
from study.tracking.sqlite import advice
from study.views.view import make_view
from trainers.config.validation import plain

if TYPE_CHECKING:
    import pandas as pd
    import polars
    from matplotlib.figure import Figure
    from ray.tune import RunConfig, Tuner
    from rich.console import Console


class Study:
    """An existing study, read from its ledger.

    :func:`run`, :func:`create` and :func:`load` return one.

    Args:
        folder: folder of the study; :func:`load` finds it by the study's name.
        own: whether this process has run the study or made its plan. If so, the check functions of
            its claims are the caller's own code and may be run.

    Attributes:
        folder: folder of the study, with its ledger, checkpoints and report.

    Example::

        first = study.load("quickstart")
        first.answer                            # a sentence
        first.trials.groupby("row")["validation/error"].mean()
        first.figure("error_per_epoch").savefig("errors.png")
        first.run(seeds=[0, 1, 2])              # trains the added seeds only
    """

    def __init__(self, folder: Path, own: bool = False) -> None:
        self.folder, self._own = folder, own
        self._read: tuple[tuple[int, int], StudyState] | None = None

    @property
    def state(self) -> StudyState:
        """State of the study; the ledger is read again if it has changed."""
        with refusals():
            refresh(self.folder)
        file = (self.folder / FILE).stat()
        seen = file.st_size, file.st_mtime_ns  # another ledger may be as long
        if self._read is None or self._read[0] != seen:
            with refusals():
                self._read = seen, read(self.folder)
        return self._read[1]

    @property
    def config(self) -> StudyConfig:
        """Config of the last plan, with the study's current storage."""
        return placed(self.state.config, self.folder)

    @property
    def trials(self) -> pd.DataFrame:
        """One row per trial: identity, config under dotted keys, status, last and final metrics.

        Example::

            finished = first.trials.query("status == 'finished'")
            finished.groupby("config.precision.format")["validation/error"].mean()
        """
        return _frame(export_rows(self.state))

    @property
    def epochs(self) -> pd.DataFrame:
        """One row per trial and epoch: identity, config under dotted keys, metrics."""
        return _frame(export_rows(self.state, epochs=True))

    def polars(self, rows: Literal["trials", "epochs"] = "trials") -> polars.DataFrame:
        """Return :attr:`trials` or :attr:`epochs` as a polars DataFrame.

        Missing values are null; a NaN was reported by the trial. A column with values of several
        types, such as a choice between numbers and strings, becomes a string column.

        Args:
            rows: ``"trials"`` or ``"epochs"``.

        Raises:
            UserError: ``rows`` is another value, or polars is not installed.
        """
        if rows not in ("trials", "epochs"):
            raise UserError(f"polars({rows!r}): unknown rows; use 'trials' or 'epochs'")
        try:
            import polars
        except ModuleNotFoundError as error:
            raise UserError(
                f"polars({rows!r}): the package polars is not installed; use `pip install"
                f" 'lns-study[polars]'`, or .{rows}, a frame of pandas"
            ) from error
        lines = export_rows(self.state, epochs=rows == "epochs")
        names = dict.fromkeys(name for line in lines for name in line)
        columns = {name: [line.get(name) for line in lines] for name in names}
        return polars.DataFrame(columns, strict=False)

    @property
    def best(self) -> Configuration | None:
        """Finished configuration with the best first objective, or None if none has finished.

        Compares all rows on the validation split and applies the search's constraints, see
        :func:`study.results.configurations.best`.
        """
        state = self.state
        search = state.config.search
        groups = groups_of_seeds(state.trials, search.objectives, search.constraints)
        return best(groups, search.objectives)

    @property
    def answer(self) -> str:
        """Answer to the study's question as a sentence, see :mod:`study.results.answer`."""
        return answer(self.state, summarise(self.state))

    @property
    def asked(self) -> list[Suggestion]:
        """Open trials: :meth:`ask` has suggested them, and :meth:`tell` has no result yet."""
        return asked(self.folder)

    def summary(self) -> pd.DataFrame:
        """Return the first table of the report as formatted strings, one line per row.

        If claims refer to rows, the column ``claims`` has their verdicts.
        """
        import pandas as pd

        table = summarise(self.state)
        names, *lines = table_of(self.state, table)
        frame = pd.DataFrame(lines, columns=names).set_index("row")
        verdicts = by_row(self.state, table)
        return frame.assign(claims=verdicts) if any(verdicts.values()) else frame

    @property
    def claims(self) -> pd.DataFrame:
        """One row per claim: estimate, interval, verdict, statement and source.

        The check functions of claims run only if this process has run the study. For a loaded
        study, their verdicts come from the last report; ``report(run_checks=True)`` runs them.
        """
        verdicts = judge(self.state, self.folder, run_checks=self._own)
        lines = record(self.state, summarise(self.state), verdicts)["claims"]
        return _frame(lines).set_index("name") if lines else _frame([])

    def figure(self, name: str, *, dark: bool = False) -> Figure:
        """Return a picture of the report as a matplotlib figure.

        Args:
            name: file name of the picture without its suffix, for example ``error_per_epoch``.
            dark: whether to use colors for a dark background.

        Raises:
            UserError: the report has no picture ``name``, or the study has no data for it.

        Example::

            first.figure("error_per_epoch", dark=True).savefig("errors.svg")
        """
        from study.report.figures.style import DARK, LIGHT
        from study.report.pictures import drawings
        from study.views.notebook import show_figures

        draw = drawings(self.state, summarise(self.state))
        if name not in draw:
            raise UserError(
                f"figure {name!r}: the report has no such picture; use one of {', '.join(draw)}"
            )
        figure = draw[name](DARK if dark else LIGHT)
        if figure is None:
            shown = ", ".join(key for key in draw if draw[key](LIGHT) is not None)
            raise UserError(f"figure {name!r}: this study has no data for it; use one of {shown}")
        show_figures()
        return figure

    def plot(self, x: str = "", y: str = "") -> Any:
        """Return a plotly figure of the trials, see :func:`study.report.interactive.scatter`.

        Raises:
            UserError: no trial has reported, or an axis is unknown; the message lists the axes.
        """
        from study.report.interactive import scatter

        with refusals():
            return scatter(self.state, x, y)

    def run(self, overrides: Mapping[str, Any] | None = None, /, **keys: Any) -> Study:
        """Change the study, for example with ``seeds=[0, 1, 2]``, and run the remaining trials.

        Failed trials run again; :meth:`resume` skips them.

        Args:
            overrides, keys: changes, as for :func:`run`.

        Raises:
            UserError: a change is invalid, or the study cannot start; nothing was changed.

        Example::

            study.load("quickstart").run({"trial.epochs": 8}, seeds=[0, 1, 2])
        """
        began = time.monotonic()
        with refusals():
            changed = extended(self.state, as_overrides({**(overrides or {}), **keys}))
            study = continued(changed, self.folder)
        return _run(study, ALL, began)

    def resume(self) -> Study:
        """Run unfinished trials except the failed ones; return the study.

        Raises:
            UserError: the study cannot start; nothing was changed.
        """
        began = time.monotonic()
        with refusals():
            study = continued(self.config, self.folder)
        return _run(study, UNFINISHED, began)

    def report(self, tracking_uri: str | None = None, *, run_checks: bool = False) -> Path:
        """Write the report again, update MLflow, and return the path of the report's page.

        Args:
            tracking_uri: MLflow store to update; None for the study's own.
            run_checks: whether to run the check functions of the study's claims even if this
                process has not run the study. The ledger names these functions, so read it first
                if you do not trust its author.

        Raises:
            UserError: the report cannot be written, or the server at ``tracking_uri`` does not
                answer; nothing was written.
        """
        run_checks = run_checks or self._own
        outcome = report_study(self.folder, _print, tracking_uri, run_checks=run_checks)
        _say_tracking(outcome)
        return outcome.report / "report.html"

    def ask(self) -> Suggestion | None:
        """Suggest the next trial for a loop of your own, see :func:`study.engines.ask_tell.ask`.

        Returns None if no trial is left, or if the search first needs the results of open trials.
        :func:`create` has an example.
        """
        return ask(self.folder)

    def tell(
        self,
        suggestion: Suggestion,
        values: float | Mapping[str, float] | None = None,
        *,
        error: str | Exception = "",
    ) -> None:
        """Record a trial's results or its error, see :func:`study.engines.ask_tell.tell`.

        Args:
            suggestion: the trial, from :meth:`ask` or :attr:`asked`.
            values: metrics by name, or the value of the only objective.
            error: why the trial failed; "" if it did not.
        """
        tell(self.folder, suggestion, values, error=error)

    def __repr__(self) -> str:
        state = self.state
        counts = ", ".join(f"{count} {status}" for status, count in state.counts().items())
        now = condition(self.folder, state)
        return printable(cut(f"<Study {state.config.name!r}: {now}; {counts or 'no trials'}>"))

    def _repr_html_(self) -> str:
        """Return the study's name, answer and table as HTML for a notebook, with escaped text."""
        parts = [f"<p>{html.escape(text)}</p>" for text in (repr(self), self.answer)]
        return printable("".join([*parts, self.summary().to_html()]))


def run(
    config: str | Path | StudyConfig, overrides: Mapping[str, Any] | None = None, /, **keys: Any
) -> Study:
    """Run a study and show its progress; resume it if it was started before.

    Ctrl-C (or a notebook's interrupt) stops the study cleanly, and the same call resumes it.

    Args:
        config: a config, the path of a YAML or Python file, or a name in ``conf/study``.
        overrides: changes by dotted key: ``{"trial.epochs": 3}``.
        keys: changes as keyword arguments: ``seeds=[0, 1]``, ``trial={"epochs": 3}``,
            ``data="digits"``; ``small=True`` runs the study's small form.

    Raises:
        UserError: the config or a change is invalid, or the study cannot start; nothing was
            changed.
        KeyboardInterrupt: the user interrupted the study; ledger, MLflow runs and report are
            complete.

    Example::

        first = study.run("quickstart", {"trial.epochs": 2}, name="first", seeds=[0, 1])
        print(first.answer)
        first.trials                            # a DataFrame, one row per trial
    """
    began = time.monotonic()
    return _run(_compose(config, overrides, keys), ALL, began)


def tuner(
    config: str | Path | StudyConfig,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    run_config: RunConfig | None = None,
    **keys: Any,
) -> Tuner:
    """Return a study as a ``ray.tune.Tuner``, whose ``fit`` runs it and returns a ``ResultGrid``.

    The study has the same ledger, MLflow runs, report, trial ids and metrics as with :func:`run`,
    and resumes in the same way. Tune's trials are named by their trial ids. A result's config
    contains ``trial``, ``row``, ``seed`` and the sampled values.

    Args:
        config, overrides, keys: as for :func:`run`; ``engine="ray"`` is set.
        run_config: callbacks and loggers, ``name``, ``storage_path`` and ``verbose`` for Tune.

    Raises:
        UserError: the config or a change is invalid, or the ``run_config`` sets a field that the
            study's config decides.

    Example::

        grid = study.tuner("quickstart", {"trial.epochs": 2}, name="in tune").fit()
        grid.get_best_result("validation/error", "min").config["row"]
    """
    from study.engines.ray.study_tuner import StudyTuner

    composed = _compose(config, overrides, {**keys, "engine": "ray"})
    return StudyTuner(lambda options: _run(composed, ALL, time.monotonic(), options), run_config)


def create(
    config: str | Path | StudyConfig, overrides: Mapping[str, Any] | None = None, /, **keys: Any
) -> Study:
    """Create a study without running it, for a loop of your own with ``ask`` and ``tell``.

    Args:
        config, overrides, keys: as for :func:`run`.

    Raises:
        UserError: the config or a change is invalid, or the study cannot start; nothing was
            changed.

    Example::

        >>> import tempfile, study
        >>> where = tempfile.mkdtemp()
        >>> mine = study.create("quickstart", name="mine", data="digits", storage=where)
        Data: scikit-learn's handwritten digits (1,797 images of 8 x 8)
        >>> trial = mine.ask()
        >>> trial.row, trial.seed
        ('float32', 0)
        >>> mine.tell(trial, {"validation/error": 0.1})  # your loop has trained trial.config
        >>> mine
        <Study 'mine': stopped; 1 finished, 19 planned>
    """
    return Study(create_study(_compose(config, overrides, keys), _print), own=True)


def load(name: str | Path, storage: str | Path = STORAGE) -> Study:
    """Return an existing study.

    Args:
        name: name or folder of the study.
        storage: folder or object store of the studies.

    Raises:
        UserError: ``storage`` has no such study; the message lists its studies.

    Example::

        first = study.load("first")
        study.load("first", "s3://bucket/studies").best.params
    """
    with refusals():
        return Study(find(str(name), str(storage)))


def _compose(
    config: str | Path | StudyConfig, overrides: Mapping[str, Any] | None, keys: dict[str, Any]
) -> StudyConfig:
    source = config if isinstance(config, StudyConfig) else str(config)
    changes = {**(overrides or {}), **keys}
    with refusals():
        if small := plain("small", keys.get("small")) is True:
            del changes["small"]
        return load_config(source, as_overrides(changes), _print, small=small)


def _run(config: StudyConfig, only: str, began: float, options: TuneOptions | None = None) -> Study:
    from study.views.console import PrintableConsole

    console = PrintableConsole()
    view, say = make_view(console), _say_on(console)
    outcome = run_study(config, view, say, only, began=began, options=options)
    _say_tracking(outcome)
    return Study(outcome.report.parent, own=True)


def _print(line: str) -> None:
    print(printable(line))


def _say_on(console: Console) -> Any:
    """Return a function that prints a line; on a terminal the line appears above the live table."""
    if console.is_jupyter:
        return _print
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say_tracking(outcome: Outcome) -> None:
    if outcome.tracking_error:
        _print(
            f"MLflow lacks part of this study ({outcome.tracking_error}); report() sends it"
            f"{advice(outcome.tracking, outcome.tracking_error)}"
        )


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)
