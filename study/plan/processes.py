"""Description of the processes of a plan's trials: the kind, the share of a GPU, and the reason.

:mod:`trainers.workers.resources` has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from study.config import StudyConfig
from study.plan.engine_choice import by_ray, choose_gang
from study.plan.plan import Plan
from study.plan.trials import PlannedTrial
from study.text import counted
from trainers.config import TrialConfig
from trainers.workers.resources import (
    MOST_LAYERS,
    SHARES,
    captured,
    choose_share,
    trials_per_process,
)

FASTER = {
    1 / 12: " train three times as fast side by side as by turns (784-512-10, an H200)",
    1 / 4: " train 1.8 to 3.6 times as fast four at a time as by turns (H100, H200)",
}
"""Measured speedup of nets that share a process, by share (docs/benchmarks/studies.md)."""


def describe_processes(
    plan: Plan, trials: Sequence[PlannedTrial], seconds: dict[str, float]
) -> Iterator[str]:
    """Yield a line on each kind of process that a plan's trials train in, and why.

    Args:
        plan: the plan.
        trials: its trials; of a search that has proposed nothing yet, random ones of its space
            (:func:`study.plan.plan.likely_trials`).
        seconds: seconds per epoch of earlier trials (:mod:`study.plan.durations`).
    """
    kinds = Counter(_describe(plan.study, trial, seconds) for trial in trials)
    for kind, count in kinds.items():
        share = f"{100 * count / len(trials):.0f} % of the space (at random)"
        yield f"Processes: {counted(count, 'trial') if plan.trials else share}: {kind}"


def _describe(study: StudyConfig, trial: PlannedTrial, seconds: dict[str, float]) -> str:
    """Describe the processes of a trial, and why it has these."""
    config, executor = trial.config, study.executor
    on_gpu = config.device == "cuda"
    if config.workers > 1:
        each = "a process and a GPU a worker" if on_gpu else "a process a worker"
        words = f"a gang of {config.workers} each, {each} (trial.workers)"
        gang = choose_gang(study, trial, seconds)
        starts = "started by Ray Train" if gang.by_train else "forked"
        return f"{words}, {starts}: {gang.why}" if by_ray(study) else words
    most, share = trials_per_process(executor, config), 1.0 if config.gpus is None else config.gpus
    if on_gpu:
        most = min(most, int(1 / share + 1e-6))
    if most > 1 and executor == "packed":
        return f"up to {most} share one (executor=packed)"
    if most > 1:
        faster = next((text for each, text in FASTER.items() if abs(share - each) < 1e-6), "")
        return (
            f"up to {most} share one, {_part(share)} a trial: small nets whose step is a CUDA"
            f" graph{faster or ', side by side'}, with the same bits; trial.gpus=1 gives each a"
            " process and a GPU"
        )
    place = f", {_part(share)} a trial" if on_gpu else ""
    return f"one each (executor={executor}){place}: {_why_alone(config, share)}"


def _part(share: float) -> str:
    """Describe a share of a GPU."""
    parts = round(1 / share)
    if share == 1:
        return "a whole GPU"
    return f"1/{parts} of a GPU" if abs(share - 1 / parts) < 1e-6 else f"{share:g} of a GPU"


def _why_alone(config: TrialConfig, share: float) -> str:
    """Return why a trial with one worker does not share a process."""
    if config.user_code:
        return "they run code of yours, which may change its whole process"
    if config.device != "cuda":
        return "only small nets on a GPU share processes by themselves"
    if not captured(config):
        return "their step is no CUDA graph"
    if not (config.model.feedforward or config.recurrence_fused):
        if config.model.name == "lstm":
            return "a recurrent net keeps Python busy, for which trials in a process wait"
        return (
            "only nets of the kinds mlp and cnn, and an LSTM's variants in float32, share processes"
            " by themselves"
        )
    if config.model.name == "lstm" and not config.model.stateless:
        return "LSTMs with dropout were not measured side by side"
    if choose_share(config) == 1:
        return f"a step's mean layer takes more than {SHARES[-1][0]:.0g} multiply-accumulates"
    if share > SHARES[-1][1]:
        return f"trial.gpus={share:g} asks for more than {_part(SHARES[-1][1])}"
    if config.telemetry:
        return "telemetry measures a process's memory"
    if not config.update_captured:
        return (
            f"the update of {config.optimizer.name} is not in their CUDA graph, as its rate varies"
        )
    return f"they have more than {MOST_LAYERS} layers"
