"""A password in a tracking URI: used if given, later read from the environment, never stored or
shown."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from study import tracking_uri as module
from study.cli import main
from study.cli.doctor_checks import Finding, _passwords
from study.config import StudyConfig
from study.ledger.log import FILE, read_ledger
from study.ledger.state import fold
from study.program import lns_study
from study.tracking.address import WHERE
from study.tracking_uri import (
    PASSWORD,
    TOKEN,
    USER,
    WHOLE,
    hide,
    reveal,
    stored,
    without_login,
    without_password,
)
from tests.study.conftest import TINY, made_up_events, write_ledger
from tests.study.servers import Server
from trainers.data import prepare

Tiny = Callable[..., StudyConfig]
SECRET = "pa-ss%40w0rd"
PLAIN = "pa-ss@w0rd"


@pytest.fixture(autouse=True)
def _no_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without stored passwords."""
    for name in (USER, PASSWORD, TOKEN, WHOLE, "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CREDENTIALS", "PGPASS"):
        monkeypatch.setattr(module, name, "/nowhere")
    monkeypatch.setattr(module, "_given", {})
    monkeypatch.setattr(module, "_named", set())


def holders(*folders: Path) -> list[Path]:
    """The files with the password, encoded or plain."""
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return [
        file
        for file in files
        if any(text.encode() in file.read_bytes() for text in (SECRET, PLAIN))
    ]


def test_a_password_in_the_uri_is_stored_and_shown_nowhere(
    tmp_path: Path,
    server: Server,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real study over a real server, and every command that prints something about it."""
    ray = Finding(name="Ray", good=True, text="not asked here")
    monkeypatch.setattr("study.cli.doctor_checks._ray", lambda address: ray)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    storage, uri = tmp_path / "studies", server.uri.replace("//", f"//ada:{SECRET}@")
    run = [
        "run",
        "tiny.yaml",
        "name=secretive",
        "trial.epochs=1",
        f"tracking_uri={uri}",
        f"storage={storage}",
    ]
    there = ["--storage", str(storage)]
    assert main([*run, "--plain"]) == 0
    codes = [
        main(words)
        for words in (
            [*run, "--dry-run"],
            ["plan", *run[1:]],
            ["list", *there],
            ["status", "secretive", *there],
            ["show", "secretive", "float32", *there],
            ["mlflow", "sync", "secretive", "--tracking-uri", uri, *there],
            ["mlflow", "verify", "--repair", "secretive", *there],
            ["report", "secretive", *there],
            ["run", "--extend", "secretive", "seeds=[0,1]", "--plain", *there],
            ["mlflow", "sync", "secretive", "--tracking-uri", f"{uri}9", *there],
            ["mlflow", "sync", "secretive", "--tracking-uri", uri.replace("http", "ftp"), *there],
            ["run", "tiny.yaml", f"tracking_ury={uri}"],
            ["ui", "--tracking-uri", uri],
            ["doctor", "--tracking-uri", uri, *there],
        )
    ]
    printed = "".join(capfd.readouterr())
    assert "MLflow has everything" in printed
    assert re.search(rf"ok +.*//ada:\*\*\*@127.0.0.1:{server.port}", printed)
    assert [code for code in codes if code] == [2, 2, 2, 2, 2]
    assert SECRET not in printed
    assert PLAIN not in printed
    assert holders(storage, server.folder) == []
    assert f"//ada:***@127.0.0.1:{server.port}" in (storage / "secretive" / FILE).read_text()


def test_a_stored_study_goes_on_with_the_password_of_the_environment(
    tracked: Tiny,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without it, the message names the missing password and nothing is done."""
    study = tracked("kept secret", f"tracking_uri={server.uri.replace('//', f'//ada:{SECRET}@')}")
    write_ledger(study, made_up_events(study))
    module._given.clear()
    words = ["mlflow", "sync", study.slug, "--storage", study.storage]
    named = [*words, "--tracking-uri", study.tracking]
    assert main(named) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("//ada:***@", "not stored", USER, PASSWORD, WHOLE))
    with monkeypatch.context() as patch:
        patch.setenv(PASSWORD, PLAIN)
        assert main(named) == 0
    with monkeypatch.context() as patch:
        patch.setenv(WHOLE, server.uri.replace("//", f"//ada:{SECRET}@"))
        assert main(words) == 0
    assert main(words) == 2


@pytest.mark.parametrize(
    ("shown", "variables", "found"),
    [
        ("https://ada:***@host/x", {PASSWORD: "a@b"}, "https://ada:a%40b@host/x"),
        ("https://ada:***@host", {PASSWORD: "x", USER: "bob"}, "https://bob:x@host"),
        ("https://ada:***@host", {TOKEN: "x"}, "https://host"),
        ("https://ada:***@host", {WHOLE: "https://ada:y@host"}, "https://ada:y@host"),
        ("https://ada:***@host", {WHOLE: "https://ada:y@another"}, ""),
        ("postgresql://me:***@host/db", {"PGPASSWORD": "x"}, "postgresql://me@host/db"),
        (
            "postgresql://host/db?user=me&password=***",
            {"PGPASSWORD": "x"},
            "postgresql://host/db?user=me",
        ),
        (
            "postgresql://me:***@host/db",
            {WHOLE: "postgresql://me:x@host/db"},
            "postgresql://me:x@host/db",
        ),
        ("postgresql://me:***@host/db", {PASSWORD: "x"}, ""),
        ("mysql+pymysql://me:***@host/db", {"PGPASSWORD": "x"}, ""),
        ("https://***@host", {PASSWORD: "x"}, ""),
        ("https://***@host", {PASSWORD: "x", USER: "bob"}, "https://bob:x@host"),
        ("https://***@host", {TOKEN: "x"}, "https://host"),
        ("https://***@host", {WHOLE: "https://t0ken@host"}, "https://t0ken@host"),
        ("https://git@host", {}, "https://git@host"),
    ],
)
def test_where_a_password_comes_from(
    shown: str, variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if found:
        assert reveal(shown) == found
    else:
        with pytest.raises(ValueError, match=r"is not stored; set .*MLFLOW_TRACKING_URI"):
            reveal(shown)


def test_what_this_process_was_given_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PASSWORD, "old")
    assert reveal(hide("https://ada:new@host")) == "https://ada:new@host"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://ada:pw@h:5000/x", "http://ada:***@h:5000/x"),
        ("http://ada:123@h", "http://ada:***@h"),
        ("http://ada:p@ss@h/", "http://ada:***@h/"),
        ("http://ada:pa/ss@h", "http://ada:***@h"),
        ("http://:pw@h", "http://:***@h"),
        ("https://ada@example.org:pw@h:5000/x", "https://ada@example.org:***@h:5000/x"),
        ("as https://ada@example.org:p@w@h, a@b", "as https://ada@example.org:***@h, a@b"),
        ("postgresql://me@server:pw@host/db", "postgresql://me@server:***@host/db"),
        ("postgresql://h/db?user=x;password=pw", "postgresql://h/db?user=x;password=***"),
        ("https://h/x#access_token=pw", "https://h/x#access_token=***"),
        ("ftp://ada:pw@h", "ftp://ada:***@h"),
        ("http://t0ken@h", "http://***@h"),
        ("see http://t0ken@h:5000/a@b", "see http://***@h:5000/a@b"),
        ("https://h/x?access_key=pw&auth=pw", "https://h/x?access_key=***&auth=***"),
        ("https://h/x?X-Amz-Credential=pw", "https://h/x?X-Amz-Credential=***"),
        ("postgresql://u:pw@h:5432/db?options=a@b", "postgresql://u:***@h:5432/db?options=a@b"),
        ("postgresql://u:1/s?s@h/db", "postgresql://u:***@h/db"),
        ("postgresql+psycopg2://u:pw@/db?host=/tmp", "postgresql+psycopg2://u:***@/db?host=/tmp"),
        ("postgresql://h/db?user=x&password=pw&b=1", "postgresql://h/db?user=x&password=***&b=1"),
        ("mysql+pymysql://h/db?passwd=pw", "mysql+pymysql://h/db?passwd=***"),
        (
            "API request to http://ada:pw@h/api failed; ask a@b",
            "API request to http://ada:***@h/api failed; ask a@b",
        ),
        ("tracking_uri='http://ada:pw@h'", "tracking_uri='http://ada:***@h'"),
        *[
            (same, same)
            for same in (
                "http://127.0.0.1:5000/a@b",
                "http://[::1]:5000/a@b",
                "http://git@h",
                "https://h/x?author=ada&key=1",
                "http://ada@example.org:***@h",
                "postgresql://u@h:5432/db",
                "https://h/x?tokenizer=gpt2&max_tokens=5",
                "http://ada:***@h",
                "sqlite:////home/a@b:c/m.db",
                "postgresql://u@h/db?application_name=a:b@c",
                "s3://bucket/a:b@c",
                "none",
            )
        ],
    ],
)
def test_how_an_address_is_shown(uri: str, shown: str) -> None:
    assert without_password(uri) == shown
    assert without_login(uri).count("***") <= shown.count("=***")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("storage=s3://ada:{}@bucket/x", "storage='s3://ada:***@bucket/x'"),
        ("trial.data.root=s3://ada:{}@bucket", "trial.data.root='s3://ada:***@bucket'"),
        (
            "trial.data.args={{url: 'postgresql://ada:{}@h/db'}}",
            "trial.data.args.url='postgresql://ada:***@h/db'",
        ),
        (
            "trial.data.args={{urls: ['https://h/x?sig={}']}}",
            "trial.data.args.urls='https://h/x?sig=",
        ),
        ("trial.model.args={{'http://ada:{}@h': 1}}", "trial.model.args='http://ada:***@h'"),
        (
            "rows=[{{label: a, overrides: ['data.root=s3://ada:{}@b']}}]",
            "rows.overrides='data.root=",
        ),
        (
            "space={{data.root: {{choice: ['http://ada:{}@h', b]}}}}",
            "space.data.root.choice='http://",
        ),
        ("small={{tracking_uri: 'http://ada:{}@h'}}", "small.tracking_uri='http://ada:***@h'"),
        ("address=ray://ada:{}@h:1", "address='ray://ada:***@h:1'"),
        ("question=See http://ada:{}@h", "question='See http://ada:***@h'"),
    ],
)
def test_a_password_in_any_other_value_is_refused_before_anything_is_done(
    override: str,
    shown: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    storage = [] if override.startswith("storage") else [f"storage={tmp_path}/studies"]
    for command in ("run", "plan"):
        given = ["baseline=null", "tracking_uri=none", *storage, override.format(SECRET)]
        assert main([command, "tiny.yaml", *given]) == 2
        said = "".join(capfd.readouterr())
        assert shown in said
        assert "holds a password, which ledger" in said
        assert "AWS_SECRET_ACCESS_KEY" in said
        assert SECRET not in said
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.parametrize(
    "command",
    [
        "curl https://ada:{}@h/x",
        "curl https://{}@h/x",
        "curl -u ada:{} h",
        "curl --user=ada:{} h",
        'curl -H "Authorization: Bearer {}" h',
        "curl -H Authorization:{} h",
        "curl https://hooks.slack.com/services/T0/B0/{}",
        "curl https://discord.com/api/webhooks/1/{}",
        "curl -d token={} h",
        "API_KEY={} notify",
        "notify --password {}",
    ],
)
def test_a_password_in_a_command_is_refused_before_anything_is_done(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = f"{TINY}\nalerts:\n  failed: '{command.format(SECRET)}'\n"
    (tmp_path / "tiny.yaml").write_text(study)
    for words in (["run"], ["run", "--dry-run"], ["plan"]):
        assert main([words[0], "tiny.yaml", "tracking_uri=none", *words[1:]]) == 2
        said = "".join(capfd.readouterr())
        assert "alerts.failed=" in said
        assert "$VARIABLE" in said
        assert SECRET not in said
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.parametrize(
    "command",
    [
        "curl -u $ADA:$WORD -H 'Authorization: Bearer $TOKEN' https://hooks.slack.com/services/$X",
        "curl -u ada:$(cat word) -d token=$TOKEN h",
        "docker run -u 1000:1000 notify",
        "echo $TRIAL: lost tokens=5, author=ada",
    ],
)
def test_a_command_without_a_password_is_taken(command: str) -> None:
    module.refuse_passwords({"alerts": {"failed": command}})


def test_a_variable_in_place_of_a_password_is_none(tiny: Tiny) -> None:
    study = tiny("variable", "alerts={failed: 'curl https://$ADA:$WORD@h/x?token=$TOKEN'}")
    assert study.alerts["failed"].endswith("?token=$TOKEN")


def test_a_server_address_that_cannot_be_read_is_refused_without_its_password(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r"http://ada:\*\*\*@h'.*%2F"):
        tiny("slashed", "tracking_uri=http://ada:pa/ss@h")


@pytest.mark.parametrize("uri", ["postgresql://me:pa ss@h/db", "http://m e:pa ss@h"])
def test_an_address_with_a_space_is_refused_without_its_password(tiny: Tiny, uri: str) -> None:
    with pytest.raises(ValueError, match=r"//\.\.\.'.*%20") as error:
        tiny("spaced", f"tracking_uri={uri}")
    assert "pa ss" not in str(error.value)


def test_the_login_of_an_address_is_an_e_mail_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "a@b")
    shown = "https://ada@example.org:***@h"
    assert reveal(shown) == "https://ada%40example.org:a%40b@h"
    monkeypatch.delenv(PASSWORD)
    monkeypatch.setenv(TOKEN, "x")
    assert reveal(shown) == "https://h"


def test_commands_to_give_next_and_links_have_no_password() -> None:
    assert "'tracking_uri=http://ada:***@h'" in lns_study(
        "run", "table", "tracking_uri=http://ada:pw@h"
    )


def test_the_links_of_a_report_have_no_login(tiny: Tiny) -> None:
    """The note of where a study's runs are may be a stranger's."""
    study = tiny("linked report")
    folder = write_ledger(study, made_up_events(study))
    where = {"uri": "http://ada:secret@h", "experiment": "1", "run": "2", "view": "3"}
    (folder / WHERE).write_text(json.dumps(where))
    assert main(["report", study.slug, "--storage", study.storage]) == 0
    page = (folder / "report" / "report.html").read_text()
    assert "http://h/#/experiments/1" in page
    assert "secret" not in page


def test_an_old_ledger_that_holds_a_password_is_named_and_the_password_not_repeated(
    tracked: Tiny,
    server: Server,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = tracked("old ledger", f"storage={tmp_path}")
    events = made_up_events(study)
    events[0]["data"] = [dataclasses.asdict(prepare(study.trial.data))]
    uri = server.uri.replace("//", f"//ada:{SECRET}@")
    events[0]["study"]["tracking_uri"] = uri
    events[0]["study"]["question"] = f"s3://ada:{SECRET}@bucket"
    write_ledger(study, events)
    shown = without_password(uri)
    assert stored(read_ledger(study.folder)) == ["s3://ada:***@bucket", shown]
    assert [f"{found.name}: {found.text}" for found in _passwords(study.storage)] == [
        f"old-ledger: its ledger holds the password of {each}"
        for each in ("s3://ada:***@bucket", shown)
    ]
    state = fold(read_ledger(study.folder))
    assert SECRET not in json.dumps(state.plan)
    assert state.config.tracking_uri == shown
    monkeypatch.setenv(PASSWORD, PLAIN)
    assert main(["run", "--resume", study.slug, "--storage", study.storage, "--plain"]) == 0
    printed = "".join(capfd.readouterr())
    assert f"The ledger holds the password of {shown}" in printed
    assert "change the password" in printed
    assert SECRET not in printed
    assert holders(study.folder, server.folder) == [study.folder / FILE]
    assert (study.folder / FILE).read_text().count(SECRET) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ['">', "')", " "])
def test_a_picture_within_a_page_is_no_password(end: str) -> None:
    """Its letters may contain one: ``pwd``, before the ``=`` of the padding."""
    page = "data:image/png;base64,iVBORpwd/0==" + end
    assert without_password(page) == page
    assert without_password("http://h/?a;base64,pwd=x9") == "http://h/?a;base64,pwd=***"


@pytest.mark.parametrize("part", ["?#", "?a", "a://:", "?password", "@b:", "a://b,"])
def test_a_long_text_is_searched_once(part: str) -> None:
    """With quadratic time 400 KB would take minutes."""
    text = part * (400_000 // len(part))
    assert without_password(text) == text
    assert without_password(f"{text} https://x/?token=abc") == f"{text} https://x/?token=***"


@contextmanager
def listening() -> Iterator[tuple[str, list[str | None]]]:
    """Provide the address of a server that asks for a login, and the logins that it got."""
    logins: list[str | None] = []

    class Curious(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            logins.append(self.headers["Authorization"])
            self.send_error(401)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Curious) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", logins
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "command",
    ["mlflow sync", "mlflow verify --repair", "report", "report --verify", "doctor --repair"],
)
def test_a_login_goes_to_no_address_that_only_a_ledger_names(
    tracked: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Not a byte is sent to it until the reader names it, in the environment or the command."""
    monkeypatch.setenv(USER, "ada")
    monkeypatch.setenv(PASSWORD, PLAIN)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with listening() as (uri, logins):
        study = tracked(f"a stranger's {command}", f"tracking_uri={uri}")
        folder = write_ledger(study, made_up_events(study))
        there = [study.slug, "--storage", study.storage]
        words = [*command.split(), *there]
        if command.startswith("report"):
            main(["report", *there, "--tracking-uri", "none"])
        if command.startswith("doctor"):
            lines = (folder / FILE).read_text().splitlines(keepends=True)
            (folder / FILE).write_text("".join([*lines[:3], "{", *lines[4:]]))
        capsys.readouterr()
        assert main(words) == (0 if command == "report" else 2)
        assert f"--tracking-uri {uri}" in capsys.readouterr().err
        assert logins == []
        monkeypatch.setenv(WHOLE, uri)
        main(words)
        assert logins[0] is None or logins[0].startswith("Basic")
        assert any(logins)
