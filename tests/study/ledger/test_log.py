"""The ledger survives torn lines, repeats, two writers and clock changes, and detects damage of any
kind."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.errors import UserError
from study.ledger.events import Event
from study.ledger.lines import seal
from study.ledger.lock import LOCK, is_locked
from study.ledger.log import (
    FILE,
    Follower,
    Ledger,
    LedgerError,
    LedgerGoneError,
    make_header,
    open_ledger,
    read_ledger,
)
from study.tracking.writer import tracking_lock
from tests.mounts import mount, mounted, unmount

REPORTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.floats(allow_nan=False)), max_size=30
)


def write(folder: Path, reports: list[tuple[str, int, float]]) -> list[bool]:
    with Ledger(folder) as ledger:
        return [
            ledger.append(
                {"event": "report", "trial": trial, "epoch": epoch, "metrics": {"x": value}}
            )
            for trial, epoch, value in reports
        ]


@given(REPORTS, REPORTS)
def test_the_first_report_of_each_epoch_is_kept_across_writers(
    first: list[Any], second: list[Any]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new = [*write(folder, first), *write(folder, second)]
        expected: dict[tuple[str, int], float] = {}
        for trial, epoch, value in [*first, *second]:
            expected.setdefault((trial, epoch), value)
        events = read_ledger(folder)
        assert {
            (event["trial"], event["epoch"]): event["metrics"]["x"] for event in events
        } == expected
        assert len(events) == len(expected) == sum(new)


def test_a_password_in_the_error_of_a_trial_is_not_kept(tmp_path: Path) -> None:
    """A database's client may show the whole address, which a loop got from the environment."""
    heard: list[Event] = []
    with Ledger(tmp_path) as ledger:
        ledger.listen(heard.append)
        for event in ("failed", "restarted", "relieved"):
            error = f"OperationalError: {event}: postgresql://ada:pa-ss@host/db is away"
            ledger.append({"event": event, "trial": "a", "error": error, "relief": {}})
    assert b"pa-ss" not in (tmp_path / FILE).read_bytes()
    assert all("postgresql://ada:***@host/db is away" in event["error"] for event in heard)


def killed(folder: Path) -> None:
    """The last writer did not end in order: its lock file does not describe its lines."""
    (folder / LOCK).write_text('{"pid": 1, "host": "gone"}')


@given(REPORTS.filter(bool), st.floats(0, 1))
def test_a_ledger_of_a_killed_writer_cut_at_any_byte_is_a_beginning_of_itself(
    reports: list, fraction: float
) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, reports)
        killed(folder)
        whole, content = read_ledger(folder), (folder / FILE).read_bytes()
        cut = int(fraction * len(content))
        (folder / FILE).write_bytes(content[:cut])
        lines = content[:cut].count(b"\n")
        left = read_ledger(folder)
        assert left == whole[: len(left)]
        assert lines <= len(left) + 1 <= lines + 1 or not left  # the header is a line too
        write(folder, [("z", 99, 1.0)])
        after = read_ledger(folder)
        assert after[:-1] == left
        assert after[-1]["trial"] == "z"
        assert open_ledger(folder).damage == []


@given(st.binary(max_size=200))
def test_garbage_behind_the_last_line_is_a_torn_line_or_damage(garbage: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [("a", 1, 1.0)])
        with (folder / FILE).open("ab") as file:
            file.write(garbage)
        assert [event["epoch"] for event in read_ledger(folder)] == [1]
        if b"\n" in garbage and garbage[: garbage.rindex(b"\n")].strip():
            with pytest.raises(ValueError, match=r"is damaged: line \d+: is damaged"):
                Ledger(folder)
        else:
            write(folder, [("a", 2, 2.0)])
            assert [event["epoch"] for event in read_ledger(folder)] == [1, 2]


EVENTS: list[Event] = [
    {"event": "planned", "ledger": "0123456789ab", "trials": []},
    {"event": "started", "trial": "a"},
    {"event": "report", "trial": "a", "epoch": 1, "metrics": {"x": 0.5}},
    {"event": "report", "trial": "a", "epoch": 2, "metrics": {"x": 0.25}},
    {"event": "finished", "trial": "a", "metrics": {"test/error": 0.125}},
    {"event": "ended", "outcome": "finished"},
]


def made(folder: Path) -> list[bytes]:
    """The lines of a small ledger, header first."""
    with Ledger(folder) as ledger:
        for event in EVENTS:
            ledger.append_all([event])
    return (folder / FILE).read_bytes().splitlines(keepends=True)


def flip(line: bytes, place: int, bit: int) -> bytes:
    place %= len(line)
    return line[:place] + bytes([line[place] ^ 1 << bit]) + line[place + 1 :]


FAULTS = {
    "damaged": lambda lines, at, place, bit: [
        *lines[:at],
        flip(lines[at], place, bit),
        *lines[at + 1 :],
    ],
    "emptied": lambda lines, at, place, bit: [*lines[:at], b"\n", *lines[at + 1 :]],
    "zeroed": lambda lines, at, place, bit: [
        *lines[:at],
        bytes(len(lines[at]) - 1) + b"\n",
        *lines[at + 1 :],
    ],
    "cut out": lambda lines, at, place, bit: lines[:at] + lines[at + 1 :],
    "cut short": lambda lines, at, place, bit: [
        *lines[:at],
        lines[at][: place % (len(lines[at]) - 1)] + b"\n",
        *lines[at + 1 :],
    ],
    "ended before": lambda lines, at, place, bit: lines[:at],
    "doubled": lambda lines, at, place, bit: [*lines[: at + 1], *lines[at:]],
    "doubled later": lambda lines, at, place, bit: [*lines, lines[at]],
    "swapped": lambda lines, at, place, bit: (
        [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]] if at else lines[::-1]
    ),
}


@given(
    st.sampled_from(sorted(FAULTS)),
    st.integers(0, len(EVENTS)),
    st.integers(0, 10**4),
    st.integers(0, 7),
)
def test_a_line_damaged_cut_swapped_or_doubled_is_seen_and_nobody_writes_on(
    fault: str, at: int, place: int, bit: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = made(folder)
        whole = read_ledger(folder)
        (folder / FILE).write_bytes(b"".join(FAULTS[fault](lines, at, place, bit)))
        found = open_ledger(folder)
        assert found.damage
        assert all(event in whole for event in found.events)
        # in order, each once
        assert found.events == [event for event in whole if event in found.events]
        before = (folder / FILE).read_bytes()
        with pytest.raises(ValueError, match=r"is damaged: line \d+.*doctor .* --repair"):
            Ledger(folder)
        assert open_ledger(folder) == found
        assert (folder / FILE).read_bytes() == before


@given(st.integers(0, len(EVENTS)), st.integers(0, 10**4), st.integers(0, 7))
def test_a_damaged_line_takes_no_other_with_it_and_is_named(at: int, place: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = made(folder)
        whole = read_ledger(folder)
        lines[at] = flip(lines[at][:-1], place, bit).replace(b"\n", b" ") + b"\n"
        (folder / FILE).write_bytes(b"".join(lines))
        found = open_ledger(folder)
        (damage,) = found.damage
        assert (damage.line, damage.number) == (at + 1, at + 1)
        assert found.events == (whole[: at - 1] + whole[at:] if at else whole)


def test_what_a_damaged_line_still_says_is_told(tmp_path: Path) -> None:
    lines = made(tmp_path)
    lines[3] = lines[3].replace(b"0.5", b"0.7")
    lines[5] = lines[5].replace(b"finished", b"finiXhed")
    (tmp_path / FILE).write_bytes(b"".join(lines))
    assert [str(damage) for damage in open_ledger(tmp_path).damage] == [
        "line 4: is damaged (report, trial a, epoch 1)",
        "line 6: is damaged (finiXhed, trial a)",
    ]


def test_a_ledger_that_is_gone_is_not_new(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match="is damaged: line 1: number 1 is missing here"):
        Ledger(tmp_path)


def version_1(events: list[Event]) -> bytes:
    return b"".join(json.dumps(event | {"time": 1.0}).encode() + b"\n" for event in events)


def test_a_ledger_of_version_1_is_read_and_goes_on_checked_under_its_id(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(version_1(EVENTS[:3]))
    with Ledger(tmp_path) as ledger:
        assert ledger.id == "0123456789ab"
        assert [event["event"] for event in ledger.history] == ["planned", "started", "report"]
        ledger.append_all(EVENTS[3:])
    found = open_ledger(tmp_path)
    assert [event["event"] for event in found.events] == [event["event"] for event in EVENTS]
    assert (found.id, found.damage, found.number, found.checked) == ("0123456789ab", [], 7, True)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join(lines[:1] + lines[2:]))
    # its header has the number of earlier lines
    assert [damage.number for damage in open_ledger(tmp_path).damage] == [3]


def test_a_torn_line_of_version_1_is_no_damage_and_a_damaged_one_is(tmp_path: Path) -> None:
    torn = json.dumps(EVENTS[2] | {"time": 1.0}).encode()[:40] + b"\n"
    (tmp_path / FILE).write_bytes(version_1(EVENTS[:2]) + torn + version_1(EVENTS))
    assert open_ledger(tmp_path).damage == []
    (tmp_path / FILE).write_bytes(version_1(EVENTS[:2]) + torn + version_1(EVENTS[3:]))
    assert list(map(str, open_ledger(tmp_path).damage)) == ["line 3: is damaged (report, trial a)"]
    (tmp_path / FILE).write_bytes(b"x" + version_1(EVENTS))
    with pytest.raises(ValueError, match="line 1: is damaged"):
        Ledger(tmp_path)


def test_parts_that_begin_with_a_header_of_their_own_make_one_ledger(tmp_path: Path) -> None:
    lines = made(tmp_path)
    second = [seal(make_header("0123456789ab", 2.0), 8), seal({"event": "planned", "time": 2.0}, 9)]
    with Ledger(tmp_path) as ledger:
        second[0] = seal(make_header(ledger.id, 2.0), 8)
    (tmp_path / FILE).write_bytes(b"".join(lines + second))
    found = open_ledger(tmp_path)
    assert (found.damage, found.number, len(found.events)) == ([], 9, 7)
    second[0] = seal(make_header("another", 2.0), 8)
    (tmp_path / FILE).write_bytes(b"".join(lines + second))
    assert list(map(str, open_ledger(tmp_path).damage)) == [
        "line 8: begins another ledger, another"
    ]


def test_times_are_as_far_apart_as_events_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with Ledger(tmp_path) as ledger:
        ledger.append({"event": "started", "trial": "a"})
        for epoch, jump in enumerate((-3600.0, 86400.0), 1):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            ledger.append({"event": "report", "trial": "a", "epoch": epoch, "metrics": {}})
    times = [event["time"] for event in read_ledger(tmp_path)]
    assert times == sorted(times)
    assert times[-1] - times[0] < 600


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_has_says_who_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with Ledger(tmp_path):
        monkeypatch.setattr(fcntl, "flock", failing(code))
        assert is_locked(tmp_path)
        with pytest.raises(
            ValueError,
            match=f"process {os.getpid()} on {socket.gethostname()} is running this study",
        ):
            Ledger(tmp_path)


def test_a_storage_without_locks_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(ValueError, match=r"gives no lock \(No locks available\)"):
        Ledger(tmp_path)
    assert not is_locked(tmp_path)
    with pytest.raises(UserError, match="gives no lock"), tracking_lock(tmp_path, patience=0.0):
        pass


def test_a_lock_of_version_1_names_its_process(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        with pytest.raises(ValueError, match="process 4711 is running this study"):
            Ledger(tmp_path)


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


class Stale:
    """A file that its server no longer knows, as with NFS."""

    def __init__(self, file: io.FileIO) -> None:
        self.tell, self.fileno, self.close = file.tell, file.fileno, file.close

    def write(self, content: bytes) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    truncate = write


def test_a_stale_file_is_opened_again_where_it_is_as_we_left_it(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.append_all(EVENTS[:2])
        ledger._file = Stale(ledger._file)  # type: ignore[assignment]
        ledger.append_all(EVENTS[2:4])
        assert is_locked(tmp_path)
        kinds = [event["event"] for event in read_ledger(tmp_path)]
        assert kinds == ["planned", "started", "report", "report"]
        (tmp_path / FILE).write_bytes(b"something else")
        ledger._file = Stale(ledger._file)  # type: ignore[assignment]
        with pytest.raises(LedgerError, match="was cut by another process"):
            ledger.append_all(EVENTS[4:])
    assert (tmp_path / FILE).read_bytes() == b"something else"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        Ledger(tmp_path),
        pytest.raises(ValueError, match=r"process \d+ on \S+ is running this study"),
    ):
        Ledger(tmp_path)
    Ledger(tmp_path).close()


def test_listeners_hear_an_event_after_it_is_on_disk(tmp_path: Path) -> None:
    heard: list[bool] = []
    with Ledger(tmp_path) as ledger:
        ledger.listen(lambda event: heard.append(event in read_ledger(tmp_path)))
        ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {}})
        ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {}})
    assert heard == [True]


def test_an_empty_folder_has_no_events(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []


def test_a_ledger_that_cannot_be_written_keeps_what_it_has_and_takes_nothing_behind_a_gap(
    tmp_path: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger(tmp_path) as ledger:
        assert ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {}})
        before = (tmp_path / FILE).read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                ledger.append({"event": "report", "trial": "a", "epoch": 2, "metrics": {}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(OSError, match="too large"):
            ledger.append({"event": "finished", "trial": "a", "metrics": {}})
    assert (tmp_path / FILE).read_bytes() == before
    assert write(tmp_path, [("a", 1, 0.0), ("a", 2, 0.0)]) == [False, True]


@pytest.mark.parametrize("of", ["its storage", "its folder"])
def test_a_storage_that_is_unmounted_takes_no_more_events(tmp_path: Path, of: str) -> None:
    """The former mount point stays empty, and the copy has every line; mounted again, it
    continues."""
    (disk := tmp_path / "disk").mkdir()
    storage = tmp_path / "storage"
    folder = storage / "study"
    place = storage if of == "its storage" else folder
    place.mkdir(parents=True)
    with mounted(place, disk):
        with Ledger(folder) as ledger:
            ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {"x": 1.0}})
            lines = (folder / FILE).read_bytes()
            unmount(place)
            with pytest.raises(LedgerGoneError, match="unmounted") as refused:
                ledger.append({"event": "report", "trial": "a", "epoch": 2, "metrics": {"x": 1.0}})
        assert list(place.iterdir()) == []
        named = re.findall(
            rf"last complete copy of the ledger is (\S+/{FILE}):", str(refused.value)
        )
        assert Path(named[0]).read_bytes() == lines
        shutil.rmtree(Path(named[0]).parent)
        mount(place, disk)
        assert write(folder, [("a", 1, 1.0), ("a", 2, 1.0)]) == [False, True]


def vanish(folder: Path, how: str) -> Path | None:
    """Take a study's folder away as users do; return the ledger's new place, if any."""
    elsewhere = folder.with_name("elsewhere")
    if how == "removed":
        shutil.rmtree(folder)
        return None
    folder.rename(elsewhere)
    if how == "replaced":
        write(folder, [("b", 1, 0.5)])
    return elsewhere / FILE


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_is_removed_moved_or_replaced_takes_no_more_events(
    tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "study"
    with Ledger(folder) as ledger:
        ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {"x": 1.0}})
        lines = (folder / FILE).read_bytes()
        now = vanish(folder, how)
        with pytest.raises(LedgerGoneError) as refused:
            ledger.append({"event": "report", "trial": "a", "epoch": 2, "metrics": {"x": 1.0}})
        with pytest.raises(LedgerGoneError):
            ledger.append({"event": "report", "trial": "a", "epoch": 3, "metrics": {"x": 1.0}})
    named = [Path(word.rstrip(",:")) for word in str(refused.value).split() if FILE in word]
    copy = named[-1]
    assert copy.read_bytes() == lines
    assert now is None or copy == now
    assert folder.exists() == (how == "replaced")
    if how == "replaced":
        assert [event["trial"] for event in read_ledger(folder)] == ["b"]


@pytest.mark.parametrize("how", ["cut", "written"])
def test_a_ledger_that_another_process_changes_takes_no_more_events(
    tmp_path: Path, how: str
) -> None:
    """Lines after a gap would be lost, and the study would end as if all were well."""
    with Ledger(tmp_path) as ledger:
        ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {"x": 1.0}})
        lines = (tmp_path / FILE).read_bytes()
        changed = lines[:-20] if how == "cut" else lines + b"x\n"
        (tmp_path / FILE).write_bytes(changed)
        for epoch in (2, 3):
            with pytest.raises(LedgerError, match=f"was {how} by another process.* --repair"):
                ledger.append(
                    {"event": "report", "trial": "a", "epoch": epoch, "metrics": {"x": 1.0}}
                )
    assert (tmp_path / FILE).read_bytes() == changed


def test_a_lock_that_is_removed_lets_no_two_processes_write(tmp_path: Path) -> None:
    with Ledger(tmp_path) as first:
        first.append({"event": "capacity", "cpus": 1})
        (tmp_path / LOCK).unlink()
        with Ledger(tmp_path) as second:
            second.append({"event": "capacity", "cpus": 2})
            with pytest.raises(LedgerGoneError, match="another process could write"):
                first.append({"event": "capacity", "cpus": 3})
    assert [event["cpus"] for event in open_ledger(tmp_path).events] == [1, 2]
    assert not open_ledger(tmp_path).damage


def test_who_follows_a_ledger_reads_no_other_that_takes_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    write(folder, [("a", 1, 1.0)])
    follower = Follower(folder)
    assert [event["trial"] for event in follower.poll()] == ["a"]
    folder.rename(tmp_path / "moved")
    write(folder, [("b", epoch, 1.0) for epoch in range(9)])
    assert follower.poll() == []
