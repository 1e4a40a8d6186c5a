"""The gradient of a mean over many terms underflows in a narrow format: a warning says so, and a
power of two on the loss prevents it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSTensor, convert_
from lns_ops.tensor.limits import underflow
from lns_ops.tensor.ops import losses

TERMS = 1024


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))


def batch(terms: int = TERMS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(terms, 16, generator=generator), torch.randint(
        0, 64, (terms,), generator=generator
    )


LOSSES: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "cross_entropy": lambda out, y, how: F.cross_entropy(out, y, reduction=how),
    "nll_loss": lambda out, y, how: F.nll_loss(out, y, reduction=how),
    "module": lambda out, y, how: nn.CrossEntropyLoss(reduction=how)(out, y),
    "mse_loss": lambda out, y, how: F.mse_loss(out[:, 0], torch.zeros(len(y)), reduction=how),
    "images": lambda out, y, how: F.cross_entropy(
        out.reshape(2, -1, 64).mT, y.reshape(2, -1), reduction=how
    ),
}


def said(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "underflow" in str(w.message)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_many_terms_is_warned_of_in_a_narrow_format(name: str) -> None:
    x, y = batch()
    outputs = {fmt: convert_(net(), fmt, scope="everywhere")(x) for fmt in ("lns12", "lns16")}
    (message,) = said(lambda: LOSSES[name](outputs["lns12"], y, "mean"))
    assert f"mean over {TERMS:,} terms" in message
    assert "lns12" in message
    assert "reduction='sum'" in message
    assert not said(lambda: LOSSES[name](outputs["lns12"], y, "sum"))
    assert not said(lambda: LOSSES[name](outputs["lns16"], y, "mean"))
    assert not said(lambda: LOSSES[name](outputs["lns12"].detach(), y, "mean"))


def test_a_mean_over_few_terms_is_not() -> None:
    x, y = batch(32)
    out = convert_(net(), "lns12", scope="everywhere")(x)
    assert not said(lambda: F.cross_entropy(out, y))


LOST_ON_THE_WAY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a mean of another name": lambda out, y: F.nll_loss(F.log_softmax(out, 1), y),
    "a mean of one's own": lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
    "mean()": lambda out, y: F.cross_entropy(out, y, reduction="none").mean(),
}


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
@pytest.mark.parametrize("name", LOST_ON_THE_WAY)
def test_a_gradient_that_underflows_as_it_enters_is_said_once(name: str, scope: str) -> None:
    x, y = batch()
    model = convert_(net(), "lns12", scope=scope)

    def train() -> None:
        for _ in range(3):
            LOST_ON_THE_WAY[name](model(x), y).backward()

    (message,) = said(train)
    assert "% of it underflow in lns12" in message
    assert "lns_ops.LossScale" in message
    assert not said(train)
    convert_(net(), "lns12", scope=scope)  # another network starts from zero
    assert len(said(train)) == 1


@pytest.mark.parametrize("fmt", ["lns12", "lns16"])
@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_a_gradient_that_keeps_what_counts_is_not_warned_of(scope: str, fmt: str) -> None:
    x, y = batch()
    model = convert_(net(), fmt, scope=scope)
    scale = 1 if fmt == "lns12" else 1 / len(y)
    sure = 20 * F.one_hot(y, 64)  # all gradients of such a row are below the range
    sure[::2] = 0
    assert not said(lambda: (F.cross_entropy(model(x), y, reduction="sum") * scale).backward())
    assert not said(
        lambda: (F.cross_entropy(model(x) + sure, y, reduction="sum") * scale).backward()
    )


def test_looking_for_what_underflows_ends() -> None:
    x, y = batch(32)
    model = convert_(net(), "lns12")
    for _ in range(underflow.LOOKS):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    assert not said(lambda: (F.cross_entropy(model(x), y) / 4096).backward())


def gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    x, y = batch()
    model = convert_(net(), "lns12", scope="everywhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model(x), y).backward()
    return [p.grad.codes for p in model.parameters()]  # type: ignore[union-attr]


def test_a_power_of_two_on_the_loss_gives_back_what_a_mean_loses() -> None:
    mean = gradients(F.cross_entropy)
    scaled = gradients(lambda out, y: F.cross_entropy(out, y) * TERMS)
    summed = gradients(lambda out, y: F.cross_entropy(out, y, reduction="sum"))
    assert all(torch.equal(a, b) for a, b in zip(scaled, summed, strict=True))
    lost, kept = (sum(int((g == 0).sum()) for g in each) for each in (mean, scaled))
    assert lost > 2 * kept


def test_the_analysis_says_by_which_power() -> None:
    analysis = lns_ops.analyze(net(), batch(), "lns12")
    assert analysis.loss_scale > 1
    assert analysis.loss_scale == 2.0 ** round(torch.tensor(analysis.loss_scale).log2().item())
    assert f"scale the loss, lns_ops.LossScale({analysis.loss_scale:.0f})" in str(analysis)
    scaled = lns_ops.analyze(
        net(), batch(), "lns12", loss=lambda out, y: analysis.loss_scale * F.cross_entropy(out, y)
    )
    before, after = (
        sum(layer.gradient.underflow for layer in a.layers if layer.gradient)
        for a in (analysis, scaled)
    )
    assert after < before / 4
    assert not any(
        values.saturated
        for layer in scaled.layers
        for values in (layer.gradient, layer.weight_gradient)
        if values
    )
    wide = lns_ops.analyze(net(), batch(), "lns16")
    assert wide.loss_scale == 1
    assert "LossScale" not in str(wide)


def trained(fmt: str, scale: float) -> float:
    model = convert_(net(), fmt, scope="everywhere") if fmt != "float32" else net()
    optimizer = lns_ops.optim.AdamW(model.parameters(), lr=3e-3, kahan_sum=fmt != "float32")
    x, y = batch(256)
    for _ in range(40):
        optimizer.zero_grad()
        out = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = F.cross_entropy(out.to_float() if isinstance(out, LNSTensor) else out, y) / 64
        (loss * scale).backward()
        optimizer.step()
    return float(loss) * 64


def test_adam_learns_from_a_scaled_loss_what_it_cannot_from_a_small_one() -> None:
    exact, scaled, plain = trained("float32", 1), trained("lns12", 64 * 256), trained("lns12", 1)
    assert scaled == pytest.approx(exact, rel=0.05)
    assert plain > scaled + 0.3


def compiled(x: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(Tensor.mean, backend="aot_eager", fullgraph=True, dynamic=True)(x)


@pytest.mark.parametrize(
    "mean",
    [
        Tensor.mean,
        lambda x: x.sum() / x.numel(),
        lambda x: (x / x.numel()).sum(),
        lambda x: F.adaptive_avg_pool1d(x[None], 1).sum(),
        compiled,
    ],
    ids=["mean", "sum", "terms", "pooling", "compiled"],
)
@pytest.mark.parametrize(("fmt", "terms"), [("lns12", 70_000), ("lns8", 300)])
def test_the_gradient_of_a_mean_over_more_terms_than_the_largest_number(
    mean: Callable[[Tensor], Tensor], fmt: str, terms: int
) -> None:
    x = LNSTensor.from_float(torch.ones(terms), fmt).requires_grad_()
    scale = 128.0
    mean(x).backward(torch.tensor(scale))
    grad = x.grad.to_float().double()  # type: ignore[union-attr]
    assert grad.unique().numel() == 1
    assert float(grad[0]) == pytest.approx(scale / terms, rel=x.fmt.epsilon)


def test_what_a_count_beyond_the_range_loses_is_said_once() -> None:
    x = LNSTensor.from_float(torch.ones(600_000), "lns12").requires_grad_()
    underflow.start_over()
    warned = said(lambda: (x.mean().backward(), x.mean().backward()))
    assert len(warned) == 1
    assert "division by 600,000 in lns12: 100 %" in warned[0]
    assert not x.grad.codes.any()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "run"),
    [("softmax", lambda x: x.softmax(-1)), ("logsumexp", lambda x: x.logsumexp(-1))],
)
def test_sums_of_more_terms_than_the_largest_number_warn(
    name: str, run: Callable[[Tensor], Tensor]
) -> None:
    few, many = (LNSTensor.from_float(torch.zeros(1, n), "lns8") for n in (200, 4096))
    with pytest.warns(UserWarning, match=f"{name} of 4,096 values in lns8: their sum saturates"):
        run(many)
    one = torch.full((1, 4096), -100.0)
    one[0, 7] = 100.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(few)
        LNSTensor.from_float(one, "lns8").softmax(-1)


def test_every_loss_of_torch_is_computed_in_float32() -> None:
    named = {getattr(F, n) for n in dir(F) if n.endswith(("_loss", "cross_entropy", "kl_div"))}
    others = {getattr(F, n, None) for n in ("linear_cross_entropy",)}  # a product and then a loss
    assert named - others <= set(losses.LOSSES)


def test_a_loss_of_many_classes_is_float32s() -> None:
    torch.manual_seed(0)
    x, y = LNSTensor.from_float(torch.randn(4, 2000) / 10 - 1, "lns8"), torch.zeros(4, 2000)
    loss = F.multilabel_soft_margin_loss(x, y)
    assert torch.equal(loss, F.multilabel_soft_margin_loss(x.to_float(), y))
