"""Makes the reference page of public Python names, whose docstrings Sphinx's autodoc reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import lns_ops
from lns_ops import formats, functional, optim, serialization, tensor
from study import api, lifecycle
from study.config import compose
from study.engines import ask_tell
from study.ledger import log, state
from study.plan import plan
from study.views import view
from trainers import user_loop

STUDY = {
    api: ["run", "create", "load", "Study"],
    ask_tell: ["Suggestion", "ask", "tell"],
    compose: ["load"],
    plan: ["make_plan", "Plan", "PlannedTrial"],
    lifecycle: ["run_study", "Outcome"],
    view: ["View"],
    log: ["read_ledger", "Follower"],
    state: ["fold", "StudyState", "TrialState"],
}
"""Names of ``study`` for scripts: a config, its plan, its run, and a ledger's content."""
HOOKS = [name for name in tensor.__all__ if name[0] != "_" and name not in lns_ops.__all__]
"""Names for adding operations to `LNSTensor`."""
LOOP = ["report", "get_checkpoint", "LoopContext"]
"""Names of ``trainers`` for a user's own training loop."""


def directive(module: ModuleType, name: str) -> str:
    """Return the autodoc directive of a name; "" for what is neither a class nor a function."""
    value: Any = getattr(module, name)
    if inspect.isclass(value):
        return f".. autoclass:: {module.__name__}.{name}\n   :members:\n"
    return (
        f".. autofunction:: {module.__name__}.{name}\n"
        if inspect.isfunction(inspect.unwrap(value))
        else ""
    )


def section(title: str, module: ModuleType, names: list[str]) -> Iterator[str]:
    """Yield a section of names."""
    found = [text for name in names if (text := directive(module, name))]
    yield f"## {title}\n```{{eval-rst}}\n" + "\n".join(found) + "```\n"


def page() -> str:
    """Return the page of Python names."""
    head = (
        "# Python\nThe public names, with their docstrings. The names of `study.api` below and"
        " `Suggestion` are also in `study`, and so are the dataclasses of"
        " [the keys](configuration.md).\n"
    )
    parts = [
        *section("`lns_ops`", lns_ops, lns_ops.__all__),
        *section("`lns_ops.optim`", optim, optim.__all__),
        *section("`lns_ops.formats`", formats, formats.__all__),
        *section("`lns_ops.functional`", functional, functional.__all__),
        *section("`lns_ops.tensor`", tensor, HOOKS),
        *section("`lns_ops.serialization`", serialization, ["save_file", "load_file", "to_floats"]),
    ]
    parts += section("`trainers`", user_loop, LOOP)
    for module, names in STUDY.items():
        parts += section(f"`{module.__name__}`", module, names)
    return "\n".join([head, *parts])
