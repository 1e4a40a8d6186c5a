"""Which combinations of a trial's keys are right; the others are refused before any work starts, each with its reason.

Every dataclass of a config refuses what is wrong by itself; here is what is wrong only together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.config import TrialConfig


def check_combinations(config: TrialConfig) -> None:
    """Refuse keys that contradict each other.

    Raises:
        ValueError: the keys and their values, why they cannot be together, and what to use.
    """
    config.layout.check(workers=config.workers, batch_size=config.batch_size, layers=len(config.model.hidden) + 1)
    if config.lr_schedule.warmup_epochs >= config.epochs:
        raise ValueError(
            f"lr_schedule.warmup_epochs={config.lr_schedule.warmup_epochs:g}, epochs={config.epochs}: the rate would never reach its full "
            "value; use a shorter warm-up"
        )
    _check_wire(config)
    _check_sync(config)
    if config.layout.pp > 1 and config.precision.lns_format is not None and config.precision.scope == "matmul":
        raise ValueError(
            f"layout.pp={config.layout.pp} with precision.scope=matmul: where such a trial diverges, encoding raises inside a "
            "stage and the other stages would wait for it; use precision.scope=everywhere, or layout.pp=1"
        )


def _check_wire(config: TrialConfig) -> None:
    wire, precision = config.wire, config.precision
    if wire.name != "native" and config.layout.replicas(config.workers) == 1:
        raise ValueError(
            f"wire.name={wire.name} with one replica (workers={config.workers}, layout.pp={config.layout.pp}): no gradient travels; use "
            "wire.name=native, or more workers"
        )
    if wire.sum == "lns" and wire.name == "native" and (precision.lns_format is None or precision.scope != "everywhere"):
        raise ValueError(
            f"wire.sum=lns with wire.name=native, precision.format={precision.format}, precision.scope={precision.scope}: the "
            "gradients are float32; use wire.name=lns16, or wire.sum=auto"
        )


def _check_sync(config: TrialConfig) -> None:
    sync, wire = config.sync, config.wire
    if (sync.name != "synchronous" or sync.straggler_seconds) and config.layout.replicas(config.workers) == 1:
        raise ValueError(
            f"sync.name={sync.name}, sync.straggler_seconds={sync.straggler_seconds:g} with one replica (workers="
            f"{config.workers}, layout.pp={config.layout.pp}): there is none to wait for or to average with; use "
            "sync.name=synchronous, or more workers"
        )
    if sync.local and (wire.name == "powersgd" or wire.sum == "lns"):
        raise ValueError(
            f"wire.name={wire.name}, wire.sum={wire.sum} with sync.name={sync.name}: powersgd and LNS sums are for gradients, what "
            "travels here are differences of weights; use another wire.name and wire.sum=auto"
        )
    if sync.name == "final_average" and wire.name != "native":
        raise ValueError(
            f"wire.name={wire.name} with sync.name=final_average: whole weights travel once, as float32; use wire.name=native"
        )
    if sync.name == "asynchronous":
        _check_asynchronous(config)


def _check_asynchronous(config: TrialConfig) -> None:
    sync = config.sync
    if config.layout.pp > 1:
        raise ValueError(
            f"layout.pp={config.layout.pp} with sync.name=asynchronous: stages pass on activations of one version of the weights, a server "
            "changes them in between; use layout.pp=1, or another sync.name"
        )
    if config.wire != type(config.wire)():
        raise ValueError(
            f"wire.name={config.wire.name}, wire.sum={config.wire.sum} with sync.name=asynchronous: the server takes gradients in their "
            "native form; use wire.name=native and wire.sum=auto"
        )
    if config.device == "cuda":
        raise ValueError("device=cuda with sync.name=asynchronous: the parameter server computes on CPUs; use device=cpu")
    if config.lr_schedule.varies:
        raise ValueError(
            f"lr_schedule.decay={config.lr_schedule.decay}, lr_schedule.warmup_epochs={config.lr_schedule.warmup_epochs:g} with "
            "sync.name=asynchronous: the server does not know which step it is; use a constant rate"
        )
    if config.optimizer.name != "sgd" and sync.staleness != 0:
        raise ValueError(
            f"optimizer.name={config.optimizer.name}, sync.staleness={sync.staleness}: every replica's gradient would be a whole step of "
            "Adam's, as large as that of a batch; use optimizer.name=sgd, or sync.staleness=0"
        )
