"""A module that multiplies by its weight; a test chooses how the product is written."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Product(nn.Module):
    """A product of an input and a weight, written in one of many ways."""

    def __init__(self, weight: Tensor, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(weight.clone()), function

    def forward(self, x: Tensor) -> Tensor:
        """Return the product. The operator ``@`` in this class lets convert_ find it."""
        return self.function(x, self.w) if x.numel() else x @ self.w
