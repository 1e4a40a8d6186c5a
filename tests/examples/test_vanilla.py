"""Deep plain nets: delta-orthogonal kernels, signals at depth, and that they train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples.modules import FOLDER, example
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.training.trainer import Training

NET = example("vanilla/net")
NEAR_THE_FIXED_POINT = 0.2
"""Allowed relative deviation of a layer's pre-activation variance from the theoretical q. The
theory holds for infinitely many channels. With 64 channels the mean of 64 squares of normal
numbers (such as the biases, which all places share) has a standard deviation of ``sqrt(2 / 64)``
= 18 %. With ``sigma_w`` 10 % too large, q would be 5.7 times as large (of 1.0247) or 1.65 times
(of 1.2)."""


def kernel(outputs: int, inputs: int, size: int, gain: float = 1.0, seed: int = 0) -> nn.Conv2d:
    """A convolution whose kernel is delta-orthogonal, with periodic images and a bias of zero."""
    torch.manual_seed(seed)
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, padding_mode="circular")
    NET.initialize_(layer, "orthogonal", gain, 0.0)
    return layer


def made(inputs: int | tuple[int, ...], **args: Any) -> nn.Sequential:
    torch.manual_seed(0)
    net: nn.Sequential = NET.make_net(inputs, 10, **args)
    return net


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 8), (8, 3)])
def test_a_delta_orthogonal_kernel_keeps_norms(outputs: int, inputs: int, size: int) -> None:
    layer = kernel(outputs, inputs, size)
    centre = layer.weight[:, :, size // 2, size // 2]
    torch.testing.assert_close(centre.T @ centre, torch.eye(inputs), atol=1e-6, rtol=0)
    assert int(layer.weight.count_nonzero()) == int(centre.count_nonzero()) == outputs * inputs
    generator = torch.Generator().manual_seed(1)
    for x in (
        torch.randn(2, inputs, 7, 6, generator=generator),
        torch.randn(2, inputs, 1, 1, generator=generator).expand(-1, -1, 7, 6),
    ):
        torch.testing.assert_close(layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


def test_other_initial_kernels_do_not_keep_norms() -> None:
    """The test above would reject torch's orthogonal matrix of the unfolded kernel: with constant
    images only the sum of its taps counts."""
    layer = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", bias=False)
    nn.init.orthogonal_(layer.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(9, 8, 1, 1, generator=torch.Generator().manual_seed(1)).expand(-1, -1, 7, 6)
    ratio = layer(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert float((ratio.detach() - 1).abs().max()) > 0.1


def test_kernels_depend_on_the_seed_and_gain_scales_them() -> None:
    one, same, other = kernel(6, 6, 3), kernel(6, 6, 3, gain=2.0), kernel(6, 6, 3, seed=1)
    torch.testing.assert_close(2 * one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)


def through(model: nn.Sequential, x: Tensor) -> list[float]:
    """The variance of every layer's pre-activations, over images, channels and places."""
    found = []
    for layer in model[:-1]:
        x = layer(x)
        if isinstance(layer, nn.Conv2d):
            found.append(float(x.detach().square().mean()))
    return found


@pytest.mark.parametrize("sigma_w", [1.0247, 1.2])
def test_signals_stay_at_the_fixed_point_to_depth_100(sigma_w: float) -> None:
    """Xiao et al. 2018: q from the equations, which assume no shortcuts and no norms."""
    q = NET.critical_bias(sigma_w)[1]
    args = {"depth": 100, "width": 64, "kernel": 3}
    generator = torch.Generator().manual_seed(0)
    x = q**0.5 * torch.randn(16, 64, 28, 28, generator=generator)
    variances = through(made((64, 28, 28), sigma_w=sigma_w, **args), x)
    assert variances[50:] == pytest.approx([q] * 50, rel=NEAR_THE_FIXED_POINT)
    chaotic = made((64, 28, 28), init="kaiming", **args)
    assert through(chaotic, x)[-1] > (1 + NEAR_THE_FIXED_POINT) * q


def test_gradients_of_100_convolutions_are_as_large_as_at_the_end() -> None:
    """The norm of the gradients changes by less than half over 100 layers; with Kaiming's weights
    it vanishes or explodes."""
    norms = {}
    for init in ("orthogonal", "kaiming"):
        model = made((1, 8, 8), depth=102, width=32, kernel=3, init=init)
        x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        start = model[:6](x).detach().requires_grad_()
        model[6:](start).square().sum().backward()  # type: ignore[no-untyped-call]
        end = model[6:-2](start.detach()).detach().requires_grad_()
        model[-2:](end).square().sum().backward()  # type: ignore[no-untyped-call]
        assert start.grad is not None
        assert end.grad is not None
        norms[init] = float(start.grad.norm() / end.grad.norm())
    assert 0.5 < norms["orthogonal"] < 2
    assert not 1e-2 < norms["kaiming"] < 1e2


def test_shapes_and_sizes_and_the_linear_net_are_as_they_are_said() -> None:
    model = made((1, 28, 28), depth=3, width=8, kernel=3)
    assert [part.stride for part in model.modules() if isinstance(part, nn.Conv2d)] == [
        (2, 2), (2, 2), (1, 1)
    ]  # fmt: skip
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert weights == 9 * 8 + 2 * 9 * 64 + 7 * 7 * 8 * 10
    linear = made(784, depth=3, width=8)
    assert [type(part) for part in linear] == [nn.Flatten, *[nn.Linear, nn.Tanh] * 3, nn.Linear]


def test_a_linear_net_keeps_lengths_and_angles_at_any_depth() -> None:
    """Schoenholz et al. 2017; the bias for sigma_w^2 = 1.05 is from Xiao et al. 2018."""
    sigma_b, q = NET.critical_bias(1.05**0.5)
    assert sigma_b**2 == pytest.approx(2.01e-5, rel=1e-3)
    assert q == pytest.approx(0.02592, rel=1e-3)
    x = q**0.5 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    gradients = {}
    for init in ("orthogonal", "kaiming"):
        model = made(64, depth=400, width=64, init=init)
        signal = x.clone().requires_grad_()
        model[:-1](signal).square().sum().backward()  # type: ignore[no-untyped-call]
        assert signal.grad is not None
        gradients[init] = float(signal.grad.norm() / signal.detach().norm())
    assert 0.2 < gradients["orthogonal"] < 5
    assert not 1e-6 < gradients["kaiming"] < 1e6
    weight = model[1].weight.detach()
    assert weight.std() == pytest.approx((2 / 64) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"kernel": 2}, "kernel=2: must be odd"),
        ({"kernel": -1}, "kernel=-1: must be odd"),
        ({"sigma_w": 1.0}, "sigma_w=1.0: must be above 1"),
        ({"init": "normal"}, "init='normal': must be orthogonal or kaiming"),
    ],
)
def test_what_cannot_be_made_is_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NET.make_net(64, 10, **args)


@pytest.mark.parametrize("fmt", ["float32", "lns16", "lns12"])
def test_shallow_convolutions_train(fmt: str) -> None:
    trial = TrialConfig(
        data=DataConfig(name="digits", train_size=640),
        model=ModelConfig(
            name=f"{FOLDER}/vanilla/net.py:make_net", args={"depth": 5, "width": 8, "kernel": 3}
        ),
        optimizer=OptimizerConfig(lr=0.02, momentum=0.9),
        batch_size=32,
        epochs=4,
        device="cpu",
        threads=1,
    )
    if fmt != "float32":
        trial = replace(trial, precision=PrecisionConfig(format=fmt, kahan_sum=True))
    training = Training(trial)
    metrics = [training.train_epoch() for _ in range(4)]
    assert metrics[-1]["train/error"] < 0.5 * metrics[0]["train/error"]
