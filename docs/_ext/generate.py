"""Writes the reference pages that are generated from code: config keys, commands, ledger events,
number formats, operations, Python names.

The Sphinx build calls :func:`write` before it reads its sources (``docs/conf.py``). The pages are
in ``docs/reference``. This module has two of them: ``configuration.md``, from the dataclasses of
``StudyConfig`` and their ``Attributes:``, and ``commands.md``, from the help of ``lns-study``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import key_rules
import ledger_events
import lns_operations
import number_formats
import python_names
import rules

from study.cli.entry import GROUPS, build_parser
from study.config.claims import AmendmentConfig, ClaimConfig
from study.config.study import RowConfig, StudyConfig
from trainers.config.data import DATA
from trainers.config.loss import MetricConfig
from trainers.config.model import ARGUMENTS
from trainers.config.validation import show

Field = dataclasses.Field[Any]
ROWS = "rows[]"
PARTS = ("mlflow sync", "mlflow verify")
"""Commands of two words that the page of commands describes."""


def attributes(config: type) -> dict[str, str]:
    """Return what the ``Attributes:`` of a docstring say, by name."""
    texts = [inspect.getdoc(base) or "" for base in config.__mro__]
    listed = "\n".join(text.partition("Attributes:\n")[2] for text in texts)
    entries = re.findall(r"^    (\w[\w, ]*): (.*\n?(?: {8}.*\n?)*)", listed, re.MULTILINE)
    return {name: plain(text) for names, text in entries for name in names.split(", ")}


def plain(text: str) -> str:
    """Convert a docstring's reStructuredText to one line of Markdown for a table cell."""
    joined = " ".join(text.split())
    without_roles = re.sub(r":\w+:(`[^`]*`)", r"\1", joined)
    return without_roles.replace("``", "`").replace("|", r"\|")


def is_config(default: object) -> bool:
    return dataclasses.is_dataclass(default) and not isinstance(default, type)


def default_of(field: Field) -> Any:
    """Return a field's default; ``dataclasses.MISSING`` for one that has to be given."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def row(prefix: str, field: Field, meanings: dict[str, str], heard: list[tuple[str, str]]) -> str:
    key, kind = f"{prefix}{field.name}", str(field.type).replace("|", r"\|")
    value = default_of(field)
    default = "must be given" if value is dataclasses.MISSING else f"`{show(value)}`"
    rule = key_rules.rule_of(key, kind, heard)
    return f"| `{key}` | `{kind}` | {default} | {rule} | {meanings.get(field.name, '')} |"


def sections(config: type, prefix: str = "", of: str = "") -> Iterator[str]:
    """Yield a table of the keys of a config, then the sections of the configs in it.

    Args:
        config: its class.
        prefix: what its keys begin with.
        of: what else the title says.
    """
    fields = dataclasses.fields(config)
    nested = [
        (field.name, type(default_of(field))) for field in fields if is_config(default_of(field))
    ]
    meanings = attributes(config)
    summary = plain((inspect.getdoc(config) or "").split("\n\n")[0])
    names = {name for name, _ in nested}
    heard = key_rules.asked(config)
    rows = [row(prefix, field, meanings, heard) for field in fields if field.name not in names]
    title = f"`{prefix.removesuffix('.')}`{of}" if prefix else "A study"
    yield "\n".join(
        [
            f"## {title}",
            summary,
            "",
            "| key | type | default | rule | meaning |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    for name, inner in nested:
        yield from sections(inner, f"{prefix}{name}.")


def arguments(part: str, kinds: Mapping[str, type]) -> Iterator[str]:
    """Yield the sections of the arguments that our models or data sets take."""
    for kind in dict.fromkeys(kinds.values()):
        takers = " and ".join(f"`{name}`" for name in kinds if kinds[name] is kind)
        if dataclasses.fields(kind):
            yield from sections(kind, f"trial.{part}.args.", f" of {takers}")


def configuration() -> str:
    """Return the page of config keys."""
    head = (
        "# Configuration\nEvery key of a study's YAML file, with its type, its default and its"
        " rule. A command changes a key by `key=value`. If the type has None, null leaves the key"
        " out.\n[Which keys go together](compatibility.md) has the rules about several keys."
    )
    return (
        "\n\n".join(
            [
                head,
                *sections(StudyConfig),
                *sections(RowConfig, f"{ROWS}."),
                *sections(ClaimConfig, "claims[]."),
                *sections(AmendmentConfig, "amendments[]."),
                *sections(MetricConfig, "trial.metrics.NAME."),
                *arguments("model", ARGUMENTS),
                *arguments("data", {name: info.arguments for name, info in DATA.items()}),
            ]
        )
        + "\n"
    )


def help_of(*words: str) -> str:
    """Return what ``lns-study WORDS --help`` prints."""
    out = io.StringIO()
    plain_terminal = mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"})
    with plain_terminal, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        build_parser().parse_args([*words, "--help"])
    return out.getvalue().strip()


def commands() -> str:
    """Return the page of commands."""
    names = [name for group in GROUPS.values() for name in group]
    parts = [f"## {name}\n```text\n{help_of(*name.split())}\n```" for name in [*names, *PARTS]]
    return "\n\n".join([f"# Commands\n```text\n{help_of()}\n```", *parts]) + "\n"


PAGES = {
    "configuration.md": configuration,
    "compatibility.md": rules.page,
    "commands.md": commands,
    "ledger.md": ledger_events.page,
    "formats.md": number_formats.page,
    "operations.md": lns_operations.page,
    "python.md": python_names.page,
}
"""The generated pages and their functions."""


def write(folder: Path) -> None:
    """Write the pages into a folder, where they have changed."""
    for name, make in PAGES.items():
        path, text = folder / name, make()
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
