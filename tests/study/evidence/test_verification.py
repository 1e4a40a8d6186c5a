"""Real runs of a study with claims: its page, MLflow's tags, verification, and reproduction."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from study.api import Study
from study.cli.entry import main
from study.config.compose import load
from study.evidence.record import FILE, read_record
from study.evidence.verify import verify
from study.ledger.lines import seal, unseal
from study.ledger.log import FILE as LEDGER
from study.ledger.studies import read
from study.report.write import write_report
from study.tracking.payload import KEY_TAG
from study.tracking.writer import connect
from tests.study.conftest import made_up_events, write_ledger

MINE: dict[str, Any] = {
    "name": "mine",
    "question": "Does a larger step train better?",
    "trial": {
        "data": {"name": "digits", "validation_size": 300, "train_size": 600},
        "model": {"hidden": [16]},
        "epochs": 3,
        "batch_size": 32,
    },
    "seeds": [0, 1, 2],
    "rows": [
        {"label": "large", "overrides": {"optimizer.lr": 0.2}},
        {"label": "none", "overrides": {"optimizer.lr": 1e-6}},
    ],
    "claims": [
        {"name": "trains", "claim": "A large step trains.", "source": "here",
         "difference": {"rows": ["none", "large"], "at_least": 5}},
        {"name": "perfect", "claim": "It makes no mistake.", "source": "here",
         "value": {"row": "large", "at_most": 0.0}},
        {"name": "best", "claim": "No step is better.", "source": "here",
         "no_row_beats": {"row": "large"}},
    ],
    "small": {"seeds": [0, 1], "epochs": 2},
    "cpus": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study file, the storage of its small form, and the page of its claims."""
    folder = tmp_path_factory.mktemp("reproduced")
    (folder / "mine.yaml").write_text(yaml.safe_dump(MINE, sort_keys=False))
    assert (
        main(["reproduce", str(folder / "mine.yaml"), "--small", "--storage", f"{folder}/studies"])
        == 0
    )
    return folder


def study_of(reproduced: Path) -> Study:
    return Study(reproduced / "studies" / "mine-small")


def command(reproduced: Path, *words: str) -> int:
    return main([*words, "--storage", str(reproduced / "studies")])


def test_the_page_of_small_forms_has_figures_and_no_verdicts(reproduced: Path) -> None:
    folder = reproduced / "studies" / "claims"
    page = (folder / "claims.md").read_text()
    claims = study_of(reproduced).claims.to_dict("index")
    assert claims["trains"]["outcome"] in ("holds", "undecided")
    assert claims["perfect"]["outcome"] in ("fails", "undecided")
    for name, claim in claims.items():
        assert f"| {name}: {claim['claim']} | {claim['shown']} |" in page
    assert "**1 small form: figures without verdicts.**" in page
    assert "| claim | ours (95 %) |" in page
    for said in ("Stated before the first trial", "Command: lns-study run mine.yaml --small"):
        assert said in page
    assert "![" in page
    assert (folder / "mine-small.png").read_bytes().startswith(b"\x89PNG")
    assert claims["trains"]["shown"] in (folder / "claims.html").read_text()


def test_a_page_is_written_again_from_the_storage_alone(
    reproduced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", str(reproduced / "mine.yaml"), "--page-only", "--output", str(tmp_path)]
    assert command(reproduced, *words, "--small") == 0
    page = reproduced / "studies" / "claims" / "claims.md"
    assert (tmp_path / "claims.md").read_text() == page.read_text()
    assert command(reproduced, *words) == 1  # the full form has not run
    assert f" --output {tmp_path} --storage " in capsys.readouterr().err


def test_other_studies_that_ran_in_this_form_keep_their_parts(
    reproduced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has a command that runs it: the file's if the file is found and unchanged since."""
    storage = tmp_path / "studies"
    (storage / "mine-small").mkdir(parents=True)
    shutil.copy(study_of(reproduced).folder / LEDGER, storage / "mine-small")
    for name in ("zebra", "plain"):
        values = {**MINE, "name": name, "claims": MINE["claims"] if name == "zebra" else []}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        words = [str(tmp_path / f"{name}.yaml"), f"storage={storage}", "tracking_uri=none"]
        for form in ([], ["--small"]):
            study = load(words[0], words[1:], small=bool(form))
            write_ledger(study, made_up_events(study))
    words = ["reproduce", str(tmp_path / "zebra.yaml"), "--page-only", "--storage", str(storage)]
    page = storage / "claims" / "claims.md"
    assert main([*words, "--small"]) == 0
    text = page.read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["mine-small", "zebra-small"]
    assert f"- Command: lns-study run --resume mine-small --storage {storage}" in " ".join(
        text.split()
    )
    assert "- Command: lns-study run zebra.yaml --small" in text
    monkeypatch.chdir(reproduced)
    assert main([*words, "--small"]) == 0
    assert "- Command: lns-study run mine --small" in page.read_text()
    assert (storage / "claims" / "mine-small.png").exists()
    assert main(words) == 0
    text = page.read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["zebra"]
    assert "| claim | verdict | ours (95 %) |" in text
    assert re.search(r"\*\*\d claims: .*\.\*\*", text)


def test_what_has_finished_is_not_run_again(
    reproduced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(reproduced, "reproduce", str(reproduced / "mine.yaml"), "--small") == 0
    out = capsys.readouterr().out
    assert "4 of 4 trials are finished" in out
    assert ": started" not in out


def test_a_report_is_verified(reproduced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(reproduced, "report", "mine-small", "--verify") == 0
    assert "every figure is as computed again" in capsys.readouterr().out


@contextmanager
def falsified(reproduced: Path, said: str) -> Iterator[dict[str, Any]]:
    """Yield the report's record for changes; afterwards verification must print a line that starts
    with ``said``."""
    file = study_of(reproduced).folder / "report" / FILE
    true = file.read_text()
    values = json.loads(true)
    yield values
    file.write_text(json.dumps(values))
    try:
        found = list(verify(study_of(reproduced).folder, "none"))
        assert any(line.startswith(said) for line in found), found
    finally:
        file.write_text(true)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("rows", 0, "mean"), "row large: mean"),
        (("rows", 1, "sd"), "row none: standard deviation"),
        (("rows", 0, "interval", 1), "row large: high end of the interval"),
        (("rows", 0, "printed", "mean"), "row large: figures.json prints"),
        (("claims", 0, "low"), "claim trains: low"),
        (("claims", 2, "figure"), "claim best: figure"),
        (("claims", 0, "outcome"), "claim trains: the report has outcome"),
        (("stated", "digest"), "statement: the first plan's sha256"),
        (("claims", 0, "claim"), "figures.json: claims trains: claim"),
        (("claims", 1, "source"), "figures.json: claims perfect: source"),
        (("claims", 1, "note"), "figures.json: claims perfect: note"),
        (("rows", 0, "printed", "interval"), "figures.json: rows large: printed: interval"),
        (("metric",), "figures.json: metric"),
    ],
)
def test_a_falsified_figure_of_the_report_is_seen(
    reproduced: Path, path: tuple[str | int, ...], said: str
) -> None:
    with falsified(reproduced, said) as values:
        place = values
        for key in path[:-1]:
            place = place[key]
        old = place[path[-1]]
        place[path[-1]] = (
            old + 0.01 if isinstance(old, float) else "fails" if old != "fails" else "x"
        )


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("claims", "claims: the report has trains, best, the study trains, perfect, best"),
        ("rows", "rows: the report has large, the study large, none"),
        ("stated", "statement: the report has as changed"),
    ],
)
def test_what_the_report_leaves_out_is_seen(reproduced: Path, part: str, said: str) -> None:
    with falsified(reproduced, said) as values:
        if part == "stated":
            values[part]["changed"] = ["seeds"]
        else:
            del values[part][1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows", 0, "mean"), "2.1"),
        (("rows", 0, "trials"), None),
        (("rows", 1, "printed"), {}),
        (("claims", 0, "low"), [1.0]),
        (("claims", 2, "outcome"), 1.0),
        (("claims",), None),
        (("stated",), {"digest": "x"}),
    ],
)
def test_a_record_of_another_form_is_told_without_being_read(
    reproduced: Path, path: tuple[str | int, ...], value: Any
) -> None:
    with falsified(reproduced, "figures.json: it is not of the form") as values:
        place = values
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value


def test_an_altered_kind_or_row_of_a_claim_is_told(reproduced: Path) -> None:
    with falsified(reproduced, "figures.json: claims best: kind") as values:
        values["claims"][2]["kind"] = "difference"
    with falsified(reproduced, "claim best: the report has arguments") as values:
        values["claims"][2]["arguments"] = {"row": "nobody"}


def test_a_record_that_is_no_json_is_refused(
    reproduced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(study_of(reproduced).folder, tmp_path / "mine-small")
    (tmp_path / "mine-small" / "report" / FILE).write_text("{")
    assert main(["report", "mine-small", "--verify", "--storage", str(tmp_path)]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_one_study_that_is_named_twice_is_refused(
    reproduced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reproduced)
    assert command(reproduced, "reproduce", "mine", "mine.yaml", "--small", "--page-only") == 2
    assert "mine mine.yaml: both keep their results as mine-small" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    reproduced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["--output", str(tmp_path / "file" / "claims"), "--storage", str(tmp_path / "none")]
    assert main(["reproduce", str(reproduced / "mine.yaml"), *words]) == 2
    assert "output=" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_falsified_page_is_seen(reproduced: Path) -> None:
    folder = study_of(reproduced).folder
    page = folder / "report" / "report.md"
    true, printed = page.read_text(), read_record(folder / "report")["rows"][0]["printed"]["mean"]
    page.write_text(true.replace(printed, "1.23 ± 0.04"))
    try:
        assert any("report.md does not print" in line for line in verify(folder, "none"))
    finally:
        page.write_text(true)


def altered(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize("what", ["cell", "verdict", "exchange", "explore", "sentence", "added"])
def test_a_page_with_one_text_altered_is_seen(reproduced: Path, what: str) -> None:
    folder = study_of(reproduced).folder
    file = folder / "report" / ("report.md" if what in ("sentence", "added") else "report.html")
    true, rows = file.read_text(), read_record(folder / "report")["rows"]
    first, second = (row["printed"]["mean"] for row in rows)
    outcome = study_of(reproduced).claims["outcome"]["perfect"]
    exchanged = true.replace(first, "@").replace(second, first).replace("@", second)
    file.write_text(
        {
            "cell": lambda: altered(true, f"<td>{first}</td>", "<td>1.23</td>"),
            "verdict": lambda: altered(true, f">{outcome}</td>", ">holds</td>"),
            "exchange": lambda: exchanged,
            "explore": lambda: altered(true, '"curve":[[1,2],[', '"curve":[[1,2],[9'),
            "sentence": lambda: altered(true, "Lowest", "Highest"),
            "added": lambda: f"{true}\n| large | {first} |\n",
        }[what]()
    )
    try:
        assert any(line.startswith(file.name) for line in verify(folder, "none"))
    finally:
        file.write_text(true)


def test_a_ledger_that_was_altered_with_its_checksum_and_report_is_seen_in_mlflow(
    reproduced: Path, tmp_path: Path
) -> None:
    """No table of a row has the validation figure, but it chooses a searched row's
    configuration."""
    study = study_of(reproduced)
    forged = tmp_path / study.folder.name
    shutil.copytree(study.folder, forged)
    lines = (forged / LEDGER).read_bytes().splitlines(keepends=True)
    events = [unseal(line.rstrip()) for line in lines]
    place, number, event = next(
        (place, number, event)
        for place, (number, event) in enumerate(events)
        if number is not None and event is not None and event["event"] == "report"
    )
    event["metrics"]["validation/error"] /= 2
    rest = {key: value for key, value in event.items() if key not in ("n", "check")}
    lines[place] = seal(rest, number)
    (forged / LEDGER).write_bytes(b"".join(lines))
    write_report(read(forged), forged / "report")
    assert not list(verify(forged, "none"))
    found = list(verify(forged, study.config.tracking))
    assert any(f"trial {event['trial']}" in line and "validation/error" in line for line in found)


@pytest.mark.parametrize("what", ["deleted", "garbage", "twice", "altered"])
def test_damage_of_the_ledger_is_told_and_nothing_else_is_blamed(
    reproduced: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "mine-small"
    shutil.copytree(study_of(reproduced).folder, damaged)
    lines = (damaged / LEDGER).read_bytes().splitlines(keepends=True)
    kind = b'"report"' if what == "altered" else b'"checkpoint"'
    place = next(number for number, line in enumerate(lines) if kind in line)
    line = lines[place]
    lines[place : place + 1] = {
        "deleted": [], "garbage": [b"x\n", line], "twice": [line, line],
        "altered": [line.replace(b"0.", b"0.1", 1)],
    }[what]  # fmt: skip
    (damaged / LEDGER).write_bytes(b"".join(lines))
    assert main(["report", "mine-small", "--verify", "--storage", str(tmp_path)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"the ledger is damaged: line {place + 1}: ") or what == "twice"
    assert "to repair it: lns-study doctor" in first
    assert last == "mine-small: 1 difference"


def test_mlflow_has_the_verdicts_and_a_falsified_metric_is_seen(
    reproduced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(reproduced)
    client = connect(study.config.tracking)
    experiment = client.get_experiment_by_name("mine-small")
    runs = {run.data.tags[KEY_TAG]: run for run in client.search_runs([experiment.experiment_id])}
    parent = min(runs, key=len)
    figures = read_record(study.folder / "report")
    tags = runs[parent].data.tags
    assert tags["claim.trains"].startswith(figures["claims"][0]["outcome"])
    assert tags["stated.sha256"] == figures["stated"]["digest"]
    trial = figures["rows"][0]["trials"][0]
    client.log_metric(runs[f"{parent}/{trial}"].info.run_id, "test/error", 0.001, step=99)
    assert command(reproduced, "report", "mine-small", "--verify") == 1
    out = capsys.readouterr().out
    assert f"MLflow, trial {trial}: test/error" in out
    assert "row large: mean of MLflow's metrics" in out


def test_reproduce_needs_studies_with_claims(tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text("name: plain\nsmall: {epochs: 1}\ntrial: {data: {name: digits}}\n")
    assert main(["reproduce", str(plain), "--storage", str(tmp_path)]) == 2
    assert main(["reproduce", "--storage", str(tmp_path)]) == 2
    assert main(["reproduce", str(plain), "--all", "--storage", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == [plain]


def test_small_forms_are_reproduced_of_studies_that_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf/study").mkdir(parents=True)
    (tmp_path / "conf/study/large.yaml").write_text(
        "name: large\nrows: [{label: a}]\n"
        "claims: [{name: b, claim: '-', source: '-', value: {row: a, at_most: 1.0}}]\n"
    )
    monkeypatch.chdir(tmp_path)
    for words, has in ((["--small"], False), ([], True)):
        assert main(["reproduce", *words, "--storage", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert ("law_of_bits," in line, "large," in line) == (True, has)
