"""Nested dicts: removing keys, and digests that ledgers keep."""

from __future__ import annotations

from typing import Any

import pytest

from study.config.keys import OUTSIDE, sha256_of, without

pytestmark = pytest.mark.unit


def test_what_changes_no_result_is_left_out_of_a_copy() -> None:
    trial: dict[str, Any] = {"gpus": 0.5, "data": {"name": "mnist", "root": "/data"}, "epochs": 3}
    assert without(trial, *OUTSIDE) == {"data": {"name": "mnist"}, "epochs": 3}
    assert trial["data"]["root"] == "/data"
    assert without({"data": None}, *OUTSIDE) == {"data": None}


def test_a_digest_is_that_of_stored_studies() -> None:
    """Ids of trials and statements in ledgers are made with it."""
    first = sha256_of({"b": [1, 2.5], "a": {"é": None}})
    assert first == sha256_of({"a": {"é": None}, "b": [1, 2.5]})
    assert first == "5378cdf8509c1d5d62ed4534dc366df05a1c87b7cf681fa2c6ac69a6a31aee6b"
