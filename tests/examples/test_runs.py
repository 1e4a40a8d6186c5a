"""Every example matches its page and runs with a tiny budget."""

from __future__ import annotations

from pathlib import Path

import pytest

import study
from study.config.compose import load, studies_with
from study.plan.plan import make_plan
from tests.examples.modules import FOLDER

DEEP: dict[str, object] = {
    "trial.data.name": "digits", "trial.data.train_size": 64, "trial.data.validation_size": 300,
    "seeds": [0], "trial.epochs": 1, "trial.model.args": {"depth": 4, "width": 8},
}  # fmt: skip
TINY: dict[str, dict[str, object]] = {
    "capsules/study.yaml": {"trial.data.train_size": 64, "seeds": [0], "trial.epochs": 1},
    "densenet/study.yaml": {"trial.data.train_size": 64, "seeds": [0], "trial.epochs": 2},
    "gans/study.yaml": {"search.num_samples": 1, "trial.trainable.args.steps": 5},
    **dict.fromkeys(("vanilla/study.yaml", "vanilla/deepest.yaml"), DEEP),
    **dict.fromkeys(("vanilla/deepest_cnn.yaml", "vanilla/deepest_lns.yaml"), DEEP),
    "vanilla/signal.yaml": {"trial.epochs": 4, "seeds": [0]},
    "gans/lns.yaml": {"search.num_samples": 1, "trial.trainable.args.steps": 2},
}
"""The studies of the examples, each with the changes that make it tiny."""
PAGE = FOLDER.parent / "docs" / "examples.md"


def test_all_examples_are_here_and_on_the_page() -> None:
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.yaml")}
    assert files == TINY.keys()
    page = PAGE.read_text()
    for folder in {path.partition("/")[0] for path in files}:
        assert f"(examples/{folder}.md)" in page
        readme = (FOLDER / folder / "README.md").read_text()
        assert f"lns-study run examples/{folder}/" in readme
        assert "**Question.**" in readme
        assert "**Result**" in readme


@pytest.mark.parametrize("file", TINY)
def test_the_plans_of_an_example_are_made(file: str) -> None:
    for small in (False, True) if load(f"{FOLDER}/{file}", download=False).small else (False,):
        config = load(f"{FOLDER}/{file}", small=small, download=False)
        assert make_plan(config, download=False).size
        assert config.name not in studies_with("name")


@pytest.mark.slow
@pytest.mark.parametrize("file", TINY)
def test_an_example_runs(file: str, tmp_path: Path) -> None:
    config = load(f"{FOLDER}/{file}", download=False)
    changes = {"storage": str(tmp_path), "trial.device": "cpu"} | TINY[file]
    form = {"small": True} if config.small else {}
    done = study.run(f"{FOLDER}/{file}", changes, tracking_uri="none", cpus=2, **form)
    assert done.state.trials
    assert {trial.status for trial in done.state.trials} == {"finished"}
    assert (done.folder / "report" / "report.html").is_file()
