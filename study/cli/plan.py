"""The command ``plan``: what a run would do, and how long it would take, also on more machines."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from study.cli.manage import Commands, add_json, print_json, print_table
from study.cli.run import add_study
from study.cli.stored import add_modes, is_stored, load_config, stored_config
from study.errors import UserError, refusals
from study.program import lns_study
from study.text import counted, duration

if TYPE_CHECKING:
    from study.config import StudyConfig
    from study.engines.simulate import SimulatedRun

SLOTS = (1, 10, 100, 1000)
"""Default numbers of slots that ``--slots`` simulates."""


def add_plan(commands: Commands) -> None:
    """Add the command ``plan`` to argparse's subparsers."""
    plan = commands.add_parser(
        "plan",
        help="print the trials, resources and expected time of a study, start nothing; with"
        " --slots on more machines",
        description=(
            "Print what `lns-study run` with the same arguments would run: the trials, excluded"
            " trials with the reason, the resources per trial, and the expected time, estimated"
            " from earlier studies in the storage. If the data are on this machine, trials are"
            " checked on them. Starts nothing, and does not run the study's own code."
            " With --slots, simulate the trials and the scheduler on given numbers of slots (a"
            " trial takes one slot per worker): makespan, utilisation, trials ended early, load on"
            " MLflow. Times and curves come from similar trials of studies in the storage, else"
            " from --seconds and synthetic curves."
        ),
    )
    add_study(plan)
    plan.add_argument(
        "--slots",
        type=int,
        nargs="*",
        help=f"simulate these numbers of slots (default: {' '.join(map(str, SLOTS))})",
    )
    plan.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="seconds per epoch if none was recorded, for --slots (default: 10)",
    )
    add_json(plan)
    add_modes(plan, runs=False)
    plan.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    from study.engines.preflight import check_here
    from study.plan.estimate import describe_plan, plan_document
    from study.plan.plan import make_plan

    with refusals():
        stored = is_stored(options)
        study = stored_config(options) if stored else load_config(options, download=False)
        if options.slots is not None:
            return _simulate(study, options.slots or SLOTS, options.seconds, options.json)
        plan, unchecked = check_here(make_plan(study, download=False))
    _say_damage(study, f"; until then `{lns_study('run')}` would refuse")
    if options.json:
        return print_json(plan_document(plan) | {"unchecked": unchecked})
    for line in describe_plan(plan):
        print(line)
    if unchecked:
        print(f"Not checked: {unchecked}. `{lns_study('run')}` does so before it starts anything.")
    return 0


SIMULATED = [
    "slots", "makespan", "utilisation", "ended early", "epochs", "epochs saved",
    "MLflow requests/s",
]  # fmt: skip
"""Column headings of the output of `plan --slots`."""


def _simulate(study: StudyConfig, slots: Sequence[int], assumed: float, as_json: bool) -> int:
    from study.engines.simulate import recorded_errors, recorded_seconds, simulate
    from study.ledger.log import readable_ledgers
    from study.ledger.state import fold
    from study.ledger.studies import folders
    from study.plan.estimate import describe_size
    from study.plan.plan import make_plan

    if min(slots) < 1 or not assumed > 0:
        raise UserError(
            f"--slots {' '.join(map(str, slots))} --seconds {assumed}: must be positive; use for"
            " example --slots 8 64"
        )
    if study.search.adaptive:
        search = dataclasses.replace(study.search, algorithm="random")
        study = dataclasses.replace(study, search=search)
    plan = make_plan(study, download=False)
    states = [fold(events) for events in readable_ledgers(folders(study.storage))]
    _say_damage(study)
    seconds = recorded_seconds(plan, states, assumed)
    error = recorded_errors(states, next(iter(study.search.objectives)))
    found = [simulate(plan, number, seconds, error) for number in slots]
    if as_json:
        return print_json([dataclasses.asdict(run) for run in found])
    print(f"{study.name}: {describe_size(plan, len(plan.trials))}")
    print_table(
        SIMULATED, [_simulated(number, run) for number, run in zip(slots, found, strict=True)]
    )
    return 0


def _simulated(slots: int, run: SimulatedRun) -> list[str]:
    if run.unfit:
        more = f"{counted(run.unfit, 'trial')} of more workers"
        return [str(slots), more, *["-"] * (len(SIMULATED) - 2)]
    return [
        str(slots),
        duration(run.makespan),
        f"{100 * (1 - run.idle):.0f} %",
        str(run.early),
        f"{run.epochs}",
        f"{run.saved}",
        f"{run.requests:.2g}",
    ]


def _say_damage(study: StudyConfig, consequence: str = "") -> None:
    """Print a warning if a study's ledger exists and is damaged."""
    from study.ledger.studies import damage_of

    if damage := damage_of(study.folder):
        print(f"lns-study: {study.name}: {damage}{consequence}", file=sys.stderr)
