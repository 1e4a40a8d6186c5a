"""Which combinations of a trial's keys are right; the others are refused before any work starts,
each with its reason.

Every dataclass of a config refuses what is wrong by itself; :data:`RULES` has what is wrong only
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lns_ops.formats import parse
from trainers.config.layout import DEFERRING
from trainers.config.optimizer import SLICEABLE, WHOLE_TENSORS

if TYPE_CHECKING:
    from trainers.config.trial import TrialConfig


@dataclass(frozen=True)
class Rule:
    """A combination of keys that is refused.

    Attributes:
        name: its keys, with a value where the rule is about that value; no two rules have the same.
        when: whether a config has the combination.
        message: the keys and their values, why they cannot be together, and what to use; of a
            config that has it.
    """

    name: str
    when: Callable[[TrialConfig], bool]
    message: Callable[[TrialConfig], str]


def check_combinations(config: TrialConfig) -> None:
    """Refuse keys that contradict each other.

    Raises:
        ValueError: the keys and their values, why they cannot be together, and what to use.
    """
    config.layout.check(
        workers=config.workers, batch_size=config.batch_size, layers=len(config.model.hidden) + 1
    )
    for rule in RULES:
        if rule.when(config):
            raise ValueError(rule.message(config))


def _where(applies: Callable[[TrialConfig], bool], *rules: Rule) -> list[Rule]:
    """Narrow ``rules`` to configs to which ``applies`` is true."""

    def narrowed(rule: Rule) -> Rule:
        return Rule(rule.name, lambda config: applies(config) and rule.when(config), rule.message)

    return [narrowed(rule) for rule in rules]


def _replicas(config: TrialConfig) -> int:
    """Count the replicas of the model."""
    return config.layout.replicas(config.workers)


def _raises(config: TrialConfig) -> bool:
    """Tell whether encoding raises where training diverges."""
    return config.precision.lns_format is not None and config.precision.scope == "matmul"


def _sizes(config: TrialConfig) -> range:
    """List the numbers of workers that an elastic trial may have."""
    return range(config.min_workers or config.workers, config.workers + 1)


def _uneven(config: TrialConfig) -> list[int]:
    """List the numbers of workers, of :func:`_sizes`, that cannot share a batch evenly."""
    return [
        workers
        for workers in _sizes(config)
        if config.batch_size % (workers * config.layout.micro_batches)
    ]


RULES: tuple[Rule, ...] = (
    Rule(
        "lr_schedule.warmup_epochs, epochs",
        lambda c: c.lr_schedule.warmup_epochs >= c.epochs,
        lambda c: (
            f"lr_schedule.warmup_epochs={c.lr_schedule.warmup_epochs:g}, epochs={c.epochs}: the"
            " rate would never reach its full value; use a shorter warm-up"
        ),
    ),
    Rule(
        "analysis_every, precision.format",
        lambda c: (
            c.analysis_every > 0 and c.precision.lns_format is None and not c.precision.simulated
        ),
        lambda c: (
            f"analysis_every={c.analysis_every} with precision.format={c.precision.format}: it"
            " compares a format with float32; use another format, or analysis_every=0"
        ),
    ),
    Rule(
        "analysis_every, layout.pp",
        lambda c: c.analysis_every > 0 and c.layout.pp > 1,
        lambda c: (
            f"analysis_every={c.analysis_every} with layout.pp={c.layout.pp}: it runs the whole"
            " model, a stage has a part of it; use layout.pp=1, or analysis_every=0"
        ),
    ),
    Rule(
        "wire.name, workers",
        lambda c: c.wire.name != "native" and _replicas(c) == 1,
        lambda c: (
            f"wire.name={c.wire.name} with one replica (workers={c.workers},"
            f" layout.pp={c.layout.pp}, layout.tp={c.layout.tp}): no gradient travels; use"
            " wire.name=native, or more workers"
        ),
    ),
    Rule(
        "wire.bucket_cap_mb, layout.pp",
        lambda c: c.wire.bucket_cap_mb is not None and c.layout.pp > 1,
        lambda c: (
            f"wire.bucket_cap_mb={c.wire.bucket_cap_mb} with layout.pp={c.layout.pp}: a stage's"
            " backward passes come between its messages to other stages; use layout.pp=1, or leave"
            " it out"
        ),
    ),
    Rule(
        "wire.sum, wire.name, precision",
        lambda c: (
            c.wire.sum == "lns"
            and c.wire.name == "native"
            and (c.precision.lns_format is None or c.precision.scope != "everywhere")
        ),
        lambda c: (
            f"wire.sum=lns with wire.name=native, precision.format={c.precision.format},"
            f" precision.scope={c.precision.scope}: the gradients are float32; use wire.name=lns16,"
            " or wire.sum=auto"
        ),
    ),
    Rule(
        "sync, workers",
        lambda c: (
            (c.sync.name != "synchronous" or c.sync.straggler_seconds > 0) and _replicas(c) == 1
        ),
        lambda c: (
            f"sync.name={c.sync.name}, sync.straggler_seconds={c.sync.straggler_seconds:g} with one"
            f" replica (workers={c.workers}, layout.pp={c.layout.pp}, layout.tp={c.layout.tp}):"
            " there is none to wait for or to average with; use sync.name=synchronous, or more"
            " workers"
        ),
    ),
    Rule(
        "wire, sync.name",
        lambda c: c.sync.local and (c.wire.name == "powersgd" or c.wire.sum == "lns"),
        lambda c: (
            f"wire.name={c.wire.name}, wire.sum={c.wire.sum} with sync.name={c.sync.name}: powersgd"
            " and LNS sums are for gradients, what travels here are differences of weights; use"
            " another wire.name and wire.sum=auto"
        ),
    ),
    Rule(
        "wire.bucket_cap_mb, sync.name",
        lambda c: c.sync.name != "synchronous" and c.wire.bucket_cap_mb is not None,
        lambda c: (
            f"wire.bucket_cap_mb={c.wire.bucket_cap_mb} with sync.name={c.sync.name}: buckets are"
            " of gradients that all replicas sum every step; use sync.name=synchronous, or leave"
            " it out"
        ),
    ),
    Rule(
        "sync.name=ensemble, layout.pp, precision.scope",
        lambda c: c.sync.name == "ensemble" and (c.layout.pp > 1 or _raises(c)),
        lambda c: (
            f"sync.name=ensemble with layout.pp={c.layout.pp}, precision.scope={c.precision.scope}:"
            " replicas predict together, so none may be in stages, or raise on its own where it"
            " diverges; use layout.pp=1 and precision.scope=everywhere"
        ),
    ),
    Rule(
        "wire.name, sync.name",
        lambda c: c.sync.name in ("final_average", "ensemble") and c.wire.name != "native",
        lambda c: (
            f"wire.name={c.wire.name} with sync.name={c.sync.name}: whole weights travel once, as"
            " float32, or never; use wire.name=native"
        ),
    ),
    *_where(
        lambda c: c.sync.name == "asynchronous",
        Rule(
            "layout.pp, sync.name=asynchronous",
            lambda c: c.layout.pp > 1,
            lambda c: (
                f"layout.pp={c.layout.pp} with sync.name=asynchronous: stages pass on activations"
                " of one version of the weights, a server changes them in between; use"
                " layout.pp=1, or another sync.name"
            ),
        ),
        Rule(
            "wire, sync.name=asynchronous",
            lambda c: c.wire != type(c.wire)(),
            lambda c: (
                f"wire.name={c.wire.name}, wire.sum={c.wire.sum} with sync.name=asynchronous: the"
                " server takes gradients in their native form; use wire.name=native and"
                " wire.sum=auto"
            ),
        ),
        Rule(
            "device, sync.name=asynchronous",
            lambda c: c.device == "cuda",
            lambda c: (
                "device=cuda with sync.name=asynchronous: the parameter server computes on CPUs;"
                " use device=cpu"
            ),
        ),
        Rule(
            "lr_schedule, sync.name=asynchronous",
            lambda c: c.lr_schedule.varies,
            lambda c: (
                f"lr_schedule.decay={c.lr_schedule.decay},"
                f" lr_schedule.warmup_epochs={c.lr_schedule.warmup_epochs:g} with"
                " sync.name=asynchronous: the server does not know which step it is; use a"
                " constant rate"
            ),
        ),
        Rule(
            "optimizer.name, sync.name=asynchronous",
            lambda c: c.optimizer.name not in SLICEABLE,
            lambda c: (
                f"optimizer.name={c.optimizer.name} with sync.name=asynchronous: the server's"
                " shards are slices across tensors, with one count of steps; use"
                f" {', '.join(SLICEABLE)}, or another sync.name"
            ),
        ),
        Rule(
            "optimizer.name, sync.staleness",
            lambda c: c.optimizer.name != "sgd" and c.sync.staleness != 0,
            lambda c: (
                f"optimizer.name={c.optimizer.name}, sync.staleness={c.sync.staleness}: every"
                " replica's gradient would be a whole step of Adam's, as large as that of a batch;"
                " use optimizer.name=sgd, or sync.staleness=0"
            ),
        ),
    ),
    *_where(
        lambda c: c.precision.simulated,
        Rule(
            "sync.name, precision.format",
            lambda c: c.sync.local or c.sync.name == "asynchronous",
            lambda c: (
                f"sync.name={c.sync.name} with precision.format={c.precision.format}: what replicas"
                " or a server exchange are weights, whose means would leave the format's grid; use"
                " sync.name=synchronous, or an LNS format"
            ),
        ),
        *_where(
            lambda c: parse(c.precision.gradient_format or c.precision.format).overflows,
            Rule(
                "layout.pp, precision.gradient_format",
                lambda c: c.layout.pp > 1,
                lambda c: (
                    f"layout.pp={c.layout.pp} with float16 gradients: each stage would find its own"
                    " loss scale and overflows; use precision.format=bfloat16, or layout.pp=1"
                ),
            ),
            Rule(
                "wire.name, precision.gradient_format",
                lambda c: c.wire.name not in ("native", "float32"),
                lambda c: (
                    f"wire.name={c.wire.name} with float16 gradients: an overflow must reach all"
                    " replicas, which only float32 carries; use wire.name=native"
                ),
            ),
        ),
    ),
    *_where(
        lambda c: c.autocast != "none",
        Rule(
            "autocast, precision.format",
            lambda c: c.precision.format != "float32",
            lambda c: (
                f"autocast={c.autocast} with precision.format={c.precision.format}: autocast is for"
                " float32 parameters; use precision.format=float32, or autocast=none"
            ),
        ),
        Rule(
            "autocast, layout.pp",
            lambda c: c.layout.pp > 1,
            lambda c: (
                f"autocast={c.autocast} with layout.pp={c.layout.pp}: stages pass on float32; use"
                " layout.pp=1, or autocast=none"
            ),
        ),
        *_where(
            lambda c: c.autocast == "float16",
            Rule(
                "autocast=float16, device",
                lambda c: c.device != "cuda",
                lambda c: (
                    f"autocast=float16 with device={c.device}: on a CPU float16 is some thirty"
                    " times slower than float32; use device=cuda, or autocast=bfloat16"
                ),
            ),
            Rule(
                "autocast=float16, wire.name, sync.name",
                lambda c: c.wire.name != "native" or c.sync.name != "synchronous",
                lambda c: (
                    f"autocast=float16 with wire.name={c.wire.name}, sync.name={c.sync.name}:"
                    " scaled gradients may overflow, which all replicas must see alike; use"
                    " wire.name=native and sync.name=synchronous, or autocast=bfloat16"
                ),
            ),
        ),
    ),
    *_where(
        lambda c: c.layout.schedule in DEFERRING,
        Rule(
            "layout.schedule, precision.format",
            lambda c: c.precision.simulated,
            lambda c: (
                f"layout.schedule={c.layout.schedule} with precision.format={c.precision.format}:"
                " layers of simulated formats round in their own backward, which cannot wait for"
                " weights; use layout.schedule=1f1b, or float32 or an LNS format"
            ),
        ),
        Rule(
            "layout.schedule, memory.activation_checkpoints",
            lambda c: c.memory.activation_checkpoints,
            lambda c: (
                f"layout.schedule={c.layout.schedule} with memory.activation_checkpoints=true: what"
                " is computed again would be kept for the weights, and nothing saved; use"
                " layout.schedule=1f1b, or no checkpoints"
            ),
        ),
    ),
    *_where(
        lambda c: c.min_workers is not None,
        Rule(
            "min_workers, workers",
            lambda c: (c.min_workers or 1) > c.workers,
            lambda c: (
                f"min_workers={c.min_workers}, workers={c.workers}: workers is the most; use"
                f" min_workers={c.workers} or less"
            ),
        ),
        Rule(
            "min_workers, layout.pp, layout.dp",
            lambda c: c.layout.pp > 1 or c.layout.dp is not None,
            lambda c: (
                f"min_workers={c.min_workers} with layout.pp={c.layout.pp},"
                f" layout.dp={c.layout.dp}: the number of replicas changes; use layout.pp=1 and"
                " leave out layout.dp"
            ),
        ),
        Rule(
            "min_workers, wire.name, sync.name, profile.ranks",
            lambda c: (
                c.wire.name != "native" or c.sync.name != "synchronous" or bool(c.profile.ranks)
            ),
            lambda c: (
                f"min_workers={c.min_workers} with wire.name={c.wire.name},"
                f" sync.name={c.sync.name}, profile.ranks={list(c.profile.ranks)}: what belongs to"
                " a rank would be lost with it; use wire.name=native, sync.name=synchronous and no"
                " profile.ranks"
            ),
        ),
        Rule(
            "min_workers, batch_size",
            lambda c: _uneven(c) != [],
            lambda c: (
                f"batch_size={c.batch_size} with min_workers={c.min_workers}, workers={c.workers}:"
                f" {_uneven(c)[0]} workers cannot share it evenly in {c.layout.micro_batches}"
                f" micro-batches; use a multiple of {math.lcm(*_sizes(c)) * c.layout.micro_batches}"
            ),
        ),
    ),
    *_where(
        lambda c: c.layout.fsdp,
        Rule(
            "layout.fsdp, precision.format",
            lambda c: c.precision.format != "float32",
            lambda c: (
                f"layout.fsdp=true with precision.format={c.precision.format}: torch shards tensors"
                " of floats, not codes nor the copies that simulated formats keep; use"
                " precision.format=float32, or layout.fsdp=false"
            ),
        ),
        Rule(
            "layout.fsdp, layout.pp",
            lambda c: c.layout.pp > 1,
            lambda c: (
                f"layout.fsdp=true with layout.pp={c.layout.pp}: every micro-batch would gather a"
                " stage's parameters in the middle of its schedule; use layout.pp=1, or"
                " layout.fsdp=false"
            ),
        ),
        Rule(
            "layout.fsdp, workers, min_workers",
            lambda c: c.workers == 1 or c.min_workers is not None,
            lambda c: (
                f"layout.fsdp=true with workers={c.workers}, min_workers={c.min_workers}:"
                " parameters are sharded over a fixed number of replicas, two at least; use"
                " workers=2 and leave out min_workers, or layout.fsdp=false"
            ),
        ),
        Rule(
            "layout.fsdp, sync.name, wire",
            lambda c: (
                c.sync.name != "synchronous"
                or c.wire.name != "native"
                or c.wire.bucket_cap_mb is not None
            ),
            lambda c: (
                f"layout.fsdp=true with sync.name={c.sync.name}, wire.name={c.wire.name},"
                f" wire.bucket_cap_mb={c.wire.bucket_cap_mb}: backward itself sums gradients, as"
                " float32, layer by layer; use sync.name=synchronous, wire.name=native and no"
                " wire.bucket_cap_mb, or layout.fsdp=false"
            ),
        ),
        Rule(
            "layout.fsdp, autocast",
            lambda c: c.autocast == "float16",
            lambda c: (
                "layout.fsdp=true with autocast=float16: a replica sees overflows in its own shards"
                " alone; use autocast=bfloat16, or layout.fsdp=false"
            ),
        ),
        Rule(
            "layout.fsdp, optimizer.name",
            lambda c: c.optimizer.name in WHOLE_TENSORS,
            lambda c: (
                f"layout.fsdp=true with optimizer.name={c.optimizer.name}: its step needs norms of"
                " whole tensors, a replica has shards; use an optimizer other than"
                f" {', '.join(WHOLE_TENSORS)}, or layout.fsdp=false"
            ),
        ),
    ),
    *_where(
        lambda c: c.memory.offload_optimizer,
        Rule(
            "memory.offload_optimizer, device",
            lambda c: c.device == "cpu",
            lambda c: (
                "memory.offload_optimizer=true with device=cpu: the optimizer's state is in the"
                " CPU's memory already; use device=cuda or device=auto, or"
                " memory.offload_optimizer=false"
            ),
        ),
        Rule(
            "memory.offload_optimizer, sync.name",
            lambda c: c.sync.name != "synchronous",
            lambda c: (
                f"memory.offload_optimizer=true with sync.name={c.sync.name}: replicas would"
                " average weights that the next update writes over; use sync.name=synchronous, or"
                " memory.offload_optimizer=false"
            ),
        ),
        Rule(
            "memory.offload_optimizer, autocast",
            lambda c: c.autocast == "float16",
            lambda c: (
                "memory.offload_optimizer=true with autocast=float16: gradients are divided by"
                " their scale on the GPU, in the optimizer's place; use autocast=bfloat16, or"
                " memory.offload_optimizer=false"
            ),
        ),
    ),
    *_where(
        lambda c: c.layout.tp > 1,
        Rule(
            "layout.tp, precision.format",
            lambda c: c.precision.format != "float32",
            lambda c: (
                f"layout.tp={c.layout.tp} with precision.format={c.precision.format}: torch cuts"
                " tensors of floats, not codes nor the copies that simulated formats keep, and"
                " sums of parts would be rounded in another order; use precision.format=float32,"
                " or layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, model.name, model.hidden",
            lambda c: c.model.name != "mlp" or not c.model.hidden,
            lambda c: (
                f"layout.tp={c.layout.tp} with model.name={c.model.name},"
                f" model.hidden={list(c.model.hidden)}: linear layers are cut in pairs; use"
                " model.name=mlp with a hidden layer, or layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, model.hidden",
            lambda c: any(width % c.layout.tp for width in c.model.hidden[::2]),
            lambda c: (
                f"layout.tp={c.layout.tp} with model.hidden={list(c.model.hidden)}: the first,"
                f" third, ... width is cut, and {list(c.model.hidden[::2])} / {c.layout.tp} are not"
                f" all whole numbers; use multiples of {c.layout.tp} there, or layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, layout.pp, layout.fsdp",
            lambda c: c.layout.pp > 1 or c.layout.fsdp,
            lambda c: (
                f"layout.tp={c.layout.tp} with layout.pp={c.layout.pp},"
                f" layout.fsdp={str(c.layout.fsdp).lower()}: a tensor is cut in one way here; use"
                " layout.pp=1 and layout.fsdp=false, or layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, min_workers",
            lambda c: c.min_workers is not None,
            lambda c: (
                f"layout.tp={c.layout.tp} with min_workers={c.min_workers}: without one worker a"
                " replica lacks parts; leave out min_workers, or use layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, sync.name, wire.bucket_cap_mb",
            lambda c: c.sync.name != "synchronous" or c.wire.bucket_cap_mb is not None,
            lambda c: (
                f"layout.tp={c.layout.tp} with sync.name={c.sync.name},"
                f" wire.bucket_cap_mb={c.wire.bucket_cap_mb}: the workers of a replica must step"
                " alike, and would end rounds, fill buckets or see a server each by its own parts;"
                " use sync.name=synchronous and no wire.bucket_cap_mb, or layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, autocast",
            lambda c: c.autocast == "float16",
            lambda c: (
                f"layout.tp={c.layout.tp} with autocast=float16: a worker sees overflows in its own"
                " parts alone; use autocast=bfloat16, or layout.tp=1"
            ),
        ),
        Rule(
            "layout.tp, optimizer.name",
            lambda c: c.optimizer.name in WHOLE_TENSORS,
            lambda c: (
                f"layout.tp={c.layout.tp} with optimizer.name={c.optimizer.name}: its step needs"
                " norms of whole tensors, a worker has parts; use an optimizer other than"
                f" {', '.join(WHOLE_TENSORS)}, or layout.tp=1"
            ),
        ),
    ),
    Rule(
        "layout.pp, model.name",
        lambda c: c.layout.pp > 1 and c.model.name == "cnn",
        lambda c: (
            f"layout.pp={c.layout.pp} with model.name=cnn: cuts are made between linear layers; use"
            " model.name=mlp"
        ),
    ),
    Rule(
        "profile.ranks, workers",
        lambda c: any(rank >= c.workers for rank in c.profile.ranks),
        lambda c: (
            f"profile.ranks={list(c.profile.ranks)}, workers={c.workers}: ranks are counted from 0;"
            f" use ranks up to {c.workers - 1}"
        ),
    ),
    Rule(
        "layout.pp, precision.scope",
        lambda c: c.layout.pp > 1 and _raises(c),
        lambda c: (
            f"layout.pp={c.layout.pp} with precision.scope=matmul: where such a trial diverges,"
            " encoding raises inside a stage and the other stages would wait for it; use"
            " precision.scope=everywhere, or layout.pp=1"
        ),
    ),
)
"""The rules in the order in which they are asked; the first that applies is raised."""
