"""The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels.

Source: E. Alpaydin, C. Kaynak 1998 (UCI).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainers.data.split import Split, scaled


def load_digits() -> tuple[Split, Split]:
    """Return the training examples (the first 1,500) and the test examples (the last 297)."""
    table = digits_table()
    pixels, labels = table[:, :-1], table[:, -1]
    return scaled(pixels[:1500], labels[:1500], 16), scaled(pixels[1500:], labels[1500:], 16)


def digits_table() -> NDArray[np.float64]:
    """Return 64 pixels (0 to 16) and the label of each digit, ``[1797, 65]``.

    Read directly from the file in scikit-learn's package if it is found, because importing
    scikit-learn takes each process of a study seconds.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
