"""Measure the cost of a TPE proposal after many trials, compared with Optuna's bare ``ask``.

Each number of trials is measured in a separate process. A search over four keys gets that many
finished configurations through ``tell``, then proposes, alternating with a bare Optuna study with
the same trials and options. Prints the median time of a proposal, the total time of ``tell`` (both
in seconds), and the growth of the process's memory.

    python scripts/bench_search.py [--trials 1000 10000] [--proposals 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

SPACE = {
    "optimizer.lr": {"loguniform": [0.001, 1.0]},
    "optimizer.momentum": {"uniform": [0.0, 0.9]},
    "optimizer.nesterov": {"choice": [False, True]},
    "batch_size": {"choice": [16, 32, 64, 128]},
}


def memory() -> float:
    """Return the resident memory of this process in MiB."""
    return float(psutil.Process().memory_info().rss) / 2**20


def make_known(trials: int) -> tuple[Any, Any, list[Any]]:
    """Return base, search space and finished trials of a made-up study with random values."""
    import numpy as np

    from study.config import StudyConfig
    from study.ledger.state import FINISHED, TrialState
    from study.plan.candidates import bind_space, rows_of
    from study.plan.trials import Base

    study = StudyConfig.from_dict(
        {
            "name": "bench",
            "space": SPACE,
            "search": {"algorithm": "tpe", "num_samples": trials + 100},
            "trial": {"data": {"name": "digits"}},
        }
    )
    base, space = Base(study, rows_of(study)[0], download=False), bind_space(study)
    generator = np.random.default_rng(0)
    known = []
    for number in range(1, trials + 1):
        params = space.point(generator.random(len(space.sampled)).tolist(), {})
        planned = base.trial(0, number, params)
        known.append(
            TrialState(
                id=planned.id,
                row=planned.row,
                seed=0,
                config={},
                status=FINISHED,
                reports={1: {"time": 0.0, "metrics": {"validation/error": generator.random()}}},
                number=number,
                params=params,
            )
        )
    return base, space, known


def measure_ours(trials: int, proposals: int) -> dict[str, float]:
    """Measure the proposer of a study."""
    from study.ledger.state import StudyState
    from study.search.optuna_proposer import Counter, Proposer

    base, space, known = make_known(trials)
    state = StudyState()
    state.known = {trial.id: trial for trial in known}
    before, began = memory(), time.perf_counter()
    proposer = Proposer(base, space, {}, base.study.search, [0], Counter(trials))
    proposer.recall(state, known)
    told = time.perf_counter() - began
    return {"told": told, **measure(proposer.propose, proposals), "MiB": memory() - before}


def measure_optuna(trials: int, proposals: int) -> dict[str, float]:
    """Measure a bare study of Optuna's."""
    import optuna

    from study.search.optuna_proposer import distribution, make_sampler, suggest

    base, space, known = make_known(trials)
    before, began = memory(), time.perf_counter()
    bare = optuna.create_study(sampler=make_sampler("tpe", base.study.search, 0))
    shapes = {domain.key: distribution(domain) for domain in space.sampled}
    for trial in known:
        bare.add_trial(
            optuna.trial.create_trial(
                params={
                    domain.key: domain.values.index(trial.params[domain.key])
                    if domain.categorical
                    else trial.params[domain.key]
                    for domain in space.sampled
                },
                distributions=shapes,
                value=trial.reports[1]["metrics"]["validation/error"],
            )
        )
    told = time.perf_counter() - began

    def ask() -> None:
        asked = bare.ask()
        for domain in space.sampled:
            suggest(asked, domain)

    return {"told": told, **measure(ask, proposals), "MiB": memory() - before}


def measure(propose: Any, proposals: int) -> dict[str, float]:
    """Return the seconds of the first proposal, and the median of the later ones."""
    seconds = []
    for _ in range(proposals):
        began = time.perf_counter()
        propose()
        seconds.append(time.perf_counter() - began)
    return {"first": seconds[0], "median": statistics.median(seconds[1:])}


def main() -> None:
    """Print a table of all sizes; see the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--proposals", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=["ours", "Optuna"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run = measure_ours if options.one == "ours" else measure_optuna
        print(json.dumps(run(options.trials[0], options.proposals)))
        return
    import optuna

    print(
        f"Optuna {optuna.__version__}, Python {platform.python_version()}, {platform.processor()}"
    )
    print("| trials | who | told s | first s | median s | MiB |\n|---|---|---|---|---|---|")
    results = []
    for trials in options.trials:
        for who in ("ours", "Optuna"):
            words = [sys.executable, __file__, "--one", who, "--trials", str(trials)]
            words += ["--proposals", str(options.proposals)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            results.append({"trials": trials, "who": who, **found})
            cells = [f"{found[key]:.3f}" for key in ("told", "first", "median")]
            print(f"| {trials} | {who} | {' | '.join(cells)} | {found['MiB']:.0f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
