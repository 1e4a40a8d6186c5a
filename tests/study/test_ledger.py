"""The ledger survives what machines do: torn lines anywhere, repeats, two writers."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.ledger import FILE, Ledger, read_ledger

REPORTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.floats(allow_nan=False)), max_size=30)


def write(folder: Path, reports: list[tuple[str, int, float]]) -> list[bool]:
    with Ledger(folder) as ledger:
        return [ledger.append("report", trial=trial, epoch=epoch, metrics={"x": value}) for trial, epoch, value in reports]


@given(REPORTS, REPORTS)
def test_the_first_report_of_each_epoch_is_kept_across_writers(first: list, second: list) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new = [*write(folder, first), *write(folder, second)]
        expected: dict[tuple[str, int], float] = {}
        for trial, epoch, value in [*first, *second]:
            expected.setdefault((trial, epoch), value)
        events = read_ledger(folder)
        assert {(event["trial"], event["epoch"]): event["metrics"]["x"] for event in events} == expected
        assert len(events) == len(expected) == sum(new)


@given(REPORTS.filter(bool), st.floats(0, 1))
def test_a_ledger_cut_at_any_byte_loses_at_most_the_last_line(reports: list, fraction: float) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, reports)
        whole, content = read_ledger(folder), (folder / FILE).read_bytes()
        cut = int(fraction * len(content))
        (folder / FILE).write_bytes(content[:cut])
        lines = content[:cut].count(b"\n")
        left = read_ledger(folder)
        assert left == whole[: len(left)]
        assert lines <= len(left) <= lines + 1
        write(folder, [("z", 99, 1.0)])
        after = read_ledger(folder)
        assert after[:-1] == left
        assert after[-1]["trial"] == "z"


@given(st.binary(max_size=200))
def test_garbage_is_skipped(garbage: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [("a", 1, 1.0)])
        with (folder / FILE).open("ab") as file:
            file.write(garbage)
        write(folder, [("a", 2, 2.0)])
        epochs = [event["epoch"] for event in read_ledger(folder) if event.get("trial") == "a"]
        assert epochs == [1, 2]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(ValueError, match=r"process \d+ is running this study"):
        Ledger(tmp_path)
    Ledger(tmp_path).close()


def test_listeners_hear_an_event_after_it_is_on_disk(tmp_path: Path) -> None:
    heard: list[bool] = []
    with Ledger(tmp_path) as ledger:
        ledger.listen(lambda event: heard.append(event in read_ledger(tmp_path)))
        ledger.append("report", trial="a", epoch=1, metrics={})
        ledger.append("report", trial="a", epoch=1, metrics={})
    assert heard == [True]


def test_an_empty_folder_has_no_events(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []


def test_a_ledger_that_cannot_be_written_keeps_what_it_has_and_takes_nothing_behind_a_gap(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(tmp_path) as ledger:
        assert ledger.append("report", trial="a", epoch=1, metrics={})
        before = (tmp_path / FILE).read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                ledger.append("report", trial="a", epoch=2, metrics={})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(OSError, match="too large"):
            ledger.append("finished", trial="a", metrics={})
    assert (tmp_path / FILE).read_bytes() == before
    assert write(tmp_path, [("a", 1, 0.0), ("a", 2, 0.0)]) == [False, True]
