"""DenseNet: its layers, the paper's sizes, and equal results after saving, loading and eval."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lns_ops import convert_
from lns_ops.optim import SGD
from lns_ops.tensor import storage_of
from tests.examples.modules import example

NET = example("densenet/net")
SMALL: dict[str, Any] = {"depth": 10, "growth": 4}


def made(
    inputs: int | tuple[int, ...] = (1, 8, 8), classes: int = 10, seed: int = 0, **args: Any
) -> nn.Sequential:
    """The network, initialized as in a trial with this seed."""
    torch.manual_seed(seed)
    net: nn.Sequential = NET.make_net(inputs, classes, **args)
    return net


@pytest.mark.parametrize(
    ("args", "published", "exact"),
    [
        ({"depth": 40, "variant": "plain"}, 1.0, 1_019_722),
        ({"depth": 100, "variant": "plain"}, 7.0, 6_979_642),
        ({"depth": 100, "growth": 24, "variant": "plain"}, 27.2, 27_249_082),
        ({"depth": 100}, 0.8, 769_162),
    ],
)
def test_the_sizes_are_those_of_table_2(args: dict[str, Any], published: float, exact: int) -> None:
    """Parameters in millions for ten classes, and L, the number of layers with weights."""
    model = made((3, 32, 32), **args)
    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(layers) == args["depth"]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6, 1) == published
    assert count == exact


def test_a_layer_hands_on_what_it_got_and_adds_its_growth() -> None:
    """The network has the shapes of the paper's figure 2: halved twice, in places and channels."""
    model = made((3, 32, 32), **SMALL)
    x, shapes = torch.rand(2, 3, 32, 32), []
    for layer in model:
        before, x = x, layer(x)
        shapes.append(tuple(x.shape[1:]))
        if isinstance(layer, NET.DenseLayer):
            assert torch.equal(x[:, : before.shape[1]], before)
            normed = F.relu(F.batch_norm(before, None, None, training=True))
            narrow = layer.branch[2](normed)
            assert narrow.shape[1] == 16
            normed = F.relu(F.batch_norm(narrow, None, None, training=True))
            torch.testing.assert_close(x[:, before.shape[1] :], layer.branch[5](normed))
    assert shapes == [
        (8, 32, 32), (12, 32, 32), (6, 16, 16), (10, 16, 16), (5, 8, 8), (9, 8, 8), (10,)
    ]  # fmt: skip


def test_weights_are_normal_as_the_paper_has_them() -> None:
    one, same, other = (made(seed=seed, **SMALL) for seed in (0, 0, 1))
    for name, value in one.named_parameters():
        assert torch.equal(value, same.get_parameter(name))
        if value.dim() > 1:
            assert not torch.equal(value, other.get_parameter(name))
    wide = made((3, 32, 32)).get_parameter("1.branch.2.weight")
    assert wide.std().item() == pytest.approx((2 / wide.shape[0]) ** 0.5, rel=0.1)


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
@pytest.mark.parametrize("variant", ["bc", "plain"])
def test_it_trains_in_lns_and_is_the_same_saved_and_loaded(scope: str, variant: str) -> None:
    """In eval mode an answer does not depend on the other images of a batch."""
    args = SMALL | {"variant": variant}
    model = convert_(made(classes=4, **args), "lns16", scope=scope)
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
    loaded = convert_(made(classes=4, seed=1, **args), "lns16", scope=scope)
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


@pytest.mark.parametrize(
    ("inputs", "args", "said"),
    [
        ((1, 3, 8), SMALL, "images of 3 x 8: .* at least 4 x 4"),
        (64, {"depth": 12}, r"depth=12 with variant=bc: must be 6 n \+ 4"),
        (64, {"depth": 12, "variant": "plain"}, r"plain: must be 3 n \+ 4"),
        (64, {"growth": 0}, "growth=0: must be at least 1"),
        (64, {"variant": "dense"}, "variant='dense': must be bc or plain"),
    ],
)
def test_what_cannot_be_made_is_refused(inputs: Any, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NET.make_net(inputs, 10, **args)
