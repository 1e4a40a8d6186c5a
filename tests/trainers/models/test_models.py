"""Our larger networks: their equations, initial weights, arguments, and cuts by layouts."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import LNSTensor
from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.memory import MemoryConfig
from trainers.config.sync import SyncConfig
from trainers.models import build, make_model
from trainers.models.init import initialize_, normal_
from trainers.models.precision import apply_precision
from trainers.parallel.pipeline_partition import split
from trainers.training.trainer import Training

RESNET = ModelConfig(name="resnet", args={"depth": 8, "width": 4})
LSTM = ModelConfig(name="lstm", args={"layers": 2, "width": 8})
VANILLA_LSTM = ModelConfig(name="lstm", args={"layers": 2, "width": 8, "variant": "vanilla"})
GPT = ModelConfig(name="gpt", args={"layers": 2, "heads": 2, "width": 8})
LNS = PrecisionConfig(format="lns12", kahan_sum=True)
BFLOAT16 = PrecisionConfig(format="bfloat16")
DIGITS = TrialConfig(
    data=DataConfig(name="digits", train_size=256),
    model=RESNET,
    optimizer=OptimizerConfig(lr=0.05, momentum=0.9),
    batch_size=32,
    epochs=2,
)


def made(config: ModelConfig, seed: int = 0) -> nn.Module:
    """The network on images of 3 x 8 x 8 or 11 tokens of 5 kinds."""
    if config == RESNET:
        return make_model(config, (3, 8, 8), 10, seed)
    return make_model(config, (11,), 5, seed, tokens=5, each_step=True)


def examples(config: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if config == RESNET:
        x = torch.rand(6, 3, 8, 8, generator=generator)
        return x, torch.randint(10, (6,), generator=generator)
    tokens = (torch.randint(5, (6, 1), generator=generator) + torch.arange(12)) % 5
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")


@pytest.mark.parametrize("config", [RESNET, LSTM, GPT], ids=lambda c: f"{c.name}{c.args}")
@pytest.mark.parametrize(
    "precision",
    [PrecisionConfig(), LNS, PrecisionConfig(format="bfloat16")],
    ids=lambda p: p.format,
)
def test_every_parameter_gets_a_gradient(config: ModelConfig, precision: PrecisionConfig) -> None:
    model, (x, y) = apply_precision(made(config), precision), examples(config)
    logits = model(x)
    assert logits.shape == (*y.shape, 10 if config == RESNET else 5)
    loss(logits, y).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(isinstance(p, LNSTensor) == (precision == LNS) for p in model.parameters())


@pytest.mark.parametrize("config", [RESNET, LSTM, GPT], ids=lambda c: f"{c.name}{c.args}")
def test_a_few_steps_lower_the_loss(config: ModelConfig) -> None:
    model, (x, y) = made(config), examples(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] / 2


def test_resnet_20_has_the_layers_of_the_paper() -> None:
    """He et al. 2015, table 6: 0.27 million parameters; the shortcuts of option B add 2,752."""
    model = build(ModelConfig(name="resnet"), (3, 32, 32), 10)
    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    shortcuts = [
        part for part in layers if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1)
    ]
    assert (len(layers) - len(shortcuts), len(shortcuts)) == (20, 2)
    extra = sum(p.numel() for part in shortcuts for p in part.parameters()) + 2 * (32 + 64)
    assert sum(p.numel() for p in model.parameters()) - extra == 269_722
    assert [f.shape[1:] for f in _through(model, torch.rand(1, 3, 32, 32))][3::3] == [
        (16, 32, 32), (32, 16, 16), (64, 8, 8)
    ]  # fmt: skip


def _through(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    found = []
    for layer in model:
        x = layer(x)
        found.append(x)
    return found


def test_flat_and_shaped_images_are_the_same() -> None:
    model = made(RESNET)
    x, _ = examples(RESNET)
    assert torch.equal(model(x), model(x.flatten(1)))
    grey = make_model(RESNET, (64,), 10, 0)
    assert grey(torch.rand(2, 64)).shape == (2, 10)
    cnn = build(ModelConfig(name="cnn", channels=[4], hidden=[]), (3, 8, 6), 10)
    images = torch.rand(2, 3, 8, 6)
    assert torch.equal(cnn(images), cnn(images.flatten(1)))


@pytest.mark.parametrize("config", [LSTM, VANILLA_LSTM, GPT], ids=lambda c: repr(c.args))
def test_a_step_sees_no_later_token(config: ModelConfig) -> None:
    model, (x, _) = made(config), examples(config)
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 5
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_gpt_is_the_equation() -> None:
    """Attention written as a softmax over earlier steps."""
    model, (x, _) = made(GPT), examples(GPT)
    embedding, *blocks, head = model
    h = embedding.tokens.weight[x] + embedding.positions
    for block in blocks:
        q, k, v = block.attention.qkv(block.norm1(h)).view(6, 11, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(2, 3)) / 4**0.5
        scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(3) @ v).transpose(1, 2).reshape(6, 11, 8)
        h = h + block.attention.project(mixed)
        first, _, last = block.feedforward
        h = h + last(F.gelu(first(block.norm2(h)), approximate="tanh"))
    torch.testing.assert_close(head(h), model(x))


def test_the_lstm_takes_vectors_values_and_one_target() -> None:
    vectors = build(LSTM, (7, 3), 4, each_step=True)
    assert vectors(torch.rand(2, 7, 3)).shape == (2, 7, 4)
    values = build(LSTM, (7,), 4)
    assert values(torch.rand(2, 7)).shape == (2, 4)


@pytest.mark.parametrize(
    ("config", "shape", "options", "said"),
    [
        (GPT, (64,), {}, r"model.name=gpt .*predicts a token at each step; use data.name=text"),
        (LSTM, (1, 8, 8), {}, r"model.name=lstm .*needs sequences"),
        (RESNET, (50,), {}, r"model.name=resnet .*needs images"),
        (RESNET, (64,), {"tokens": 5, "each_step": True}, r"5 tokens, a target for each step"),
        (ModelConfig(), (64,), {"tokens": 5}, r"model.name=mlp .*use model.name=lstm"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    config: ModelConfig, shape: tuple[int, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        build(config, shape, 10, **options)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("resnet", {"deep": 20}, "args.deep=20 .*no such argument; there are depth=20, width=16"),
        ("resnet", {"depth": 18}, r"model.args.depth=18: must be 6 n \+ 2"),
        ("resnet", {"width": 1.5}, "must be a whole number; use for example model.args.width=16"),
        ("lstm", {"dropout": 1}, "model.args.dropout=1: must be at least 0 and below 1"),
        ("lstm", {"layers": True}, "must be a whole number"),
        ("gpt", {"width": 10, "heads": 4}, "heads share the width evenly"),
        ("gpt", {"layers": 0}, "model.args.layers=0: must be a whole number of at least 1"),
        ("cnn", {"width": 3}, "there are activation=relu, beta=1.0"),
        ("mlp", {"beta": 2.0}, "only swish and swish_beta have it"),
    ],
)
def test_arguments_are_checked(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig(name=name, args=args)


EVERY_LAYER = {
    "linear": lambda: nn.Linear(3, 4),
    "conv1d": lambda: nn.Conv1d(3, 4, 3),
    "conv2d": lambda: nn.Conv2d(3, 4, 3),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3),
    "batch norm": lambda: nn.BatchNorm2d(3),
    "layer norm": lambda: nn.LayerNorm(3),
    "group norm": lambda: nn.GroupNorm(1, 3),
    "embedding": lambda: nn.Embedding(30, 40, padding_idx=2),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
}


@pytest.mark.parametrize("make", EVERY_LAYER.values(), ids=EVERY_LAYER)
def test_layers_are_drawn_as_torch_draws_them(make: Any) -> None:
    """The same ranges and spreads, from (seed, name) alone."""
    torch.manual_seed(0)
    theirs, ours = make(), initialize_(make(), 0)
    again, other = initialize_(make(), 0), initialize_(make(), 1)
    for name, value in ours.named_parameters():
        twin = dict(theirs.named_parameters())[name]
        assert torch.equal(value, dict(again.named_parameters())[name])
        if value.std() == 0 or value.numel() == 1:
            assert torch.equal(value, twin)
            continue
        if name == "out_proj.bias":  # torch has zeros; here it is a linear layer's bias
            continue
        assert not torch.equal(value, dict(other.named_parameters())[name])
        assert 0.4 < (value.std() / twin.std()).item() < 2.5
        if make().__class__ is not nn.Embedding and not name.startswith("bias_"):
            assert value.abs().max() <= 1.5 * twin.abs().max()


def test_names_decide_not_the_order_and_shared_parameters_are_drawn_once() -> None:
    one = initialize_(nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.LSTM(2, 3)}), 0)
    two = initialize_(nn.ModuleDict({"b": nn.LSTM(2, 3), "a": nn.Linear(2, 3)}), 0)
    for name, value in one.named_parameters():
        assert torch.equal(value, two.get_parameter(name))
    tied = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    free = initialize_(copy.deepcopy(tied), 0)
    tied["second"].weight = tied["first"].weight
    initialize_(tied, 0)
    assert torch.equal(tied["second"].weight, free["first"].weight)


class Bare(nn.Module):
    def __init__(self, said: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2000))
        if said:
            normal_(self, scale=0.5)


def test_a_parameter_that_nobody_draws_is_refused_by_name() -> None:
    drawn = initialize_(nn.Sequential(Bare(True)), 0)[0].scale
    assert 0.45 < drawn.std().item() < 0.55
    with pytest.raises(ValueError, match=r"parameter '0.scale' of a Bare: no rule draws it"):
        initialize_(nn.Sequential(Bare(False)), 0)


@pytest.mark.parametrize(
    "config", [RESNET, LSTM, VANILLA_LSTM, GPT], ids=lambda c: f"{c.name}{c.args}"
)
def test_stages_are_balanced_and_know_what_passes_between_them(config: ModelConfig) -> None:
    model, (x, _) = made(config), examples(config)
    names, shapes = split(model, 2, x[:1])
    assert [name for stage in names for name in stage] == [
        name for name, _ in model.named_children()
    ]
    assert shapes[0] == x.shape[1:]
    assert shapes[1] == nn.Sequential(*(model.get_submodule(n) for n in names[0]))(x).shape[1:]
    assert config.layers <= len(list(model.children()))


def bits(training: Training) -> list[list[Any]]:
    held = [*training.model.named_parameters(), *training.model.named_buffers()]
    return [[name, storage_of(value.detach()).tolist()] for name, value in held]


def without_speed(metrics: dict[str, float]) -> dict[str, float]:
    left_out = ("samples_per_second", "bytes")
    return {key: value for key, value in metrics.items() if not key.startswith(left_out)}


@pytest.mark.parametrize("precision", [PrecisionConfig(), LNS], ids=lambda p: p.format)
def test_networks_with_statistics_train_and_resume_with_the_same_bits(
    precision: PrecisionConfig, tmp_path: Path
) -> None:
    config = replace(DIGITS, precision=precision)
    whole, begun, resumed = Training(config), Training(config), Training(config)
    expected = [without_speed(whole.train_epoch()) for _ in range(2)]
    assert expected[1]["train/loss"] < expected[0]["train/loss"]
    begun.train_epoch()
    begun.save(tmp_path / "checkpoint")
    resumed.restore(tmp_path / "checkpoint")
    assert without_speed(resumed.train_epoch()) == expected[1]
    assert bits(resumed) == bits(whole)


def test_dropout_is_drawn_again_where_activations_are_computed_again() -> None:
    """The LSTM classifies digits pixel by pixel."""
    model = ModelConfig(name="lstm", args={"layers": 2, "width": 4, "dropout": 0.5})
    config = replace(DIGITS, model=model, data=DataConfig(name="digits", train_size=64), epochs=1)
    plain, saving, none = (
        Training(each)
        for each in (
            config,
            replace(config, memory=MemoryConfig(activation_checkpoints=True)),
            replace(config, model=replace(model, args=model.args | {"dropout": 0.0})),
        )
    )
    first = plain.train_epoch()
    assert without_speed(saving.train_epoch()) == without_speed(first)
    assert bits(saving) == bits(plain)
    assert none.train_epoch()["train/loss"] != first["train/loss"]


def staged(rank: int, folder: str) -> dict[str, Any]:
    """Two stages; two replicas; two sharded replicas, interrupted and continued."""
    found: dict[str, Any] = {}
    for name, precision in (("float32", PrecisionConfig()), ("lns", LNS)):
        config = replace(DIGITS, precision=precision, workers=2)
        pipeline = replace(config, layout=Layout(pp=2, micro_batches=2))
        training = Training(pipeline, rank=rank, world_size=2)
        metrics = [without_speed(training.train_epoch()) for _ in range(2)]
        found[name] = {"metrics": metrics, "bits": bits(training)}
    for name, layout in (("replicas", Layout()), ("sharded", Layout(fsdp=True))):
        config = replace(DIGITS, workers=2, layout=layout)
        whole = Training(config, rank=rank, world_size=2)
        before = [b.clone() for b in whole.model.buffers()]
        expected = [without_speed(whole.train_epoch()) for _ in range(2)]
        begun = Training(config, rank=rank, world_size=2)
        begun.train_epoch()
        begun.save(Path(folder) / name)
        dist.barrier()  # rank 0 writes
        resumed = Training(config, rank=rank, world_size=2)
        resumed.restore(Path(folder) / name)
        after = [b.tolist() for b in resumed.model.buffers()]
        found[name] = {
            "same": without_speed(resumed.train_epoch()) == expected[1],
            "learns": expected[1]["train/loss"] < expected[0]["train/loss"],
            "kept": after == [b.tolist() for b in begun.model.buffers()],
            "moved": after != [b.tolist() for b in before],
            "buffers": [b.tolist() for b in whole.model.buffers() if b.is_floating_point()],
        }
    return found


@pytest.mark.slow
def test_layouts_cut_networks_with_statistics(tmp_path: Path) -> None:
    """Two stages with two micro-batches give the bits of one process with two micro-batches,
    running statistics included. Replicas end an epoch with the same statistics, and continue with
    them."""
    first, second = spawned(staged, tmp_path)
    for name, precision in (("float32", PrecisionConfig()), ("lns", LNS)):
        config = replace(DIGITS, precision=precision, layout=Layout(micro_batches=2))
        alone = Training(config)
        metrics = [without_speed(alone.train_epoch()) for _ in range(2)]
        assert first[name]["metrics"] == metrics
        assert sorted(first[name]["bits"] + second[name]["bits"]) == sorted(bits(alone))
    for name in ("replicas", "sharded"):
        assert first[name]["buffers"] == second[name]["buffers"]
        for key in ("same", "learns", "kept", "moved"):
            assert first[name][key], f"{name} {key}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"workers": 2, "layout": Layout(pp=2, schedule="zero_bubble", micro_batches=2)},
            "layout.schedule=zero_bubble with model.name=resnet",
        ),
        ({"workers": 2, "layout": Layout(tp=2)}, "layout.tp=2 with model.name=resnet"),
        (
            {"workers": 2, "layout": Layout(tp=2)}
            | {"model": ModelConfig(args={"activation": "swish_beta"})},
            r"layout.tp=2 with model.args=\{activation: swish_beta\}: a worker would train",
        ),
        (
            {"workers": 2, "sync": SyncConfig(name="ensemble")},
            "sync.name=ensemble with model.name=resnet",
        ),
        (
            {"memory": MemoryConfig(activation_checkpoints=True)},
            "memory.activation_checkpoints=true with model.name=resnet",
        ),
        (
            {"workers": 3, "batch_size": 33, "layout": Layout(pp=3, micro_batches=3)}
            | {"model": ModelConfig(name="lstm")},
            "3 stages, but the model has 2 layers",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(DIGITS, **changes)


@pytest.mark.slow
def test_ten_thousand_layers_are_built_saved_and_restored(tmp_path: Path) -> None:
    deepest = ModelConfig(hidden=[8] * 10_000)
    config = replace(DIGITS, model=deepest, precision=LNS)
    training, other = Training(config), Training(replace(config, seed=1))
    training.save(tmp_path)
    restored = Training(config)
    with torch.no_grad():
        storage_of(next(restored.model.parameters())).add_(1)
    restored.restore(tmp_path)
    names = [name for name, _ in training.model.named_parameters()]
    assert len(names) == 2 * 10_001
    assert bits(restored) == bits(training) != bits(other)
