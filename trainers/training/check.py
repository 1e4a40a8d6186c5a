"""Checks of a trial before any process starts: of its batch, its rates, and the user's code.

The user's model, data, loss and metrics are tried together on a few examples: they must train,
evaluate, and resume with the same bits after an interruption.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainers.checkpoint.state import load_model_tensors, model_tensors
from trainers.config import LossConfig, TrialConfig
from trainers.config.compatibility import RULES_BEFORE_TRAINING
from trainers.config.schedule_changes import optimizer_at
from trainers.config.validation import fits
from trainers.data import Dataset, DatasetInfo, Split
from trainers.models.loss import Loss, plain
from trainers.models.precision import apply_precision
from trainers.settings import load_matplotlib
from trainers.text import describe_error
from trainers.training.build import (
    CHECKED,
    check_batch,
    digest,
    load_data,
    make_trial_optimizer,
    make_whole_model,
)
from trainers.training.evaluate import Metrics, evaluate
from trainers.training.step import train_step
from trainers.user_code import find_source, forget, load_code, names_code, seeded

SUM_TOLERANCE = 1e-3
"""Relative tolerance of the check that a loss is a mean; float32 sums of a few values are a
thousand times more accurate."""
_answers: dict[str, int] = {}
"""Number of answers per example, for each task that this process has checked."""
_accepted: set[str] = set()
"""Optimizer settings that this process has accepted; a search tries each point in many rows."""


def check(config: TrialConfig, info: DatasetInfo) -> None:
    """Check, before any process starts, that a trial can succeed.

    Args:
        config: the trial.
        info: its data, from :func:`trainers.data.prepare`.

    Raises:
        ValueError: a batch larger than the training set, a learning rate or momentum that
            underflows in the LNS format, or the user's code does not train.
    """
    check_batch(config, info.train)
    answers = 1
    if config.own_code or config.loss != LossConfig() or not config.model.feedforward:
        answers = _answers_each(config)
    check_optimizer(config, answers)


def _answers_each(config: TrialConfig) -> int:
    """Check the trial's task and return the number of answers per example.

    A built-in model with built-in data and loss is trained once, with the first sizes and the first
    number format of the study; with others it is only constructed.
    """
    parts = (config.data, config.loss, config.metrics)
    task = repr((config.model, *parts, config.precision))
    if task not in _answers:
        if config.own_code:
            forget()
            if names_code(config.data.name):  # even if the data are in memory
                load_code("data.name", config.data.name, config.data.code)
            _answers[task] = _check_task(config)
        else:
            given = config.model.args.items()
            args = {key: value for key, value in given if type(value) not in (int, float)}
            kind = repr((config.model.name, args, *parts))
            if kind in _answers:
                apply_precision(make_whole_model(config, load_data(config)), config.precision)
            else:
                _answers[kind] = _check_task(config)
            _answers[task] = _answers[kind]
    return _answers[task]


def check_optimizer(config: TrialConfig, answers: int = 1) -> None:
    """Check that the optimizer's options are representable in its number format and have an effect.

    Args:
        config: the trial.
        answers: number of answers per example.

    Raises:
        ValueError: a learning rate or momentum underflows, or rounds to 1, or one of
            :data:`~trainers.config.compatibility.RULES_BEFORE_TRAINING` applies.
    """
    for rule in RULES_BEFORE_TRAINING:
        if rule.when(config):
            raise ValueError(rule.message(config))
    parts = (config.optimizer, config.changes, config.precision, config.lr_schedule)
    key = repr((parts, config.batch_size, config.update_examples, answers))
    if key in _accepted:
        return
    model = apply_precision(nn.Linear(1, 1), config.precision)
    for epoch in (0, *(change["epoch"] for change in config.changes)):
        options = optimizer_at(config.optimizer, config.changes, epoch)
        make_trial_optimizer(config, options, model, answers)
    _accepted.add(key)


def _check_task(config: TrialConfig) -> int:
    """Train and evaluate on some examples, in the trial's precision.

    Returns:
        The number of answers per example.

    Raises:
        ValueError: the data, the model, the loss or a metric do not fit together.
    """
    loss = Loss(config.loss, config.precision.gradient_scale)
    data = load_data(config)
    some = data.train.head(2)
    each = loss.answers_each(some.y)
    if config.sync.name == "asynchronous" and each > 1:
        raise ValueError(
            f"sync.name=asynchronous with data.name={config.data.name}: the server takes examples"
            f" of one answer, not of {each}; use sync.name=synchronous"
        )
    _check_range(config, data)
    model = make_whole_model(config, data)
    forward = type(model).forward
    with _explained(config):
        outputs = apply_precision(model, config.precision)(some.x)
    _check_outputs(config, outputs, some, data.outputs, forward)
    _check_trained(config, model, outputs, forward)
    if config.loss.own:
        _check_mean(config, loss, outputs.detach(), some.y)
    with _explained(config):
        summed = loss(outputs, some.y)
    _check_gradients(config, model, summed)
    with _explained(config):
        evaluate(model, data.validation.head(CHECKED), loss)
        outputs = model.eval()(data.test.head(2).x)
    _check_outputs(config, outputs, data.test.head(2), data.outputs, forward)
    for name in config.metrics:
        _check_metric(config, name, model, data, loss)
    if config.model.own:
        _check_resumes(config, data, loss)
    return each


def _check_metric(
    config: TrialConfig, name: str, model: nn.Module, data: Dataset, loss: Loss
) -> None:
    """Check that a metric accepts the trial's answers and targets.

    Raises:
        ValueError: it does not; the message has the shapes, the metric's error, and a metric that
            accepts them.
    """
    load_matplotlib()  # before torchmetrics imports it
    from torchmetrics.aggregation import BaseAggregator

    metrics, some = Metrics({name: config.metrics[name]}, data.outputs), data.validation.head(2)
    reason = "it summarises one series of values, and compares nothing with targets"
    if not isinstance(metrics.of(name), BaseAggregator):
        try:
            evaluate(model, data.validation.head(CHECKED), loss, metrics)
            metrics.compute("validation")
            return
        except Exception as error:
            if str(error).startswith(f"metrics.{name}: "):
                raise
            name_of = config.metrics[name].name
            own = [find_source("name", name_of)] if ".py:" in name_of else []
            reason = describe_error(error, *own)
    classes = config.loss.chooses
    kind, instead = "numbers", "MeanAbsoluteError'"
    if classes or config.loss.counts_errors:
        kind = "classes" if classes else "labels"
        instead = f"Accuracy', args: {{task: {'multiclass' if classes else 'binary'}}}"
    outputs, targets = (
        str(("batch", *part.shape[1:])).replace("'", "") for part in (model(some.x), some.y)
    )
    raise ValueError(
        f"metrics.{name}.name={config.metrics[name].name!r}: does not take outputs of shape"
        f" {outputs} with targets of shape {targets}, which are {kind}: {reason}; use a metric of"
        f" {kind}, for example {{name: 'torchmetrics:{instead}}}, or other args"
    )


def _check_range(config: TrialConfig, data: Dataset) -> None:
    """Check the range of the user's examples.

    Raises:
        ValueError: the number format would saturate examples, a token is negative, or the outputs
            or embeddings of that many classes or tokens do not fit into memory.
    """
    if not names_code(config.data.name):
        return
    where = f"data.name={config.data.name!r}"
    fits(
        f"{where} with batch_size={config.batch_size}, {data.outputs:,} classes",
        8.0 * data.outputs * config.batch_size,  # outputs and their gradients, float32
        "number classes from 0 without gaps",
    )
    held = [split for split in data if isinstance(split, Split)]
    tokens = [split.x for split in held if not split.x.is_floating_point()]
    if tokens and not config.model.own:
        least, most = min(int(x.min()) for x in tokens), max(int(x.max()) for x in tokens)
        if least < 0:
            raise ValueError(f"{where}: its least token is {least}; number tokens from 0")
        fits(f"{where}, {most + 1:,} tokens", 8.0 * most, "number tokens from 0 without gaps")
    fmt = config.precision.lns_format
    floats = [part.aminmax() for split in held for part in split if part.is_floating_point()]
    largest = max((abs(float(end)) for ends in floats for end in ends), default=0.0)
    if fmt is not None and largest > fmt.largest:
        raise ValueError(
            f"{where}: has values to {largest:g}, beyond {config.precision.format}'s"
            f" {fmt.largest:g}; scale examples and targets, for example to a standard deviation"
            " of 1, or use another precision.format"
        )


def _check_trained(
    config: TrialConfig, model: nn.Module, outputs: Tensor, forward: Callable[..., Any]
) -> None:
    """Check that gradients flow through the outputs of the user's network.

    Raises:
        ValueError: they do not; the message has file and line.
    """
    if outputs.requires_grad:
        return
    where = _place("model.name", config.model.name, forward)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{where}: all its parameters are frozen, so nothing would be trained; leave"
            " requires_grad of those to train as it is"
        )
    raise ValueError(
        f"{where}: its outputs have no gradient, so nothing would be trained; compute them without"
        " torch.no_grad or detach"
    )


def _check_gradients(config: TrialConfig, model: nn.Module, summed: Tensor) -> None:
    """Compute the gradients of a loss, and check that a parameter gets one.

    Raises:
        ValueError: no parameter does; the message has file and line.
    """
    own = config.loss if config.loss.own else config.model
    if not summed.requires_grad:
        raise ValueError(
            f"{_place('loss.name', config.loss.name)}: has no gradient; compute it from the outputs"
            " without torch.no_grad, detach, item or NumPy"
        )
    with _explained(config):
        summed.backward()
    if all(parameter.grad is None for parameter in model.parameters()):
        key = "loss.name" if config.loss.own else "model.name"
        raise ValueError(
            f"{_place(key, own.name, type(model).forward)}: no parameter gets a gradient, so"
            " nothing would be trained; compute outputs and loss from one to the other without"
            " detach or new tensors"
        )


def _place(key: str, name: str, *functions: Callable[..., Any]) -> str:
    """Return a key and its code for error messages, with the line of the first of ``functions``
    that is in its file, else of the factory."""
    if not names_code(name):
        return f"{key}={name!r}"
    path, factory = find_source(key, name), load_code(key, name)
    made = [factory.forward] if inspect.isclass(factory) and hasattr(factory, "forward") else []
    codes = [getattr(found, "__code__", None) for found in (*functions, *made, factory)]
    lines = [
        code.co_firstlineno for code in codes if code and Path(code.co_filename).resolve() == path
    ]
    return f"{key}={name!r} ({path}{f', line {lines[0]}' if lines else ''})"


def _check_resumes(config: TrialConfig, data: Dataset, loss: Loss) -> None:
    """Take two steps of the user's model without and with a save and restore in between.

    Raises:
        ValueError: the weights differ.
    """

    some = data.train.head(2)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = apply_precision(make_whole_model(config, data), config.precision)
        answers = loss.answers_each(some.y)
        return model, make_trial_optimizer(config, config.optimizer, model, answers)

    def weights(interrupted: bool) -> str:
        model, optimizer = make()
        for step in range(2):
            if step and interrupted:
                saved = model_tensors(model, optimizer)
                model, optimizer = make()
                load_model_tensors(model, optimizer, saved)
            with seeded(step):
                train_step(model, optimizer, some.head(2), loss=loss)
        return digest(*model.state_dict().values())

    with _explained(config):
        found = [weights(interrupted=False), weights(interrupted=True)]
    if len(set(found)) > 1:
        raise ValueError(
            f"model.name={config.model.name!r}: after an interruption it would not resume with the"
            " same bits: two steps gave other weights when its state was saved and restored"
            " between them; keep all its state in parameters and buffers of fixed shapes, and draw"
            " random numbers from torch, NumPy or random, not from a generator of its own"
        )


def _check_mean(config: TrialConfig, loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Check that the user's loss is a mean: it must not change if the examples are duplicated.

    With a sum, steps would grow with the batch size and shrink with the number of micro-batches.

    Raises:
        ValueError: the loss changes; the message has both values.
    """
    answers = plain(outputs)
    with _explained(config), seeded(0):
        once = float(loss(answers, targets)) / len(targets)
    with _explained(config), seeded(0):
        twice = float(loss(answers.repeat(2, *[1] * (answers.dim() - 1)), torch.cat([targets] * 2)))
    twice /= 2 * len(targets)
    if once and math.isclose(twice, 2 * once, rel_tol=SUM_TOLERANCE):
        raise ValueError(
            f"loss.name={config.loss.name!r}: is {once:g} on some examples and {twice:g} on the"
            " same examples twice, so it is a sum over them; return their mean, or a loss of each"
        )


@contextmanager
def _explained(config: TrialConfig) -> Iterator[None]:
    """Convert errors of the user's code to ``ValueError`` with the file and line.

    Raises:
        ValueError: the code in the context raised an error.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        files = [
            find_source(f"{part}.name", named.name)
            for part, named in (("model", config.model), ("loss", config.loss))
            if names_code(named.name)
        ]
        raise ValueError(
            f"model.name={config.model.name!r} with loss.name={config.loss.name!r} does not train"
            f" in precision.format={config.precision.format}: {describe_error(error, *files)};"
            " mend the code, or use another precision"
        ) from error


def _check_outputs(
    config: TrialConfig, outputs: Any, some: Split, count: int, forward: Callable[..., Any]
) -> None:
    """Check that the outputs have the data type and shape that the loss takes.

    Raises:
        ValueError: they do not; the message has the type, or both shapes.
    """
    where = f"model.name={config.model.name!r} with loss.name={config.loss.name!r}"
    if not isinstance(outputs, torch.Tensor):
        raise ValueError(
            f"{where}: turns examples into a {type(outputs).__name__}; return a tensor, or an"
            " object whose logits are one"
        )
    if outputs.is_complex():
        kind = str(outputs.dtype).removeprefix("torch.")
        raise ValueError(
            f"{_place('model.name', config.model.name, forward)}: its outputs are {kind}; return"
            " real ones, for example torch.view_as_real or their abs"
        )
    wanted = {tuple(some.y.shape)}
    if config.loss.chooses:
        size, *rest = some.y.shape
        wanted = {(size, *rest, count), (size, count, *rest)}
    elif _is_as_many(outputs.shape, some.y.shape):
        return
    if not config.loss.own and tuple(outputs.shape) not in wanted:
        shapes = " or ".join(str(("batch", *shape[1:])).replace("'", "") for shape in wanted)
        raise ValueError(
            f"{where}: turns two examples of shape {tuple(some.x.shape[1:])} into"
            f" {tuple(outputs.shape)}; return outputs of shape {shapes}"
        )


def _is_as_many(outputs: Sequence[int], targets: Sequence[int]) -> bool:
    """Return whether outputs and targets match one to one, flattened or not.

    Dimensions of length 1 are ignored. ``(B, 3, 2)`` does not match ``(B, 2, 3)``: the number is
    the same, but the order differs.
    """
    longer, shorter = ([size for size in shape if size > 1] for shape in (outputs, targets))
    if len(longer) < len(shorter):
        longer, shorter = shorter, longer
    return longer == shorter or (
        len(shorter) < len(longer) and math.prod(longer) == math.prod(shorter)
    )
