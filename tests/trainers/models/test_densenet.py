"""DenseNet: its layers, the paper's sizes, and that it stays what it is through files and eval."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lns_ops import convert_
from lns_ops.optim import SGD
from lns_ops.tensor import storage_of
from trainers.config import ModelConfig
from trainers.models import build, make_model
from trainers.models.densenet import DenseLayer

SMALL = ModelConfig(name="densenet", args={"depth": 10, "growth": 4})


@pytest.mark.parametrize(
    ("args", "published", "exact"),
    [
        ({"depth": 40, "variant": "plain"}, 1.0, 1_019_722),
        ({"depth": 100, "variant": "plain"}, 7.0, 6_979_642),
        ({"depth": 100, "growth": 24, "variant": "plain"}, 27.2, 27_249_082),
        ({"depth": 100}, 0.8, 769_162),
    ],
)
def test_the_sizes_are_those_of_table_2(
    args: dict[str, int | str], published: float, exact: int
) -> None:
    """Parameters in millions, for ten classes; and the layers with weights, L."""
    config = ModelConfig(name="densenet", args=dict(args))
    model = build(config, (3, 32, 32), 10)
    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(layers) == args["depth"]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6, 1) == published
    assert count == exact
    assert len(model) == config.layers


def test_a_layer_hands_on_what_it_got_and_adds_its_growth() -> None:
    """The network has the shapes of the paper's figure 2: halved twice, in places and channels."""
    model = make_model(SMALL, (3, 32, 32), 10, 0)
    assert isinstance(model, nn.Sequential)
    x, shapes = torch.rand(2, 3, 32, 32), []
    for layer in model:
        before, x = x, layer(x)
        shapes.append(tuple(x.shape[1:]))
        if isinstance(layer, DenseLayer):
            assert torch.equal(x[:, : before.shape[1]], before)
            normed = F.relu(F.batch_norm(before, None, None, training=True))
            narrow = layer.branch[2](normed)
            assert narrow.shape[1] == 16
            normed = F.relu(F.batch_norm(narrow, None, None, training=True))
            torch.testing.assert_close(x[:, before.shape[1] :], layer.branch[5](normed))
    assert shapes == [
        (8, 32, 32), (12, 32, 32), (6, 16, 16), (10, 16, 16), (5, 8, 8), (9, 8, 8), (10,)
    ]  # fmt: skip


def test_weights_depend_on_seed_and_name_alone() -> None:
    one, same, other = (make_model(SMALL, (1, 8, 8), 10, seed) for seed in (0, 0, 1))
    deeper = make_model(ModelConfig(name="densenet", args={"depth": 16, "growth": 4}), 64, 10, 0)
    for name, value in one.named_parameters():
        assert torch.equal(value, same.get_parameter(name))
        if value.dim() > 1:
            assert not torch.equal(value, other.get_parameter(name))
    first = "1.branch.2.weight"
    assert torch.equal(one.get_parameter(first), deeper.get_parameter(first))
    spread = build(ModelConfig(name="densenet"), (3, 32, 32), 10)
    wide = make_model(ModelConfig(name="densenet"), (3, 32, 32), 10, 0).get_parameter(first)
    assert wide.shape == spread.get_parameter(first).shape
    assert wide.std().item() == pytest.approx((2 / wide.shape[0]) ** 0.5, rel=0.1)


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
@pytest.mark.parametrize("variant", ["bc", "plain"])
def test_it_trains_in_lns_and_is_the_same_saved_and_loaded(scope: str, variant: str) -> None:
    """In eval mode an answer does not depend on the other images of a batch."""
    config = ModelConfig(name="densenet", args={"depth": 10, "growth": 4, "variant": variant})
    model = convert_(make_model(config, (1, 8, 8), 4, 0), "lns16", scope=scope)
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(16) % 4
    x = torch.rand(16, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1) / 2
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(20):  # float32 takes 14
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = convert_(make_model(config, (1, 8, 8), 4, 1), "lns16", scope=scope)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for each in (model, loaded, copied := copy.deepcopy(model)):
        each.eval()
    with torch.inference_mode():
        whole = storage_of(model(x))
        assert torch.equal(storage_of(loaded(x)), whole)
        assert torch.equal(storage_of(copied(x)), whole)
        parts = torch.cat([storage_of(model(each)) for each in x.split(1)])
        if scope == "everywhere":  # float32 sums of another size may be added in another order
            assert torch.equal(parts, whole)
        assert not torch.equal(storage_of(model.train()(x)), whole)


def test_images_that_cannot_be_halved_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"densenet with images of 3 x 8: .* at least 4 x 4"):
        build(SMALL, (1, 3, 8), 10)
