"""Makes the reference page of torch operations in LNS from the tests' table, the registries of
``lns_ops.tensor`` and ``lns_ops.formats``, and torch's dispatcher."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import number_formats

import lns_ops  # noqa: F401 (registers operations)
from lns_ops._compat import WRITTEN_IN_CPP, has_kernel, operator_names
from lns_ops.formats import parse
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.decoded import NAMES
from lns_ops.tensor.registry import HANDLERS, REPLACEMENTS
from tests.lns_ops.operations import GROUPS

DEVICES = {"CPU": "CPU", "CUDA": "GPU"}
"""Keys of torch's dispatcher, and what the page calls them."""


def topics(table: dict[Any, Callable[..., Any]]) -> dict[str, list[str]]:
    """Return the names in a table of the registry by the module that computes them."""
    found: dict[str, set[str]] = defaultdict(set)
    for operation, handler in table.items():
        module = inspect.unwrap(handler).__module__
        found[module.rpartition(".")[2]].add(spelled(operation))
    return {topic: sorted(names) for topic, names in sorted(found.items())}


def spelled(operation: Any) -> str:
    """Return an aten operator's name without its overload, or a torch function's as it is written
    in code."""
    if hasattr(operation, "overloadpacket"):
        return str(operation.overloadpacket)
    name = operation.__name__
    if name == "__set__":
        return f"torch.Tensor.{operation.__self__.__name__} = ..."
    if hasattr(operation, "__objclass__") or "Tensor." in operation.__qualname__:
        return f"torch.Tensor.{name}"
    place = operation.__module__ or "torch"
    part = place.removeprefix(WRITTEN_IN_CPP)
    if part == place:
        return f"{place}.{name}"
    return f"torch.{'nn.functional' if part == 'nn' else part}.{name.removeprefix(f'{part}_')}"


def kernels() -> Iterator[tuple[str, list[str]]]:
    """Yield the operators on codes, and the devices for which the dispatcher has a kernel."""
    for name in sorted(operator_names()):
        if name.startswith("lns_ops::"):
            yield (name, [shown for key, shown in DEVICES.items() if has_kernel(name, key)])


def takes_codes(name: str) -> bool:
    """Tell whether tensors of codes, ``LNSTensor``, can have a format."""
    try:
        LNSFormat.of(name)
    except ValueError:
        return False
    return True


def formats() -> Iterator[str]:
    """Yield a row for each way in which the operations take formats, and the formats."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in number_formats.NAMES:
        form = "the LNS forms, on codes" if takes_codes(name) else "torch's own, on float32"
        found[number_formats.arithmetic_of(parse(name)), form].append(name)
    for (computed, form), names in found.items():
        yield f"| {code(names)} | {form} | {computed} |"


def code(names: list[str]) -> str:
    """Return names as code, in a cell of a table."""
    return ", ".join(f"`{name}`" for name in names)


def by_topic() -> Iterator[str]:
    """Yield a row for each topic: the operators with an LNS form, and the functions replaced."""
    forms, replaced = topics(HANDLERS), topics(REPLACEMENTS)
    for topic in sorted(forms.keys() | replaced.keys()):
        yield f"| `{topic}` | {code(forms.get(topic, []))} | {code(replaced.get(topic, []))} |"


def page() -> str:
    """Return the page of operations."""
    decoded = sorted(name for name in NAMES if not name.startswith("_"))
    return "\n".join(
        [
            "# Operations in LNS",
            "Which torch operations have an LNS form, how exact it is, in which formats and"
            " on which devices.",
            "",
            "## How exact",
            "The same in every LNS format. Except for losses and norms, CPU and GPU give the same"
            " bits. [Operations of LNSTensor](../operations.md) lists each group's operations.",
            "",
            "| group | operations | result |",
            "|---|---|---|",
            *(
                f"| {title} | {len(names)} | {meaning} |"
                for title, (names, meaning) in GROUPS.items()
            ),
            "",
            "## By format",
            "`LNSTensor` has the LNS forms. In a simulated format values are rounded to the grid"
            " between layers. Each name is in [number formats](formats.md); parameters and scales"
            " are examples.",
            "",
            "| formats | operations | layers compute in |",
            "|---|---|---|",
            *formats(),
            "",
            "## By topic",
            "A topic is a file of `lns_ops/tensor/ops`. *aten operators* have their own LNS form;"
            " *torch functions* are replaced as a whole. torch decomposes everything else into"
            " these, or an error names the operation.",
            "For the functions of `torch.linalg`, `torch.fft` and `torch.special`, and functions"
            " with these names, arguments are decoded, computed in float32 and encoded once:"
            f" {code(decoded)}.",
            "",
            "| topic | aten operators | torch functions |",
            "|---|---|---|",
            *by_topic(),
            "",
            "## Kernels on codes",
            "The operators in torch's dispatcher to which all of these lead.",
            "",
            "| operator | kernels |",
            "|---|---|",
            *(f"| `{name}` | {', '.join(devices)} |" for name, devices in kernels()),
            "",
        ]
    )
