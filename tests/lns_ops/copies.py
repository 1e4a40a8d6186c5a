"""Save and load copies through files, for tests of tensors and optimizers."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_torch(x: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)
