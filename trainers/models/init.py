"""Initial weights that depend on the seed and the parameter's name alone.

They do not depend on the layout or the order of creation. Linear and convolution layers: weight and
bias uniform in ``+- 1 / sqrt(fan_in)``, torch's own default, with one generator a parameter.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator seeded with a hash of ``seed`` and the parameter's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialize_(model: nn.Module, seed: int) -> nn.Module:
    """Draw every parameter of ``model`` in place, and return the model.

    The same seed and names give the same float32 bits on any layout.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            for name, parameter in module.named_parameters(recurse=False):
                parameter.uniform_(-bound, bound, generator=_generator(seed, f"{path}.{name}"))
    return model
