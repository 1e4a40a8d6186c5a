"""Interface for a user's own training loop: the trial's context, reports and checkpoints.

The loop is a function that trains in its own way and calls :func:`report` once an epoch::

    from trainers import get_checkpoint, report

    def train(config):
        model = make_model(config["width"])
        state = get_checkpoint() or {"epoch": 0, "model": model.state_dict()}
        model.load_state_dict(state["model"])
        for epoch in range(state["epoch"], 10):
            ...
            state = {"epoch": epoch + 1, "model": model.state_dict()}
            report({"validation/error": validate(model)}, checkpoint=state)
        return {"test/error": test(model)}

It is called as ``train(config)``, or with a :class:`LoopContext` if it has a parameter named
``context``. A process trains one such trial at a time, so :func:`report` needs no argument for the
trial. The counterpart is :mod:`trainers.workers.own_loop`. Does not import torch.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.user_code import find_source, load_code, where

if TYPE_CHECKING:
    from trainers.config import TrialConfig

KEY = "trainable.name"
RESERVED = ("done", "history", "checkpoint_path", "final", "pid", "host", "seconds", "bits")
"""Names that reports must not use: other entries of a trial's messages, and metrics that the study
measures itself."""

Checkpoint = Path | dict[str, Any]
"""A folder, or a dict of values that ``torch.load(weights_only=True)`` accepts."""


class TrialEnded(BaseException):
    """Raised in a loop to unwind it after its trial has ended.

    Not a subclass of ``Exception``, so that loops do not catch it by accident.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopContext:
    """The trial that a loop trains.

    Attributes:
        config: arguments of the loop, ``trainable.args``.
        trial: config of the whole trial. Only ``epochs``, ``seed``, ``device``, ``gpus``,
            ``threads`` and ``workers`` have an effect without code in the loop.
        seed: seed of the trial; torch, NumPy and Python are already seeded with it.
        device: ``cpu`` or ``cuda``.
        resume: last checkpoint of an earlier attempt, see :func:`get_checkpoint`.
        rank, world_size: rank and number of the trial's workers. With several workers,
            torch.distributed's default group exists.

    Example::

        def train(context):  # a loop may take the context, or the keys of trainable.args
            optimizer = torch.optim.SGD(net.parameters(), lr=context.config["lr"])
            for epoch in range(context.trial.epochs):
                context.report({"validation/error": train_an_epoch(net, optimizer)})
    """

    config: dict[str, Any]
    trial: TrialConfig
    seed: int
    device: str
    resume: Checkpoint | None
    rank: int = 0
    world_size: int = 1
    _tell: Callable[[Mapping[str, Any], Checkpoint | str | None], None]

    def report(
        self, metrics: Mapping[str, Any], *, checkpoint: Checkpoint | str | None = None
    ) -> None:
        """Report an epoch of the trial; see :func:`report`."""
        self._tell(metrics, checkpoint)


_trained: list[LoopContext] = []
"""The trial whose loop is running in this process; at most one entry."""


def report(metrics: Mapping[str, Any], *, checkpoint: Checkpoint | str | None = None) -> None:
    """Report an epoch of the current trial; every call counts as one epoch.

    When the trial ends, because of a scheduler or after ``epochs`` reports, the call raises
    :class:`TrialEnded` instead of returning, so that the loop's ``finally`` and ``with`` blocks
    run. With several workers, every worker must report every epoch; rank 0's report counts.

    Args:
        metrics: finite numbers by name. They must include the metrics by which the study compares
            trials. ``epoch`` is added, counted from 1.
        checkpoint: a folder, a Ray ``Checkpoint``, or a dict of tensors, numbers, texts, lists and
            dicts. It is copied before the call returns. An interrupted trial resumes from its last
            checkpoint.

    Raises:
        ValueError: no trial is running in this process, a metric is missing or not a finite number,
            or the checkpoint cannot be stored.

    Example::

        def train(lr):
            net = make_net()
            while True:  # report ends the loop
                error = train_an_epoch(net, lr)
                report({"validation/error": error}, checkpoint=net.state_dict())
    """
    _current("report").report(metrics, checkpoint=checkpoint)


def get_checkpoint() -> Checkpoint | None:
    """Return the last checkpoint that the trial reported before it was interrupted.

    Returns:
        A folder (a path that also has Ray's ``as_directory()``), or a dict with tensors on the CPU,
        like the reported one; None if the trial starts from scratch.

    Raises:
        ValueError: no trial is running in this process.

    Example::

        if (checkpoint := get_checkpoint()) is not None:
            net.load_state_dict(checkpoint)
    """
    return _current("get_checkpoint").resume


def _current(name: str) -> LoopContext:
    if not _trained:
        raise ValueError(
            f"trainers.{name}() outside of a trial: it belongs to a loop that a study calls; name"
            " the function in a study's YAML, trainable: file.py:function, and `lns-study run` it"
        )
    return _trained[-1]


@contextmanager
def training(context: LoopContext) -> Iterator[None]:
    """Make a trial the current one for :func:`report`."""
    _trained.append(context)
    try:
        yield
    finally:
        _trained.remove(context)


def load_loop(name: str, code: str) -> Callable[[LoopContext], Any]:
    """Return the loop named by ``trainable.name``, as a function of the context.

    Args:
        name: ``file.py:function`` or ``package.module:function``.
        code: digest of its file when the study was planned; "" to skip the check.

    Raises:
        ValueError: it cannot be loaded, has changed, is not a plain function, or has other required
            parameters than ``config`` or ``context``.
    """
    loop = load_code(KEY, name, code)
    place = where(find_source(KEY, name), loop)
    kinds = {
        "a class": inspect.isclass(loop),
        "a generator": inspect.isgeneratorfunction(loop),
        "asynchronous": inspect.iscoroutinefunction(loop),
    }
    if kind := next((kind for kind, found in kinds.items() if found), ""):
        raise ValueError(
            f"{KEY}={name!r}: is {kind} ({place}); name a function that trains and"
            " calls trainers.report(metrics) once an epoch"
        )
    signature = inspect.signature(loop)
    named = [word for word in ("context", "config") if word in signature.parameters]
    by_name = "context" in named
    try:
        signature.bind(**dict.fromkeys(named)) if by_name else signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"{KEY}={name!r}: {error} in {name.rpartition(':')[2]}{signature}"
            f" ({place}); it is called with the dict trainable.args alone, or with a"
            " parameter named context; give other parameters defaults"
        ) from None

    @functools.wraps(loop)
    def start(context: LoopContext) -> Any:
        offered = {"context": context, "config": context.config}
        return loop(**{word: offered[word] for word in named}) if by_name else loop(context.config)

    return start


def numbers(values: Any, what: str) -> dict[str, float]:
    """Convert a loop's report or return value to floats by name.

    Args:
        values: a mapping of names to numbers; NumPy numbers and one-element tensors are accepted.
        what: description of the values, for error messages.

    Raises:
        ValueError: it is not such a mapping, a name is reserved, or a number is not finite.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{what} is of type {type(values).__name__}; give a dict of names to numbers"
        )
    found = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name or name in RESERVED:
            raise ValueError(
                f"{what} has the name {name!r}; names are texts other than {', '.join(RESERVED)}"
            )
        single = value
        if hasattr(value, "item"):
            with suppress(ValueError, RuntimeError):  # it has several elements
                single = value.item()
        if isinstance(single, bool) or not isinstance(single, int | float):
            raise ValueError(
                f"{what} has {name}={str(value)[:80]} of type {type(value).__name__}; give a"
                " number, or a tensor of one element"
            )
        if not math.isfinite(single):
            raise ValueError(
                f"{what} has {name}={single}, with which nothing can be compared; return from the"
                " loop before it reports that it has diverged, or mend it"
            )
        found[name] = float(single)
    return found


def check_report(values: Any, epoch: int, wanted: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a report, with ``epoch``.

    Args:
        values: the loop's report.
        epoch: number of the report, from 1.
        wanted: names of the metrics by which the study compares trials.

    Raises:
        ValueError: see :func:`numbers`; or a metric is missing; or ``epoch`` is wrong.
    """
    what = f"report {epoch}"
    found = numbers(values, what)
    if lacking := [name for name in wanted if name not in found]:
        raise ValueError(
            f"{what} has {', '.join(found) or 'nothing'} and lacks {', '.join(lacking)}, by which"
            " the study compares its trials; report it too"
        )
    if found.get("epoch", epoch) != epoch:
        raise ValueError(
            f"{what} has epoch={found['epoch']:g}; every report is one epoch, counted from 1, those"
            " before an interruption included: leave epoch out, or continue where get_checkpoint()"
            " left off"
        )
    return {"epoch": float(epoch), **found}
