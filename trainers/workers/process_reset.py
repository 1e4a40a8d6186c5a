"""The reset of a process between two trials: changed settings are restored, leaks are detected.

All state that affects results is created for each trial, but a trial's code, or a library that it
calls, may change settings of the process. Between two trials :class:`InitialSettings` restores
them to their values before the first trial. Leaked threads and memory cannot be released; above a
limit it raises an error, so that the next trial gets a new process.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import psutil
import torch

from lns_ops import get_matmul_accumulation, set_matmul_accumulation
from trainers._compat import choose_cudnn
from trainers.training.device import returns_memory

THREADS = 64
"""Maximum number of Python threads above the number before the first trial."""
MEMORY = max(2 << 30, psutil.virtual_memory().total // 16)
"""Maximum growth in bytes, of the process or on its GPU, since the first trial; other shapes and
formats need some."""


class LeakError(RuntimeError):
    """A process has leaked resources and should exit."""


class InitialSettings:
    """The process's settings at the time of construction, before the first trial."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._settings, self._random = _settings(), torch.get_rng_state()
        self._threads = threading.active_count()
        self._returned_memory = returns_memory()
        self._memory: tuple[int, int] | None = None
        gc.collect()
        # exclude the existing half a million objects of libraries from garbage collection
        gc.freeze()

    def restore(self) -> None:
        """Restore the process's settings; to be called between trials.

        Raises:
            LeakError: threads or memory have grown above their limits, or a setting cannot be
                restored.
        """
        os.environ.clear()
        os.environ.update(self._environment)
        _restore(self._settings)
        torch.set_rng_state(self._random)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if returns_memory() and not self._returned_memory:
            raise LeakError(
                "this process gives memory back as a trial with activation checkpoints wants it,"
                " which slows others; the next one gets a new process"
            )
        self._memory = self._memory or _memory()
        grown = max(now - before for now, before in zip(_memory(), self._memory, strict=True))
        more = threading.active_count() - self._threads
        if grown > MEMORY or more > THREADS:
            raise LeakError(
                f"this process keeps {grown >> 20} MB and {more} threads more than after its first"
                " trial; the next one gets a new process"
            )


def _memory() -> tuple[int, int]:
    """Return the bytes of the process, and of its tensors on the GPU."""
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return int(psutil.Process().memory_info().rss), on_gpu


def _umask() -> int:
    """Return the umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "os.chdir": (os.getcwd, os.chdir),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_default_device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(_named(device)),
    ),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.backends.cudnn": (
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        lambda choice: choose_cudnn(deterministic=choice[0], benchmark=choice[1]),
    ),
    "torch.autograd.set_detect_anomaly": (
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    ),
    "lns_ops.set_matmul_accumulation": (get_matmul_accumulation, set_matmul_accumulation),
    "random.seed": (random.getstate, random.setstate),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "os.umask": (_umask, os.umask),
}
"""Getter and setter of each setting, by the setter's name. A setter is only called if the setting
has changed, because torch imports its compiler (two seconds) in some of them."""
PATCHED = ("trainers", "lns_ops", "torch.nn", "torch.optim", "torch.utils.data")
"""Packages in which a replaced function or class would change the results of other trials."""
ALSO_PATCHED = ("builtins", "math", "random", "numpy", "numpy.random", "torch", "torch.linalg")
"""Modules in which it would as well; their submodules are not checked."""


def process_state() -> dict[str, Any]:
    """Return the process-wide state by which code could affect other trials, by name.

    It consists of settings, torch's global hooks, signal handlers, modules, functions and methods.
    Additions, such as new modules, threads or warning filters, do not count, because imports make
    them too.
    """
    found = _settings() | {
        f"signal.{number.name}": signal.getsignal(number) for number in signal.Signals
    }
    for place in ("torch.nn.modules.module", "torch.optim.optimizer"):
        found |= {
            f"{place}.{name}": copy(value)
            for name, value in vars(sys.modules[place]).items()
            if name.startswith("_global")
        }
    for name, module in list(sys.modules.items()):
        if name in ALSO_PATCHED or name.startswith(tuple(f"{each}." for each in PATCHED)):
            found[f"sys.modules[{name!r}]"] = module
            found |= _functions(name, vars(module))
    return found


def changed_since(before: dict[str, Any]) -> list[str]:
    """Return the names of the entries of :func:`process_state` that have changed.

    If modules were replaced, only these are returned.
    """
    now = process_state()
    changed = [name for name, value in before.items() if now.get(name) != value]
    return [name for name in changed if name.startswith("sys.modules")] or changed


def _functions(place: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions of a module or class, including methods of the module's own classes."""
    found = {f"{place}.{name}": value for name, value in names.items() if callable(value)}
    for name, value in list(found.items()):
        legacy = type(value) is type(torch.FloatTensor)  # many, and alike
        if isinstance(value, type) and value.__module__ == place and not legacy:
            found |= _functions(name, vars(value))
    return found


def _named(device: torch.device) -> torch.device | None:
    """Return the argument for ``set_default_device``; None for the CPU, which is faster than
    "cpu"."""
    return None if device.type == "cpu" else device


def _settings() -> dict[str, Any]:
    return {name: get() for name, (get, _) in _SETTINGS.items()}


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore the process's settings when the context ends."""
    settings = _settings()
    try:
        yield
    finally:
        _restore(settings)


def _restore(settings: dict[str, Any]) -> None:
    for name, (get, set_) in _SETTINGS.items():
        if get() != settings[name]:
            set_(settings[name])
