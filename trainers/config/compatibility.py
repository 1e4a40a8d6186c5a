"""Combinations of a trial's keys that are refused before work starts, with reasons.

Every dataclass of a config checks its own values; :class:`TrialConfig` checks combinations between
the dataclasses with :data:`RULES`. ``docs/_ext/rules.py`` makes the site's page from these rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from lns_ops.formats import parse
from trainers.config.layout import DEFERRING
from trainers.config.optimizer import SLICEABLE, WHOLE_TENSORS
from trainers.config.schedule_changes import check_changes
from trainers.config.trial import TrialKeys
from trainers.config.validation import Rule, common_multiple, plain_values


def _alone(config: TrialKeys) -> bool:
    """Tell whether the model has one replica."""
    return config.layout.replicas(config.workers) == 1


def _raises(config: TrialKeys) -> bool:
    """Tell whether encoding raises where training diverges."""
    return config.precision.lns_format is not None and config.precision.scope == "matmul"


def _scales_loss(config: TrialKeys) -> bool:
    """Tell whether simulated gradients may overflow, so that the loss is scaled."""
    precision = config.precision
    return precision.simulated and parse(precision.gradient_format or precision.format).overflows


def _plain(config: TrialKeys) -> bool:
    """Tell whether replicas sum gradients every step in their native form."""
    return config.wire.name == "native" and config.sync.name == "synchronous"


LOOP = "trainable.name"

RULES: tuple[Rule, ...] = (
    Rule(
        (LOOP, "sync.name"),
        lambda c: c.own_loop and c.sync.name == "ensemble",
        "predictions are averaged by our loop",
        "sync.name=synchronous, and average in your loop",
    ),
    Rule(
        (LOOP, "min_workers"),
        lambda c: c.own_loop and c.min_workers is not None,
        "a loop of your own gets no message when workers join or leave",
        "a fixed number of workers, without min_workers",
    ),
    Rule(
        (LOOP, "changes"),
        lambda c: c.own_loop and c.changes != [],
        "our loop changes the optimizer's options",
        "trainable.args, and change them in your loop",
    ),
    Rule(
        ("lr_schedule.warmup_epochs", "epochs"),
        lambda c: c.lr_schedule.warmup_epochs >= c.epochs,
        "the rate would never reach its full value",
        "lr_schedule.warmup_epochs below {epochs}",
    ),
    Rule(
        ("analysis_every", "precision.format"),
        lambda c: c.analysis_every > 0 and c.precision.format == "float32",
        "it compares a format with float32",
        "another format, or analysis_every=0",
    ),
    Rule(
        ("analysis_every", "layout.pp"),
        lambda c: c.analysis_every > 0 and c.layout.pp > 1,
        "it runs the whole model, a stage has a part of it",
        "layout.pp=1, or analysis_every=0",
    ),
    Rule(
        ("wire.name", "workers", "layout.pp", "layout.tp"),
        lambda c: c.wire.name != "native" and _alone(c),
        "no gradient travels where there is one replica",
        "wire.name=native, or more workers",
    ),
    Rule(
        ("wire.bucket_cap_mb", "layout.pp"),
        lambda c: c.wire.bucket_cap_mb is not None and c.layout.pp > 1,
        "a stage's backward passes come between its messages to other stages",
        "layout.pp=1, or leave it out",
    ),
    Rule(
        ("layout.pairwise", "sync.name", "wire.name", "wire.bucket_cap_mb"),
        lambda c: c.layout.pairwise and not (_plain(c) and c.wire.bucket_cap_mb is None),
        "it adds whole gradients of all replicas, every step, after backward",
        "sync.name=synchronous and the native wire without buckets, or layout.pairwise=false",
    ),
    Rule(
        ("wire.sum", "wire.name", "precision.format", "precision.scope"),
        lambda c: (
            (c.wire.sum, c.wire.name) == ("lns", "native")
            and (c.precision.lns_format is None or c.precision.scope != "everywhere")
        ),
        "the gradients are float32",
        "wire.name=lns16, or wire.sum=auto",
    ),
    Rule(
        ("sync.name", "workers", "layout.pp", "layout.tp", "sync.straggler_seconds"),
        lambda c: (c.sync.name != "synchronous" or c.sync.straggler_seconds > 0) and _alone(c),
        "one replica has none to wait for or to average with",
        "sync.name=synchronous and sync.straggler_seconds=0, or more workers",
    ),
    Rule(
        ("wire.name", "sync.name", "wire.sum"),
        lambda c: c.sync.local and (c.wire.name == "powersgd" or c.wire.sum == "lns"),
        "powersgd and LNS sums are for gradients, what travels here are differences of weights",
        "another wire.name and wire.sum=auto",
    ),
    Rule(
        ("wire.bucket_cap_mb", "sync.name"),
        lambda c: c.wire.bucket_cap_mb is not None and c.sync.name != "synchronous",
        "buckets are of gradients that all replicas sum every step",
        "sync.name=synchronous, or leave it out",
    ),
    Rule(
        ("sync.name", "layout.pp", "precision.scope"),
        lambda c: c.sync.name == "ensemble" and (c.layout.pp > 1 or _raises(c)),
        "replicas predict together, so none may be in stages, or raise on its own",
        "layout.pp=1 and precision.scope=everywhere",
    ),
    Rule(
        ("wire.name", "sync.name"),
        lambda c: c.wire.name != "native" and c.sync.name in ("final_average", "ensemble"),
        "whole weights travel once, as float32, or never",
        "wire.name=native",
    ),
    Rule(
        ("layout.pp", "sync.name"),
        lambda c: c.sync.name == "asynchronous" and c.layout.pp > 1,
        "a server changes the weights between the stages' parts of one step",
        "layout.pp=1, or another sync.name",
    ),
    Rule(
        ("wire.name", "sync.name", "wire.sum", "wire.bucket_cap_mb"),
        lambda c: c.sync.name == "asynchronous" and c.wire != type(c.wire)(),
        "the server takes gradients in their native form",
        "wire.name=native and wire.sum=auto",
    ),
    Rule(
        ("device", "sync.name"),
        lambda c: c.sync.name == "asynchronous" and c.device == "cuda",
        "the parameter server computes on CPUs",
        "device=cpu",
    ),
    Rule(
        ("lr_schedule.decay", "sync.name", "lr_schedule.warmup_epochs"),
        lambda c: c.sync.name == "asynchronous" and c.lr_schedule.varies,
        "the server does not know which step it is",
        "lr_schedule.decay=constant and lr_schedule.warmup_epochs=0",
    ),
    Rule(
        ("optimizer.name", "sync.name"),
        lambda c: c.sync.name == "asynchronous" and c.optimizer.name not in SLICEABLE,
        "the server's shards are slices across tensors, with one count of steps",
        f"{', '.join(SLICEABLE)}, or another sync.name",
    ),
    Rule(
        ("optimizer.name", "sync.staleness"),
        lambda c: c.optimizer.name != "sgd" and c.sync.staleness != 0,
        "each replica's gradient would make a full Adam step, as large as the whole batch's step",
        "optimizer.name=sgd, or sync.staleness=0",
    ),
    Rule(
        ("changes", "sync.name"),
        lambda c: c.sync.name == "asynchronous" and c.changes != [],
        "the parameter server has the optimizer, not the trial",
        "another sync.name, or leave out changes",
    ),
    Rule(
        ("sync.name", "precision.format"),
        lambda c: c.precision.simulated and c.sync.name != "synchronous",
        "what replicas or a server exchange are weights, whose means would leave the format's grid",
        "sync.name=synchronous, or an LNS format",
    ),
    Rule(
        ("layout.pp", "precision.format", "precision.gradient_format"),
        lambda c: _scales_loss(c) and c.layout.pp > 1,
        "each stage would find its own loss scale and overflows for float16 gradients",
        "precision.format=bfloat16, or layout.pp=1",
    ),
    Rule(
        ("wire.name", "precision.format", "precision.gradient_format"),
        lambda c: _scales_loss(c) and c.wire.name not in ("native", "float32"),
        "an overflow of float16 gradients must reach all replicas, which only float32 carries",
        "wire.name=native",
    ),
    Rule(
        ("precision.loss_scale", "precision.format", "precision.gradient_format"),
        lambda c: c.precision.gradient_scale != 1 and _scales_loss(c),
        "float16 gradients find their own scale",
        "precision.loss_scale=1",
    ),
    Rule(
        ("precision.sum_format", "model.name"),
        lambda c: c.precision.sum_format is not None and c.model.name == "lstm",
        "only the sums of linear layers and convolutions can be rounded",
        "another model, or leave out precision.sum_format",
    ),
    Rule(
        ("layout.schedule", "precision.loss_scale"),
        lambda c: c.layout.schedule in DEFERRING and c.precision.gradient_scale != 1,
        "gradients of weights come later, where nothing divides them",
        "layout.schedule=1f1b, or precision.loss_scale=1",
    ),
    Rule(
        ("autocast", "precision.format"),
        lambda c: c.autocast != "none" and c.precision.format != "float32",
        "autocast is for float32 parameters",
        "precision.format=float32, or autocast=none",
    ),
    Rule(
        ("autocast", "layout.pp"),
        lambda c: c.autocast != "none" and c.layout.pp > 1,
        "stages pass on float32",
        "layout.pp=1, or autocast=none",
    ),
    Rule(
        ("autocast", "device"),
        lambda c: c.autocast == "float16" and c.device != "cuda",
        "on a CPU float16 is some thirty times slower than float32",
        "device=cuda, or autocast=bfloat16",
    ),
    Rule(
        ("autocast", "wire.name", "sync.name"),
        lambda c: c.autocast == "float16" and not _plain(c),
        "scaled gradients may overflow, which all replicas must see alike",
        "wire.name=native and sync.name=synchronous, or autocast=bfloat16",
    ),
    Rule(
        ("layout.schedule", "precision.format"),
        lambda c: c.layout.schedule in DEFERRING and c.precision.simulated,
        "layers of simulated formats round in their own backward, which cannot wait for weights",
        "layout.schedule=1f1b, or float32 or an LNS format",
    ),
    Rule(
        ("layout.schedule", "memory.activation_checkpoints"),
        lambda c: c.layout.schedule in DEFERRING and c.memory.activation_checkpoints,
        "recomputed activations would be kept for the weights' gradients, so no memory is saved",
        "layout.schedule=1f1b, or memory.activation_checkpoints=false",
    ),
    Rule(
        ("min_workers", "workers"),
        lambda c: c.min_workers is not None and c.min_workers > c.workers,
        "min_workers counts the fewest workers and workers the most",
        "min_workers={workers} or less",
    ),
    Rule(
        ("min_workers", "layout.pp", "layout.dp", "layout.pairwise"),
        lambda c: c.min_workers is not None and c.layout.fixes_replicas,
        "the number of replicas changes",
        "layout.pp=1 and leave out layout.dp and layout.pairwise",
    ),
    Rule(
        ("min_workers", "wire.name", "sync.name", "profile.ranks"),
        lambda c: c.min_workers is not None and (bool(c.profile.ranks) or not _plain(c)),
        "what belongs to a rank would be lost with it",
        "wire.name=native, sync.name=synchronous and no profile.ranks",
    ),
    Rule(
        ("batch_size", "min_workers", "workers", "layout.micro_batches"),
        lambda c: c.min_workers is not None and c.batch_size % common_multiple(c) != 0,
        "any number of workers, {min_workers} to {workers}, must share it evenly in micro-batches",
        "a multiple of {common_multiple}",
    ),
    Rule(
        ("layout.fsdp", "precision.format"),
        lambda c: c.layout.fsdp and c.precision.format != "float32",
        "torch shards tensors of floats, not codes nor the copies that simulated formats keep",
        "precision.format=float32, or layout.fsdp=false",
    ),
    Rule(
        ("layout.fsdp", "layout.pp"),
        lambda c: c.layout.fsdp and c.layout.pp > 1,
        "every micro-batch would gather a stage's parameters in the middle of its schedule",
        "layout.pp=1, or layout.fsdp=false",
    ),
    Rule(
        ("layout.fsdp", "workers", "min_workers"),
        lambda c: c.layout.fsdp and (c.workers == 1 or c.min_workers is not None),
        "parameters are sharded over a fixed number of replicas, two at least",
        "workers=2 and leave out min_workers, or layout.fsdp=false",
    ),
    Rule(
        ("layout.fsdp", "sync.name", "wire.name", "wire.bucket_cap_mb"),
        lambda c: c.layout.fsdp and (c.wire.bucket_cap_mb is not None or not _plain(c)),
        "backward itself sums gradients, as float32, layer by layer",
        "sync.name=synchronous, wire.name=native and no wire.bucket_cap_mb, or layout.fsdp=false",
    ),
    Rule(
        ("layout.fsdp", "autocast"),
        lambda c: c.layout.fsdp and c.autocast == "float16",
        "a replica sees overflows in its own shards alone",
        "autocast=bfloat16, or layout.fsdp=false",
    ),
    Rule(
        ("layout.fsdp", "optimizer.name"),
        lambda c: c.layout.fsdp and c.optimizer.name in WHOLE_TENSORS,
        "its step needs norms of whole tensors, a replica has shards",
        f"an optimizer other than {', '.join(WHOLE_TENSORS)}, or layout.fsdp=false",
    ),
    Rule(
        ("memory.offload_optimizer", "device"),
        lambda c: c.memory.offload_optimizer and c.device == "cpu",
        "the optimizer's state is in the CPU's memory already",
        "device=cuda or device=auto, or memory.offload_optimizer=false",
    ),
    Rule(
        ("memory.offload_optimizer", "sync.name"),
        lambda c: c.memory.offload_optimizer and c.sync.name != "synchronous",
        "replicas would average weights that the next update writes over",
        "sync.name=synchronous, or memory.offload_optimizer=false",
    ),
    Rule(
        ("memory.offload_optimizer", "autocast"),
        lambda c: c.memory.offload_optimizer and c.autocast == "float16",
        "gradients are divided by their scale on the GPU, in the optimizer's place",
        "autocast=bfloat16, or memory.offload_optimizer=false",
    ),
    Rule(
        ("layout.tp", "precision.format"),
        lambda c: c.layout.tp > 1 and c.precision.format != "float32",
        "torch cuts tensors of floats alone, and sums of parts would be rounded in another order",
        "precision.format=float32, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "model.name", "model.hidden"),
        lambda c: c.layout.tp > 1 and (c.model.name != "mlp" or not c.model.hidden),
        "linear layers are cut in pairs",
        "model.name=mlp with a hidden layer, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "model.args"),
        lambda c: c.layout.tp > 1 and c.model.args.get("activation") == "swish_beta",
        "a worker would train the beta of a layer by its part of the layer's units alone",
        "model.args.activation=swish, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "model.hidden"),
        lambda c: any(width % c.layout.tp for width in c.model.hidden[::2]),
        "the first, third, ... width is cut into {layout.tp} equal parts",
        "multiples of {layout.tp} there, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "layout.pp", "layout.fsdp"),
        lambda c: c.layout.tp > 1 and (c.layout.pp > 1 or c.layout.fsdp),
        "a tensor is cut in one way here",
        "layout.pp=1 and layout.fsdp=false, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "min_workers"),
        lambda c: c.layout.tp > 1 and c.min_workers is not None,
        "without one worker a replica lacks parts",
        "no min_workers, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "sync.name", "wire.bucket_cap_mb"),
        lambda c: c.layout.tp > 1 and (c.sync.name, c.wire.bucket_cap_mb) != ("synchronous", None),
        "the workers of a replica must step alike, and would exchange each by its own parts",
        "sync.name=synchronous and no wire.bucket_cap_mb, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "autocast"),
        lambda c: c.layout.tp > 1 and c.autocast == "float16",
        "a worker sees overflows in its own parts alone",
        "autocast=bfloat16, or layout.tp=1",
    ),
    Rule(
        ("layout.tp", "optimizer.name"),
        lambda c: c.layout.tp > 1 and c.optimizer.name in WHOLE_TENSORS,
        "its step needs norms of whole tensors, a worker has parts",
        f"an optimizer other than {', '.join(WHOLE_TENSORS)}, or layout.tp=1",
    ),
    Rule(
        ("layout.schedule", "model.name"),
        lambda c: c.layout.schedule in DEFERRING and c.model.name != "mlp",
        "only linear layers with a batch of vectors put the gradients of their weights off",
        "layout.schedule=1f1b, or model.name=mlp",
    ),
    Rule(
        ("memory.activation_checkpoints", "model.name"),
        lambda c: c.memory.activation_checkpoints and c.model.normed,
        "batch norm would count a batch twice in its running statistics where it is computed again",
        "memory.activation_checkpoints=false",
    ),
    Rule(
        ("autocast", "model.name"),
        lambda c: c.autocast != "none" and c.model.own,
        "mixed precision is for our networks",
        "autocast=none, with torch.autocast in your network's forward",
    ),
    Rule(
        ("sync.name", "model.name"),
        lambda c: c.sync.name in ("asynchronous", "ensemble") and (c.model.own or c.model.normed),
        "running statistics and other buffers are averaged over replicas of the same weights",
        "sync.name=synchronous",
    ),
    Rule(
        ("sync.name", "loss.name"),
        lambda c: c.sync.name == "ensemble" and c.loss.name != "cross_entropy",
        "replicas that predict together average the probabilities of classes",
        "loss.name=cross_entropy, or sync.name=synchronous",
    ),
    Rule(
        ("sync.name", "data.num_workers"),
        lambda c: c.sync.name in ("asynchronous", "ensemble") and c.data.num_workers is not None,
        "which examples a replica takes must be known before they are loaded",
        "sync.name=synchronous, or leave out data.num_workers",
    ),
    Rule(
        ("analysis_every", "data.num_workers"),
        lambda c: c.analysis_every > 0 and c.data.num_workers is not None,
        "it looks at the same examples every time",
        "analysis_every=0, or leave out data.num_workers",
    ),
    Rule(
        ("metrics", "layout.pp"),
        lambda c: bool(c.metrics) and c.layout.pp > 1,
        "only the last stage sees answers",
        "layout.pp=1, or leave out metrics",
    ),
    Rule(
        ("profile.ranks", "workers"),
        lambda c: any(rank >= c.workers for rank in c.profile.ranks),
        "ranks are counted from 0",
        "ranks below {workers}",
    ),
    Rule(
        ("layout.pp", "precision.scope"),
        lambda c: c.layout.pp > 1 and _raises(c),
        "encoding raises inside a stage where it diverges, and the others would wait for it",
        "precision.scope=everywhere, or layout.pp=1",
    ),
)
"""The rules in the order of their checks; the first rule that applies raises its error."""

RULES_BEFORE_TRAINING: tuple[Rule, ...] = (
    Rule(
        ("optimizer.name", "lr_schedule.decay", "lr_schedule.warmup_epochs", "changes"),
        lambda c: (
            c.optimizer.name == "rprop"
            and (c.lr_schedule.varies or any("optimizer.lr" in change for change in c.changes))
        ),
        "it takes the rate in its first step alone",
        "a constant rate without warm-up and changes, or another optimizer",
    ),
)
"""The rules that :mod:`trainers.training.check` checks instead of :class:`TrialConfig`. They were
added later, and studies with older trials that break them must stay readable."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class TrialConfig(TrialKeys):
    """The complete config of a training run: it gives the same bits again on the same machine.

    The keys are the attributes of :class:`~trainers.config.trial.TrialKeys`. With a user's loop,
    only the rules with ``trainable.name`` are checked, as most keys are only values for that loop.

    Raises:
        ValueError: keys contradict each other; the message has the reason and advice.

    Example::

        >>> from trainers.config import PrecisionConfig
        >>> trial = TrialConfig(epochs=4, precision=PrecisionConfig(format="lns12"))
        >>> TrialConfig.from_dict(trial.to_dict()) == trial
        True
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.own_loop:
            self.layout.check(
                workers=self.workers, batch_size=self.batch_size, layers=self.model.layers
            )
        for rule in RULES:
            if rule.when(self) and (not self.own_loop or LOOP in rule.keys):
                raise ValueError(rule.message(self))
        check_changes(self.optimizer, self.changes, self.epochs)
