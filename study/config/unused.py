"""Keys that mean nothing to a trial, or to a study, whose other keys leave them without a use.

Two trials that differ in such a key alone do the same work: it would be trained twice and compared
as if it were different. A row that sets one itself is refused when a study is made; one that
inherits it is not (a float32 row beside LNS rows, all under ``precision.accumulation: float32``),
but two rows that differ in nothing else are one. A study that exists keeps what it says: ids of
trials are made of all keys (:func:`study.plan.identity.trial_id`).

To a loop of the user's own every key of a trial is a value that it may use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from study.config.keys import apply, lookup
from study.config.search import SearchConfig
from study.config.study import StudyConfig
from trainers.config import TrialConfig
from trainers.config.validation import show


@dataclass(frozen=True, kw_only=True)
class Unused:
    """A key of a trial that means nothing beside some values of others.

    Attributes:
        key: dotted key.
        others: dotted keys that decide whether it means something.
        when: whether it means nothing to a trial.
        because: the reason.
    """

    key: str
    others: tuple[str, ...]
    when: Callable[[TrialConfig], bool]
    because: str


def _has_codes(config: TrialConfig) -> bool:
    """Tell whether a trial's parameters are LNS codes."""
    return config.precision.lns_format is not None and config.precision.scope == "everywhere"


UNUSED: tuple[Unused, ...] = (
    Unused(
        key="precision.accumulation",
        others=("precision.format",),
        when=lambda c: c.precision.lns_format is None,
        because="sums of products are float32",
    ),
    Unused(
        key="precision.update_arithmetic",
        others=("precision.format", "precision.scope"),
        when=lambda c: not _has_codes(c),
        because="the parameters are no LNS codes",
    ),
    Unused(
        key="precision.scope",
        others=("precision.format",),
        when=lambda c: c.precision.lns_format is None,
        because="only LNS has scopes",
    ),
    Unused(
        key="layout.schedule",
        others=("layout.pp",),
        when=lambda c: c.layout.pp == 1,
        because="there are no stages to schedule",
    ),
    Unused(
        key="layout.pairwise",
        others=("workers", "layout.micro_batches"),
        when=lambda c: c.layout.replicas(c.workers) * c.layout.micro_batches == 1,
        because="a batch is one part, which is added to nothing",
    ),
    Unused(
        key="wire.sum",
        others=("workers", "layout.pp", "layout.tp"),
        when=lambda c: c.layout.replicas(c.workers) == 1,
        because="no gradient travels where there is one replica",
    ),
    Unused(
        key="profile.ranks",
        others=("profile.steps",),
        when=lambda c: not c.profile.steps,
        because="no step is recorded",
    ),
    Unused(
        key="gpus",
        others=("device", "workers"),
        when=lambda c: c.device == "cpu" or c.workers > 1,
        because="only the worker of a one-worker trial on a GPU takes a share of one",
    ),
)
"""The keys of a trial that may mean nothing."""

SCHEDULED: dict[str, tuple[str, ...]] = {
    "grace_period": ("asha", "hyperband", "median"),
    "reduction_factor": ("asha", "hyperband", "halving"),
    "perturbation_interval": ("pbt", "pb2"),
    "quantile_fraction": ("pbt", "pb2"),
    "resample_probability": ("pbt",),
}
"""Keys of a search, and the schedulers that they mean something to."""


def unused(config: TrialConfig) -> list[Unused]:
    """Return the keys that depart from their default and mean nothing to the trial."""
    if config.own_loop:
        return []
    values, defaults = config.to_dict(), TrialConfig().to_dict()
    return [
        each
        for each in UNUSED
        if lookup(values, each.key) != lookup(defaults, each.key) and each.when(config)
    ]


def effective(config: TrialConfig) -> dict[str, Any]:
    """Return a trial's nested dict with the keys that mean nothing to it at their defaults."""
    defaults = TrialConfig().to_dict()
    return apply(
        config.to_dict(), {each.key: lookup(defaults, each.key) for each in unused(config)}
    )


def check_unused(
    study: StudyConfig,
    sets: Mapping[str, set[str]],
    make: Callable[[str], TrialConfig],
    say: Callable[[str], None],
) -> None:
    """Refuse keys of a new study's rows and search that mean nothing, and name those of its base.

    A base trial's key may be there for other rows, or for another command, so it is only named.

    Args:
        study: the config.
        sets: dotted keys that each row sets itself, by its label.
        make: makes a row's trial.
        say: prints a line for the user.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    searched = {key for domain in study.parsed_space.domains for key in domain.sets}
    keys = {each.key for each in UNUSED}
    for label in [label for label, own in sets.items() if own & keys]:
        config = make(label)
        for each in unused(config):
            if each.key in sets[label] and not {each.key, *each.others} & searched:
                raise ValueError(
                    f"row {label!r}: {_why(each, config)}; leave {each.key} out of the row"
                )
    for each in unused(study.trial):
        if not {each.key, *each.others} & searched.union(*sets.values()):
            say(f"trial.{_why(each, study.trial)}.")
    search = study.search
    for key, schedulers in SCHEDULED.items():
        value = getattr(search, key)
        if value != getattr(SearchConfig, key) and search.scheduler not in schedulers:
            raise ValueError(
                f"search.{key}={show(value)} with search.scheduler={search.scheduler}: means"
                f" nothing to it; leave it out, or use one of {', '.join(schedulers)}"
            )
    if study.insecure and study.address is None:
        raise ValueError(
            "insecure=true without address: this machine's Ray asks for a token of its own; leave"
            " it out, or name the cluster, address=host:port"
        )


def _why(each: Unused, config: TrialConfig) -> str:
    """Return the values of a key and of those that leave it without a use, and the reason."""
    first, *others = [
        f"{key}={show(lookup(config.to_dict(), key))}" for key in (each.key, *each.others)
    ]
    return f"{first} with {', '.join(others)}: {each.because}, so it means nothing"
