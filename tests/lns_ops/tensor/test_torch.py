"""Common uses of tensors and modules in torch: saving, copying, compiling, checkpointing, counting,
loading in workers."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import lns_ops
from lns_ops import LNSTensor, allow_float_fallback, convert_, lns12, lns16, revert_, summary
from lns_ops.nn.matmul_layers import LNSMatmulConv2d, LNSMatmulLinear
from tests.lns_ops.nets import GPT, LSTMClassifier, ResNet18

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")


def codes(x: Tensor) -> Tensor:
    return x.codes if isinstance(x, LNSTensor) else x


def tiny(name: str) -> tuple[nn.Module, Tensor]:
    """A net and an input for it."""
    torch.manual_seed(0)
    if name == "resnet":
        return ResNet18(width=4), torch.randn(2, 3, 32, 32)
    if name == "lstm":
        return LSTMClassifier(), torch.randint(0, 20, (4, 6))
    return GPT(layers=1, fused=name == "gpt").eval(), torch.randint(0, 20, (2, 8))


# -------------------------------------------------------------------------------------------------


def trained(make: Any, batch: Tensor, labels: Tensor, steps: int, **conversion: Any) -> list[float]:
    """Losses of some steps of Adam from the same start."""
    torch.manual_seed(0)
    model = make()
    if conversion:
        convert_(model, **conversion)
    optimizer, losses = (
        lns_ops.optim.Adam(model.parameters(), lr=3e-3, kahan_sum=bool(conversion)),
        [],
    )
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(batch)
        loss = F.cross_entropy(out.flatten(0, -2) if out.dim() == 3 else out, labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


NETS = {
    "resnet": (lambda: ResNet18(width=8), (8, 3, 32, 32), 8),
    "lstm": (lambda: LSTMClassifier(bidirectional=True), (16, 5), 16),
    "gpt": (lambda: GPT(), (4, 12), 48),
    "gpt written out": (lambda: GPT(fused=False), (4, 12), 48),
}


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
@pytest.mark.parametrize("fmt", ["lns12", "lns16"])
@pytest.mark.parametrize("name", NETS)
def test_whole_networks_train_as_in_float32(name: str, fmt: str, scope: str) -> None:
    make, shape, targets = NETS[name]
    if name == "lstm" and scope == "matmul":
        pytest.skip("scope matmul does not reach into an LSTM")
    torch.manual_seed(1)
    batch = torch.randn(shape) if name == "resnet" else torch.randint(0, 20, shape)
    labels = torch.arange(targets) % 4
    float32 = trained(make, batch, labels, 12)
    losses = trained(make, batch, labels, 12, fmt=fmt, scope=scope)
    assert losses[0] - losses[-1] > 0.6 * (float32[0] - float32[-1]) > 0
    assert losses[-1] == pytest.approx(float32[-1], rel=0.25, abs=0.1)


def test_formats_by_name_pattern_and_by_filter() -> None:
    model = convert_(
        ResNet18(width=4),
        {"conv1": "lns16", "bn1": "lns16", "layer1.*": "lns16", "layer*": "lns12"},
        scope="everywhere",
    )
    assert model.layer1[0].conv1.weight.fmt == lns16
    assert model.layer2[0].bn1.weight.fmt == lns12
    assert type(model.fc.weight.data) is Tensor
    assert model(torch.randn(2, 3, 32, 32)).dtype == torch.float32
    first_and_last = {"conv1", "fc"}
    model = convert_(
        ResNet18(width=4),
        lns12,
        "matmul",
        lambda module, name: "lns16" if name in first_and_last else True,
    )
    assert (model.conv1.fmt, model.layer1[0].conv1.fmt) == (lns16, lns12)
    assert type(model.conv1) is LNSMatmulConv2d
    assert type(model.fc) is LNSMatmulLinear


def test_a_module_is_converted_in_steps() -> None:
    model, x = tiny("resnet")
    convert_(model, lns12, "matmul", lambda module, name: name in ("conv1", "fc"))
    convert_(model, lns16, "everywhere", lambda module, name: name.startswith(("layer", "bn1")))
    out = model(x)
    out.sum().backward()
    assert type(out) is Tensor
    assert isinstance(model.layer1[0].conv1.weight.grad, LNSTensor)
    assert type(model.conv1.weight.grad) is Tensor
    with pytest.raises(ValueError, match="layer 'conv1': is LNS already"):
        convert_(model, lns12, "everywhere")


@pytest.mark.parametrize("name", ["resnet", "lstm", "gpt"])
def test_revert_gives_the_ordinary_module_back(name: str) -> None:
    model, x = tiny(name)
    original = copy.deepcopy(model)
    if name != "lstm":
        model.train(False)
        reverted = revert_(convert_(copy.deepcopy(model), lns12))
        assert torch.equal(reverted(x), original.train(False)(x))
    convert_(model, lns16, "everywhere")
    rounded = {n: p.to_float() for n, p in model.named_parameters()}
    revert_(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(p, rounded[n]) for n, p in model.named_parameters())
    if name == "gpt":
        assert model.head.weight is model.tokens.weight
    convert_(model, lns16, "everywhere")
    assert torch.equal(
        model.state_dict()[next(iter(rounded))].to_float(), next(iter(rounded.values()))
    )


def test_summary_says_what_was_converted() -> None:
    model = convert_(
        nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3, bias=False)),
        lns12,
        filter_fn=lambda m, n: n == "0",
    )
    assert summary(model).splitlines() == [
        "layer  type             scope   format   parameters",
        "0      LNSMatmulLinear  matmul  lns12            10",
        "2      Linear           -       float32           6",
    ]


def test_buffers_and_integers_stay_as_they_are() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.order = nn.Parameter(torch.tensor([3, 105, 999]), requires_grad=False)
            self.even = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
            self.register_buffer("positions", torch.linspace(0, 1, 4))
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.average.mul_(0.99).add_(x.detach().mean(0), alpha=0.01)
            return x * self.scale + self.positions

    model = convert_(nn.Sequential(Counts(), nn.BatchNorm1d(4)), lns12, "everywhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(200):
            out = model(torch.ones(3, 4))
    assert isinstance(out, LNSTensor)
    assert isinstance(model[0].scale, LNSTensor)
    assert model[0].order.tolist() == [3, 105, 999]
    assert model[0].even.tolist() == [True, False]
    assert all(type(buffer) is Tensor for buffer in model.buffers())
    assert model[0].calls == 200
    assert torch.allclose(model[0].average, torch.tensor(1 - 0.99**200), rtol=1e-4)


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet", "lstm", "gpt"])
def test_files_of_every_kind_give_the_same_outputs(name: str, tmp_path: Path) -> None:
    model, x = tiny(name)
    convert_(model, lns12, "everywhere").eval()
    expected = codes(model(x))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    lns_ops.serialization.save_file(model.state_dict(), tmp_path / "model.safetensors")
    for state in (
        torch.load(tmp_path / "model.pt", weights_only=True),
        lns_ops.serialization.load_file(tmp_path / "model.safetensors"),
    ):
        torch.manual_seed(7)
        other = convert_(
            type(model)(**({"width": 4} if name == "resnet" else {"layers": 1})),
            lns12,
            "everywhere",
        ).eval()
        other.load_state_dict(state)
        assert torch.equal(codes(other(x)), expected)
    assert torch.equal(codes(copy.deepcopy(model)(x)), expected)


def test_a_safetensors_file_holds_codes_that_anyone_can_read(tmp_path: Path) -> None:
    weight = LNSTensor.from_float(torch.randn(3, 4), lns12).t()
    lns_ops.serialization.save_file(
        {"weight": weight, "steps": torch.arange(3)}, tmp_path / "a.safetensors"
    )
    plain = safetensors_torch.load_file(tmp_path / "a.safetensors")
    assert torch.equal(plain["weight"], weight.codes)
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["lns_formats"]) == {"weight": "lns12"}
    back = lns_ops.serialization.load_file(tmp_path / "a.safetensors")
    assert back["weight"].fmt == lns12
    assert torch.equal(back["steps"], torch.arange(3))
    with pytest.raises(ValueError, match="'lns99': not one of"):
        lns_ops.serialization.from_codes(plain, {"lns_formats": '{"weight": "lns99"}'})


def test_a_float32_checkpoint_loads_into_a_converted_module() -> None:
    model, _ = tiny("resnet")
    state = copy.deepcopy(model.state_dict())
    convert_(model, lns12, "everywhere")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert torch.equal(model.fc.weight.codes, LNSTensor.from_float(state["fc.weight"], lns12).codes)


# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
@pytest.mark.parametrize(
    "name", [pytest.param("resnet", marks=pytest.mark.slow), "gpt", "gpt written out"]
)
def test_compiled_without_a_graph_break_and_equal(name: str, scope: str) -> None:
    model, x = tiny(name)
    convert_(model, lns12, scope)
    found = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        out = call(x)
        (out.to_float() if isinstance(out, LNSTensor) else out).square().sum().backward()
        found.append([codes(out), *(codes(p.grad) for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_a_step_compiled_by_inductor_with_the_loss() -> None:
    torch.manual_seed(0)
    model = convert_(
        nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3)), lns12, "everywhere"
    )
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    step = torch.compile(lambda x, y: F.cross_entropy(model(x), y), fullgraph=True)
    losses = []
    for call in (lambda x, y: F.cross_entropy(model(x), y), step):
        model.zero_grad()
        loss = call(x, y)
        loss.backward()
        losses.append((loss.item(), model[0].weight.grad.codes.clone()))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert torch.equal(losses[0][1], losses[1][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_the_same_bits(reentrant: bool) -> None:
    model, _ = tiny("resnet")
    convert_(model, lns12, "everywhere").eval()
    found = []
    for run in (model.layer2, lambda h: checkpoint(model.layer2, h, use_reentrant=reentrant)):
        model.zero_grad()
        h = LNSTensor.from_float(torch.ones(2, 4, 8, 8), lns12).requires_grad_()
        run(h).sum().backward()
        found.append([h.grad.codes, *(p.grad.codes for p in model.layer2.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_by_autograd_grad() -> None:
    x, y = (LNSTensor.from_float(torch.randn(4), lns12).requires_grad_() for _ in range(2))
    result = checkpoint(lambda t: torch.sigmoid(t) * 2, x, use_reentrant=False)
    (by_grad,) = torch.autograd.grad(result.sum(), x, retain_graph=True)
    result.sum().backward(inputs=[x], retain_graph=True)
    assert torch.equal(by_grad.codes, x.grad.codes)
    assert torch.autograd.grad(result.sum(), (x, y), allow_unused=True)[1] is None
    zeros = torch.autograd.grad((x * 2).sum(), (x, y), materialize_grads=True)[1]
    assert not zeros.codes.any()
    with pytest.raises(
        RuntimeError, match=r"shape \(4,\): it defaults to 1 only for a scalar; pass the gradient"
    ):
        (x * 2).backward()


def test_functional_call_with_other_parameters() -> None:
    model, x = tiny("gpt")
    convert_(model, lns12, "everywhere")
    twice = {n: LNSTensor.from_float(p.to_float() * 2, lns12) for n, p in model.named_parameters()}
    out = torch.func.functional_call(model, twice, (x,))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(twice[n])
    assert torch.equal(out.codes, model(x).codes)


def test_hooks_see_lns_tensors() -> None:
    model, seen = convert_(nn.Linear(3, 2), lns12, "everywhere"), []
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(type(outputs[0])))
    x = LNSTensor.from_float(torch.randn(2, 3), lns12).requires_grad_()
    x.register_hook(lambda grad: seen.append(grad.fmt))
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    model(x).sum().backward()
    assert seen.count(LNSTensor) == 2
    assert lns12 in seen


def test_dataloader_workers_collate_lns_tensors() -> None:
    x = LNSTensor.from_float(torch.randn(8, 3), lns12)
    rows = [x[i] for i in range(8)]
    loader = DataLoader(
        rows, batch_size=4, num_workers=2, collate_fn=torch.stack, multiprocessing_context="fork"
    )
    assert torch.equal(torch.cat([batch.codes for batch in loader]), x.codes)


def test_dataloader_workers_feed_a_converted_module() -> None:
    model = convert_(nn.Linear(3, 2), lns12, "everywhere")
    data = TensorDataset(torch.randn(8, 3), torch.arange(8))
    for batch, _ in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork"):
        assert model(batch).shape == (4, 2)


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
@pytest.mark.parametrize("name", ["resnet", "gpt written out"])
def test_flops_are_those_of_the_float_model(name: str, scope: str) -> None:
    model, x = tiny(name)
    totals = []
    for net in (model, convert_(copy.deepcopy(model), lns12, scope)):
        with FlopCounterMode(display=False) as counter:
            out = net(x)
            (out.to_float() if isinstance(out, LNSTensor) else out).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == pytest.approx(totals[1], rel=0.01)
    assert totals[0] > 0


def test_what_is_saved_for_the_backward_pass_takes_two_bytes_a_value() -> None:
    model = convert_(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.GroupNorm(2, 8), nn.SiLU()),
        lns16,
        "everywhere",
    )
    sizes: list[tuple[int, int]] = []

    def pack(x: Tensor) -> Tensor:
        inner = codes(x)
        if any(inner.stride()):  # the graph has one element in place of a norm's parts
            sizes.append((x.numel(), inner.numel() * inner.element_size()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(torch.randn(2, 3, 10, 10))
    assert sum(n for n, _ in sizes) > 3 * 2 * 8 * 64
    assert sum(size for _, size in sizes) == 2 * sum(n for n, _ in sizes)


def test_codes_are_shared_without_a_copy() -> None:
    x = LNSTensor.from_float(torch.randn(4), lns12)
    shared = torch.from_dlpack(x.codes)
    shared[0] = 5
    assert x.codes[0] == 5


def test_fallback_carries_a_net_with_an_operation_that_lns_lacks() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.i0(x)

    model = convert_(nn.Sequential(nn.Linear(3, 4), Odd(), nn.Linear(4, 2)), lns12, "everywhere")
    with pytest.raises(NotImplementedError, match=r"aten\.i0\.default"):
        model(torch.randn(2, 3))
    with allow_float_fallback() as converted:
        model(torch.randn(2, 3)).sum().backward()
    assert set(converted.counts) == {"aten.i0.default"}
    assert model[0].weight.grad.codes.any()
