"""Generated data: they match their definition, depend only on their seed, and networks learn
them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from trainers.config import DataConfig, ModelConfig, OptimizerConfig, TrialConfig
from trainers.data import load, prepare
from trainers.data.split import IGNORED
from trainers.models import make_model
from trainers.training.trainer import Training

NAMES = ("mnist1d", "copy", "sort", "addition")


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides(name: str) -> None:
    def digest(seed: int) -> str:
        load.cache_clear()
        args = {"seed": seed, "examples": 100, "test": 20}
        return prepare(DataConfig(name=name, args=args)).digest

    assert digest(0) == digest(0) != digest(1)
    data = load(DataConfig(name=name, args={"examples": 100, "test": 20}))
    assert [len(split.y) for split in data] == [90, 10, 20]


@pytest.mark.parametrize("name", NAMES[1:])
def test_answers_are_right_and_questions_differ(name: str) -> None:
    args = {"examples": 300, "test": 100, "length": 3} | (
        {} if name == "addition" else {"symbols": 12}
    )
    data = load(DataConfig(name=name, args=args))
    x, y = (torch.cat([getattr(split, part) for split in data]) for part in ("x", "y"))
    asked = y[0] != IGNORED
    assert torch.equal((y != IGNORED).all(0), asked)
    assert torch.equal(x == 0, y != IGNORED)
    question, answer = x[:, ~asked] - 1, y[:, asked]
    assert len(question.unique(dim=0)) == 400
    if name == "addition":
        digits = 10 ** torch.arange(4)
        terms = (question[:, :3] + 1j * question[:, 3:]).flip(1) * digits[:3]
        expected = terms.real.sum(1) + terms.imag.sum(1)
        assert torch.equal((answer * digits).sum(1), expected.long())
    else:
        assert torch.equal(answer, question.sort(1).values if name == "sort" else question)


def test_mnist1d_is_learnt_and_hard_for_a_linear_net() -> None:
    def error(hidden: list[int]) -> float:
        training = Training(
            TrialConfig(
                data=DataConfig(name="mnist1d"),
                model=ModelConfig(hidden=hidden),
                optimizer=OptimizerConfig(name="adam", lr=0.01),
                epochs=8,
            )
        )
        return [training.train_epoch()["validation/error"] for _ in range(8)][-1]

    net, linear = error([100]), error([])
    assert net < 0.3 < linear


def test_a_gpt_learns_to_copy() -> None:
    data = load(DataConfig(name="copy", args={"examples": 600, "test": 100, "length": 4}))
    config = ModelConfig(name="gpt", args={"layers": 2, "heads": 2, "width": 32})
    model = make_model(config, (8,), 8, 0, tokens=9, each_step=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(150):
        chosen = torch.arange(step * 50, step * 50 + 50) % len(data.train.y)
        optimizer.zero_grad()
        logits, y = model(data.train.x[chosen]), data.train.y[chosen]
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    model.eval()
    answers = model(data.test.x).argmax(2)[:, 4:]
    assert (answers == data.test.y[:, 4:]).float().mean() > 0.95
