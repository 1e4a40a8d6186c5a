"""Write CIFAR-10's binary format from a copy of its images as JPEG files.

    python scripts/convert_cifar_jpegs.py TRAIN TEST FOLDER

TRAIN and TEST each name two files without their ending: ``NAME.jpegs.xz``, JPEG files of 32 x 32
end to end, compressed by xz, and ``NAME.npz`` with ``lengths`` (bytes of each) and ``labels``.
FOLDER gets ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, which
``data.name=cifar10 data.root=FOLDER`` reads. JPEG loses: beside a figure on such a copy say so, and
compare it with figures on the same copy only. Images that are sorted by class are put into a fixed
random order, because validation takes the last ones.
"""

from __future__ import annotations

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ORDER_SEED = 0
"""Seed of the order of the images."""


def read(name: str) -> NDArray[np.uint8]:
    """Return the records of a copy, ``[N, 3073]``: the class, then red, green and blue values."""
    index, content = np.load(f"{name}.npz"), lzma.decompress(Path(f"{name}.jpegs.xz").read_bytes())
    ends = np.cumsum(index["lengths"], dtype=np.int64)
    records = np.empty((len(ends), 3073), np.uint8)
    records[:, 0] = index["labels"]
    for place, (start, end) in enumerate(zip(np.r_[0, ends[:-1]], ends, strict=True)):
        image = np.asarray(Image.open(io.BytesIO(content[start:end])).convert("RGB"))
        if image.shape != (32, 32, 3):
            raise ValueError(f"{name}: image {place} is {image.shape}, must be (32, 32, 3)")
        records[place, 1:] = image.transpose(2, 0, 1).ravel()
    return records[np.random.default_rng(ORDER_SEED).permutation(len(records))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", metavar="TRAIN")
    parser.add_argument("test", metavar="TEST")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(read(options.train), 5), 1):
        (options.folder / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    (options.folder / "test_batch.bin").write_bytes(read(options.test).tobytes())


if __name__ == "__main__":
    main()
