"""The data of a trial: finding, checking, reading and splitting files, and batches of examples.

The order of the batches depends only on the seed and the epoch. Torch is imported on the first use
of :func:`load`.
"""

from typing import TYPE_CHECKING, Any

from trainers.data.batches import batches, epoch_order, evaluation_batches, share
from trainers.data.descriptions import prepare
from trainers.data.download import DATA_VARIABLE, DownloadError, cache_folder
from trainers.data.mnist import describe_download, download_mnist, find_mnist, read_idx
from trainers.data.places import describe_place, fetch, resolve
from trainers.data.split import Dataset, DatasetInfo, Examples, Split

if TYPE_CHECKING:
    from trainers.data.datasets import load

__all__ = [
    "DATA_VARIABLE",
    "Dataset",
    "DatasetInfo",
    "DownloadError",
    "Examples",
    "Split",
    "batches",
    "cache_folder",
    "describe_download",
    "describe_place",
    "download_mnist",
    "epoch_order",
    "evaluation_batches",
    "fetch",
    "find_mnist",
    "load",
    "prepare",
    "read_idx",
    "resolve",
    "share",
]


def __getattr__(name: str) -> Any:
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainers.data.datasets import load

    return load
