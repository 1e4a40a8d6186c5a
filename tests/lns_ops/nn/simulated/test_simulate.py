"""Training in simulated formats: the grid of each value, the precision of updates, loss scaling,
products of float8."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lns_ops
from lns_ops import formats, quantize_updates_, simulate_
from lns_ops.formats import NumberFormat, parse
from lns_ops.nn.float8_linear import Float8Linear, product_kind, scaled_product
from lns_ops.nn.simulate import GROWTH_INTERVAL, INITIAL_LOSS_SCALE
from lns_ops.optim import SGD, Adam, AdamW

NAMES = [
    "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fn/tensor",
    "fixed(16,10)", "int8", "int8/channel", "lns8/channel", "float(3,6)", "posit(8)",
    "takum(10)/channel", "bfp(8,16)",
    "mxfp8", "mxint8", "nvfp4", "binary8p4",
]  # fmt: skip
UPDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kahan": {"kahan_sum": True},
    "stochastic": {"stochastic_rounding": True, "seed": 3},
    "master": {"master_format": "float32"},
    "master, kahan": {"master_format": "bfloat16", "kahan_sum": True},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 10),
    )  # fmt: skip


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    return x, (x @ torch.randn(64, 10, generator=generator)).argmax(1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x, y = batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss.backward()
    optimizer.step()
    return loss.item()


def on_grid(fmt: NumberFormat, x: torch.Tensor) -> bool:
    return torch.equal(fmt.quantize(x.detach()), x.detach())


@pytest.mark.parametrize("update", list(UPDATES))
@pytest.mark.parametrize("name", NAMES)
def test_weights_live_on_the_grid_and_learn(name: str, update: str) -> None:
    fmt, model = parse(name), simulate_(network(), name)
    options = UPDATES[update]
    optimizer = quantize_updates_(SGD(model.parameters(), lr=0.003, momentum=0.5), model, **options)
    first, before = math.nan, [p.detach().clone() for p in model.parameters()]
    for number in range(30):
        loss = step(model, optimizer)
        first = loss if number == 0 else first
        assert all(on_grid(fmt, p) for p in model.parameters())
        assert (
            all(on_grid(fmt, p.grad) for p in model.parameters() if p.grad is not None)
            or name == "float16"
        )
    # most updates are lost there, as expected
    if update != "plain" or name not in ("float8_e4m3fn", "float8_e5m2"):
        assert loss < 0.9 * first
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for p in model.parameters():
        state = optimizer.state[p]
        stored = parse(options["master_format"]) if "master_format" in options else fmt
        assert ("master" in state) == ("master_format" in options)
        assert on_grid(stored, state.get("master", p))
        assert torch.equal(fmt.quantize(state["master"]), p) if "master" in state else True
        assert (
            on_grid(stored.compensation, state["compensation"])
            if options.get("kahan_sum")
            else "compensation" not in state
        )


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "float8_e4m3fn/tensor", "int8/channel", "lns8/channel", "posit(8)", "bfp(8,16)"],
)
def test_activations_and_their_gradients_lie_on_the_grid(name: str) -> None:
    fmt, model = parse(name), simulate_(network(), name)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(layer_name: str, layer: nn.Module) -> None:
        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: seen.__setitem__(layer_name, (output.detach(), grad)))

        layer.register_forward_hook(keep)

    for layer_name, layer in model.named_children():
        if layer_name in ("1", "5", "7"):
            watch(layer_name, layer)
    x, y = batch()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    assert set(seen) == {"1", "5", "7"}
    for layer_name, (output, _) in seen.items():
        assert on_grid(fmt, output), layer_name
    # The gradient at the GELU's output was rounded at the last layer's input. The gradient that
    # comes from the loss is still float32.
    assert not on_grid(fmt, seen["7"][1])
    weights = [layer.weight.grad for layer in model if isinstance(layer, nn.Linear)]
    assert not any(on_grid(fmt, grad) for grad in weights), (
        "gradients of parameters are rounded by the optimizer"
    )


def test_a_step_in_bfloat16_is_its_definition() -> None:
    """One linear layer by hand: every rounding is where the page says."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 3))
    w, b, x, y = (
        model[0].weight.detach().clone(),
        model[0].bias.detach().clone(),
        torch.randn(4, 5),
        torch.arange(4) % 3,
    )

    def q(t: torch.Tensor) -> torch.Tensor:
        return t.bfloat16().float()

    simulate_(model, "bfloat16")
    optimizer = quantize_updates_(SGD(model.parameters(), lr=0.5), model, kahan_sum=True)
    logits = q(q(x) @ q(w).t() + q(b)).requires_grad_()
    F.cross_entropy(logits, y).backward()
    assert logits.grad is not None
    grad = q(logits.grad)
    expected = {"weight": (q(w), q(grad.t() @ q(x))), "bias": (q(b), q(grad.sum(0)))}
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name, parameter in model[0].named_parameters():
        old, gradient = expected[name]
        update = (old - 0.5 * gradient) - old
        new = q(old + update)
        assert torch.equal(parameter, new)
        assert torch.equal(optimizer.state[parameter]["compensation"], q(update - (new - old)))


@pytest.mark.parametrize("name", ["bfloat16", "fixed(16,8)", "int8/channel", "lns8/channel"])
def test_kahan_and_random_rounding_keep_what_nearest_loses(name: str) -> None:
    """A hundred updates of a sixteenth of a step each: rounding to nearest keeps none, the others
    keep all."""
    fmt, finals = parse(name), {}
    start = torch.full((1, 64), 0.75)
    start[0, 0] = 1.0  # keeps its value, and so the scale of the others
    start = fmt.quantize(start)
    slightly_less = torch.where(start == start[0, 0], start, start * (1 - 2.0**-12))
    width = float(
        (start - fmt.quantize(slightly_less, torch.zeros_like(start, dtype=torch.int32)))[0, 1]
    )
    assert width > 2.0**-10
    for update in ("plain", "kahan", "stochastic"):
        model = nn.Linear(64, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(start)
        simulate_(model, name, gradient_format="float32")
        optimizer = quantize_updates_(SGD(model.parameters(), lr=1.0), model, **UPDATES[update])
        for _ in range(100):
            model.weight.grad = torch.where(start == start[0, 0], 0, width / 16)
            optimizer.step()
        finals[update] = float((start - model.weight.detach())[0, 1:].mean())
    assert finals["plain"] == 0
    assert finals["kahan"] == pytest.approx(100 * width / 16, rel=0.2)
    assert finals["stochastic"] == pytest.approx(100 * width / 16, rel=0.2)


def test_random_rounding_repeats_and_resumes(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = simulate_(network(), "bfloat16")
        return model, quantize_updates_(
            Adam(model.parameters(), lr=0.01), model, stochastic_rounding=True, seed=5
        )

    runs = [made(), made()]
    for model, optimizer in runs:
        for _ in range(3):
            step(model, optimizer)
    assert all(
        torch.equal(p, q)
        for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True)
    )
    torch.save([runs[0][0].state_dict(), runs[0][1].state_dict()], tmp_path / "state.pt")
    model, optimizer = made()
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for resumed in ((model, optimizer), runs[1]):
        for _ in range(3):
            step(*resumed)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), runs[1][0].parameters(), strict=True)
    )


def test_loss_scaling_saves_small_gradients_and_survives_overflows() -> None:
    model = simulate_(nn.Sequential(nn.Linear(4, 2, bias=False)), "float16")
    optimizer = quantize_updates_(SGD(model.parameters(), lr=1.0), model)
    weight = model[0].weight
    (model(torch.ones(1, 4)).sum() * 2.0**-26).backward()
    assert weight.grad is not None
    assert bool((weight.grad == 2.0**-26).all()), "would be zero in float16"
    optimizer.step()
    assert float(model.get_buffer("loss_scale")) == INITIAL_LOSS_SCALE
    before = weight.detach().clone()
    optimizer.zero_grad()
    (model(torch.ones(1, 4)).sum() * 8.0).backward()  # 8 x 2^16 is beyond float16
    assert not bool(weight.grad.isfinite().all())
    optimizer.step()
    assert torch.equal(weight, before)
    assert float(model.get_buffer("loss_scale")) == INITIAL_LOSS_SCALE / 2
    model.get_buffer("growth_tracker").fill_(GROWTH_INTERVAL - 1)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert float(model.get_buffer("loss_scale")) == INITIAL_LOSS_SCALE
    assert int(model.get_buffer("growth_tracker")) == 0


def test_other_formats_have_no_loss_scale() -> None:
    assert not list(simulate_(network(), "bfloat16").buffers())
    assert (
        len(list(simulate_(network(), "float8_e4m3fn", gradient_format="float16").buffers())) == 2
    )


def test_convert_takes_the_names_and_revert_undoes() -> None:
    model = network()
    x, _ = batch()
    lns_ops.convert_(model, "int8/channel", scope="everywhere")
    assert "simulated  int8/channel" in lns_ops.summary(model)
    rounded = [p.detach().clone() for p in model.parameters()]
    simulated = model(x)
    lns_ops.revert_(model)
    assert not any(hasattr(layer, "simulation") for layer in model.modules())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), rounded, strict=True))
    assert not torch.equal(model(x), simulated)
    assert lns_ops.convert_(model, formats.bfloat16, scope="everywhere") is model


def test_copies_are_independent() -> None:
    model = simulate_(network(), "float16")
    x, y = batch()
    twin = copy.deepcopy(model)
    twin.get_buffer("loss_scale").fill_(2.0)
    F.cross_entropy(twin(x), y).backward()
    assert float(model.get_buffer("loss_scale")) == INITIAL_LOSS_SCALE
    assert twin[1].simulation.root is twin
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_recurrent_and_attention_layers_are_rounded_at_their_border() -> None:
    torch.manual_seed(0)
    fmt = parse("bfloat16")
    recurrent = simulate_(nn.LSTM(6, 5), "bfloat16")
    output, (hidden, cell) = recurrent(torch.randn(3, 2, 6))
    assert all(on_grid(fmt, t) for t in (output, hidden, cell))
    attention = simulate_(nn.MultiheadAttention(8, 2), "bfloat16")
    x = torch.randn(4, 1, 8)
    assert on_grid(fmt, attention(x, x, x)[0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: simulate_(simulate_(network(), "tf32"), "tf32"), "is in a number format already"),
        (
            lambda: simulate_(lns_ops.convert_(network(), "lns12", scope="everywhere"), "tf32"),
            "is in a number format already",
        ),
        (
            lambda: lns_ops.convert_(network(), "bfloat16"),
            "only LNS has scopes; use scope='everywhere'",
        ),
        (lambda: simulate_(network(), "float7"), "unknown; formats are"),
        (
            lambda: quantize_updates_(SGD(network().parameters(), lr=1.0), network()),
            "call lns_ops.nn.simulate.simulate_ first",
        ),
    ],
)
def test_bad_input_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_two_ways_of_rounding_and_closures_are_refused() -> None:
    model = simulate_(network(), "bfloat16")
    with pytest.raises(ValueError, match="one is enough; choose one"):
        quantize_updates_(
            SGD(model.parameters(), lr=1.0), model, kahan_sum=True, stochastic_rounding=True
        )
    optimizer = quantize_updates_(SGD(model.parameters(), lr=1.0), model)
    with pytest.raises(ValueError, match=r"call backward\(\) before step\(\)"):
        optimizer.step(lambda: 0.0)


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(16, 32, 48), (5, 7, 3), (128, 100, 10), (1, 1, 1)]
)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fn/tensor"])
def test_scaled_products_are_those_of_the_values(
    rows: int, inner: int, columns: int, name: str
) -> None:
    """torch computes ``_scaled_mm`` on CPUs too, so padding, order and scales can be checked
    without a GPU."""
    torch.manual_seed(0)
    fmt = parse(name)
    x, y = fmt.encode(torch.randn(rows, inner)), fmt.encode(torch.randn(inner, columns))
    expected = fmt.decode(x).double() @ fmt.decode(y).double()
    # Products are exact in float32. A sum of `inner` products has an error of inner 2^-24 of the
    # sum of magnitudes.
    bound = inner * 2.0**-23 * (fmt.decode(x).abs().double() @ fmt.decode(y).abs().double())
    assert bool(((scaled_product(x, y) - expected).abs() <= bound).all())


def test_linear_layers_in_float8_say_how_they_multiply() -> None:
    model = simulate_(network(), "float8_e4m3fn")
    assert [type(layer) for layer in model if isinstance(layer, nn.Linear)] == [
        Float8Linear,
        Float8Linear,
    ]
    assert (
        product_kind("cpu")
        == "emulated: a cpu has no 8-bit products; float32 products of float8 values"
    )
    assert [
        type(layer) for layer in simulate_(network(), "float8_e5m2") if isinstance(layer, nn.Linear)
    ] == [nn.Linear, nn.Linear]
    assert type(lns_ops.revert_(model)[-1]) is nn.Linear
    assert "emulated" in str(lns_ops.backends()["cpu"]["float8_products"])  # type: ignore[index]


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("gradient", [None, "float8_e5m2"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fn/tensor"])
def test_float8_on_a_gpu_really_multiplies_in_8_bits(name: str, gradient: str | None) -> None:
    if product_kind("cuda") != "torch._scaled_mm":
        pytest.skip(product_kind("cuda"))
    gradient = f"{gradient}/tensor" if gradient and "/" in name else gradient
    models = [
        simulate_(network(), name, gradient_format=gradient),
        simulate_(network().cuda(), name, gradient_format=gradient),
    ]
    x, y = batch()
    for model, inputs, labels in zip(models, (x, x.cuda()), (y, y.cuda()), strict=True):
        with torch.profiler.profile() as profile:
            F.cross_entropy(model(inputs), labels, reduction="sum").backward()
        used = any(event.key == "aten::_scaled_mm" for event in profile.key_averages())
        assert used == inputs.is_cuda
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        # Sums in another order sometimes move values across an 8-bit rounding threshold; most
        # values agree.
        difference = (theirs.grad.cpu() - mine.grad).norm() / mine.grad.norm()
        assert float(difference) < 0.2


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("update", list(UPDATES))
@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "fixed(16,10)", "int8/channel", "lns8/channel"]
)
def test_updates_on_a_gpu_are_those_of_the_cpu(name: str, update: str) -> None:
    """With given gradients, the weights have the same bits."""
    finals = []
    for device in ("cpu", "cuda"):
        model = simulate_(network().to(device), name)
        optimizer = quantize_updates_(SGD(model.parameters(), lr=0.125), model, **UPDATES[update])
        generator = torch.Generator().manual_seed(7)
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).mul(2.0**-6).to(device)
            optimizer.step()
        finals.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*finals, strict=True))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_the_compensation_of_the_format_is_not_the_optimizers_own(
    kind: type[torch.optim.Optimizer],
) -> None:
    """Each update equals an optimizer's without compensation; the format's compensation is
    separate."""
    torch.manual_seed(0)
    net = simulate_(nn.Linear(8, 4), "bfloat16")
    optimizer = quantize_updates_(kind(net.parameters(), lr=0.01), net, kahan_sum=True)
    fmt = parse("bfloat16")
    for _ in range(5):
        plain = kind(
            (copies := [p.detach().clone().requires_grad_() for p in net.parameters()]), lr=0.01
        )
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        carried = [
            optimizer.state[p].get("compensation", torch.zeros_like(p)).clone()
            for p in net.parameters()
        ]
        optimizer.zero_grad()
        net(torch.randn(16, 8)).square().sum().backward()
        for copied, p in zip(copies, net.parameters(), strict=True):
            copied.grad = fmt.quantize(p.grad)
        old = [p.detach().clone() for p in copies]
        plain.step()
        optimizer.step()
        for p, stepped, before, kept in zip(net.parameters(), copies, old, carried, strict=True):
            assert torch.equal(p, fmt.quantize(before + (kept + (stepped - before))))


class Positions(nn.Module):
    """A module with a forward of its own, a parameter and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        self.seen = t.detach()
        y: torch.Tensor = self.gain * self.layer(torch.stack([t.sin(), t.cos()], -1))
        return y


class OwnProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return x @ self.w


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return super().forward(x)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "bfloat16", "int8/channel"])
def test_float_inputs_of_modules_with_a_forward_of_their_own_stay(name: str) -> None:
    x, model = torch.tensor([1001.0, 4097.0, 9999.0]), simulate_(Positions(), name)
    y = model(x)
    assert torch.equal(model.seen, x)
    assert torch.equal(y, parse(name).quantize(y))


@pytest.mark.parametrize("kind", [OwnProduct, lambda: OwnLinear(3, 1)])
def test_inputs_that_meet_a_weight_of_the_module_are_rounded(kind: Any) -> None:
    x, model = torch.tensor([1001.0, 4097.0, 9999.0]), simulate_(kind(), "bfloat16")
    model(x)
    assert torch.equal(model.seen, parse("bfloat16").quantize(x))


@pytest.mark.parametrize("name", ["float(5,4)", "int8/channel", "mxfp8"])
def test_padded_sequences_go_through_a_transformer_in_evaluation(name: str) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    simulate_(model, name).eval()
    x, padded = torch.randn(2, 6, 32), torch.arange(6) >= torch.tensor([[6], [4]])
    expected = model(x, src_key_padding_mask=padded)
    with torch.no_grad():
        found = model(x, src_key_padding_mask=padded)
    assert torch.equal(found[~padded], expected[~padded])
