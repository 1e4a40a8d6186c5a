"""Augmentation of training images: random shifts and mirroring, different in every epoch.

An image is padded with :data:`SHIFT` zeros on each side, a window of the original size is cut out
at a uniformly random position, and half of the windows are mirrored left to right. All images of an
epoch are drawn at once from a seed, so they do not depend on the layout or on interruptions.

Source: K. He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385),
section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainers.config import DataConfig
from trainers.config.data import DATA
from trainers.data.split import Examples, Split

SHIFT = 4
"""Maximum shift in pixels, in each direction."""
_AT_A_TIME = 4_096
"""Number of images that are padded together."""


class AugmentedImages:
    """Augmented training images, drawn for one epoch at a time.

    Args:
        images: original images, ``x`` float32 [N, C, H, W] or [N, C H W]; on any device.
        shape: ``(C, H, W)``.
    """

    def __init__(self, images: Split, shape: tuple[int, ...]) -> None:
        self._images, self._shape = images, shape
        self._drawn = Split(torch.empty_like(images.x), images.y)

    def draw(self, seed: int) -> Split:
        """Return all images of an epoch; the next call overwrites them."""
        count, generator = self._images.size, torch.Generator().manual_seed(seed)
        shifts = torch.randint(2 * SHIFT + 1, (2, count), generator=generator)
        mirrored = torch.rand(count, generator=generator) < 0.5
        for start in range(0, count, _AT_A_TIME):
            some = slice(start, start + _AT_A_TIME)
            x = self._images.x[some]
            windows = _cut(x.unflatten(1, self._shape) if x.dim() == 2 else x, shifts[:, some],
                           mirrored[some])  # fmt: skip
            self._drawn.x[some] = windows.reshape(x.shape)
        return self._drawn


def _cut(images: Tensor, shifts: Tensor, mirrored: Tensor) -> Tensor:
    """Return a window of each padded image, with the upper left corner at ``shifts`` [2, N]."""
    count, channels, height, width = images.shape
    rows = shifts[0, :, None] + torch.arange(height)
    across = torch.arange(width)
    columns = shifts[1, :, None] + torch.where(mirrored[:, None], across.flip(0), across)
    places = (
        torch.arange(count)[:, None, None, None],
        torch.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    )
    padded = functional.pad(images, [SHIFT] * 4)
    return padded[tuple(place.to(images.device) for place in places)]


def augment(config: DataConfig, images: Examples) -> AugmentedImages | None:
    """Return the augmentation of the training images by ``data.args.augment``; None if it is
    off."""
    if config.name not in DATA or getattr(config.arguments, "augment", "none") == "none":
        return None
    assert isinstance(images, Split)
    return AugmentedImages(images, DATA[config.name].shape)
