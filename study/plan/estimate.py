"""Estimate of a study's trials, resources and time.

The time is estimated by packing the trials into the CPUs and GPUs of this machine
(:mod:`study.plan.packing`), with seconds per epoch from earlier studies in the storage
(:mod:`study.plan.durations`). The estimate needs a similar earlier trial; the plan reports if it
has none. The proposals of an adaptive search are replaced by as many random configurations of its
space (:func:`study.plan.plan.likely_trials`). Every trial counts with all epochs and all data. So
the estimate is an upper bound, and is labelled as one, if a scheduler ends trials early, rounds
train on part of the data, or a race drops configurations.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from study.config import StudyConfig
from study.config.search import choose_sampler
from study.config.space import describe
from study.plan.candidates import by_rule, generation_ends
from study.plan.durations import of_storage
from study.plan.identity import pace_key
from study.plan.packing import Schedule, need_of, pack
from study.plan.plan import Plan, confirmation_rounds, likely_trials
from study.plan.processes import describe_processes
from study.plan.resources import local_cpus, visible_gpus
from study.plan.trials import PlannedTrial
from study.text import counted, duration
from trainers.workers.resources import cpus_of, gpus_of

TRIALS_SHOWN = 12
ARGUMENTS = "trainable.args."
"""Prefix of the keys of a user's loop's arguments."""


def describe_plan(plan: Plan) -> Iterator[str]:
    """Yield the description of a plan, as lines for a terminal."""
    study = plan.study
    known = of_storage(study.storage)
    count = _confirmations(plan)
    best = f", and {_up_to(plan)}{count} that confirm the best" if count else ""
    whole = f"{_up_to(plan)}{counted(plan.size + count, 'trial')}"
    yield f"{study.name}: {whole} = {_product(plan)}{best}"
    for trial in plan.trials[:TRIALS_SHOWN]:
        yield f"  {_describe_trial(trial, known)}"
    if len(plan.trials) > TRIALS_SHOWN:
        yield f"  and {len(plan.trials) - TRIALS_SHOWN} more"
    if study.search.adaptive:
        search = study.search
        chosen, why = choose_sampler(search, study.parsed_space)
        auto = f" (auto: {why})" if search.algorithm == "auto" else ""
        yield (
            f"  {'more are' if plan.trials else 'they are'} proposed by"
            f" {search.scheduler if search.in_rounds else chosen}{auto} as results come in"
        )
    for loop in dict.fromkeys(_describe_loop(trial) for trial in plan.trials):
        yield from loop
    yield from _describe_unnamed(plan)
    if study.search.constraints:
        bounds = ", ".join(f"{name} {bound}" for name, bound in study.search.constraints.items())
        yield f"  a configuration can be the best only with {bounds}"
    likely = likely_trials(plan)
    yield from describe_processes(plan, likely, known)
    if plan.excluded:
        yield f"Left out, {len(plan.excluded)} configurations that make no valid trial:"
        for count, first in by_rule(plan.excluded):
            yield f"  {count}: {first.reason}"
            left_out = [entry for entry in plan.excluded if entry.rule == first.rule]
            yield from (f"    {entry.row}: {describe(entry.params)}" for entry in left_out)
    yield _describe_time(plan, likely, known)


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON document; ``expected`` is None if no earlier trial is like these."""
    known, likely = of_storage(plan.study.storage), likely_trials(plan)
    expected = _packed(plan, likely, known)
    return {
        "name": plan.study.name,
        "size": plan.size + _confirmations(plan),
        "trials": [_trial_document(trial, known) for trial in plan.trials],
        "excluded": [
            {"row": each.row, "params": each.params, "reason": each.reason}
            for each in plan.excluded
        ],
        "expected": expected
        and {
            "seconds": expected[0].makespan,
            "trial_seconds": expected[1],
            "concurrent": expected[0].most,
            "is_upper_bound": bool(_less(plan)),
        },
    }


def _trial_document(trial: PlannedTrial, known: dict[str, float]) -> dict[str, Any]:
    values = trial.config.to_dict()
    seconds = known.get(pace_key(values))
    return {
        **{name: getattr(trial, name) for name in ("id", "row", "number", "seed", "params")},
        "epochs": trial.config.epochs,
        "workers": trial.config.workers,
        "cpus": cpus_of(values),
        "gpus": gpus_of(values),
        "seconds": seconds and seconds * trial.config.epochs,
    }


def describe_size(plan: Plan, planned: int) -> str:
    """Describe the number of planned trials, including the confirmation of the best."""
    count = _confirmations(plan)
    best = f", {count} of which confirm the best" if count else ""
    return f"{_up_to(plan)}{counted(planned + count, 'trial')}{best}"


def _confirmations(plan: Plan) -> int:
    return sum(map(len, confirmation_rounds(plan)))


def _up_to(plan: Plan) -> str:
    """Return "up to " where a race may need fewer trials than it has seeds for."""
    return "up to " if plan.study.search.confirm > 1 else ""


def _product(plan: Plan) -> str:
    """Describe the factors of a plan's size, per row if the rows' sizes differ."""
    rows, seeds = plan.rows, len(plan.study.seeds)
    sizes = [plan.size_of(row) // seeds for row in rows]
    alone = ", each a search of its own" if plan.study.search.per_seed else ""
    of_seeds = f" x {counted(seeds, 'seed')}{alone}"
    if len(set(sizes)) > 1:
        each = ", ".join(f"{row.label}: {n}" for row, n in zip(rows, sizes, strict=True))
        return f"{_configurations(plan, sum(sizes))} of {len(rows)} rows ({each}){of_seeds}"
    labels = ", ".join(row.label for row in rows)
    return f"{counted(len(rows), 'row')} ({labels}) x {_configurations(plan, sizes[0])}{of_seeds}"


def _configurations(plan: Plan, count: int) -> str:
    algorithm = f" ({plan.study.search.algorithm})" if plan.study.space else ""
    return f"{counted(count, 'configuration')}{algorithm}"


def _describe_loop(trial: PlannedTrial) -> tuple[str, ...]:
    """Return a line on the user's loop that trains a trial, if one does."""
    loop = trial.config.trainable
    return (f"Loop: {loop.name} (code {loop.code})",) if loop.name else ()


def _describe_unnamed(plan: Plan) -> Iterator[str]:
    """Yield a line on each searched argument of the user's loop that the base trial does not have.

    Such an argument may be misspelt, and the loop would ignore it.
    """
    args = plan.study.trial.trainable.args
    for key in plan.study.space:
        name = key.removeprefix(ARGUMENTS)
        if args and name != key and name.partition(".")[0] not in args:
            yield (
                f"  {key} is searched, and trial.trainable.args has no {name}, but"
                f" {', '.join(args)}: is it what the loop reads?"
            )


def describe_cost(plan: Plan) -> str:
    """Describe the GPU hours and CPU hours of a plan, from the times of similar earlier trials.

    GPU hours are seconds of a trial x its share of GPUs / 3600, summed over all trials. Trials
    without a similar earlier trial count as the mean.
    """
    known = of_storage(plan.study.storage)
    likely, rounds = likely_trials(plan), confirmation_rounds(plan)
    paced = _hours(likely, known)
    if not paced:
        values = [trial.config.to_dict() for trial in likely]
        gpus = max(map(gpus_of, values), default=0.0)
        return (
            "Cost: unknown, no earlier trial in the storage is like these; a trial takes"
            f" {gpus:g} GPU and {max(map(cpus_of, values), default=1)} CPU"
        )
    confirming = list(itertools.chain(*rounds))
    gpu, cpu = (
        _whole_trials(plan) * statistics.fmean(of_search)
        + len(confirming) * statistics.fmean(of_best)
        for of_search, of_best in zip(
            zip(*paced, strict=True),
            zip(*(_hours(confirming, known) or paced), strict=True),
            strict=True,
        )
    )
    return f"Cost: about {gpu:.3g} GPU hours and {cpu:.3g} CPU hours{_less(plan)}"


def _hours(trials: Iterable[PlannedTrial], known: dict[str, float]) -> list[tuple[float, float]]:
    """Return the GPU and CPU hours of the trials that are like an earlier one."""
    values = [trial.config.to_dict() for trial in trials]
    hours = [
        (known[pace_key(each)] * each["epochs"] / 3600, each)
        for each in values
        if pace_key(each) in known
    ]
    return [(each * gpus_of(of), each * cpus_of(of)) for each, of in hours]


def _whole_trials(plan: Plan) -> float:
    """Return how many trials of all epochs a plan amounts to: each generation of a population goes
    on where the one before ended."""
    study = plan.study
    if not study.search.population:
        return plan.size
    ends = generation_ends(study.trial.epochs, study.search.perturbation_interval)
    return plan.size / len(ends)


def _less(plan: Plan) -> str:
    """Return why a study may take less time than estimated; "" if it will not."""
    search = plan.study.search
    causes = {
        "rounds on part of the data": search.scheduler == "halving",
        "what the scheduler ends early": search.ends_early,
        "what a race decides early": search.confirm > 1,
    }
    found = [cause for cause, is_one in causes.items() if is_one]
    return f", less with {' and '.join(found)}" if found else ""


def _describe_trial(trial: PlannedTrial, known: dict[str, float]) -> str:
    config = trial.config
    number = "" if trial.number is None else f" #{trial.number}"
    sampled = f" ({describe(trial.params)})" if trial.params else ""
    values = config.to_dict()
    resources = f"{cpus_of(values)} CPU" + (
        f", {gpus_of(values):g} GPU" if config.device == "cuda" else ""
    )
    seconds = known.get(pace_key(values))
    time = f", about {duration(seconds * config.epochs)}" if seconds else ""
    size = f"{counted(config.epochs, 'epoch')}, {counted(config.workers, 'worker')}"
    return f"{trial.id}  {trial.row}{number}, seed {trial.seed}{sampled}: {size}, {resources}{time}"


def _packed(
    plan: Plan, likely: Sequence[PlannedTrial], known: dict[str, float]
) -> tuple[Schedule, float, int] | None:
    """Pack all trials into the resources of the machine; for a cluster into ``max_concurrent``.

    Returns:
        The schedule, the seconds of all its trials, and the number of trials that are unlike any
        earlier one; None if all are.
    """
    rounds = confirmation_rounds(plan)
    times = {
        trial.id: known[key] * trial.config.epochs
        for trial in itertools.chain(likely, *rounds)
        if (key := pace_key(trial.config.to_dict())) in known
    }
    if not times:
        return None
    mean = statistics.fmean(times.values())

    def seconds(trial: PlannedTrial) -> float:
        return times.get(trial.id, mean) / trial.config.epochs

    # future proposals are assumed to be like the existing ones
    trials = list(itertools.islice(itertools.cycle(likely), max(1, round(_whole_trials(plan)))))
    cpus, gpus, _ = _have(plan.study, likely)
    packed = pack(trials, cpus, gpus, seconds, most=_most(plan.study), rounds=rounds)
    total = sum(seconds(trial) * trial.config.epochs for trial in itertools.chain(trials, *rounds))
    return packed, total, sum(trial.id not in times for trial in likely)


def _describe_time(plan: Plan, likely: Sequence[PlannedTrial], known: dict[str, float]) -> str:
    """Describe the expected time of all trials."""
    found = _packed(plan, likely, known)
    if found is None:
        return (
            "Expected time: unknown, no earlier trial in the storage is like these; after the first"
            " epochs a run shows it"
        )
    packed, total, unknown = found
    cpus, gpus, assumed = _have(plan.study, likely)
    use = ""
    if plan.study.address is None and packed.makespan:
        have = {"CPUs": cpus, "GPUs": gpus}
        held = dict(zip(have, packed.held.values(), strict=True))
        shares = {
            name: held[name] / (count * packed.makespan) for name, count in have.items() if count
        }
        name = max(shares, key=lambda each: shares[each])
        use = f", utilisation of the {name} at most {100 * shares[name]:.0f} %"
    notes = [
        assumed,
        f"{counted(packed.unfit, 'trial')} too large for this machine" if packed.unfit else "",
        f"{unknown} trials are unlike any earlier one and counted at the mean" if unknown else "",
    ]
    return (
        f"Expected time: {duration(packed.makespan)}, at most {packed.most} at a time"
        f" ({duration(total)} of trial time){use}"
        + _less(plan)
        + "".join(f"; {note}" for note in notes if note)
    )


def _most(study: StudyConfig) -> int | None:
    return study.max_concurrent or (None if study.address is None else 1)


def _have(study: StudyConfig, trials: Sequence[PlannedTrial]) -> tuple[int, int, str]:
    """Return the CPUs and GPUs that trials have, and what of it is assumed.

    A cluster has room for as many as the config allows.
    """
    needs = [need_of(trial) for trial in trials]
    most = max(need.cpus for need in needs), math.ceil(max(need.gpus for need in needs))
    if study.address is not None:
        count = _most(study) or 1
        return math.ceil(count * most[0]), count * most[1], ""
    gpus = len(visible_gpus()) if most[1] else 0
    if most[1] and not gpus:
        on = f"as on a machine with {counted(most[1], 'GPU')}, this one has none"
        return local_cpus(study), most[1], on
    return local_cpus(study), gpus, ""
