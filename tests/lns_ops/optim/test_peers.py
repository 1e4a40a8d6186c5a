"""Updates of bfloat16 weights compared with two other libraries: torchao's stochastic rounding
equals ours; optimi's Kahan summation rounds once more."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from lns_ops.formats import parse
from lns_ops.nn.simulate import simulate_
from lns_ops.optim.quantized_updates import quantize_updates_

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
RATE, STEPS = 2.0**-6, 400


@needs_torchao
def test_rounding_at_random_is_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao.optim rounds its float32 result up if r is below the 16 bits that are dropped. Ours
    has the same bits with 2^16 - 1 - r in place of r, which is equally random."""
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, generator=generator) * torch.logspace(-30, 30, 200)
    random = torch.arange(1 << 16, dtype=torch.int32)
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: random)
    bfloat16 = parse("bfloat16")
    for value in values:
        x = value.repeat(1 << 16)
        ours = bfloat16.quantize(x, random.flip(0))
        assert torch.equal(ours, _fp32_to_bf16_sr(x).float())
        assert float(ours.double().mean()) == float(value)


def kahan_of_optimi(w: Tensor, c: Tensor, grad: Tensor) -> None:
    """The rule of optimi 0.3's SGD, in bfloat16 tensors: ``c = q(c + u)``, ``new = q(w + c)``, ``c
    = q(c + q(w - new))``."""
    c.add_(grad, alpha=-RATE)
    old = w.clone()
    w.add_(c)
    c.add_(old - w)


@pytest.mark.parametrize("kahan_sum", [True, False])
def test_kahan_is_optimis_but_for_one_rounding(kahan_sum: bool) -> None:
    """Ours rounds ``c + u`` only when it is added to the weight, optimi's also by itself. Both stay
    within one bfloat16 step of the exact sum of 400 updates, which rounding to nearest loses."""
    generator = torch.Generator().manual_seed(0)
    start = (1 + torch.rand(64, 8, generator=generator)).bfloat16()
    layer = nn.Linear(8, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(start)
    simulate_(layer, "bfloat16")
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    quantize_updates_(optimizer, layer, kahan_sum=kahan_sum)
    theirs, compensation, exact = start.clone(), torch.zeros_like(start), start.double()
    for _ in range(STEPS):
        grad = (0.05 * (1 + torch.rand(64, 8, generator=generator))).bfloat16()
        layer.weight.grad = grad.float()
        optimizer.step()
        kahan_of_optimi(theirs, compensation, grad)
        exact -= RATE * grad.double()
    step = 2.0**-7  # of bfloat16 in 1 to 2
    assert float((theirs.double() - exact).abs().max()) < step
    lost = float((layer.weight.detach().double() - exact).abs().max())
    assert lost < step if kahan_sum else lost > 20 * step
