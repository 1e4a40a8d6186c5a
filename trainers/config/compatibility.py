"""Which combinations of a trial's keys are right; the others are refused before any work starts, each with its reason.

Every dataclass of a config refuses what is wrong by itself; here is what is wrong only together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lns_ops.formats import parse
from trainers.config.layout import DEFERRING
from trainers.config.optimizer import SLICEABLE, WHOLE_TENSORS

if TYPE_CHECKING:
    from trainers.config.trial import TrialConfig


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
    _check_analysis(config)
    _check_wire(config)
    _check_sync(config)
    _check_simulated(config)
    _check_autocast(config)
    _check_deferred(config)
    _check_elastic(config)
    _check_fsdp(config)
    _check_offload(config)
    _check_tp(config)
    if config.layout.pp > 1 and config.model.name == "cnn":
        raise ValueError(
            f"layout.pp={config.layout.pp} with model.name=cnn: cuts are made between linear layers; use model.name=mlp"
        )
    if any(rank >= config.workers for rank in config.profile.ranks):
        raise ValueError(
            f"profile.ranks={list(config.profile.ranks)}, workers={config.workers}: ranks are counted from 0; use ranks up to "
            f"{config.workers - 1}"
        )
    if config.layout.pp > 1 and config.precision.lns_format is not None and config.precision.scope == "matmul":
        raise ValueError(
            f"layout.pp={config.layout.pp} with precision.scope=matmul: where such a trial diverges, encoding raises inside a "
            "stage and the other stages would wait for it; use precision.scope=everywhere, or layout.pp=1"
        )


def _check_elastic(config: TrialConfig) -> None:
    """Every size that the group may take must be a right one."""
    if config.min_workers is None:
        return
    if config.min_workers > config.workers:
        raise ValueError(
            f"min_workers={config.min_workers}, workers={config.workers}: workers is the most; use min_workers={config.workers} or less"
        )
    if config.layout.pp > 1 or config.layout.dp is not None:
        raise ValueError(
            f"min_workers={config.min_workers} with layout.pp={config.layout.pp}, layout.dp={config.layout.dp}: the number of replicas "
            "changes; use layout.pp=1 and leave out layout.dp"
        )
    if config.wire.name != "native" or config.sync.name != "synchronous" or config.profile.ranks:
        raise ValueError(
            f"min_workers={config.min_workers} with wire.name={config.wire.name}, sync.name={config.sync.name}, "
            f"profile.ranks={list(config.profile.ranks)}: what belongs to a rank would be lost with it; use wire.name=native, "
            "sync.name=synchronous and no profile.ranks"
        )
    for workers in range(config.min_workers, config.workers + 1):
        if config.batch_size % (workers * config.layout.micro_batches):
            raise ValueError(
                f"batch_size={config.batch_size} with min_workers={config.min_workers}, workers={config.workers}: {workers} workers cannot "
                f"share it evenly in {config.layout.micro_batches} micro-batches; use a multiple of "
                f"{math.lcm(*range(config.min_workers, config.workers + 1)) * config.layout.micro_batches}"
            )


def _check_fsdp(config: TrialConfig) -> None:
    """Shards are of float32 tensors, over replicas that take every step together."""
    if not config.layout.fsdp:
        return
    if config.precision.format != "float32":
        raise ValueError(
            f"layout.fsdp=true with precision.format={config.precision.format}: torch shards tensors of floats, not codes nor the copies "
            "that simulated formats keep; use precision.format=float32, or layout.fsdp=false"
        )
    if config.layout.pp > 1:
        raise ValueError(
            f"layout.fsdp=true with layout.pp={config.layout.pp}: every micro-batch would gather a stage's parameters in the middle of its "
            "schedule; use layout.pp=1, or layout.fsdp=false"
        )
    if config.workers == 1 or config.min_workers is not None:
        raise ValueError(
            f"layout.fsdp=true with workers={config.workers}, min_workers={config.min_workers}: parameters are sharded over a fixed number "
            "of replicas, two at least; use workers=2 and leave out min_workers, or layout.fsdp=false"
        )
    wire, sync = config.wire, config.sync
    if sync.name != "synchronous" or wire.name != "native" or wire.bucket_cap_mb is not None:
        raise ValueError(
            f"layout.fsdp=true with sync.name={sync.name}, wire.name={wire.name}, wire.bucket_cap_mb={wire.bucket_cap_mb}: backward itself "
            "sums gradients, as float32, layer by layer; use sync.name=synchronous, wire.name=native and no wire.bucket_cap_mb, or "
            "layout.fsdp=false"
        )
    if config.autocast == "float16":
        raise ValueError(
            "layout.fsdp=true with autocast=float16: a replica sees overflows in its own shards alone; use autocast=bfloat16, or "
            "layout.fsdp=false"
        )
    if config.optimizer.name in WHOLE_TENSORS:
        raise ValueError(
            f"layout.fsdp=true with optimizer.name={config.optimizer.name}: its step needs norms of whole tensors, a replica has shards; "
            f"use an optimizer other than {', '.join(WHOLE_TENSORS)}, or layout.fsdp=false"
        )


def _check_offload(config: TrialConfig) -> None:
    """The copy on the CPU is the one that counts, so nobody else may change weights, and updates cannot wait for a GPU's scale."""
    if not config.memory.offload_optimizer:
        return
    if config.device == "cpu":
        raise ValueError(
            "memory.offload_optimizer=true with device=cpu: the optimizer's state is in the CPU's memory already; use device=cuda or "
            "device=auto, or memory.offload_optimizer=false"
        )
    if config.sync.name != "synchronous":
        raise ValueError(
            f"memory.offload_optimizer=true with sync.name={config.sync.name}: replicas would average weights that the next update writes "
            "over; use sync.name=synchronous, or memory.offload_optimizer=false"
        )
    if config.autocast == "float16":
        raise ValueError(
            "memory.offload_optimizer=true with autocast=float16: gradients are divided by their scale on the GPU, in the optimizer's "
            "place; use autocast=bfloat16, or memory.offload_optimizer=false"
        )


def _check_tp(config: TrialConfig) -> None:
    """Parts are of a float32 net's linear layers, whose replicas take every step together."""
    tp, hidden = config.layout.tp, config.model.hidden
    if tp == 1:
        return
    if config.precision.format != "float32":
        raise ValueError(
            f"layout.tp={tp} with precision.format={config.precision.format}: torch cuts tensors of floats, not codes nor the copies that "
            "simulated formats keep, and sums of parts would be rounded in another order; use precision.format=float32, or layout.tp=1"
        )
    if config.model.name != "mlp" or not hidden:
        raise ValueError(
            f"layout.tp={tp} with model.name={config.model.name}, model.hidden={list(hidden)}: linear layers are cut in pairs; use "
            "model.name=mlp with a hidden layer, or layout.tp=1"
        )
    if any(width % tp for width in hidden[::2]):
        raise ValueError(
            f"layout.tp={tp} with model.hidden={list(hidden)}: the first, third, ... width is cut, and {list(hidden[::2])} / {tp} are not "
            f"all whole numbers; use multiples of {tp} there, or layout.tp=1"
        )
    if config.layout.pp > 1 or config.layout.fsdp:
        raise ValueError(
            f"layout.tp={tp} with layout.pp={config.layout.pp}, layout.fsdp={str(config.layout.fsdp).lower()}: a tensor is cut in one way "
            "here; use layout.pp=1 and layout.fsdp=false, or layout.tp=1"
        )
    if config.min_workers is not None:
        raise ValueError(
            f"layout.tp={tp} with min_workers={config.min_workers}: without one worker a replica lacks parts; leave out min_workers, or "
            "use layout.tp=1"
        )
    wire, sync = config.wire, config.sync
    if sync.name != "synchronous" or wire.bucket_cap_mb is not None:
        raise ValueError(
            f"layout.tp={tp} with sync.name={sync.name}, wire.bucket_cap_mb={wire.bucket_cap_mb}: the workers of a replica must step "
            "alike, and would end rounds, fill buckets or see a server each by its own parts; use sync.name=synchronous and no "
            "wire.bucket_cap_mb, or layout.tp=1"
        )
    if config.autocast == "float16":
        raise ValueError(
            f"layout.tp={tp} with autocast=float16: a worker sees overflows in its own parts alone; use autocast=bfloat16, or layout.tp=1"
        )
    if config.optimizer.name in WHOLE_TENSORS:
        raise ValueError(
            f"layout.tp={tp} with optimizer.name={config.optimizer.name}: its step needs norms of whole tensors, a worker has parts; use "
            f"an optimizer other than {', '.join(WHOLE_TENSORS)}, or layout.tp=1"
        )


def _check_deferred(config: TrialConfig) -> None:
    """Weight gradients that wait need layers that leave them."""
    if config.layout.schedule not in DEFERRING:
        return
    if config.precision.simulated:
        raise ValueError(
            f"layout.schedule={config.layout.schedule} with precision.format={config.precision.format}: layers of simulated formats "
            "round in their own backward, which cannot wait for weights; use layout.schedule=1f1b, or float32 or an LNS format"
        )
    if config.memory.activation_checkpoints:
        raise ValueError(
            f"layout.schedule={config.layout.schedule} with memory.activation_checkpoints=true: what is computed again would be "
            "kept for the weights, and nothing saved; use layout.schedule=1f1b, or no checkpoints"
        )


def _check_autocast(config: TrialConfig) -> None:
    if config.autocast == "none":
        return
    if config.precision.format != "float32":
        raise ValueError(
            f"autocast={config.autocast} with precision.format={config.precision.format}: autocast is for float32 parameters; use "
            "precision.format=float32, or autocast=none"
        )
    if config.layout.pp > 1:
        raise ValueError(
            f"autocast={config.autocast} with layout.pp={config.layout.pp}: stages pass on float32; use layout.pp=1, or autocast=none"
        )
    if config.autocast == "bfloat16":
        return
    if config.device != "cuda":
        raise ValueError(
            f"autocast=float16 with device={config.device}: on a CPU float16 is some thirty times slower than float32; use device=cuda, or "
            "autocast=bfloat16"
        )
    if config.wire.name != "native" or config.sync.name != "synchronous":
        raise ValueError(
            f"autocast=float16 with wire.name={config.wire.name}, sync.name={config.sync.name}: scaled gradients may overflow, which all "
            "replicas must see alike; use wire.name=native and sync.name=synchronous, or autocast=bfloat16"
        )


def _check_analysis(config: TrialConfig) -> None:
    if config.analysis_every and config.precision.lns_format is None and not config.precision.simulated:
        raise ValueError(
            f"analysis_every={config.analysis_every} with precision.format={config.precision.format}: it compares a format with "
            "float32; use another format, or analysis_every=0"
        )
    if config.analysis_every and config.layout.pp > 1:
        raise ValueError(
            f"analysis_every={config.analysis_every} with layout.pp={config.layout.pp}: it runs the whole model, a stage has a part of it; "
            "use layout.pp=1, or analysis_every=0"
        )


def _check_simulated(config: TrialConfig) -> None:
    precision = config.precision
    if not precision.simulated:
        return
    if config.sync.local or config.sync.name == "asynchronous":
        raise ValueError(
            f"sync.name={config.sync.name} with precision.format={precision.format}: what replicas or a server exchange are weights, whose "
            "means would leave the format's grid; use sync.name=synchronous, or an LNS format"
        )
    if not parse(precision.gradient_format or precision.format).overflows:
        return
    if config.layout.pp > 1:
        raise ValueError(
            f"layout.pp={config.layout.pp} with float16 gradients: each stage would find its own loss scale and overflows; use "
            "precision.format=bfloat16, or layout.pp=1"
        )
    if config.wire.name not in ("native", "float32"):
        raise ValueError(
            f"wire.name={config.wire.name} with float16 gradients: an overflow must reach all replicas, which only float32 carries; use "
            "wire.name=native"
        )


def _check_wire(config: TrialConfig) -> None:
    wire, precision = config.wire, config.precision
    if wire.name != "native" and config.layout.replicas(config.workers) == 1:
        raise ValueError(
            f"wire.name={wire.name} with one replica (workers={config.workers}, layout.pp={config.layout.pp}, layout.tp="
            f"{config.layout.tp}): no gradient travels; use wire.name=native, or more workers"
        )
    if wire.bucket_cap_mb is not None and config.layout.pp > 1:
        raise ValueError(
            f"wire.bucket_cap_mb={wire.bucket_cap_mb} with layout.pp={config.layout.pp}: a stage's backward passes come between its "
            "messages to other stages; use layout.pp=1, or leave it out"
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
            f"{config.workers}, layout.pp={config.layout.pp}, layout.tp={config.layout.tp}): there is none to wait for or to average with; "
            "use sync.name=synchronous, or more workers"
        )
    if sync.local and (wire.name == "powersgd" or wire.sum == "lns"):
        raise ValueError(
            f"wire.name={wire.name}, wire.sum={wire.sum} with sync.name={sync.name}: powersgd and LNS sums are for gradients, what "
            "travels here are differences of weights; use another wire.name and wire.sum=auto"
        )
    if sync.name != "synchronous" and wire.bucket_cap_mb is not None:
        raise ValueError(
            f"wire.bucket_cap_mb={wire.bucket_cap_mb} with sync.name={sync.name}: buckets are of gradients that all replicas sum every "
            "step; use sync.name=synchronous, or leave it out"
        )
    raises = config.precision.lns_format is not None and config.precision.scope == "matmul"
    if sync.name == "ensemble" and (config.layout.pp > 1 or raises):
        raise ValueError(
            f"sync.name=ensemble with layout.pp={config.layout.pp}, precision.scope={config.precision.scope}: replicas predict together, "
            "so none may be in stages, or raise on its own where it diverges; use layout.pp=1 and precision.scope=everywhere"
        )
    if sync.name in ("final_average", "ensemble") and wire.name != "native":
        raise ValueError(
            f"wire.name={wire.name} with sync.name={sync.name}: whole weights travel once, as float32, or never; use wire.name=native"
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
    if config.optimizer.name not in SLICEABLE:
        raise ValueError(
            f"optimizer.name={config.optimizer.name} with sync.name=asynchronous: the server's shards are slices across tensors, with one "
            f"count of steps; use {', '.join(SLICEABLE)}, or another sync.name"
        )
    if config.optimizer.name != "sgd" and sync.staleness != 0:
        raise ValueError(
            f"optimizer.name={config.optimizer.name}, sync.staleness={sync.staleness}: every replica's gradient would be a whole step of "
            "Adam's, as large as that of a batch; use optimizer.name=sgd, or sync.staleness=0"
        )
