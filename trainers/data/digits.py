"""The handwritten digits that scikit-learn brings along: 1,797 images of 8 x 8 pixels (UCI, E.
Alpaydin and C. Kaynak 1998)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainers.data.split import Split, scaled


def load_digits() -> tuple[Split, Split]:
    table = digits_table()
    pixels, labels = table[:, :-1], table[:, -1]
    return scaled(pixels[:1500], labels[:1500], 16), scaled(pixels[1500:], labels[1500:], 16)


def digits_table() -> NDArray[np.float64]:
    """64 pixels (0 to 16) and the label of each of scikit-learn's digits, ``[1797, 65]``.

    From the file in its package where that is in its place: importing scikit-learn takes every
    process of a study seconds.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
