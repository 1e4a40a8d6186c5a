"""Studies in an object store: one writer, despite failures of the store, the driver or a cache."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from study.config import StudyConfig
from study.engines.control import Wish, ask
from study.ledger import storage
from study.ledger.lock import is_locked
from study.ledger.log import FILE, Ledger, open_ledger
from study.ledger.storage import PACKED, check_storage, fetch_report, study_folders
from study.ledger.studies import condition, find, read
from study.plan.checkpoints import check_checkpoints
from tests.study.conftest import TINY
from tests.study.object_store import BUCKET, SECRET, Line, cache, google, s3, s3_server, store_line
from trainers import object_store
from trainers.checkpoint.files import load_checkpoint, save_checkpoint
from trainers.checkpoint.manifest import STATE, sealed
from trainers.checkpoint.remote import fetched, remote_checkpoints, upload
from trainers.object_store import Store, local_folder

URL = f"s3://{BUCKET}/studies"
NAME = "tiny"
TIMEOUT = 300
EPOCHS = 250


@pytest.fixture
def url(store_line: tuple[str, Line]) -> str:
    """The URL of studies in an empty bucket."""
    return f"{store_line[0]}/studies"


@pytest.fixture
def line(store_line: tuple[str, Line]) -> Line:
    """The connection to that bucket."""
    return store_line[1]


@pytest.fixture
def folder(url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study's cache there; its lock is checked often."""
    monkeypatch.setattr(storage, "BEAT_SECONDS", 0.3)
    monkeypatch.setattr(storage, "SILENT_SECONDS", 2.0)
    return local_folder(f"{url}/{NAME}")


def note(ledger: Ledger, number: int) -> None:
    ledger.append({"event": "capacity", "cpus": number, "gpus": 0, "nodes": 1})


def noted(folder: Path) -> list[int]:
    contents = open_ledger(folder)
    assert not contents.damage
    return [event["cpus"] for event in contents.events]


def test_ray_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gang=train with storage='s3://bucket/x'"):
        StudyConfig(name="x", storage="s3://bucket/x", gang="train")


def test_another_machine_reads_what_one_wrote(folder: Path, url: str, tmp_path: Path) -> None:
    with Ledger(folder) as ledger:
        note(ledger, 1)
        written = (folder / FILE).read_bytes()
        with cache(tmp_path / "other"):
            other = local_folder(f"{url}/{NAME}")
            assert noted(other) == [1]
            assert (other / FILE).read_bytes() == written
            note(ledger, 2)
            assert noted(other) == [1, 2]
            assert is_locked(other)
    with cache(tmp_path / "other"):
        assert not is_locked(other)
        assert study_folders(url) == [other]
        with Ledger(other) as ledger:
            assert [event["cpus"] for event in ledger.history] == [1, 2]
            note(ledger, 3)
    assert noted(folder) == [1, 2, 3]


def test_a_second_driver_is_refused(folder: Path, url: str, tmp_path: Path) -> None:
    with Ledger(folder) as ledger, cache(tmp_path / "other"):
        other = local_folder(f"{url}/{NAME}")
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"process {os.getpid()} .* is running this"):
                Ledger(other)
        note(ledger, 1)
        assert noted(other) == [1]


def test_a_driver_that_was_silent_for_too_long_writes_no_more(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both think that they have the lock; the store's order of lines decides."""
    monkeypatch.setattr(storage, "BEAT_SECONDS", 100.0)
    first = Ledger(folder)
    note(first, 1)
    with cache(tmp_path / "other"):
        other = local_folder(f"{url}/{NAME}")
        with Ledger(other) as second:
            note(second, 2)
            with pytest.raises(OSError, match="another driver continues this study"):
                note(first, 3)
            note(second, 4)
        assert noted(other) == [1, 2, 4]
        first.close()
        assert noted(other) == [1, 2, 4]
    assert noted(folder) == [1, 2, 4]


def test_a_store_that_is_away_holds_the_driver_up_and_doubles_nothing(
    folder: Path, line: Line
) -> None:
    with Ledger(folder) as ledger:
        note(ledger, 1)
        line.cut()
        thread = threading.Thread(target=note, args=(ledger, 2))
        thread.start()
        thread.join(3.0)
        assert thread.is_alive()
        assert (folder / FILE).read_bytes().count(b'"cpus"') == 1
        line.mend()
        thread.join(TIMEOUT)
        note(ledger, 3)
    assert noted(folder) == [1, 2, 3]


def test_waiting_for_a_store_and_for_a_writer_is_said(
    folder: Path,
    url: str,
    line: Line,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(object_store, "QUIET_SECONDS", 0.5)
    store = Store(url)
    store.put("x", b"x")
    line.cut()
    threading.Timer(3.0, line.mend).start()
    assert store.get("x") == b"x"
    said = capfd.readouterr().err
    assert said.count("does not answer") == 1
    assert f"{url}/x does not answer" in said
    monkeypatch.setattr(storage, "BEAT_SECONDS", 100.0)
    with monkeypatch.context() as other:
        other.setattr(storage.socket, "gethostname", lambda: "dead")
        first = Ledger(folder)
    assert capfd.readouterr().err == ""
    with cache(tmp_path / "other"), Ledger(local_folder(f"{url}/{NAME}")):
        assert f"on dead wrote {url}" in capfd.readouterr().err
    first.close()


def test_a_request_whose_answer_was_lost_is_no_second_writer(folder: Path, url: str) -> None:
    store = Store(f"{url}/{NAME}")
    store.put("a", b"mine", new=True)
    store.put("a", b"mine", new=True)
    with pytest.raises(FileExistsError):
        store.put("a", b"other", new=True)


def test_a_cache_that_is_damaged_or_of_another_ledger_is_fetched_again(
    folder: Path, url: str
) -> None:
    with Ledger(folder) as ledger:
        note(ledger, 1)
        note(ledger, 2)
    whole = (folder / FILE).read_bytes()
    lines = whole.splitlines(keepends=True)
    for content in (whole[:-20], b"".join(lines[:2]), b"nonsense\n" + whole, lines[0] + lines[2]):
        (folder / FILE).write_bytes(content)
        assert noted(folder) == [1, 2]
        assert (folder / FILE).read_bytes() == whole
    store = Store(f"{url}/{NAME}")
    for name in store.names():
        store.remove(name)
    (folder / "checkpoints").mkdir()
    with Ledger(folder) as ledger:
        assert not ledger.history
        note(ledger, 3)
    assert noted(folder) == [3]
    assert not (folder / "checkpoints").exists()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the objects whose content is requested."""
    names: list[str] = []
    get_all = Store.get_all

    def noted_get_all(self: Store, wanted: list[str]) -> list[bytes]:
        names.extend(wanted)
        return get_all(self, wanted)

    monkeypatch.setattr(Store, "get_all", noted_get_all)
    return names


def test_a_ledger_of_many_objects_is_fetched_as_a_few_and_only_what_is_new(
    folder: Path, url: str, tmp_path: Path, asked: list[str]
) -> None:
    def lines_fetched() -> list[str]:
        found = [name for name in asked if name.startswith(("ledger/", "packs/"))]
        asked.clear()
        return found

    with Ledger(folder) as ledger:
        for number in range(PACKED):
            note(ledger, number)
        lines_fetched()
        with cache(tmp_path / "other"):
            other = local_folder(f"{url}/{NAME}")
            assert noted(other) == list(range(PACKED))
            assert len(lines_fetched()) == PACKED
            note(ledger, PACKED)
            assert noted(other) == list(range(PACKED + 1))
            # the copy may have the first part of them
            assert lines_fetched() == [
                f"ledger/{number:010d}.jsonl" for number in (PACKED + 1, PACKED + 2)
            ]
    lines_fetched()
    with cache(tmp_path / "third"):
        new = local_folder(f"{url}/{NAME}")
        assert noted(new) == list(range(PACKED + 1))
        assert lines_fetched() == [f"packs/{1:010d}-{PACKED + 2:010d}.jsonl"]
        with Ledger(new) as ledger:
            note(ledger, -1)
    assert noted(folder) == [*range(PACKED + 1), -1]
    assert (folder / FILE).read_bytes() == (new / FILE).read_bytes()


def test_a_ledger_with_lost_lines_is_not_packed(folder: Path, url: str) -> None:
    store = Store(f"{url}/{NAME}")
    with Ledger(folder) as ledger:
        for number in range(PACKED):
            note(ledger, number)
        store.remove("ledger/0000000003.jsonl")
    with pytest.raises(ValueError, match="nothing was started"):
        Ledger(folder)
    assert not store.names("packs")


def test_lines_that_the_store_lost_are_seen(folder: Path, url: str) -> None:
    with Ledger(folder) as ledger:
        for number in range(3):
            note(ledger, number)
    store = Store(f"{url}/{NAME}")
    segments = store.names("ledger")
    for lost in (segments[-1], segments[1]):
        store.remove(f"ledger/{lost}")
        assert open_ledger(folder).damage
        with pytest.raises(ValueError, match="nothing was started"):
            Ledger(folder)


def test_checkpoints_without_a_ledger_are_refused(folder: Path, url: str) -> None:
    Store(f"{url}/{NAME}").put("checkpoints/t/000001/state.json", b"{}")
    with pytest.raises(ValueError, match="has checkpoints, and their ledger is gone"):
        Ledger(folder)


def test_an_upload_that_broke_off_leaves_no_checkpoint(
    folder: Path, url: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = f"{url}/{NAME}/checkpoints/t"
    tensors = {"w": torch.arange(100_000, dtype=torch.float32)}
    local_folder(trial).mkdir(parents=True)
    for epoch in (1, 2):
        save_checkpoint(local_folder(f"{trial}/{epoch:06d}"), tensors, {"epoch": epoch})
    upload(local_folder(f"{trial}/000001"), f"{trial}/000001")
    monkeypatch.setattr(object_store.Store.__init__, "__defaults__", (1.0,))
    line.left = 200_000
    with pytest.raises(OSError, match="000002"):
        upload(local_folder(f"{trial}/000002"), f"{trial}/000002")
    line.mend()
    assert remote_checkpoints(trial) == [f"{trial}/000001"]
    with cache(folder / "other"):
        found = fetched(f"{trial}/000001")
        assert load_checkpoint(found)[0]["w"].equal(tensors["w"])
        tensor_file = next(found.glob("tensors-*"))
        tensor_file.write_bytes(b"damaged")
        assert load_checkpoint(fetched(f"{trial}/000001"))[1] == {"epoch": 1}
        with pytest.raises(OSError, match="000002"):
            fetched(f"{trial}/000002")
    upload(local_folder(f"{trial}/000002"), f"{trial}/000002")
    assert remote_checkpoints(trial)[0] == f"{trial}/000002"


def test_the_stores_report_is_fetched_unless_the_own_one_is_newer(folder: Path, url: str) -> None:
    store = Store(f"{url}/{NAME}")
    store.put("report/figures.json", b"1")
    store.put("report/slots.png", b"1")
    path = folder / "report" / "figures.json"
    fetch_report(folder)
    assert {each.name for each in path.parent.iterdir()} == {"figures.json", "slots.png"}
    os.utime(path, (0, 0))
    store.put("report/figures.json", b"2")
    fetch_report(folder)
    assert path.read_bytes() == b"2"
    os.utime(path, (time.time() + 60, time.time() + 60))
    store.put("report/figures.json", b"3")
    fetch_report(folder)
    assert path.read_bytes() == b"2"


def test_the_checkpoints_of_the_store_are_checked(folder: Path, url: str) -> None:
    store = Store(f"{url}/{NAME}/checkpoints")
    local_folder(f"{store.url}/t").mkdir(parents=True)
    for epoch in (1, 2, 3):
        place = f"{store.url}/t/{epoch:06d}"
        save_checkpoint(local_folder(place), {"w": torch.ones(9)}, {"epoch": epoch})
        upload(local_folder(place), place)
    save_checkpoint(local_folder(f"{store.url}/t/000004"), {"w": torch.ones(9)}, {"epoch": 4})
    store.put(next(name for name in store.names("") if "000001/tensors" in name), b"damaged")
    store.put("t/000002/state.json", b"damaged")
    with cache(folder / "other"):
        found = dict(check_checkpoints(local_folder(f"{url}/{NAME}")))
    assert found == {f"{store.url}/t/{epoch:06d}": epoch == 3 for epoch in (1, 2, 3)}


def test_a_checkpoint_that_would_write_elsewhere_is_not_fetched(folder: Path, url: str) -> None:
    store = Store(f"{url}/{NAME}/checkpoints/t/000001")
    store.put("../w", b"evil")
    store.put("state.json", sealed({"epoch": 1, "files": {"../w": "0"}}).encode())
    with pytest.raises(ValueError, match="must be a name within the checkpoint"):
        fetched(store.url)
    assert not (local_folder(store.url).parent / "w").exists()


def test_a_store_that_overwrites_or_is_not_there_is_refused(s3: Line) -> None:
    check_storage(URL)
    assert Store(URL).names() == []
    s3.change = lambda content: content.replace(b"If-None-Match", b"X-None-Match-")
    with pytest.raises(ValueError, match="overwrites an object that a condition"):
        check_storage(URL)
    with pytest.raises(ValueError, match=r"cannot be written.*bucket must exist"):
        check_storage("s3://no-such-bucket/studies")


def test_a_google_bucket_that_overwrites_or_is_not_there_is_refused(google: Line) -> None:
    place = f"gs://{BUCKET}/studies"
    check_storage(place)
    assert Store(place).names() == []
    google.change = lambda content: content.replace(b"ifGenerationMatch", b"xxGenerationMatch")
    with pytest.raises(ValueError, match="overwrites an object that a condition"):
        check_storage(place)
    with pytest.raises(ValueError, match=r"cannot be written.*GOOGLE_APPLICATION_CREDENTIALS"):
        check_storage("gs://no-such-bucket/studies")


def test_objects_beyond_one_request_and_lists_beyond_one_page(url: str, tmp_path: Path) -> None:
    """101 MiB are uploaded in parts, and 120 objects are listed in pages."""
    store = Store(url)
    large, there, back = os.urandom(101 << 20), tmp_path / "there", tmp_path / "back"
    store.put("large", large, new=True)
    assert store.get("large") == large
    with pytest.raises(FileExistsError):
        store.put("large", large[1:], new=True)
    there.write_bytes(large[::-1])
    store.put_file("large", there)
    store.get_file("large", back)
    assert back.read_bytes() == large[::-1]
    with pytest.raises(FileNotFoundError):
        store.get_file("none", back)
    assert set(tmp_path.iterdir()) >= {there, back}
    assert not list(tmp_path.glob(".*"))
    names = [f"many/{number:03d}/x" for number in range(120)]
    for name in names:
        store.put(name, name.encode())
    assert store.names("many") == [name.removeprefix("many/") for name in names]
    assert Store(f"{url}/many").folders() == [f"{number:03d}" for number in range(120)]
    assert store.get_all(names) == [name.encode() for name in names]
    store.remove(names[0])
    store.remove(names[0])
    assert 0 <= store.age(names[1]) < 60
    with pytest.raises(FileNotFoundError):
        store.get(names[0])


# --------------------------------------------------------------------------------------------------


def start(folder: Path, place: str, other_cache: Path | None = None) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(TINY)
    words = [sys.executable, "-m", "study", "run", "tiny.yaml", "--plain", f"storage={place}",
             "tracking_uri=none", f"trial.epochs={EPOCHS}"]  # fmt: skip
    env = os.environ | ({object_store.CACHE: str(other_cache)} if other_cache else {})
    return subprocess.Popen(
        words, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def await_epoch(process: subprocess.Popen[str], epoch: int) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        found = re.search(rf"epoch (\d+)/{EPOCHS}", line)
        if found and int(found[1]) >= epoch:
            return seen
    raise AssertionError(seen)


def weights(url: str) -> dict[str, str]:
    """The digest of each trial's last weights."""
    names = Store(url).names("checkpoints")
    return {
        name.split("/")[0]: name.rpartition("tensors-")[2]
        for name in names
        if f"/{EPOCHS:06d}/tensors-" in name
    }


def undisturbed(folder: Path, storage: Path) -> dict[str, str]:
    """The weights that :func:`weights` must return, from an undisturbed study."""
    process = start(folder, str(storage))
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    return {
        path.parent.parent.name: path.name.removeprefix("tensors-")
        for path in (storage / NAME / "checkpoints").glob(f"*/{EPOCHS:06d}/tensors-*")
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_driver_that_is_killed_goes_on_from_an_empty_cache_after_the_store_was_away(
    url: str, line: Line, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "study", tmp_path / "local")
    assert len(expected) == 2

    first = start(tmp_path / "study", url)
    await_epoch(first, 3)
    second = start(tmp_path / "study", url, tmp_path / "second")
    output, _ = second.communicate(timeout=TIMEOUT)
    assert second.returncode == 2, output
    assert f"process {first.pid} " in output
    line.cut()
    time.sleep(60.0)
    assert first.poll() is None
    line.mend()
    time.sleep(3.0)  # some more epochs
    first.send_signal(signal.SIGKILL)
    first.wait()

    third = start(tmp_path / "study", url, tmp_path / "third")
    seen = await_epoch(third, 1)
    assert "2 continue from their last checkpoint" in seen
    with cache(tmp_path / "fourth"):
        folder = find(NAME, url)
        assert condition(folder, read(folder)) == "running"
        ask(folder, wish=Wish.CANCEL)
    output, _ = third.communicate(timeout=TIMEOUT)
    assert "asked to cancel" in output
    with cache(tmp_path / "fourth"):
        assert condition(folder, read(folder)) == "stopped"
        done = [e["epoch"] for e in open_ledger(folder).events if e["event"] == "report"]
    fourth = os.environ | {object_store.CACHE: str(tmp_path / "fourth")}
    resume = [sys.executable, "-m", "study", "run", "--resume", NAME, "--storage", url]
    last = subprocess.run(resume, env=fourth, capture_output=True, text=True, timeout=TIMEOUT)
    assert last.returncode == 0, last
    assert weights(f"{url}/{NAME}") == expected
    with cache(tmp_path / "fourth"):
        contents = open_ledger(folder)
    assert not contents.damage
    reports = [(e["trial"], e["epoch"]) for e in contents.events if e["event"] == "report"]
    assert sorted(reports) == sorted(
        {(trial, n) for trial in expected for n in range(1, EPOCHS + 1)}
    )
    assert len(done) < 2 * EPOCHS
    assert any(name.startswith("report/") for name in Store(f"{url}/{NAME}").names())
    assert_nowhere(SECRET, url, tmp_path)


def assert_nowhere(secret: str, url: str, folder: Path) -> None:
    store = Store(url)
    assert all(secret.encode() not in content for content in store.get_all(store.names()))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == STATE for path in files)
    assert all(secret.encode() not in path.read_bytes() for path in files)
