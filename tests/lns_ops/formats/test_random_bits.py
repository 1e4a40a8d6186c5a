"""The bits of stochastic rounding: kernel and torch's operations equal the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lns_ops import reference
from lns_ops.formats import random_bits
from lns_ops.formats.stochastic_rounding import _philox


@pytest.mark.parametrize("key", [(1 << 33) + 5, 1 << 63, (1 << 64) - 1, -5 << 32])
@pytest.mark.parametrize("count", [1, 8, 17, 1000])
def test_random_bits_without_the_kernel_are_the_same(count: int, key: int) -> None:
    step = 1 << 31
    expected = reference.random_bits(count, key, step, 3)
    np.testing.assert_array_equal(
        _philox(count, key, torch.tensor(step), 3)[:count].numpy(), expected
    )
    np.testing.assert_array_equal(
        random_bits(torch.empty(count), key, torch.tensor(step), 3).numpy(), expected
    )
