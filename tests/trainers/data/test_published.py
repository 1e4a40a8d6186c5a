"""Data sets in published formats, with small files that the tests write in these formats, and their
download from a server on loopback."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from trainers.config import DataConfig
from trainers.data import cifar, download, fetch, load, mnist, prepare, resolve
from trainers.data.cifar import read_batch, read_binary
from trainers.data.download import BATCHES, REMOTES, DownloadError, cache_folder
from trainers.data.mnist import FILES

RNG = np.random.default_rng(0)
TEXT = "To be, or not to be: that is the question.\n" * 40


@pytest.fixture(autouse=True)
def _nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LNS_STUDY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    load.cache_clear()
    mnist.mnist_arrays.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten images per CIFAR file, 60 + 10 in the IDX sets."""
    monkeypatch.setattr(cifar, "TRAIN", 50)
    monkeypatch.setattr(cifar, "TEST", 10)
    for name, expected in FILES.items():
        items = 60 if name.startswith("train") else 10
        monkeypatch.setitem(FILES, name, expected._replace(items=items, sha256="0"))


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (count, 3072), np.uint8), RNG.integers(0, 10, count)


def write_cifar(folder: Path, version: str) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10 in ``folder``; the pixels and classes of its training images."""
    folder.mkdir(parents=True)
    found = []
    for name in BATCHES:
        x, y = images(10)
        found.append((x, y))
        if version == "binary":
            rows = np.concatenate([y[:, None].astype(np.uint8), x], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            batch = {b"batch_label": b"batch", b"labels": y.tolist(), b"data": x}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return np.concatenate([x for x, _ in found[:-1]]), np.concatenate([y for _, y in found[:-1]])


@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10(small: None, tmp_path: Path, version: str, inner: str) -> None:
    x, y = write_cifar(tmp_path / "here" / inner, version)
    data = load(DataConfig(name="cifar10", root=str(tmp_path / "here"), validation_size=5))
    assert data.train.x.shape == (45, 3, 32, 32)
    assert torch.equal(torch.cat([data.train.y, data.validation.y]), torch.from_numpy(y))
    green = torch.from_numpy(x[7, 1024:2048].astype(np.float32)) / 255
    assert torch.equal(data.train.x[7, 1].flatten(), green)
    config = DataConfig(name="cifar10", root=str(tmp_path / "here"), validation_size=5)
    info = prepare(config)
    assert (info.inputs, info.classes, info.test) == (3072, 10, 10)
    assert prepare(config) == info


def test_cifar100_has_fine_classes(small: None, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar100"
    folder.mkdir(parents=True)
    for name, count in (("train", 50), ("test", 10)):
        x, fine = images(count)
        coarse = np.full((count, 1), 19, np.uint8)
        rows = np.concatenate([coarse, fine[:, None].astype(np.uint8) + 90, x], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    data = load(DataConfig(name="cifar100", validation_size=5))
    assert data.train.y.min() >= 90
    batch = {b"fine_labels": fine.tolist(), b"coarse_labels": [0] * 10, b"data": x}
    _, labels = read_batch(pickle.dumps(batch, protocol=2), Path("train"))
    assert labels.tolist() == fine.tolist()


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({b"labels": [0], b"data": Evil()}, "asks for (posix|nt).system, which is refused"),
        ({b"labels": [0]}, "KeyError"),
        ([1], "TypeError"),
        ({b"labels": [0], b"data": np.zeros((1, 3072))}, "pixels of float64"),
    ],
)
def test_batches_are_unpickled_safely(batch: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_batch(pickle.dumps(batch, protocol=2), Path("data_batch_1"))
    assert not (tmp_path / "ran").exists()


def test_damaged_files_of_cifar_are_refused(small: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 3073"):
        read_binary(bytes(3074), Path("x.bin"), 10)
    with pytest.raises(ValueError, match="not a batch of CIFAR's"):
        read_batch(b"no pickle", Path("x"))
    write_cifar(tmp_path / "few", "binary")
    (tmp_path / "few" / "test_batch.bin").write_bytes(bytes(3073))
    with pytest.raises(ValueError, match="must have 10 images"):
        load(DataConfig(name="cifar10", root=str(tmp_path / "few")))
    (tmp_path / "few" / "test_batch.bin").write_bytes(bytes([11]) * 30730)
    with pytest.raises(ValueError, match="classes 11 to 11, must be 0 to 9"):
        load(DataConfig(name="cifar10", root=str(tmp_path / "few")))


def write_idx(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, expected in FILES.items():
        header = struct.pack(">ii", expected.magic, expected.items)
        if expected.magic == 2051:
            pixels = RNG.integers(0, 256, expected.items * 784, np.uint8)
            content = header + struct.pack(">ii", 28, 28) + pixels.tobytes()
        else:
            content = header + RNG.integers(0, 10, expected.items, np.uint8).tobytes()
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))


@pytest.mark.parametrize("name", ["fashion_mnist", "kmnist"])
def test_idx_sets_are_read_and_not_mistaken_for_mnist(
    small: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(Path("files") / name)
    monkeypatch.setenv("LNS_STUDY_DATA", "files")
    config = DataConfig(name=name, validation_size=20)
    assert prepare(config).train == 40
    content = gzip.decompress((Path("files") / name / "t10k-labels-idx1-ubyte.gz").read_bytes())
    known = FILES["t10k-labels-idx1-ubyte"]._replace(sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(FILES, "t10k-labels-idx1-ubyte", known)
    load.cache_clear()
    mnist.mnist_arrays.cache_clear()
    with pytest.raises(ValueError, match="is MNIST's file of that name"):
        load(config)


def test_text_is_windows_of_characters() -> None:
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    config = DataConfig(name="text", root="book.txt", args={"context": 10})
    data = load(config)
    letters = sorted(set(TEXT))
    whole = torch.cat([data.train.x.flatten(), data.validation.x.flatten()])
    assert "".join(letters[i] for i in whole) == TEXT[: len(whole)]
    following = torch.cat([data.train.y.flatten(), data.validation.y.flatten()])
    assert "".join(letters[i] for i in following) == TEXT[1 : len(whole) + 1]
    assert "".join(letters[i] for i in data.test.x.flatten()) in TEXT[-len(TEXT) // 10 :]
    info = prepare(config)
    assert (info.inputs, info.classes) == (10, len(letters))


def test_strided_windows_of_text_overlap_in_training_only() -> None:
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    config = DataConfig(name="text", root="book.txt", args={"context": 10}, validation_size=3)
    plain, strided = load(config), load(replace(config, args={"context": 10, "stride": 4}))
    for part in ("validation", "test"):
        for ours, theirs in zip(getattr(strided, part), getattr(plain, part), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(strided.train, plain.train, strict=True):
        stream = theirs.flatten()
        starts = range(0, len(stream) - 9, 4)
        assert torch.equal(ours, torch.stack([stream[i : i + 10] for i in starts]))
    assert (
        load(replace(config, args={"context": 10, "stride": None})).train.size == plain.train.size
    )
    with pytest.raises(ValueError, match=r"stride=11 .*context=10: .*left out"):
        load(replace(config, args={"context": 10, "stride": 11}))
    with pytest.raises(ValueError, match="validation_size=9999: must leave some"):
        load(replace(config, args={"context": 10, "stride": 4}, validation_size=9999))


def test_another_text_is_another_trial() -> None:
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    config = resolve(DataConfig(name="text", root="book.txt"))
    assert len(config.code) == 12
    assert resolve(replace(config, root="book.txt")).code == config.code
    Path("book.txt").write_text(TEXT[1:], encoding="utf-8")
    with pytest.raises(ValueError, match="has changed since the study was planned"):
        resolve(config)


def test_piano_rolls_predict_each_frame_from_those_before_it() -> None:
    rolls = [(RNG.random((length, 88)) < 0.1).astype(np.uint8) for length in (7, 9, 12)]
    pieces = np.empty((1, 2), object)
    pieces[0, 0], pieces[0, 1] = rolls[0], rolls[1]
    whole = {"traindata": pieces, "validdata": pieces[:, 1:], "testdata": pieces[:, :1]}
    savemat("music.mat", whole)
    config = DataConfig(name="piano_rolls", root="music.mat", args={"context": 4})
    data = load(config)
    assert data.train.y.shape == (4, 4, 88)
    assert torch.equal(
        data.train.y.flatten(0, 1).to(torch.uint8), torch.from_numpy(np.concatenate(rolls[:2]))
    )
    assert not data.train.x[0, 0].any()
    assert torch.equal(data.train.x.flatten(0, 1)[1:], data.train.y.flatten(0, 1)[:-1])
    assert (len(data.validation.y), len(data.test.y)) == (2, 1)
    assert prepare(config).classes == 88
    with pytest.raises(ValueError, match=r"context=99 .*fewer than a window"):
        load(replace(config, args={"context": 99}))
    Path("data/piano_rolls").mkdir(parents=True)
    Path("music.mat").rename("data/piano_rolls/Nottingham.mat")
    found = resolve(DataConfig(name="piano_rolls", args={"collection": "Nottingham"}))
    assert found.root == str(Path("data/piano_rolls/Nottingham.mat").resolve())
    assert resolve(found) == found
    with pytest.raises(DownloadError, match=r"MuseData.mat in none of .*fetch piano_rolls"):
        resolve(DataConfig(name="piano_rolls", args={"collection": "MuseData"}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"name": "cifar10"},
            "data.name=cifar10: data_batch_1.bin, .*lns-study data fetch cifar10",
        ),
        ({"name": "cifar10", "root": "."}, "data.root='.' .*must hold data_batch_1.bin"),
        ({"name": "text"}, "input.txt in none of .*lns-study data fetch text"),
        ({"name": "text", "root": "none.txt"}, "there is no such file; name a text"),
        ({"name": "text", "root": "binary"}, "not a text in UTF-8"),
        ({"name": "piano_rolls", "root": "binary"}, "no .mat file with traindata"),
        ({"name": "kmnist"}, "train-images-idx3-ubyte, .* in none of data/kmnist"),
    ],
)
def test_what_is_missing_is_named_and_how_to_get_it(config: dict[str, str], said: str) -> None:
    Path("binary").write_bytes(bytes([255] * 200))
    with pytest.raises(ValueError, match=said):
        load(DataConfig(**config))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "text", "args": {"lines": 3}}, "no such argument; there are context=64, stride="),
        ({"name": "copy", "args": {"length": 2}}, "must be at most half of the 64"),
        ({"name": "mnist1d", "args": {"noise": -1.0}}, "data.args.noise"),
        ({"name": "piano_rolls", "args": {"collection": "Bach"}}, "one of JSB_Chorales, MuseData"),
        ({"name": "mnist", "args": {"seed": 1}}, "it takes no arguments"),
        ({"name": "piano_rolls", "validation_size": 3}, "its file has pieces for validation"),
    ],
)
def test_arguments_are_checked(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig(**values)  # type: ignore[arg-type]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which a real HTTP server serves it."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            """Keep the test output clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_archive_is_downloaded_checked_and_unpacked(
    small: None, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, url = served
    monkeypatch.setenv("LNS_STUDY_CIFAR10_URL", url)
    write_cifar(tmp_path / "cifar-10-batches-bin", "binary")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
        archive.add(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", "../../escaped.bin")
    (folder / "cifar-10-binary.tar.gz").write_bytes(packed.getvalue())
    with pytest.raises(DownloadError, match=r"sent something else \(MD5 .*LNS_STUDY_CIFAR10_URL"):
        fetch("cifar10")
    assert not list(cache_folder("cifar10").iterdir())
    md5 = hashlib.md5(packed.getvalue()).hexdigest()
    remote = replace(REMOTES["cifar10"], files={"cifar-10-binary.tar.gz": f"md5:{md5}"})
    monkeypatch.setitem(download.REMOTES, "cifar10", remote)
    assert fetch("cifar10") == cache_folder("cifar10")
    assert {path.name for path in cache_folder("cifar10").iterdir()} == set(remote.needs[0])
    assert load(DataConfig(name="cifar10", validation_size=5)).test.y.shape == (10,)
    (folder / "cifar-10-binary.tar.gz").unlink()
    assert fetch("cifar10") == cache_folder("cifar10")


def test_a_text_is_downloaded(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, url = served
    (folder / "input.txt").write_text(TEXT)
    monkeypatch.setenv("LNS_STUDY_TEXT_URL", url)
    sha = hashlib.sha256(TEXT.encode()).hexdigest()
    monkeypatch.setitem(
        download.REMOTES, "text", replace(REMOTES["text"], files={"input.txt": f"sha256:{sha}"})
    )
    fetch("text")
    (folder / "input.txt").unlink()
    fetch("text")  # existing files are kept
    assert len(load(DataConfig(name="text", args={"context": 8})).train.y) > 10
    monkeypatch.setenv("LNS_STUDY_KMNIST_URL", f"{url}/nowhere")
    with pytest.raises(DownloadError, match=r"cannot be downloaded .*LNS_STUDY_KMNIST_URL"):
        fetch("kmnist")
