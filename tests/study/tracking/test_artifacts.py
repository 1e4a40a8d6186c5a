"""Where runs of somebody else's store may write files: nowhere in the reader's folders."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from study.cli.entry import main
from study.config import StudyConfig
from study.tracking import address
from study.tracking.artifacts import Artifacts, PlaceError
from study.tracking.models import _checkpoint
from study.tracking.writer import connect
from study.tracking_uri import PASSWORD, USER
from tests.study.conftest import TINY, made_up_events, write_ledger
from tests.study.tracking.conftest import Tiny, break_store, runs_of, send
from trainers.checkpoint.manifest import STATE, sealed

COMMANDS = [["report"], ["mlflow", "sync"], ["mlflow", "verify", "--repair"]]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """The reader's own code."""
    folder = tmp_path / "home" / "study"
    folder.mkdir(parents=True)
    return folder


def strangers(tracked: Tiny, name: str, place: str) -> StudyConfig:
    """A study in a storage whose database names a place for its runs' artifacts."""
    study = tracked(name)
    assert send(study, made_up_events(study))[0] == ""
    report = study.folder / "report"
    report.mkdir()
    (report / "__init__.py").write_text("a stranger's code")
    (report / "report.html").write_text("a stranger's page")
    break_store(study, f"UPDATE runs SET artifact_uri='{place}', status='RUNNING'")
    return study


@pytest.mark.parametrize("command", COMMANDS)
def test_no_run_has_files_put_into_a_folder_of_the_readers(
    tracked: Tiny, victim: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    study = strangers(tracked, f"puts {command[-1]}", victim.as_uri())
    assert main([*command, study.slug, "--storage", study.storage]) > 0
    said = "".join(capsys.readouterr())
    assert victim.as_uri() in said
    assert "artifacts must lie in" in said
    assert "--tracking-uri" in said
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_no_experiment_leads_files_into_a_folder_of_the_readers(
    tracked: Tiny, victim: Path, command: list[str]
) -> None:
    study = tracked(f"experiment {command[-1]}")
    events = made_up_events(study)
    connect(study.tracking).create_experiment(study.name, artifact_location=victim.as_uri())
    write_ledger(study, events)
    assert main([*command, study.slug, "--storage", study.storage]) > 0
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("command", ["sync", "run", "ui"])
def test_a_storage_that_is_copied_with_its_database_keeps_its_artifacts(
    tracked: Tiny, tmp_path: Path, command: str
) -> None:
    """Every address in the copy points into the copy; the original's stay."""
    study = tracked("copied", f"storage={tmp_path}/a 1/studies")
    events = made_up_events(study)
    assert send(study, events)[0] == ""
    copied = tmp_path / "b" / "studies"
    shutil.copytree(study.storage, copied)
    uri, before = f"sqlite:///{copied}/mlflow.db", places(Path(study.storage))
    assert all(f"{tmp_path}/a%201/" in place for place in before), before
    if command == "sync":
        assert main(["mlflow", "sync", study.slug, "--storage", str(copied)]) == 0
        assert main(["mlflow", "verify", study.slug, "--storage", str(copied)]) == 0
    elif command == "run":
        there = dataclasses.replace(study, storage=str(copied))
        assert send(there, events)[0] == ""
    else:
        Artifacts(uri, copied / "artifacts").follow()
    assert places(copied) == [place.replace("/a%201/", "/b/") for place in before]
    assert places(Path(study.storage)) == before


def places(storage: Path) -> list[str]:
    """Every artifact address of experiments, except MLflow's own, and of runs."""
    with closing(sqlite3.connect(storage / "mlflow.db")) as database:
        query = (
            "SELECT artifact_location FROM experiments WHERE experiment_id > 0"
            " UNION ALL SELECT artifact_uri FROM runs"
        )
        return [place for (place,) in database.execute(query)]


@pytest.mark.parametrize("shape", ["{}/artifacts/../code", "{}/artifacts", "{}/code/x", "x"])
def test_only_a_folder_of_that_name_is_followed(tracked: Tiny, victim: Path, shape: str) -> None:
    study = tracked(f"shape {len(shape)}")
    client = connect(study.tracking)
    made = client.create_experiment(study.name, artifact_location=shape.format(victim))
    before = places(Path(study.storage))
    artifacts = Artifacts(study.tracking, Path(study.storage) / "artifacts")
    artifacts.follow()
    assert places(Path(study.storage)) == before
    with pytest.raises(PlaceError):
        artifacts.check(client.get_experiment(made).artifact_location, "experiment")


def test_studies_of_two_storages_share_a_database_that_lies_elsewhere(
    tracked: Tiny, tmp_path: Path
) -> None:
    for storage in ("one", "other"):
        uri = f"tracking_uri=sqlite:///{tmp_path}/mlflow.db"
        study = tracked("shared", f"storage={tmp_path}/{storage}", uri)
        assert send(study, made_up_events(study))[0] == ""
    assert len(list((tmp_path / "artifacts" / "shared").rglob("config.yaml"))) == 2


@pytest.fixture
def web() -> Iterator[SimpleNamespace]:
    """A web server that records what it receives."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            heard.append(str(self.headers))
            self.send_response(200)
            self.end_headers()

        do_GET = do_POST = do_PUT  # noqa: N815  names of http.server's

        def log_message(self, *_: object) -> None:
            """Do nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(uri=f"http://127.0.0.1:{server.server_port}", heard=heard)
        server.shutdown()
        thread.join()


def test_a_login_goes_to_no_address_of_artifacts(
    tracked: Tiny, web: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER, "ada")
    monkeypatch.setenv(PASSWORD, "secret")
    for scheme in ("", "mlflow-artifacts:"):
        place = f"{web.uri}/x" if not scheme else f"{scheme}{web.uri.removeprefix('http:')}/x"
        study = strangers(tracked, f"web {bool(scheme)}", place)
        assert main(["mlflow", "sync", study.slug, "--storage", study.storage]) == 1
    assert web.heard == []


def test_only_the_files_of_the_report_just_written_are_sent(tracked: Tiny) -> None:
    study = tracked("just written")
    folder = write_ledger(study, made_up_events(study))
    (folder / "report").mkdir()
    for name in ("__init__.py", "report.html", "evil.html"):
        (folder / "report" / name).write_text("a stranger's")
    assert main(["mlflow", "sync", study.slug, "--storage", study.storage]) == 0
    client, parent, _ = runs_of(study)
    sent = {file.path: file for file in client.list_artifacts(parent.info.run_id, "report")}
    assert {"report/report.html", "report/report.md", "report/figures.json"} <= sent.keys()
    assert not {"report/__init__.py", "report/evil.html"} & sent.keys()
    for name in sent:
        content = Path(client.download_artifacts(parent.info.run_id, name)).read_bytes()
        assert b"a stranger's" not in content


@pytest.mark.parametrize("where", ["artifacts", "artifacts/linked", "artifacts/linked/report"])
def test_a_link_among_the_artifacts_leads_nowhere(
    tracked: Tiny, tmp_path: Path, victim: Path, where: str
) -> None:
    study = tracked("linked", f"storage={tmp_path}/studies")
    link = Path(study.storage) / where
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    place = (Path(study.storage) / "artifacts" / "linked").as_uri()
    artifacts = Artifacts(study.tracking, Path(study.storage) / "artifacts")
    (tmp_path / "page.html").write_text("x")
    with pytest.raises((PlaceError, OSError)):
        artifacts.put(place, "run", [tmp_path / "page.html"], "report")
    assert list(victim.iterdir()) == []


def test_a_storage_that_is_a_link_keeps_its_artifacts(tracked: Tiny, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "studies").symlink_to(tmp_path / "disk")
    study = tracked("by a link", f"storage={tmp_path}/studies")
    assert send(study, made_up_events(study))[0] == ""
    found = [path.name for path in (tmp_path / "disk" / "artifacts").rglob("*.yaml")]
    assert sorted(found) == ["config.yaml", "environment.yaml", "plan.yaml"]


@pytest.mark.parametrize(
    "place",
    [
        "file:///home/ada/studies/artifacts/../code",
        "file:///home/ada/studies/artifacts/%2e%2e/code",
        "file://host/home/ada/studies/artifacts/x",
        "home/ada/studies/artifacts/x",
        "s3://bucket/x",
        "mlflow-artifacts:/1/x",
        "file:///home/ada/studies/artifacts2/x",
    ],
)
def test_an_address_elsewhere_is_refused(place: str) -> None:
    root = Path("/home/ada/studies/artifacts")
    artifacts = Artifacts(f"sqlite:///{root.parent}/mlflow.db", root)
    with pytest.raises(PlaceError, match=r"artifact_uri=.* must lie in .*"):
        artifacts.check(place, "run 1")
    artifacts.check("file:///home/ada/studies/artifacts/x", "run 1")
    artifacts.check("/home/ada/studies/artifacts/x", "run 1")


def test_a_server_keeps_artifacts_itself_and_names_no_other() -> None:
    artifacts = Artifacts("http://127.0.0.1:5000", Path("/home/ada/studies/artifacts"))
    artifacts.check("mlflow-artifacts:/1/x", "run 1")
    for place in ("mlflow-artifacts://evil.example/1/x", "http://127.0.0.1:5000/x", "/home/ada"):
        with pytest.raises(PlaceError, match="lns-study ui"):
            artifacts.check(place, "run 1")


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_outside_the_storage_is_written_if_its_reader_names_it(
    tracked: Tiny, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger's own word is not enough, and neither is a link in the storage."""
    other = tmp_path / "home" / "other.db"
    other.parent.mkdir()
    (tmp_path / "link.db").symlink_to(other)
    for number, uri in enumerate((f"sqlite:///{other}", f"sqlite:///{tmp_path}/link.db")):
        own = f"storage={tmp_path}/studies{number}"
        study = tracked(f"outside {command[-1]}", own, f"tracking_uri={uri}")
        write_ledger(study, made_up_events(study))
        words = [*command, study.slug, "--storage", study.storage]
        assert main(words) == (0 if command == ["report"] else 2)
        assert f"--tracking-uri {uri}" in "".join(capsys.readouterr())
        assert not other.exists()
    assert main([*words, "--tracking-uri", f"sqlite:///{other}"]) == 0
    assert other.exists()


@pytest.mark.parametrize("owned", ["the database", "its folder"])
def test_a_database_of_another_user_is_written_if_its_reader_names_it(
    tracked: Tiny, owned: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tracked("another's")
    write_ledger(study, made_up_events(study))
    path = Path(study.tracking.removeprefix("sqlite:///"))
    given = path if owned == "the database" else path.parent
    monkeypatch.setattr(address, "owner_of", lambda place: 12345 if place == given else 0)
    words = ["mlflow", "sync", study.slug, "--storage", study.storage]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{given} belongs to another user" in said
    assert f"--tracking-uri {study.tracking}" in said
    assert main([*words, "--tracking-uri", study.tracking]) == 0
    monkeypatch.setattr(address, "owner_of", lambda place: 0)  # root is not a stranger
    address.check_owner(study.tracking)


def test_a_run_writes_no_database_that_another_user_put_into_its_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that the run has not named: behind a link, or another user's."""
    victim = tmp_path / "private.db"
    with closing(sqlite3.connect(victim)) as database:
        database.execute("CREATE TABLE mine (x)")
    before = victim.read_bytes()
    storage = tmp_path / "shared"
    storage.mkdir()
    (storage / "mlflow.db").symlink_to(victim)
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    words = ["run", str(file), f"storage={storage}", "--plain"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"is a link to {victim}, out of the storage" in said
    assert f"`tracking_uri=sqlite:///{victim}`" in said
    assert victim.read_bytes() == before
    (storage / "mlflow.db").unlink()
    monkeypatch.setattr(address, "owner_of", lambda place: 12345)
    assert main(words) == 2
    assert "belongs to another user" in capsys.readouterr().err
    assert not list(storage.glob("mlflow.db*"))


def test_a_checkpoint_outside_the_storage_is_not_sent(tmp_path: Path) -> None:
    """A stranger's ledger may name any of the reader's."""
    folder = tmp_path / "home" / "checkpoints" / "trial" / "1"
    folder.mkdir(parents=True)
    (folder / STATE).write_text(sealed({"files": {}}))
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "link").symlink_to(tmp_path / "home")
    for place in (folder, tmp_path / "studies" / "link" / "checkpoints" / "trial" / "1"):
        assert _checkpoint(str(place), tmp_path / "studies") is None
    assert _checkpoint("s3://another/home/checkpoints/trial/1", tmp_path / "studies") is None
    assert _checkpoint(str(folder), tmp_path / "home") == folder
