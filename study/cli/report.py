"""The commands ``report`` and ``compare``: the tables and pages of studies that ran."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from study.cli.manage import Commands, add_command, add_json, print_json, print_table
from study.cli.run import print_outcome
from study.errors import UserError, refusals
from study.text import NAME, counted, one_line
from trainers.files import check_own_folder, write_whole
from trainers.object_store import place_of


def add_report(commands: Commands) -> None:
    """Add the command ``report`` to argparse's subparsers."""
    report = add_command(
        commands,
        "report",
        _report,
        "print a study's table and rewrite its report; `report --serve` shows it while it runs",
        description=(
            "Print the table of a study, rewrite its report from its ledger, and send missing data"
            " to MLflow (for example after the tracking server was down)."
        ),
    )
    report.add_argument("--tracking-uri", help="MLflow store to send to (default: the study's own)")
    forms = "also write the table as Markdown or LaTeX, or the trials as csv or parquet"
    report.add_argument(
        "--format", choices=("html", "md", "csv", "parquet", "latex"), default="html", help=forms
    )
    report.add_argument(
        "--verify",
        action="store_true",
        help="write nothing; recompute the report's figures from ledger and MLflow, and print"
        " the differences",
    )
    report.add_argument(
        "--run-checks",
        action="store_true",
        help="run the claims' own functions (check), which the study's ledger names; only use it"
        " for studies whose code you trust (default: keep the last report's verdicts)",
    )
    add_json(report)
    live = report.add_argument_group("a live page")
    live.add_argument(
        "--serve",
        action="store_true",
        help="serve the report on 127.0.0.1, updated while the study runs, until Ctrl-C",
    )
    live.add_argument("--port", type=int, default=5001, help="port to listen on (default: 5001)")
    live.add_argument(
        "--every",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="seconds between updates (default: 10)",
    )


def add_compare(commands: Commands) -> None:
    """Add the command ``compare`` to argparse's subparsers."""
    compare = add_command(
        commands, "compare", _compare, "compare two studies: matched trials, paired test, a picture"
    )
    compare.add_argument(
        "other",
        metavar="OTHER",
        help="the other study: its name in the same storage, or its folder",
    )
    compare.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="file of the picture (default: compared-with-OTHER.png in STUDY's report)",
    )
    add_json(compare)


def _report(options: argparse.Namespace) -> int:
    from study.evidence.record import read_record
    from study.ledger.studies import find
    from study.lifecycle import report_study
    from study.report.write import write_format

    if options.serve:
        return _serve(options)
    with refusals():
        folder = find(options.study, options.storage)
        if options.verify:
            return _verify(folder, options)
    outcome = report_study(
        folder,
        lambda line: print(line, file=sys.stderr),
        options.tracking_uri,
        run_checks=options.run_checks,
    )
    written = write_format(outcome.state, outcome.report, options.format)
    if options.json:
        print_json(read_record(outcome.report) | {"mlflow_error": outcome.tracking_error})
        return 1 if outcome.tracking_error else 0
    print_outcome(outcome, place_of(folder.parent))
    if options.format != "html":
        print(f"{options.format}: {written}")
    return 1 if outcome.tracking_error else 0


def _verify(folder: Path, options: argparse.Namespace) -> int:
    from study.evidence.verify import verify
    from study.ledger.studies import read

    differences = list(verify(folder, options.tracking_uri, run_checks=options.run_checks))
    if options.json:
        print_json({"study": folder.name, "differences": differences})
        return int(bool(differences))
    for line in differences:
        print(line)
    count = len(differences)
    verified = "every figure is as computed again" if not count else counted(count, "difference")
    own = [claim.name for claim in read(folder).config.claims if claim.check]
    if own and not options.run_checks:
        verified += f"; without --run-checks not judged again: {', '.join(own)}"
    print(f"{folder.name}: {verified}")
    return int(bool(count))


def _serve(options: argparse.Namespace) -> int:
    from study.ledger.studies import find, read
    from study.ops.serve.dashboard import serve
    from study.ops.serve.ui import listen

    with refusals():
        folder = find(options.study, options.storage)
        read(folder)
        listen(options.port).close()
        if not options.every > 0:
            raise UserError(
                f"--every {options.every}: must be positive; use for example --every 10"
            )
    return serve(folder, options.port, options.every, lambda line: print(line, flush=True))


def _compare(options: argparse.Namespace) -> int:
    from study.ledger.studies import find, read
    from study.report.compare import compare, document, draw, lines, verdict

    with refusals():
        folder, other = (find(name, options.storage) for name in (options.study, options.other))
        first, second = read(folder), read(other)
        found = compare(first, second)
    for state in (first, second):
        if state.damage:
            print(
                f"lns-study: {one_line(state.config.name, NAME)}: {state.damage}", file=sys.stderr
            )
    if not options.json:
        print_table(["row", "pairs", *found.names, "difference"], lines(found))
        print(f"\n{one_line(verdict(found))}")
    path = Path(options.output or folder / "report" / f"compared-with-{other.name}.png")
    with refusals():
        if not options.output:
            check_own_folder(path.parent)
    try:
        if options.output:
            path.write_bytes(draw(found))
        else:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, draw(found))
    except OSError as error:
        raise UserError(
            f"--output {path}: cannot be written ({error.strerror}); choose another file"
        ) from None
    if options.json:
        return print_json(document(found) | {"picture": str(path)})
    print(f"Picture: {path}")
    return 0
