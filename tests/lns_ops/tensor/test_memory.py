"""An LNSTensor takes 2 bytes per value: weights, gradients, optimizer state, and tensors saved for
the backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lns_ops import LNSTensor, convert_
from lns_ops.optim import SGD


def kept(lns: bool) -> dict[str, int]:
    """Bytes in float tensors, every storage once, without the int64 indices of max pooling."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )
    if lns:
        convert_(model, "lns12", scope="everywhere")
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.5, kahan_sum=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.rand(16, 1, 8, 8))
    F.cross_entropy(logits, torch.arange(16) % 10).backward()
    optimizer.step()

    def size(tensors: list[torch.Tensor]) -> int:
        values = [
            t.codes if isinstance(t, LNSTensor) else t for t in tensors if t.dtype != torch.int64
        ]
        return sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values}.values()
        )

    parameters = list(model.parameters())
    return {
        "weights": size(parameters),
        "gradients": size([p.grad for p in parameters if p.grad is not None]),
        "state": size([value for state in optimizer.state.values() for value in state.values()]),
        "saved": size(saved),
    }


def test_everything_takes_half_of_float32() -> None:
    float32, lns = kept(lns=False), kept(lns=True)
    assert min(float32.values()) > 0
    assert {name: 2 * size for name, size in lns.items()} == float32
