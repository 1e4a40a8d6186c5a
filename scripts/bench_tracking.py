"""Time tracking beside Ray's MLflowLoggerCallback, in the same run and through the same server.

python scripts/bench_tracking.py [--only WORD ...] [--json FILE]

requests    requests a report and seconds of 30 trials x 20 reports x 10 metrics, through a proxy
            that counts: the study engine with and without tracking, Ray Tune with and without the
            callback
fit         seconds of a study of eight trials that train (20,000 images of MNIST, LNS with Kahan
            summation, 4 epochs), tracked and not
stall       ledger lines while the server is down: the 99th percentile and the longest
points      points a second through the embedded server, a ledger sent from its beginning
postgres    the same through four workers over the PostgreSQL database $LNS_STUDY_BENCH_POSTGRES,
            four studies at once
server      seconds until the embedded server answers, the first time (it makes its database) and
            the second, and its memory
crowd       300 trials at a time that report once a second for a minute, through one server: cores
            that the driver and its process for MLflow use, and what MLflow lacks in the end
view        seconds until Chromium shows the prepared view of 3,000 runs, table and charts, nothing
            cached and the second time
report      seconds and memory of the report of 1,000 trials
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from bench.stores import Proxy, free_port, made_up, made_up_search, server
from bench_study import DIGITS, Sleep, View, executed_by
from bench_study import run as run_trials

from study.config import RowConfig, StudyConfig
from study.ledger.log import Ledger
from study.tracking.address import page
from study.tracking.writer import connect, sync
from study.tracking.writer_supervisor import Tracker
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig

_RESULTS: dict[str, float] = {}
TRIALS, REPORTS, METRICS = 30, 20, 10
VIEWED = 3000
CROWD = 300
"""The number of trials that report at the same time."""
OF_CALLBACK = 5
"""The number of trials with the callback; it makes some 18 requests a report.

All thirty trials would take many minutes.
"""


class Metrics(Sleep):
    """Twenty reports of ten metrics."""

    reports, metrics = REPORTS, METRICS


def report(name: str, value: float, unit: str) -> None:
    print(f"{name:70s} {value:10.3f} {unit}", flush=True)
    _RESULTS[name] = value


def engine(storage: str, uri: str) -> float:
    """Return the seconds of the trials through the study engine, tracking complete at the end."""
    from study.lifecycle import run_study

    settings = StudyConfig(
        name="bench",
        trial=DIGITS,
        rows=[RowConfig(label="a")],
        seeds=list(range(TRIALS)),
        storage=storage,
        tracking_uri=uri,
        checkpoint_every=10**6,
    )
    with executed_by("Twenty"):
        start = time.perf_counter()
        outcome = run_study(settings, View(), lambda line: None)
        assert not outcome.tracking_error, outcome.tracking_error
        return time.perf_counter() - start


def bench_requests() -> None:
    import ray
    from bench_study import bare

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch), port := free_port()):
        Proxy.port = port
        proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{proxy.server_port}"
        with tempfile.TemporaryDirectory() as storage:
            engine(storage, "none")  # the first processes
        with tempfile.TemporaryDirectory() as storage:
            without = engine(storage, "none")
        with tempfile.TemporaryDirectory() as storage:
            tracked = engine(storage, uri)
        report("engine, tracking off", without, "s")
        report("engine, tracked, all of it in MLflow at the end", tracked, "s")
        report("engine: requests a report", Proxy.count / (TRIALS * REPORTS), "")
        Proxy.count = 0
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        bench_without = bare(OF_CALLBACK, Metrics, reuse=True)
        bench_callback = bare(
            OF_CALLBACK,
            Metrics,
            reuse=True,
            callbacks=[MLflowLoggerCallback(tracking_uri=uri, experiment_name="callback")],
        )
        report(f"Ray Tune alone, {OF_CALLBACK} trials", bench_without, "s")
        report(f"Ray Tune with MLflowLoggerCallback, {OF_CALLBACK} trials", bench_callback, "s")
        report("MLflowLoggerCallback: requests a report", Proxy.count / (OF_CALLBACK * REPORTS), "")
        proxy.shutdown()
    ray.shutdown()


def bench_fit() -> None:
    import ray

    config = TrialConfig(
        data=DataConfig(name="mnist", train_size=20_000),
        model=ModelConfig(hidden=[128]),
        precision=PrecisionConfig(format="lns12", kahan_sum=True),
        optimizer=OptimizerConfig(lr=0.5),
        epochs=4,
        batch_size=128,
    )
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    run_trials(2, None, tracked=True, config=config)  # compiles kernels, reads files
    for tracked in (False, True, True, False):
        seconds[tracked].append(run_trials(8, None, tracked=tracked, config=config)[0])
    ray.shutdown()
    report(
        "eight trials that train, tracking off, mean of two studies", sum(seconds[False]) / 2, "s"
    )
    report("tracked, all of it in MLflow at the end", sum(seconds[True]) / 2, "s")
    report("tracked over not tracked", sum(seconds[True]) / sum(seconds[False]), "")


def bench_stall() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bench"
        made_up(folder, 1, 1, 1)
        with Ledger(folder) as ledger:
            times = {}
            for name, uri in (("no tracking", ""), ("server down", "http://127.0.0.1:9")):
                if uri:
                    tracker = Tracker(folder, uri, Path(scratch) / "artifacts", lambda line: None)
                    tracker.start()
                    time.sleep(4)
                times[name] = []
                for epoch in range(1000):
                    start = time.perf_counter()
                    ledger.append(
                        {
                            "event": "report",
                            "trial": f"stall {name}",
                            "epoch": epoch,
                            "metrics": {f"m{index}": 1.0 for index in range(METRICS)},
                        }
                    )
                    times[name].append(time.perf_counter() - start)
                    time.sleep(0.002)
                ordered = sorted(times[name])
                report(f"a ledger line, {name}: 99th percentile", 1e3 * ordered[990], "ms")
                report(f"a ledger line, {name}: longest", 1e3 * ordered[-1], "ms")
            assert tracker._process is not None
            tracker._process.kill()


def bench_points() -> None:
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch), port := free_port()):
        folder = Path(scratch) / "bench"
        made_up(folder, 10, 400, 10)
        connect(f"http://127.0.0.1:{port}").search_experiments()  # imports MLflow
        start = time.perf_counter()
        error = sync(
            folder,
            f"http://127.0.0.1:{port}",
            Path(scratch) / "artifacts",
            None,
            lambda message: None,
        )
        assert error == "", error
        report(
            "points a second through the embedded server (10 trials x 4,000 points)",
            40000 / (time.perf_counter() - start),
            "/s",
        )


def send(folder: Path, port: int, ready: Any, begin: Any) -> None:
    """Send one study's ledger as soon as all processes are ready; runs in a process of its own."""
    connect(f"http://127.0.0.1:{port}").search_experiments()  # imports MLflow
    ready.release()
    begin.wait()
    error = sync(
        folder, f"http://127.0.0.1:{port}", folder.parent / "artifacts", None, lambda message: None
    )
    assert error == "", error


def bench_postgres() -> None:
    workers = 4
    if not (uri := os.environ.get("LNS_STUDY_BENCH_POSTGRES", "")):
        print(
            "postgres: left out; name an empty database,"
            " LNS_STUDY_BENCH_POSTGRES=postgresql://user@host/name"
        )
        return
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        server(Path(scratch), port := free_port(), uri, workers),
    ):
        ready, begin = spawn.Semaphore(0), spawn.Event()
        folders = [Path(scratch) / f"bench-{index}" for index in range(workers)]
        for folder in folders:
            made_up(folder, 5, 400, 10)
        senders = [
            spawn.Process(target=send, args=(folder, port, ready, begin)) for folder in folders
        ]
        for sender in senders:
            sender.start()
        for _ in senders:
            ready.acquire()
        begin.set()
        start = time.perf_counter()
        for sender in senders:
            sender.join()
            assert sender.exitcode == 0
        seconds = time.perf_counter() - start
        report(
            f"points a second, PostgreSQL, {workers} workers, {workers} studies at once",
            workers * 20000 / seconds,
            "/s",
        )


def bench_server() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for which in ("first", "second"):
            start = time.perf_counter()
            with server(Path(scratch), free_port()) as process:
                report(
                    f"embedded server answers after, {which} start",
                    time.perf_counter() - start,
                    "s",
                )
                members = [
                    psutil.Process(process.pid),
                    *psutil.Process(process.pid).children(recursive=True),
                ]
                report(
                    "its memory (proportional set size)",
                    sum(member.memory_full_info().pss for member in members) / 1e9,
                    "GB",
                )


def bench_crowd() -> None:
    from study.lifecycle import run_study
    from study.tracking.reconcile import reconcile

    with tempfile.TemporaryDirectory() as name, server(folder := Path(name), port := free_port()):
        study = StudyConfig(
            name="crowd",
            trial=DIGITS,
            rows=[RowConfig(label="a")],
            seeds=list(range(CROWD)),
            storage=name,
            tracking_uri=f"http://127.0.0.1:{port}",
            checkpoint_every=10**6,
            cpus=CROWD,
        )
        view, before, began = View(), os.times(), time.time()
        writer, ended = [0.0], threading.Event()
        watch = threading.Thread(target=_watch_writer, args=(writer, ended))
        watch.start()
        with executed_by("Minute"):
            outcome = run_study(study, view, lambda line: None)
        used = os.times().user + os.times().system - before.user - before.system
        ended.set()
        watch.join()
        assert not outcome.tracking_error, outcome.tracking_error
        first = min(event["time"] for event in view.events if event["event"] == "started")
        last = max(event["time"] for event in view.events if event["event"] == "finished")
        report(f"{CROWD} trials, a report a second: cores of the driver", used / (last - began), "")
        report("cores of its process for MLflow", writer[0] / (time.time() - began), "")
        report("its seconds from the last end until MLflow has all", time.time() - last, "s")
        report("utilisation, from the first start to the last end", 60 / (last - first), "")
        _, audit = reconcile(study.folder, study.tracking, folder, repair=False)
        report("points of reports in MLflow", audit.points, "")
        report("trials of which MLflow lacks something", len(audit.missing), "")
        assert audit.equal, list(audit.differences())[:3]


def _watch_writer(seconds: list[float], ended: threading.Event) -> None:
    """Keep the CPU seconds of this process's child that sends to MLflow."""
    while not ended.wait(0.5):
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if "study.tracking.writer" in " ".join(child.cmdline()):
                    times = child.cpu_times()
                    seconds[0] = max(seconds[0], times.user + times.system)


TABLE_DRAWN = (
    "[...document.querySelectorAll('a')].some((link) => / seed [0-9]/.test(link.innerText))"
)
CHARTS_DRAWN = "document.querySelectorAll('.scatterlayer .point').length >= 100"
"""JavaScript expressions that are true once a page has been drawn."""


def bench_view() -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as scratch:
        folder, opened = Path(scratch) / "bench", []
        made_up(folder, VIEWED, 2, 4)
        start = time.perf_counter()
        error = sync(
            folder,
            f"sqlite:///{scratch}/mlflow.db",
            Path(scratch) / "artifacts",
            None,
            opened.append,
        )
        assert error == "", error
        report(
            f"{VIEWED} runs into sqlite, no server between",
            VIEWED / (time.perf_counter() - start),
            "runs/s",
        )
        with server(Path(scratch), port := free_port()), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            link = f"http://127.0.0.1:{port}/{page(opened[0]['experiment'], opened[0]['view'])}"
            for what, address, drawn in (
                ("table", link, TABLE_DRAWN),
                ("charts", f"{link}&compareRunsMode=CHART", CHARTS_DRAWN),
            ):
                _time_page(browser, what, address, drawn)
            browser.close()


def _time_page(browser: Any, what: str, address: str, drawn: str) -> None:
    """Report after how long a page is drawn: at first, and with what a browser has cached."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    for which in ("nothing cached", "second time"):
        tab = context.new_page()
        start = time.perf_counter()
        tab.goto(address)
        tab.wait_for_function(drawn, timeout=120_000)
        took = time.perf_counter() - start
        report(f"prepared view of {VIEWED} runs, {what}, {which}", took, "s")
        tab.close()
    context.close()


def bench_report() -> None:
    code = (
        "import sys, time, resource; from pathlib import Path; from study.ledger.studies import"
        " read\nfrom study.report.write import write_report\nstart = time.perf_counter();"
        " write_report(read(Path(sys.argv[1])), Path(sys.argv[1]) /"
        " 'report')\nprint(time.perf_counter() - start, time.process_time(),"
        " resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bench"
        made_up_search(folder)
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
        )
        seconds, busy, memory = map(float, done.stdout.split())
        report("report of 1,000 trials", seconds, "s")
        report("its processor time, imports included", busy, "s")
        report("its memory", memory, "GB")
        report("its page", (folder / "report" / "report.html").stat().st_size / 1e6, "MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benches = {
        "report": bench_report,
        "fit": bench_fit,
        "stall": bench_stall,
        "server": bench_server,
        "points": bench_points,
        "postgres": bench_postgres,
        "crowd": bench_crowd,
        "view": bench_view,
        "requests": bench_requests,
    }
    parser.add_argument("--only", nargs="+", choices=benches, default=list(benches))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from study.engines.ray_session import ENVIRONMENT as OF_RAY

    os.environ |= {name: value for name, value in OF_RAY.items() if name not in os.environ}
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {resource.getpagesize()} bytes a"
        " page"
    )
    for name in options.only:
        benches[name]()
    if options.json:
        options.json.write_text(json.dumps(_RESULTS, indent=1))


if __name__ == "__main__":
    main()
