"""A training step as a CUDA graph: captured once, replayed for every later batch.

Eager, most of a step of a converted net is Python, which launches some thousand small kernels. A
graph of them is launched at once. What it repeats are kernels and their arguments: Python in the
step runs while it is captured and never again, so a step that reads a value on the host, or whose
shapes depend on values, cannot be captured, and numbers that Python hands to kernels keep the
values of the capture. A learning rate is such a number, whose change is refused, not overlooked,
unless it is a tensor on the GPU.

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
    """Return ``step`` as a function that replays it from a CUDA graph.

    The first ``warmup`` calls run eagerly, the next one is captured; each call is one step, these
    too. Example::

        def step(x, y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = lns_ops.cuda_graph(step)
        for x, y in loader:  # with drop_last=True: every batch has the shape of the first
            loss = step(x.cuda(), y.cuda())

    Tensors that are passed are copied into those of the capture; what is returned is overwritten by
    the next call. Random numbers are drawn anew in each. Faults (a NaN to encode) are raised
    by a later call, once the GPU has met them, or by :func:`lns_ops.check_faults`. For a rate that
    varies, give the optimizer a tensor on the GPU, ``lr=torch.tensor(0.1, device="cuda")``, which
    torch's schedulers fill; or leave ``optimizer.step()`` out of the step and call it after each.

    Args:
        step: runs forward, backward and mostly an optimizer's step. Its arguments are tensors on
            one GPU, or values that are the same in every call.
        warmup: calls before capture, which compile kernels and create the optimizer's state.

    Raises:
        ValueError: ``warmup`` below 1; on a call, no GPU, tensors on another device, in lists,
            tuples or dicts, that need gradients, or that differ in shape or dtype from those
            captured, other arguments that differ, or an optimizer in the step whose options have
            changed since.
        RuntimeError: on a call, a step that cannot be captured.
    """
    if warmup < 1:
        raise ValueError(
            f"cuda_graph: warmup={warmup}: must be at least 1, as kernels are not compiled while a"
            " graph is captured; use 3"
        )
    graph = _Graph(step, warmup)

    @wraps(step)
    def replayed(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = graph(args, kwargs)
        return result

    return replayed


class _Graph:
    """A step, the calls until its capture, and then its graph."""

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
            random.graphsafe_set_state(before)  # torch leaves the failed one in the capture
            raise RuntimeError(
                f"cuda_graph: the step cannot be captured"
                f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''});"
                " it may not read values on the host (.item(), printing, check_faults, an `if` on"
                " a tensor), nor copy from the CPU, nor have shapes that depend on values: do that"
                " with what the step returns, after the call"
            ) from error
        # on that stream torch has also set the graph's random numbers to their beginning, which a
        # busy GPU does after the replay has set them to where the generator is
        assert capture.capture_stream is not None
        torch.cuda.current_stream().wait_stream(capture.capture_stream)
        self._inputs = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        self._options = [(optimizer, _options_of(optimizer)) for optimizer in stepped]
        self._graph = graph

    def _refuse_changes(self, given: Mapping[str, Any]) -> None:
        """Refuse what a replay would overlook: other shapes, values and options.

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
                    " the value of its capture; pass a tensor, or make a graph for each value"
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
                    " options; give it lr=torch.tensor(..., device='cuda') if it is the rate, or"
                    " leave optimizer.step() out of the step and call it after each"
                )


def _device_of(given: Mapping[str, Any]) -> torch.device:
    """Return the GPU of the tensors among the arguments; the current one where there are none.

    Raises:
        ValueError: a tensor that is on the CPU or another GPU, needs a gradient or is in a list,
            tuple or dict; no GPU.
    """
    device: torch.device | None = None
    for name, value in given.items():
        if not isinstance(value, Tensor):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"cuda_graph: {name} is a {type(value).__name__} with tensors, which a replay"
                    " would not take anew; pass each tensor as an argument of its own, for example"
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
                f"cuda_graph: {name} needs a gradient, which would belong to the graph's copy of"
                " it; pass it detached, and return gradients from the step"
            )
        device = value.device
    if device is None and not torch.cuda.is_available():
        raise ValueError(
            "cuda_graph: torch finds no GPU here, and a graph runs on one; call the step itself"
        )
    return device or torch.device("cuda", torch.cuda.current_device())


def _aside(device: torch.device, step: Callable[[], Any]) -> Any:
    """Run an eager step on a stream of its own, as captures need of those before them."""
    with torch.cuda.device(device):
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = step()
        current.wait_stream(stream)
    return result


@contextmanager
def _optimizers_that_step() -> Iterator[list[Optimizer]]:
    """Collect the optimizers whose ``step`` is called in the context, each once."""
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

    Tensors on a GPU are the optimizer's own, whose values kernels read; one on the CPU is read as
    the step is captured, and stands here with its value.
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
    """Return a copy of a tensor, and what else there is as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kind(value: Tensor) -> str:
    """Return type, shape, dtype and format of a tensor, in words."""
    fmt = f" of {value.fmt.name}" if isinstance(value, LNSTensor) else ""
    return f"{type(value).__name__}{fmt} {list(value.shape)} {storage_of(value).dtype}"
