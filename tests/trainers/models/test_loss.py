"""Losses: torch's own figures, summed over answers, and targets that do not fit them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import LNSTensor, lns16
from tests.lns_ops.lns_formats import half_ulp
from trainers.config import LossConfig
from trainers.data.split import IGNORED, Dataset, Split
from trainers.models.loss import Loss

NUMBERS = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


def made(name: str, **args: Any) -> Loss:
    return Loss(LossConfig(name=name, args=args))


def dataset(y: Tensor) -> Dataset:
    return Dataset(*(Split(torch.zeros(len(y), 3), y) for _ in range(3)))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_compared_as_torch_does(name: str) -> None:
    outputs, targets = torch.randn(6, 3), torch.randn(6, 3)
    loss = made(name)
    wanted = NUMBERS[name](outputs, targets, reduction="sum")
    torch.testing.assert_close(loss(outputs, targets), wanted, rtol=0, atol=0)
    assert (int(loss.wrong(outputs, targets)), int(loss.answers(targets))) == (0, 18)


def test_one_number_an_example_may_come_in_a_column() -> None:
    outputs, targets = torch.randn(6, 1), torch.randn(6)
    wanted = F.mse_loss(outputs[:, 0], targets, reduction="sum")
    torch.testing.assert_close(made("mse")(outputs, targets), wanted, rtol=0, atol=0)


def test_in_lns_the_gradient_is_the_softmax_minus_one_hot() -> None:
    x, classes = 3 * torch.randn(6, 5), torch.tensor([0, 4, IGNORED, 2, 1, 3])
    x[0, 0] = 9.0  # its probability rounds to 1
    logits = LNSTensor.from_float(x, lns16).detach().requires_grad_()
    loss = made("cross_entropy", softmax="lns")(logits, classes)
    wanted = F.cross_entropy(logits.to_float(), classes, reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=0, atol=0)
    (2 * loss).backward()  # type: ignore[no-untyped-call]
    assert isinstance(logits.grad, LNSTensor)
    (exact,) = torch.autograd.grad(2 * wanted, logits)
    # exp has a rounded argument, and eight operations round
    depth = (x.max(1).values - x.min(1).values + 8) * half_ulp(lns16)
    for found, expected, rtol in zip(logits.grad, exact, depth.tolist(), strict=True):
        torch.testing.assert_close(found.to_float(), expected.to_float(), rtol=rtol, atol=0)


def test_a_softmax_in_lns_is_of_lns_numbers_and_alone() -> None:
    with pytest.raises(ValueError, match=r"precision\.scope=everywhere"):
        made("cross_entropy", softmax="lns")(torch.randn(6, 5), torch.zeros(6, dtype=torch.int64))
    for args in ({"softmax": "exact"}, {"softmax": "lns", "label_smoothing": 0.1}):
        with pytest.raises(ValueError, match="softmax is lns, and then takes no other argument"):
            made("cross_entropy", **args)


def test_arguments_are_torchs() -> None:
    logits, classes = torch.randn(6, 5), torch.randint(5, (6,))
    wanted = F.cross_entropy(logits, classes, reduction="sum", label_smoothing=0.2)
    found = made("cross_entropy", label_smoothing=0.2)(logits, classes)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    wanted = F.huber_loss(logits, logits + 1, reduction="sum", delta=0.1)
    torch.testing.assert_close(made("huber", delta=0.1)(logits, logits + 1), wanted)


def test_answers_of_a_sequence_count_one_by_one_without_those_not_asked_for() -> None:
    logits, classes = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    classes[0, 2:] = IGNORED
    asked = classes != IGNORED
    loss = made("cross_entropy")
    wanted = F.cross_entropy(logits[asked], classes[asked], reduction="sum")
    for outputs in (logits, logits.movedim(-1, 1)):
        torch.testing.assert_close(loss(outputs, classes), wanted)
        assert int(loss.wrong(outputs, classes)) == int(
            (logits[asked].argmax(-1) != classes[asked]).sum()
        )
    assert int(loss.answers(classes)) == 6
    assert loss.answers_each(classes) == 4


def test_labels_are_wrong_one_by_one() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 1.0, -0.5]])
    labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    loss = made("binary_cross_entropy")
    assert int(loss.wrong(logits, labels)) == 3
    wanted = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    torch.testing.assert_close(loss(logits, labels), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy", *NUMBERS])
def test_outputs_in_lns_are_decoded(name: str) -> None:
    outputs = LNSTensor.from_float(torch.randn(6, 3), lns16).requires_grad_()
    targets = torch.randint(3, (6,)) if name == "cross_entropy" else torch.ones(6, 3)
    loss = made(name)(outputs, targets)
    plain = made(name)(outputs.detach().to_float(), targets)
    torch.testing.assert_close(loss, plain, rtol=0, atol=0)
    loss.backward()
    assert outputs.grad is not None


@pytest.mark.parametrize(
    ("name", "y", "message"),
    [
        ("cross_entropy", torch.zeros(4), "its targets are float32, and classes are whole"),
        ("cross_entropy", torch.tensor([0, -1]), "whole numbers from -1"),
        ("cross_entropy", torch.tensor([[0, -1]]), "whole numbers from -1"),
        ("binary_cross_entropy", torch.tensor([[0.0, 0.5]]), "not all 0 or 1"),
    ],
)
def test_targets_that_do_not_fit_are_refused(name: str, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=rf"data.name='d' with loss.name={name}: .*{message}.*use"):
        made(name).fit("d", dataset(y))


def test_whole_numbers_may_be_labels_and_numbers_to_predict() -> None:
    for name in ("binary_cross_entropy", "mse"):
        assert made(name).fit("d", dataset(torch.tensor([[0, 1]]))).test.y.dtype == torch.float32


def test_unknown_losses_and_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"loss.name='mae': must be one of cross_entropy, .*file"):
        LossConfig(name="mae")
    with pytest.raises(
        ValueError, match=r"loss.args=.*weight is not among .*\(label_smoothing, softmax\)"
    ):
        LossConfig(args={"weight": [1, 2]})
