"""Compared studies: keys that differ, and other data."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from study.config import StudyConfig
from study.report.compare import compare, verdict
from tests.study.report.test_compare import made_up

Tiny = Callable[..., StudyConfig]


def test_the_keys_in_which_matched_trials_differ_are_named(tiny: Tiny) -> None:
    rows = ("rows=[{label: a}, {label: b, overrides: {epochs: 2}}]", "baseline=null")
    first = made_up(tiny("first", *rows, "seeds=[0,1]"))
    second = made_up(tiny("second", *rows, "seeds=[0,1]", "model.hidden=[7]", "trial.epochs=4"))
    found = compare(first, second)
    assert found.matched_by == "row"
    assert found.differing == {"model.hidden": "[16] and [7]", "epochs": "3 and 4"}
    assert verdict(found).endswith(
        "; matched trials differ in epochs (3 and 4), model.hidden ([16] and [7])"
    )
    assert "differ in" not in verdict(compare(first, made_up(tiny("third", *rows))))


def test_studies_of_other_data_are_not_subtracted(tiny: Tiny) -> None:
    first = made_up(tiny("first"))
    of_mnist = "trial.data={name: mnist, validation_size: null, train_size: null}"
    with pytest.raises(ValueError, match="have other data, digits and mnist, and figures of other"):
        compare(first, made_up(tiny("second", of_mnist)))
    lstm = "trial.model={name: lstm, hidden: [512]}", "rows=[{label: a}]", "baseline=null"
    lengths = [
        made_up(tiny(f"of-{n}", f"trial.data={{name: copy, args: {{length: {n}}}}}", *lstm))
        for n in (5, 7)
    ]
    with pytest.raises(ValueError, match=r"copy \{length: 5\} and copy \{length: 7\}"):
        compare(*lengths)
    digits = {"name": "digits", "args": {}, "identity": "", "train": 1, "validation": 1, "test": 1}
    for state, digest in ((first, "a" * 64), (other := made_up(tiny("other")), "b" * 64)):
        state.plan["data"] = [digits | {"digest": digest, "files": digest, "root": None}]
    with pytest.raises(ValueError, match="files of data 'digits' are not the same"):
        compare(first, other)
