"""The tensors of a model and its optimizer in checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.checkpoint.state import load_model_tensors, model_tensors


def test_codes_of_a_buffer_that_is_float_now_are_refused() -> None:
    """In earlier checkpoints buffers beside LNS parameters were codes."""
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = model_tensors(model, optimizer)
    load_model_tensors(model, optimizer, saved)
    saved["model/running_mean"] = torch.tensor([16384, 0], dtype=torch.int16)
    with pytest.raises(ValueError, match="running_mean is of LNS codes"):
        load_model_tensors(model, optimizer, saved)
