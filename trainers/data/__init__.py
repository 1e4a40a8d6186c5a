"""The data of a trial as tensors in memory: found, checked, read, split, and dealt out in batches.

The order of the batches depends on the seed and the epoch alone.
"""

from trainers.data.batches import batches, epoch_order, evaluation_batches, share
from trainers.data.datasets import describe_place, fetch, load, prepare, resolve
from trainers.data.download import DATA_VARIABLE, DownloadError, cache_folder
from trainers.data.mnist import describe_download, download_mnist, find_mnist, read_idx
from trainers.data.split import CLASSES, PIXELS, Dataset, DatasetInfo, Examples, Split

__all__ = [
    "CLASSES",
    "DATA_VARIABLE",
    "PIXELS",
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
