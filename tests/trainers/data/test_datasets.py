"""Data: splits, order, and all faults that MNIST files can have, with files made here in MNIST's
format."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from trainers import data
from trainers.config import DataConfig
from trainers.data import batches, digits, find_mnist, load, prepare, read_idx, resolve
from trainers.data.batches import evaluation_batches
from trainers.data.mnist import FILES


@pytest.fixture(autouse=True)
def _nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No MNIST in the usual places and no network, so a test defines which files exist."""
    monkeypatch.delenv("LNS_STUDY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LNS_STUDY_MNIST_URL", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    load.cache_clear()


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four IDX files of random pixels in MNIST's format, 60 + 10 images; the loader expects their
    sizes and digests."""
    folder = tmp_path / "idx"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, expected in FILES.items():
        items = 60 if name.startswith("train") else 10
        header = struct.pack(">ii", expected.magic, items)
        if expected.magic == 2051:
            content = (
                header
                + struct.pack(">ii", 28, 28)
                + rng.integers(0, 256, items * 784, np.uint8).tobytes()
            )
        else:
            content = header + rng.integers(0, 10, items, np.uint8).tobytes()
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        monkeypatch.setitem(
            FILES, name, expected._replace(items=items, sha256=hashlib.sha256(content).hexdigest())
        )
    return folder


@pytest.fixture
def mirror(small_mnist: Path) -> Iterator[str]:
    """A real HTTP server on loopback that serves the files."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(small_mnist))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            """Keep the test output clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_digits_splits() -> None:
    info = prepare(DataConfig(name="digits"))
    assert (info.train, info.validation, info.test, info.inputs) == (1200, 300, 297, 64)
    splits = load(DataConfig(name="digits"))
    assert all(s.x.dtype == torch.float32 and s.x.min() >= 0 and s.x.max() <= 1 for s in splits)
    assert len(prepare(DataConfig(name="digits")).digest) == 64


def test_mnist_files_plain_or_gzipped(small_mnist: Path) -> None:
    config = DataConfig(root=str(small_mnist), validation_size=20)
    zipped = prepare(config)
    assert (zipped.train, zipped.validation, zipped.test, zipped.inputs) == (40, 20, 10, 784)
    plain = small_mnist / "plain" / "mnist"
    plain.mkdir(parents=True)
    for path in small_mnist.glob("*.gz"):
        (plain / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    assert prepare(DataConfig(root=str(plain.parent), validation_size=20)).digest == zipped.digest


def test_the_digest_of_files_is_the_same_whatever_is_chosen_of_them(small_mnist: Path) -> None:
    few, more = (
        prepare(DataConfig(root=str(small_mnist), validation_size=20, train_size=size))
        for size in (10, 20)
    )
    assert few.files == more.files
    assert few.digest != more.digest
    assert (
        prepare(DataConfig(name="digits", train_size=10)).files
        == prepare(DataConfig(name="digits")).files
        != few.files
    )


def test_validation_is_the_end_of_the_training_set(small_mnist: Path) -> None:
    whole = load(DataConfig(root=str(small_mnist), validation_size=1))
    split = load(DataConfig(root=str(small_mnist), validation_size=20, train_size=30))
    assert torch.equal(split.validation.x[:19], whole.train.x[40:])
    assert torch.equal(split.train.x, whole.train.x[:30])
    assert torch.equal(split.test.y, whole.test.y)


@pytest.mark.parametrize("place", ["LNS_STUDY_DATA", "data/mnist", "cache"])
def test_mnist_is_found_in_the_usual_places(
    small_mnist: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_mnist(None) is None
    if place == "LNS_STUDY_DATA":
        monkeypatch.setenv(place, str(small_mnist))
    else:
        shutil.copytree(
            small_mnist,
            tmp_path / ("data/mnist" if place == "data/mnist" else "cache/lns-study/mnist"),
        )
    assert find_mnist(None) is not None
    assert resolve(DataConfig(name="auto", validation_size=20)).name == "mnist"


def test_download_is_checked_and_kept(mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNS_STUDY_MNIST_URL", mirror)
    assert prepare(DataConfig(validation_size=20)).train == 40
    monkeypatch.setenv("LNS_STUDY_MNIST_URL", "http://127.0.0.1:9")
    load.cache_clear()
    assert prepare(DataConfig(validation_size=20)).train == 40


def test_a_mirror_that_sends_something_else_leaves_nothing_behind(
    mirror: str, small_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LNS_STUDY_MNIST_URL", mirror)
    (small_mnist / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(b"<html>not here</html>")
    )
    with pytest.raises(ValueError, match="magic number"):
        prepare(DataConfig(validation_size=20))
    assert not list(data.cache_folder().iterdir())


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_scikit_learns(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from its package's file, or through its function if the file is not there."""
    from sklearn.datasets import load_digits

    if not found:
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
    pixels, labels = load_digits(return_X_y=True)
    train, test = digits.load_digits()
    assert torch.equal(torch.cat([train.x, test.x]) * 16, torch.from_numpy(pixels).float())
    assert torch.equal(torch.cat([train.y, test.y]), torch.from_numpy(labels))


def test_without_mnist_and_network_auto_is_digits_and_mnist_an_error() -> None:
    assert resolve(DataConfig(name="auto")).name == "digits"
    with pytest.raises(ValueError, match=r"cannot be downloaded.*LNS_STUDY_DATA.*data.name=digits"):
        resolve(DataConfig(name="mnist"))


def test_a_cache_that_cannot_be_written_is_no_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert resolve(DataConfig(name="auto")).name == "digits"
    with pytest.raises(ValueError, match=r"cannot be written.*set XDG_CACHE_HOME to another"):
        resolve(DataConfig(name="mnist"))


def test_a_given_root_must_hold_the_files(small_mnist: Path) -> None:
    (small_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    for name in ("mnist", "auto"):
        with pytest.raises(ValueError, match=r"data.root=.*lacks t10k-labels-idx1-ubyte;"):
            resolve(DataConfig(name=name, root=str(small_mnist)))


@pytest.mark.parametrize("part", ["", "mnist"])
def test_a_folder_in_the_environment_must_hold_the_files(
    small_mnist: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If three of four files exist, the loader does not silently look elsewhere or download."""
    (small_mnist / "t10k-labels-idx1-ubyte.gz").unlink()
    folder = small_mnist if not part else small_mnist.parent
    small_mnist.rename(folder / part)
    shutil.copytree(folder / part, Path("data") / "mnist")
    monkeypatch.setenv("LNS_STUDY_DATA", str(folder))
    for name in ("mnist", "auto"):
        said = (
            rf"LNS_STUDY_DATA='{folder}': .*lacks t10k-labels-idx1-ubyte( in mnist/)?; .*unset it"
        )
        with pytest.raises(ValueError, match=said) as raised:
            resolve(DataConfig(name=name))
        assert "train-images" not in str(raised.value)
    monkeypatch.setenv("LNS_STUDY_DATA", "/nowhere")
    with pytest.raises(
        ValueError,
        match=r"LNS_STUDY_DATA='/nowhere': .*lacks train-images-idx3-ubyte, train-labels",
    ):
        resolve(DataConfig(name="auto"))
    assert resolve(DataConfig(name="digits")).name == "digits"


def test_without_leave_to_download_nothing_is(mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNS_STUDY_MNIST_URL", mirror)
    for name in ("mnist", "auto"):
        resolved = resolve(DataConfig(name=name), download=False)
        assert (resolved.name, resolved.root, resolved.validation_size) == ("mnist", None, 10_000)
    assert not data.cache_folder().exists()
    assert data.describe_download().startswith("train-images-idx3-ubyte.gz, ")
    assert data.describe_download().endswith(f" from {mirror}/ to {data.cache_folder()}")
    resolve(DataConfig(name="mnist"))
    assert resolve(DataConfig(name="auto"), download=False).root == str(
        data.cache_folder().resolve()
    )


def damage(path: Path, how: str) -> None:
    content = gzip.decompress(path.read_bytes())
    raw = path.read_bytes()
    if how in ("gzip", "deflate"):
        path.write_bytes(raw[:-20] if how == "gzip" else raw[:12] + bytes(len(raw) - 12))
        return
    changed = {
        "magic": struct.pack(">i", 1234) + content[4:],
        "short": content[:-1],
        "long": content + b"\0",
        "empty": b"",
        "pixel": content[:-1] + bytes([content[-1] ^ 1]),
    }[how]
    path.write_bytes(gzip.compress(changed))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gzip", "not a whole gzip file"),
        ("deflate", "not a whole gzip file"),
        ("magic", "magic number 1234, must be 20"),
        ("short", "truncated"),
        ("long", "bytes, must be"),
        ("empty", "magic number None"),
        ("pixel", "SHA-256 .* corrupt"),
    ],
)
@pytest.mark.parametrize("name", list(FILES))
def test_damaged_files_are_refused(small_mnist: Path, name: str, how: str, said: str) -> None:
    path = small_mnist / f"{name}.gz"
    damage(path, how)
    with pytest.raises(ValueError, match=said) as raised:
        read_idx(path, FILES[name])
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DataConfig(name="digits", validation_size=1500), "validation_size=1500"),
        (DataConfig(name="digits", train_size=1201), "train_size=1201: must be at most the 1200"),
    ],
)
def test_split_sizes_must_fit(config: DataConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(config)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_order_depends_on_seed_and_epoch_alone(world_size: int) -> None:
    split = data.Split(torch.arange(103.0)[:, None], torch.arange(103))

    def epoch(seed: int, number: int) -> torch.Tensor:
        parts = [
            [
                b.y
                for b in batches(
                    split, batch_size=8, seed=seed, epoch=number, rank=r, world_size=world_size
                )
            ]
            for r in range(world_size)
        ]
        return torch.stack([torch.cat(step) for step in zip(*parts, strict=True)])

    single = torch.stack([b.y for b in batches(split, batch_size=8, seed=1, epoch=2)])
    assert torch.equal(epoch(1, 2), single)
    assert single.shape == (12, 8)
    assert single.unique().numel() == 96
    assert not torch.equal(epoch(1, 3), single)
    assert not torch.equal(epoch(2, 2), single)


class FromDisk:
    """Examples that are not in memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def load(self, parts: Iterable[torch.Tensor], seed: int) -> Iterator[int]:
        yield from (len(part) for part in parts)


@pytest.mark.parametrize("size", [250, 251])
def test_replicas_that_step_together_evaluate_equally_many_parts(size: int) -> None:
    """One replica has one more example, and the others must take part in its forward pass."""
    parts = list(evaluation_batches(FromDisk(size), like=251))  # type: ignore[arg-type]
    assert (len(parts), sum(parts)) == (2, size)  # type: ignore[arg-type]
    assert list(evaluation_batches(FromDisk(501))) == [250, 250, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["digits", "mnist1d", "copy"])
def test_a_folder_of_data_that_have_no_files_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"are read from no files; leave data\.root out"):
        resolve(DataConfig(name=name, root=str(tmp_path)))
