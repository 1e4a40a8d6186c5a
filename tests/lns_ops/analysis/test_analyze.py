"""analyze: counts and ratios match their definitions, for layers of all kinds; the model is
unchanged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSTensor, analyze, convert_, lns8, lns12, lns16
from lns_ops.analysis import Grid, Values, decibels


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(36, 3)
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    return (
        torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)),
        torch.arange(16) % 3,
    )


def test_values_are_counted_as_defined() -> None:
    x = torch.tensor([0.0, 2.0**-20, -(2.0**-17), 1.0, -3.0, 2.0**17, 2.0**20])
    values = Values.of(x, Grid(lns12))
    assert (values.count, values.zeros, values.underflow, values.saturated) == (7, 1, 2, 2)
    assert (values.low, values.high) == (-20, 20)
    rounded = LNSTensor.from_float(x, lns12).to_float().double()
    assert values.rounding_db == pytest.approx(
        10 * math.log10((x.double() ** 2).sum() / ((x - rounded) ** 2).sum())
    )
    nothing = Values.of(torch.zeros(3), Grid(lns12))
    assert (nothing.zeros, math.isnan(nothing.low), math.isnan(nothing.rounding_db)) == (
        3,
        True,
        True,
    )


def test_decibels() -> None:
    x = torch.ones(100)
    assert decibels(x, x + 0.1) == pytest.approx(20, abs=1e-5)
    assert decibels(x, x) == math.inf


def test_ratios_are_those_of_two_networks_run_by_hand() -> None:
    torch.manual_seed(0)
    model, (x, y) = (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        (torch.randn(10, 6), torch.arange(10) % 3),
    )
    analysis = analyze(model, (x, y), lns12)
    other = convert_(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), lns12, scope="everywhere"
    )
    with torch.no_grad():
        for own, theirs in zip(other.parameters(), model.parameters(), strict=True):
            own.copy_(LNSTensor.from_float(theirs, lns12))
    got, exact = other(x), model(x)
    F.cross_entropy(got, y).backward()
    F.cross_entropy(exact, y).backward()
    last = analysis.layers[-1]
    assert last.forward_db == pytest.approx(decibels(exact, got.to_float()))
    theirs, own = (
        torch.cat(
            [p.grad.to_float().flatten() if lns else p.grad.flatten() for p in m[0].parameters()]
        )  # type: ignore[union-attr]
        for m, lns in ((model, False), (other, True))
    )
    assert analysis.layers[0].weight_gradient_db == pytest.approx(decibels(theirs, own))
    assert [layer.name for layer in analysis.layers] == ["0", "1", "2"]
    assert last.gradient is not None
    assert last.gradient.count == 30


def test_finer_formats_lose_less() -> None:
    analyses = [analyze(net(), batch(), fmt, lr=0.1) for fmt in (lns8, lns12, lns16)]
    for layers in zip(*(a.layers for a in analyses), strict=True):
        ratios = [layer.forward_db for layer in layers]
        assert ratios == sorted(ratios)  # type: ignore[type-var]
        if layers[0].updates_lost is not None:
            lost: Any = [layer.updates_lost for layer in layers]
            assert lost == sorted(lost, reverse=True)
    linear = analyses[2].layers[-1]
    assert 30 < linear.forward_db < 60  # type: ignore[operator]


@pytest.mark.parametrize(("lr", "lost"), [(1e-4, 1.0), (0.004, 1.0), (0.008, 0.0), (0.1, 0.0)])
def test_updates_are_lost_below_half_an_ulp(lr: float, lost: float) -> None:
    """Weights and gradients of 1: half an ulp of lns12 is 0.0054."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    analysis = analyze(
        model, (torch.ones(1, 4), None), lns12, loss=lambda output, _: output.sum(), lr=lr
    )
    assert analysis.layers[0].updates_lost == lost
    assert analysis.layers[0].updates == 8
    made = analyze(
        model, (torch.ones(1, 4), None), lns12, loss=lambda output, _: output.sum(),
        optimizer=lambda parameters: lns_ops.optim.AdamW(parameters, lr=lr, weight_decay=0.0),
    )  # fmt: skip
    assert made.layers[0].updates_lost == lost


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_the_model_and_the_generator_stay_as_they_are(scope: str) -> None:
    model, converted = net(), convert_(net(), lns12, scope=scope)
    for each in (model, converted):
        before = {
            k: (v.codes if isinstance(v, LNSTensor) else v).clone()
            for k, v in each.state_dict().items()
        }
        state, hooks = torch.random.get_rng_state(), list(each[0]._forward_hooks)
        first, again = (analyze(each, batch(), lns12, scope=scope) for _ in range(2))
        assert first.to_dict().keys() == again.to_dict().keys()
        assert str(first) == str(again)
        assert torch.equal(torch.random.get_rng_state(), state)
        for key, value in each.state_dict().items():
            assert torch.equal(value.codes if isinstance(value, LNSTensor) else value, before[key])
        assert all(p.grad is None for p in each.parameters())
        assert list(each[0]._forward_hooks) == hooks


def test_layers_may_have_formats_of_their_own() -> None:
    analysis = analyze(net(), batch(), {"0": "lns16", "1": "lns16", "6": "lns12"})
    formats = {layer.name: layer.format for layer in analysis.layers}
    assert (formats["0"], formats["2"], formats["6"]) == ("lns16", "lns16", "lns12")
    assert analysis.span is None


@pytest.mark.parametrize(
    ("name", "low"), [("bfloat16", -133), ("fixed(16,12)", -12), ("int8/channel", None)]
)
def test_other_formats(name: str, low: float | None) -> None:
    analysis = analyze(net(), batch(), name, lr=0.1)
    assert analysis.format == name
    assert (analysis.span is None) == (low is None)
    if analysis.span is not None:
        assert analysis.span[0] == low
    linear = analysis.layers[-1]
    assert linear.output is not None
    assert linear.forward_db is not None
    assert 15 < linear.forward_db < 80
    assert linear.updates_lost is not None
    assert 0 <= linear.updates_lost < 1
    again = analyze(convert_(net(), name, scope="everywhere"), batch(), name)
    assert [layer.name for layer in again.layers] == [layer.name for layer in analysis.layers]


def test_recurrent_layers_and_shared_ones() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = (
                nn.Embedding(7, 6),
                nn.LSTM(6, 5, batch_first=True),
                nn.Linear(5, 7),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.lstm(self.embed(tokens))[0]
            return self.head(self.head(hidden)[..., :5]).mean(1)  # type: ignore[no-any-return]

    analysis = analyze(
        Tagger(), (torch.arange(12).view(3, 4) % 7, torch.tensor([0, 1, 2])), lns16, lr=0.1
    )
    layers = {layer.name: layer for layer in analysis.layers}
    assert layers.keys() == {"embed", "lstm", "head"}
    assert layers["head"].output.count == 2 * 3 * 4 * 7  # type: ignore[union-attr]
    assert layers["lstm"].updates == layers["lstm"].weight.count  # type: ignore[union-attr]


def test_table_frame_and_picture(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="to_pandas needs pandas")
    analysis = analyze(net(), batch(), lns12, lr=0.1)
    lines = str(analysis).splitlines()
    assert lines[0] == "lns12, 2^-16.0 .. 2^16.0; ranges in octaves"
    assert [line.split()[0] for line in lines[1:]] == [
        "layer",
        "0",
        "1",
        "2",
        "3",
        "6",
        "gradients",
    ]
    frame = analysis.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    output: Any = analysis.layers[0].output
    assert frame.loc["0", "output.count"] == output.count
    figure = analysis.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    ranges, _, lost = figure.axes
    assert ranges.get_yticklabels()[0].get_text() == "0 (Conv2d)"
    assert len(lost.patches) == 3


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"lr=0.1 and an optimizer: both define the update"):
        analyze(
            net(),
            batch(),
            lns12,
            lr=0.1,
            optimizer=lambda parameters: lns_ops.optim.SGD(parameters, lr=0.1),
        )
    with pytest.raises(ValueError, match=r"batch of type Tensor: must be a pair"):
        analyze(net(), torch.ones(3), lns12)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format 'lns99'"):
        analyze(net(), batch(), "lns99")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.left(x) + self.right(y)
        return out


def test_a_network_may_have_several_inputs() -> None:
    x, y, labels = torch.randn(5, 4), torch.randn(5, 2), torch.arange(5) % 3
    by_place = lns_ops.analyze(Pair(), ((x, y), labels), "lns16")
    by_name = lns_ops.analyze(Pair(), ({"y": y, "x": x}, labels), "lns16")
    for analysis in (by_place, by_name):
        assert [layer.name for layer in analysis.layers] == ["left", "right"]
