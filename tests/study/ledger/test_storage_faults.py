"""Studies in an object store that fails, has objects from others, or was changed by hand."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
)
from google.auth.exceptions import RefreshError
from s3fs.errors import translate_boto_error

from study.config import LimitsConfig
from study.engines.control import FILE as CONTROL
from study.engines.control import Control, Wish, ask, clear
from study.errors import UserError
from study.ledger import storage
from study.ledger.lines import seal
from study.ledger.log import FILE, Ledger, make_header, open_ledger
from study.ledger.state import StudyState
from study.ledger.storage import PACKED, fetch_report, is_locked_remotely, study_folders
from tests.study.ledger.test_storage import (
    EPOCHS,
    NAME,
    TIMEOUT,
    await_epoch,
    folder,
    line,
    note,
    noted,
    start,
    url,
    weights,
)
from tests.study.object_store import BUCKET, Line, cache, google, s3, s3_server, store_line
from trainers import object_store
from trainers.checkpoint.files import save_checkpoint
from trainers.checkpoint.remote import fetched, upload
from trainers.object_store import Store, local_folder

PART = 5 << 20
"""The minimum size in bytes of a part of an upload to S3."""


def test_a_repaired_ledger_is_not_mixed_with_packs_of_the_damaged_one(
    folder: Path, url: str, tmp_path: Path
) -> None:
    store = Store(f"{url}/{NAME}")
    with Ledger(folder) as ledger:
        for number in range(PACKED):
            note(ledger, number)
    with Ledger(folder) as ledger:
        note(ledger, -1)
    assert store.names("packs")
    for under in ("ledger", "locks"):
        for name in store.names(under):
            store.remove(f"{under}/{name}")
    store.put("ledger/0000000001.jsonl", (folder / FILE).read_bytes())
    with cache(tmp_path / "other"), Ledger(local_folder(store.url)) as ledger:
        assert ledger.history[-1]["cpus"] == -1
        note(ledger, -2)
        assert noted(ledger.folder) == [*range(PACKED), -1, -2]
    assert noted(folder) == [*range(PACKED), -1, -2]


def test_a_pack_that_cannot_be_written_leaves_no_lock(folder: Path, url: str) -> None:
    store = Store(f"{url}/{NAME}")
    store.put(f"packs/{1:010d}-{PACKED + 1:010d}.jsonl", b"of another ledger")
    with Ledger(folder) as ledger:
        for number in range(PACKED):
            note(ledger, number)
    assert not is_locked_remotely(folder)
    assert noted(folder) == list(range(PACKED))


def test_a_copy_of_lines_that_were_replaced_by_others_as_long_is_fetched_again(
    folder: Path, url: str
) -> None:
    store = Store(f"{url}/{NAME}")

    def put(number: int, cpus: int) -> None:
        event = {"event": "capacity", "time": 1.0, "cpus": cpus, "gpus": 0, "nodes": 1}
        store.put(f"ledger/{number:010d}.jsonl", seal(event, number))

    store.put("ledger/0000000001.jsonl", seal(make_header("0" * 12, 1.0), 1))
    for number in range(2, 9):
        put(number, 10 + number)
    assert noted(folder) == list(range(12, 19))
    for number in range(5, 11):
        put(number, 50 + number)
    assert noted(folder) == [12, 13, 14, *range(55, 61)]


def test_a_reader_at_the_end_of_a_run_misses_no_lines(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(folder)
    note(ledger, 1)
    pieces = storage._pieces

    def pieces_before_the_end(store: Store) -> Any:
        found = pieces(store)
        monkeypatch.setattr(storage, "_pieces", pieces)
        note(ledger, 2)
        ledger.close()
        return found

    monkeypatch.setattr(storage, "_pieces", pieces_before_the_end)
    with cache(tmp_path / "other"):
        other = local_folder(f"{url}/{NAME}")
        assert noted(other) == [1]
        assert noted(other) == [1, 2]


def test_a_reader_that_waits_for_the_store_refuses_no_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that it fetched before the driver's lines do not overwrite them."""
    with Ledger(folder) as ledger:
        note(ledger, 1)
    (folder / FILE).unlink()
    get_all, waits, goes_on = Store.get_all, threading.Event(), threading.Event()

    def slow(self: Store, names: list[str]) -> list[bytes]:
        found = get_all(self, names)
        if threading.current_thread() is reader and any(
            name.startswith("ledger") for name in names
        ):
            waits.set()
            assert goes_on.wait(TIMEOUT)
        return found

    monkeypatch.setattr(Store, "get_all", slow)
    seen: list[list[int]] = []
    reader = threading.Thread(target=lambda: seen.append(noted(folder)))
    reader.start()
    assert waits.wait(TIMEOUT)
    with Ledger(folder) as ledger:
        note(ledger, 2)
    goes_on.set()
    reader.join(TIMEOUT)
    assert seen == [[1, 2]]


@pytest.mark.parametrize(("pids", "lives"), [("elsewhere", True), (None, True), ("here", False)])
def test_a_writer_whose_process_id_may_be_of_elsewhere_is_not_taken_for_dead(
    folder: Path,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pids: str | None,
    lives: bool,
) -> None:
    """Of another container with the host's name, or a version without it (None)."""
    monkeypatch.setattr(storage, "BEAT_SECONDS", 0.3 if lives else 100.0)
    monkeypatch.setattr(storage, "SILENT_SECONDS", TIMEOUT)
    other = {"pid": 1 << 23, "host": socket.gethostname(), "id": "x"}  # no process has this number
    own = storage._pids()
    first = Ledger(folder)
    assert first._remote is not None
    first._remote._note = other | ({"pids": own if pids == "here" else pids} if pids else {})
    name = f"{storage.LOCKS}/{first._remote._name}"
    Store(f"{url}/{NAME}").put(name, json.dumps(first._remote._note).encode())
    with cache(tmp_path / "other"):
        place = local_folder(f"{url}/{NAME}")
        if lives:
            with pytest.raises(ValueError, match="is running this"):
                Ledger(place)
        else:
            Ledger(place).close()
    first.close()


@pytest.mark.parametrize("name", ["ledger/.DS_Store", "ledger/1.jsonl", "packs/x", "locks/x.json"])
def test_what_others_put_among_the_lines_is_left_alone(folder: Path, url: str, name: str) -> None:
    Store(f"{url}/{NAME}").put(name, b"")
    with Ledger(folder) as ledger:
        note(ledger, 1)
    assert noted(folder) == [1]
    assert not is_locked_remotely(folder)


def test_no_name_of_an_object_leads_out_of_the_cache(
    folder: Path, url: str, tmp_path: Path
) -> None:
    with Ledger(folder) as ledger:
        note(ledger, 1)
    store = Store(f"{url}/{NAME}")
    for name in ("../../../../evil", f"/{tmp_path}/evil", "./evil"):
        store.put(f"report/{name}", b"evil")
    store.put("report/figures.json", b"1")
    Store(url).put("../ledger/0000000001.jsonl", b"evil")
    fetch_report(folder)
    assert study_folders(url) == [folder]
    with pytest.raises(ValueError, match=r"checkpoint=.*must be"):
        fetched(f"{url}/../../../../evil")
    assert not list(tmp_path.rglob("evil"))
    assert [path.name for path in (folder / "report").iterdir()] == ["figures.json"]


def test_of_many_objects_those_that_failed_are_asked_for_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:02d}" for number in range(40)]
    store = Store(url, 10.0)
    for name in names:
        store.put(name, name.encode())
    client = object_store._filesystem(url[:5], os.getpid())
    cat_file, chance = client._cat_file, random.Random(0)

    async def flaky(path: str, *arguments: Any, **options: Any) -> Any:
        if chance.random() < 0.3:
            raise OSError(5, "503")
        return await cat_file(path, *arguments, **options)

    monkeypatch.setattr(client, "_cat_file", flaky)
    assert store.get_all(names) == [name.encode() for name in names]
    with pytest.raises(FileNotFoundError):
        store.get_all([*names, "none"])


Failing = Callable[[str, Exception, bool], None]


@pytest.fixture
def failing(s3: Line, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Make S3's next answer to a request an error, before or after the request is done."""
    client = object_store._filesystem("s3://", os.getpid())
    call = client._call_s3

    def fail(method: str, error: Exception, done: bool) -> None:
        errors = [error]

        async def once(asked: str, *arguments: Any, **options: Any) -> Any:
            fails = asked == method and errors
            answer = None if fails and not done else await call(asked, *arguments, **options)
            if fails:
                raise errors.pop()
            return answer

        monkeypatch.setattr(client, "_call_s3", once)

    return fail


@pytest.mark.parametrize("code", ["IncompleteBody", "BadDigest", "400", "SlowDown"])
def test_an_error_of_s3_that_passes_is_no_second_writer(failing: Failing, code: str) -> None:
    store = Store(f"s3://{BUCKET}/x", 10.0)
    error = ClientError({"Error": {"Code": code, "Message": code}}, "PutObject")
    failing("put_object", translate_boto_error(error), False)
    store.put("a", b"1", new=True)
    with pytest.raises(FileExistsError):
        store.put("a", b"2", new=True)


def test_an_upload_in_parts_whose_last_answer_was_lost_is_sent_again(
    failing: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, chunksize=None: PART)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART + 1))
    failing("complete_multipart_upload", EndpointConnectionError(endpoint_url="x"), True)
    store = Store(f"s3://{BUCKET}/x", 10.0)
    store.put_file("a", path)
    assert store.get("a") == path.read_bytes()
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.put_file("b", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("scheme", "error"),
    [
        ("s3", FlexibleChecksumError(error_msg="Expected checksum x")),
        ("s3", CredentialRetrievalError(provider="role", error_msg="timed out")),
        ("gs", RefreshError("timed out")),
    ],
)
def test_content_damaged_on_its_way_and_a_role_that_is_renewed_late_are_asked_for_again(
    scheme: str, error: Exception, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue({"s3": "s3", "gs": "google"}[scheme])
    store = Store(f"{scheme}://{BUCKET}/x", 10.0)
    store.put("a", b"1")
    client = object_store._filesystem(f"{scheme}://", os.getpid())
    cat_file, errors = client.cat_file, [error]

    def once(path: str, *arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return cat_file(path, *arguments, **options)

    monkeypatch.setattr(client, "cat_file", once)
    assert store.get("a") == b"1"


def test_a_fetched_checkpoint_is_as_its_manifest_says(url: str) -> None:
    place = f"{url}/{NAME}/checkpoints/t/000001"
    local_folder(place).parent.mkdir(parents=True)
    save_checkpoint(local_folder(place), {"w": torch.ones(9)}, {"epoch": 1})
    upload(local_folder(place), place)
    store = Store(place)
    tensors = next(name for name in store.names() if name.startswith("tensors-"))
    store.put(tensors, b"damaged")
    assert fetched(place) == local_folder(place)
    (local_folder(place) / tensors).unlink()
    with pytest.raises(ValueError, match=rf"{place}: {tensors} does not match its digest"):
        fetched(place)


def test_a_store_that_refuses_is_told_to_the_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(folder) as ledger:
        note(ledger, 1)

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Access Denied")

        with monkeypatch.context() as other:
            other.setattr(Store, "put", refuse)
            with pytest.raises(UserError, match=r"storage: .*Access Denied; check .* credentials"):
                ask(folder, wish=Wish.STOP)
        with monkeypatch.context() as other:
            other.setattr(Store, "get", refuse)
            with pytest.raises(ValueError, match=r"storage: .*Access Denied; check .* credentials"):
                is_locked_remotely(folder)


@contextmanager
def ended_here(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, together with its children."""
    try:
        yield process
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid)
            for each in (*family.children(recursive=True), family):
                each.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_driver_whose_machine_slept_gives_way_to_the_one_that_took_over(
    url: str, tmp_path: Path
) -> None:
    local = start(tmp_path / "study", str(tmp_path / "local"))
    output, _ = local.communicate(timeout=TIMEOUT)
    assert local.returncode == 0, output
    tensors = (tmp_path / "local" / NAME / "checkpoints").glob(f"*/{EPOCHS:06d}/tensors-*")
    expected = {path.parts[-3]: path.name.removeprefix("tensors-") for path in tensors}
    assert len(expected) == 2

    with ended_here(start(tmp_path / "study", url, tmp_path / "first")) as first:
        await_epoch(first, 3)
        driver = psutil.Process(first.pid)
        asleep = [driver, *driver.children(recursive=True)]
        for process in asleep:
            process.suspend()
        with ended_here(start(tmp_path / "study", url, tmp_path / "second")) as second:
            seen = await_epoch(second, 1)
            assert f"Process {first.pid} on" in seen
            assert "continue from their last checkpoint" in seen
            for process in reversed(asleep):
                process.resume()
            output, _ = first.communicate(timeout=TIMEOUT)
            assert first.returncode not in (0, -signal.SIGKILL), output
            assert "another driver" in output
            assert "Traceback" not in output
            assert not psutil.wait_procs(asleep, timeout=30)[1]
            assert second.poll() is None
            rest, _ = second.communicate(timeout=2 * TIMEOUT)
            assert second.returncode == 0, seen + rest
    assert weights(f"{url}/{NAME}") == expected
    with cache(tmp_path / "second"):
        contents = open_ledger(local_folder(f"{url}/{NAME}"))
    assert not contents.damage
    reports = [(e["trial"], e["epoch"]) for e in contents.events if e["event"] == "report"]
    assert sorted(reports) == [
        (trial, epoch) for trial in sorted(expected) for epoch in range(1, EPOCHS + 1)
    ]


@pytest.mark.parametrize("asked", [Wish.STOP, None])
def test_wishes_that_a_job_keeps_are_the_stores(folder: Path, asked: Wish | None) -> None:
    """A cache may have requests of an earlier run, which another machine has cleared since."""
    with Ledger(folder):
        if asked is not None:
            ask(folder, wish=asked)
        (folder / CONTROL).write_text('{"wish": "cancel"}')
        clear(folder, keep=True)
        control = Control(folder, StudyState(), LimitsConfig())
        assert control.decide().wish == (asked or Wish.RUN)
        clear(folder)
        assert Control(folder, StudyState(), LimitsConfig()).decide().wish == Wish.RUN
