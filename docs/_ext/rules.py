"""Writes the page of incompatible trial keys, from the table of rules
(:data:`trainers.config.compatibility.RULES`, and the rules that are checked before training).

Its matrices are computed: the rules are checked for every pair of choices. The rules within a part
of a trial are read from the code of :data:`PARTS`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any

from study.config.keys import apply
from trainers.config import (
    TrialConfig,
    compatibility,
    data,
    layout,
    loss,
    lr_schedule,
    memory,
    model,
    optimizer,
    precision,
    sync,
    trial,
    wire,
)
from trainers.config.validation import Rule, show

RULES = (*compatibility.RULES, *compatibility.RULES_BEFORE_TRAINING)
Choice = Mapping[str, Any]

BASE = TrialConfig().to_dict() | {"workers": 4, "batch_size": 120}
"""A trial in which every choice alone is right: four workers, two hidden layers."""
BASE["model"]["hidden"] = [512, 512]

LAYOUTS: tuple[Choice, ...] = (
    {"layout.pp": 2, "layout.micro_batches": 2},
    {"layout.tp": 2},
    {"layout.fsdp": True},
    {"min_workers": 2},
)
PRECISIONS: tuple[Choice, ...] = (
    {"precision.format": "lns12"},
    {"precision.format": "lns12", "precision.scope": "matmul"},
    {"precision.format": "bfloat16"},
    {"precision.format": "float16"},
    {"autocast": "bfloat16"},
    {"autocast": "float16", "device": "cuda"},
)
EXCHANGES: tuple[Choice, ...] = (
    {"sync.name": "local_sgd"},
    {"sync.name": "diloco"},
    {"sync.name": "elastic"},
    {"sync.name": "final_average"},
    {"sync.name": "ensemble"},
    {"sync.name": "asynchronous"},
    {"wire.name": "float32"},
    {"wire.name": "lns16", "wire.sum": "lns"},
    {"wire.name": "int8"},
    {"wire.name": "powersgd"},
    {"wire.bucket_cap_mb": 25.0},
)


def allowed(*choices: Choice) -> bool:
    """Tell whether a trial may make these choices together."""
    values = BASE
    for choice in choices:
        values = apply(values, choice)
    try:
        TrialConfig.from_dict(values)
    except ValueError:
        return False
    return True


def label(choice: Choice) -> str:
    """Return a choice as a command spells it."""
    return " ".join(f"`{key}={show(value)}`" for key, value in choice.items())


def matrix(columns: tuple[Choice, ...], rows: tuple[Choice, ...]) -> str:
    """Return a table of which choices go together."""
    lines = [["", *map(label, columns)], ["---"] * (len(columns) + 1)]
    lines += [
        [label(row), *("yes" if allowed(row, column) else "**no**" for column in columns)]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def text(template: str) -> str:
    """Return a text of a rule as Markdown, with the names of keys in the place of their values."""
    names = re.sub(r"\{([\w.]+)\}", r"\1", template)
    return re.sub(r"\b([a-z_]+\.[a-z_.]+[a-z]|\w+_\w+|[a-z_.]+=\w+)(=\w+)?", r"`\g<0>`", names)


def conditions() -> list[str]:
    """Return when each rule applies, as its code says it, constants with their values."""
    tree = ast.parse(inspect.getsource(compatibility))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lambdas = [call.args[1] for call in calls if ast.unparse(call.func) == "Rule"]
    found = [ast.unparse(each.body) for each in lambdas if isinstance(each, ast.Lambda)]
    plain = [re.sub(r"\b_?(\w+)\(c\)|\bc\.", r"\1", each) for each in found]
    return [
        re.sub(r"\b[A-Z_]{2,}\b", lambda name: str(getattr(compatibility, name[0])), each)
        for each in plain
    ]


def meanings() -> Iterator[str]:
    """Yield the meaning of names in the conditions that are not keys, from their docstrings."""
    config = TrialConfig()
    for name in sorted(set(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", " ".join(conditions())))):
        part, _, last = name.rpartition(".")
        own = getattr(type(attrgetter(part)(config) if part else config), last, None)
        known = own if isinstance(own, property) else getattr(compatibility, f"_{name}", None)
        if known is not None:
            (first, *_) = (inspect.getdoc(known) or "").split("\n\n")
            yield f"- `{name}`: {re.sub('^(Tell w|W)hether ', '', ' '.join(first.split()))}"


def section(key: str, rules: list[tuple[Rule, str]]) -> str:
    """Return the table of the rules whose first key is ``key``, each with its condition."""
    rows = [
        f"| {', '.join(f'`{other}`' for other in rule.keys[1:])} | `{when}` |"
        f" {text(rule.because)} | {text(rule.use)} |"
        for rule, when in rules
    ]
    head = ["| with | refused if | why not | use instead |", "|---|---|---|---|"]
    return "\n".join([f"### `{key}`", *head, *rows])


PARTS = (data, model, trial, precision, loss, optimizer, lr_schedule, layout, wire, sync, memory)
"""The modules whose configs check combinations of their own keys."""


def template(node: ast.expr) -> str:
    """Return a text of the code, its values in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + plainly(node.value) + "}"
    return str(node.value) if isinstance(node, ast.Constant) else ""


def plainly(node: ast.AST) -> str:
    """Return code without the name of its object."""
    return re.sub(r"\b(self|args)\.", "", ast.unparse(node))


def refusals(nodes: list[ast.stmt], where: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the conditions under which the code refuses, and the messages."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ", ".join(where), template(node.exc.args[0])
        elif isinstance(node, ast.If):
            yield from refusals(node.body, (*where, plainly(node.test)))
            yield from refusals(node.orelse, (*where, f"not ({plainly(node.test)})"))
        elif isinstance(node, ast.For):
            each = f"for {plainly(node.target)} in {plainly(node.iter)}"
            yield from refusals(node.body, (*where, each))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from refusals(node.body)


def valued(condition: str, module: ModuleType) -> str:
    """Return a condition with the values of the module's lists in the place of their names."""

    def value(name: re.Match[str]) -> str:
        found = getattr(module, name[0], None)
        return str(found) if isinstance(found, tuple | list) else name[0]

    return re.sub(r"\b[A-Z_]{2,}\b", value, condition)


def parts() -> Iterator[str]:
    """Yield a row for each refusal of two keys or more by a part of a trial."""
    for module in PARTS:
        for when, said in refusals(ast.parse(inspect.getsource(module)).body):
            given, _, rule = said.partition(": ")
            because, _, use = rule.partition("; ")
            keys = re.findall(r"([a-z_]+(?:\.(?:[a-z_]+|{\w+}))*)=|without ([\w.]+)", given)
            names = [key or other for key, other in keys]
            names += re.findall(r"(?<= ){(\w+)}", given)
            if len(names) > 1:
                yield (
                    f"| {', '.join(f'`{name}`' for name in names)} | `{valued(when, module)}` |"
                    f" {text(because)} | {text(use)} |"
                )


def page() -> str:
    """Return the page."""
    grouped: dict[str, list[tuple[Rule, str]]] = {}
    for rule, when in zip(RULES, conditions(), strict=True):
        grouped.setdefault(rule.keys[0], []).append((rule, when))
    return (
        "\n\n".join(
            [
                "# Which keys go together\nA trial whose keys contradict each other is refused"
                " before any work starts; a search leaves such points out.",
                "## Choices in pairs\nFour workers and two hidden layers; all other keys have their"
                " defaults. First the layouts, then the precisions, against the other choices.",
                matrix(LAYOUTS, PRECISIONS + EXCHANGES),
                matrix(PRECISIONS, EXCHANGES),
                "## Rules\nA rule is listed under the first of its keys. The conditions are the"
                " code's; a key's name means its value. Other names in the conditions:",
                "\n".join(meanings()),
                *(section(key, rules) for key, rules in grouped.items()),
                "## Rules within a part\nRules of the data, the model, the optimizer and other"
                " parts of a trial by themselves, and the equations of the layout. Names in the"
                " conditions are the part's own keys.",
                "\n".join(
                    ["| keys | refused if | why not | use instead |", "|---|---|---|---|", *parts()]
                ),
            ]
        )
        + "\n"
    )
