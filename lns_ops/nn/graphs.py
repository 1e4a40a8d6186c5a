"""A training step as a CUDA graph: captured once, replayed for every later batch.

Run eagerly, a training step of a converted network spends most of its time in Python, which
launches about a thousand small kernels. A CUDA graph launches all of them at once. It repeats
kernels and their arguments only: Python code in the step runs during capture and never again. So a
step cannot be captured if it reads a value on the host or has shapes that depend on values, and
Python numbers that are passed to kernels keep their values from the capture. The learning rate is
such a number, unless it is a tensor on the GPU; a replay after it has changed raises.

Source: CUDA C++ Programming Guide, "CUDA Graphs"; PyTorch documentation, "CUDA Graphs" in "CUDA
semantics".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lns_ops._compat import tree_leaves
from lns_ops.cuda import raise_seen
from lns_ops.tensor import LNSTensor, storage_of

P = ParamSpec("P")
R = TypeVar("R")


def cuda_graph(step: Callable[P, R], *, warmup: int = 3) -> Callable[P, R]:
    """Return a function that runs ``step`` and, after a few calls, replays it from a CUDA graph.

    The first ``warmup`` calls run eagerly, the next call captures the graph; each of these calls is
    a real step, too. Example::

        def step(x, y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = lns_ops.cuda_graph(step)
        for x, y in loader:  # with drop_last=True: every batch has the shape of the first
            loss = step(x.cuda(), y.cuda())

    Tensor arguments are copied into the tensors of the capture, and the next call overwrites the
    result. Random numbers differ from call to call. Faults (encoding a NaN) are raised by a later
    call, after the GPU has detected them, or by :func:`lns_ops.check_faults`. For a varying
    learning rate, give the optimizer a tensor on the GPU, ``lr=torch.tensor(0.1, device="cuda")``,
    which torch's schedulers fill in place; or call ``optimizer.step()`` outside the step.

    Args:
        step: runs forward, backward and usually an optimizer step. Its arguments are tensors on one
            GPU, or values that are the same in every call.
        warmup: number of eager calls, which compile kernels and create the optimizer's state.

    Raises:
        ValueError: ``warmup`` is below 1. On a call: no GPU; tensors that are on another device,
            in lists, tuples or dicts, or need gradients; tensors whose shape or dtype differs from
            the capture; other arguments that differ; or changed options of an optimizer in the
            step.
        RuntimeError: on a call, if the step cannot be captured.
    """
    if warmup < 1:
        raise ValueError(
            f"cuda_graph: warmup={warmup}: must be at least 1, because kernels cannot be"
            " compiled while a graph is captured; use 3"
        )
    graph = _Graph(step, warmup)

    @wraps(step)
    def replayed(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = graph(args, kwargs)
        return result

    return replayed


class _Graph:
    """A step: eager calls, then its capture, then its CUDA graph."""

    def __init__(self, step: Callable[..., Any], warmup: int) -> None:
        self._step, self._left = step, warmup
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Any] = {}
        self._options: list[tuple[Optimizer, list[dict[str, Any]]]] = []
        self._output: Any = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Take one step: eager, captured or replayed."""
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        device = _device_of(given)
        if self._graph is None and self._left > 0:
            self._left -= 1
            return _aside(device, lambda: self._step(*args, **kwargs))
        with torch.cuda.device(device):
            if self._graph is None:
                self._capture(args, kwargs)
            else:
                self._refuse_changes(given)
                raise_seen(torch.cuda.current_device())
                for name, value in given.items():
                    if isinstance(value, Tensor):
                        storage_of(self._inputs[name]).copy_(storage_of(value))
            assert self._graph is not None
            self._graph.replay()
        return self._output

    def _capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Capture the step on copies of its arguments."""
        args = tuple(_copied(value) for value in args)
        kwargs = {name: _copied(value) for name, value in kwargs.items()}
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph)
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        before = random.clone_state()
        try:
            with _optimizers_that_step() as stepped, capture:
                self._output = self._step(*args, **kwargs)
        except Exception as error:
            random.graphsafe_set_state(before)  # torch leaves the failed generator in capture mode
            raise RuntimeError(
                f"cuda_graph: the step cannot be captured"
                f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''});"
                " it must not read values on the host (.item(), printing, check_faults, an `if` on"
                " a tensor), copy from the CPU, or have shapes that depend on values: do that"
                " after the call, with the step's result"
            ) from error
        # on that stream torch has also reset the graph's random numbers, and on a busy GPU that
        # would run after the replay has set them to the generator's position
        assert capture.capture_stream is not None
        torch.cuda.current_stream().wait_stream(capture.capture_stream)
        self._inputs = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        self._options = [(optimizer, _options_of(optimizer)) for optimizer in stepped]
        self._graph = graph

    def _refuse_changes(self, given: Mapping[str, Any]) -> None:
        """Reject changes that a replay would ignore: other shapes, values and options.

        Raises:
            ValueError: see :func:`cuda_graph`.
        """
        if given.keys() != self._inputs.keys():
            raise ValueError(
                f"cuda_graph: called with {', '.join(given)}, captured with"
                f" {', '.join(self._inputs)}; pass the same arguments in every call"
            )
        for name, value in given.items():
            captured = self._inputs[name]
            if isinstance(captured, Tensor) and isinstance(value, Tensor):
                if _kind(value) != _kind(captured):
                    raise ValueError(
                        f"cuda_graph: {name} is {_kind(value)}, captured as {_kind(captured)}: a"
                        " graph has the shapes of its capture; use drop_last=True in the"
                        " DataLoader, or a graph for each shape"
                    )
            elif isinstance(captured, Tensor) or value != captured:
                raise ValueError(
                    f"cuda_graph: {name} is {value!r}, captured as {captured!r}: a graph repeats"
                    " the captured value; pass a tensor, or make a graph for each value"
                )
        for optimizer, captured in self._options:
            now = _options_of(optimizer)
            changed = [
                f"{key}={new[key]} (captured {old.get(key)})"
                for old, new in zip(captured, now, strict=False)
                for key in new
                if new[key] is not old.get(key) and new[key] != old.get(key)
            ]
            if changed or len(now) != len(captured):
                raise ValueError(
                    f"cuda_graph: {type(optimizer).__name__} has changed since the capture:"
                    f" {', '.join(changed) or 'parameter groups'}: a graph repeats the captured"
                    " options; for a varying rate use lr=torch.tensor(..., device='cuda'), or"
                    " call optimizer.step() outside the captured step"
                )


def _device_of(given: Mapping[str, Any]) -> torch.device:
    """Return the GPU of the tensor arguments; the current GPU if no argument is a tensor.

    Raises:
        ValueError: a tensor is on the CPU or another GPU, needs a gradient, or is in a list, tuple
            or dict; or torch finds no GPU.
    """
    device: torch.device | None = None
    for name, value in given.items():
        if not isinstance(value, Tensor):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"cuda_graph: {name} is a {type(value).__name__} with tensors, which a replay"
                    " would not update; pass each tensor as a separate argument, for example"
                    " step(*tensors) or step(**tensors)"
                )
            continue
        if value.device.type != "cuda" or value.device != (device or value.device):
            raise ValueError(
                f"cuda_graph: {name} is on {value.device}: a graph runs on one GPU; move the"
                f" tensors there, for example with .to({str(device or 'cuda')!r})"
            )
        if value.requires_grad:
            raise ValueError(
                f"cuda_graph: {name} needs a gradient, which would go to the graph's copy of the"
                " tensor; pass it detached, and return gradients from the step"
            )
        device = value.device
    if device is None and not torch.cuda.is_available():
        raise ValueError(
            "cuda_graph: torch finds no GPU, and a graph needs one; call the step itself"
        )
    return device or torch.device("cuda", torch.cuda.current_device())


def _aside(device: torch.device, step: Callable[[], Any]) -> Any:
    """Run an eager step on a side stream, as torch requires before a capture."""
    with torch.cuda.device(device):
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = step()
        current.wait_stream(stream)
    return result


@contextmanager
def _optimizers_that_step() -> Iterator[list[Optimizer]]:
    """Collect the optimizers whose ``step`` is called in the context, without duplicates."""
    stepped: list[Optimizer] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        if all(optimizer is not other for other in stepped):
            stepped.append(optimizer)

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield stepped
    finally:
        hook.remove()


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group.

    A tensor on a GPU is returned as it is, because kernels read its value. A tensor on the CPU is
    read during capture, so it is replaced by its value.
    """
    return [
        {
            key: value.tolist() if isinstance(value, Tensor) and not value.is_cuda else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    """Return a copy of a tensor; return any other value unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kind(value: Tensor) -> str:
    """Describe type, shape, dtype and format of a tensor as text."""
    fmt = f" of {value.fmt.name}" if isinstance(value, LNSTensor) else ""
    return f"{type(value).__name__}{fmt} {list(value.shape)} {storage_of(value).dtype}"
