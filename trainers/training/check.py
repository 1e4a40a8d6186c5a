"""Checks of a trial before any process starts: of its batch, its rates, and the user's code.

The user's model, data, loss and metrics are tried together on a few examples: they must train,
evaluate, and go on with the same bits after an interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainers.checkpoint.state import load_model_tensors, model_tensors
from trainers.config import LossConfig, TrialConfig
from trainers.config.schedule_changes import optimizer_at
from trainers.data import Dataset, DatasetInfo, Split
from trainers.models.loss import Loss, plain
from trainers.models.precision import apply_precision
from trainers.training.build import (
    CHECKED,
    check_batch,
    digest,
    load_data,
    make_trial_optimizer,
    make_whole_model,
    uses_code,
)
from trainers.training.evaluate import Metrics, evaluate
from trainers.training.step import train_step
from trainers.user_code import describe_error, find_source, forget, names_code, seeded

SUM_TOLERANCE = 1e-3
"""Relative error with which a loss of twice as many examples is twice as large: float32 sums of a
few values are a thousand times more exact."""
_answers: dict[str, int] = {}
"""Answers of an example, by what has been checked in this process of trials of the user's code."""


def check(config: TrialConfig, info: DatasetInfo) -> None:
    """Refuse a trial that could only fail, before any process starts.

    Args:
        config: the trial.
        info: its data, from :func:`trainers.data.prepare`.

    Raises:
        ValueError: a batch larger than the training set, a learning rate or momentum that
            underflows in the LNS format, or the user's code does not train.
    """
    check_batch(config, info.train)
    answers = 1
    if uses_code(config) or config.loss != LossConfig() or not config.model.feedforward:
        parts = (config.model, config.data, config.loss, config.metrics, config.precision)
        if (task := repr(parts)) not in _answers:
            forget()
            _answers[task] = _check_task(config)
        answers = _answers[task]
    model = apply_precision(nn.Linear(1, 1), config.precision)
    for epoch in (0, *(change["epoch"] for change in config.changes)):
        options = optimizer_at(config.optimizer, config.changes, epoch)
        make_trial_optimizer(config, options, model, answers)


def _check_task(config: TrialConfig) -> int:
    """Train and evaluate on some examples, in the trial's precision.

    Returns:
        The number of answers of an example.

    Raises:
        ValueError: the data, the model, the loss or a metric do not go together.
    """
    loss = Loss(config.loss)
    data = load_data(config, loss)
    some = data.train.head(2)
    each = loss.answers_each(some.y)
    if config.sync.name == "asynchronous" and each > 1:
        raise ValueError(
            f"sync.name=asynchronous with data.name={config.data.name}: the server takes examples"
            f" of one answer, not of {each}; use sync.name=synchronous"
        )
    model = make_whole_model(config, data)
    metrics = Metrics(config.metrics, data.outputs)
    with _explained(config):
        outputs = apply_precision(model, config.precision)(some.x)
    _check_outputs(config, outputs, some, data.outputs)
    if config.loss.own:
        _check_mean(config, loss, outputs.detach(), some.y)
    with _explained(config):
        loss(outputs, some.y).backward()
        evaluate(model, data.validation.head(CHECKED), loss, metrics)
        outputs = model.eval()(data.test.head(2).x)
    _check_outputs(config, outputs, data.test.head(2), data.outputs)
    metrics.compute("validation")
    if config.model.own:
        _check_resumes(config, data, loss)
    return each


def _check_resumes(config: TrialConfig, data: Dataset, loss: Loss) -> None:
    """Take two steps of the user's model in one go, and again with a save and a restore between.

    Raises:
        ValueError: the weights are not the same.
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
            f"model.name={config.model.name!r}: after an interruption it would not go on with the"
            " same bits: two steps gave other weights where its state was saved and restored"
            " between them; keep all its state in parameters and buffers of fixed shapes, and draw"
            " random numbers from torch, NumPy or random, not from a generator of its own"
        )


def _check_mean(config: TrialConfig, loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss of the user's that is a sum: the same examples twice have the same mean.

    With a sum a step would grow with the batch, and shrink with the number of micro-batches.

    Raises:
        ValueError: with both values and the remedy.
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
    """Raise what the user's code raises as a ``ValueError`` that says where.

    Raises:
        ValueError: the code within has raised.
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


def _check_outputs(config: TrialConfig, outputs: Any, some: Split, count: int) -> None:
    """Refuse outputs of another shape than the loss takes.

    Raises:
        ValueError: with both shapes.
    """
    where = f"model.name={config.model.name!r} with loss.name={config.loss.name!r}"
    if not isinstance(outputs, torch.Tensor):
        raise ValueError(
            f"{where}: turns examples into a {type(outputs).__name__}; return a tensor, or an"
            " object whose logits are one"
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
    """Tell whether outputs are those of the targets one by one, laid flat or not.

    Dimensions of length 1 do not count. ``(B, 3, 2)`` for ``(B, 2, 3)`` are not: as many, and in
    another order.
    """
    longer, shorter = ([size for size in shape if size > 1] for shape in (outputs, targets))
    if len(longer) < len(shorter):
        longer, shorter = shorter, longer
    return longer == shorter or (
        len(shorter) < len(longer) and math.prod(longer) == math.prod(shorter)
    )
