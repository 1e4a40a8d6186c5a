"""Cached machine code of kernels: stored in files, shared by processes, rebuilt when damaged.
Without a usable cache kernels still work."""

from __future__ import annotations

import ast
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError

import lns_ops
from lns_ops import cpu
from lns_ops import reference as ref
from lns_ops.cpu.compiler import object_cache
from lns_ops.cpu.compiler.object_cache import Kernel
from lns_ops.cpu.kernels import elementwise, gather_gemm, small
from lns_ops.cpu.simd import avx2, avx512
from lns_ops.format import LNSFormat, lns12, lns16

CODES = np.arange(-40, 60, dtype=np.int16)


def widened(kernel: Kernel) -> np.ndarray[Any, Any]:
    """Return the result of a kernel that uses ``gather_gemm.widen``."""
    out = np.zeros(CODES.size, np.int32)
    arguments = (CODES, out, lns12.bias, lns12.field_mask)
    assert kernel.code(arguments)(*arguments, 0, CODES.size) == 0
    return out


def fresh() -> Kernel:
    """A small kernel that this process has not loaded."""
    return Kernel(gather_gemm.widen.function)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; returns the folder that will hold the files."""
    monkeypatch.setenv("LNS_OPS_CACHE", str(tmp_path))
    return tmp_path / object_cache._folder_name()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the functions compiled since then."""
    names: list[str] = []
    compile_: Callable[..., bytes] = object_cache._compile

    def counted(function: Callable[..., int], kinds: tuple[Any, ...]) -> bytes:
        names.append(function.__name__)
        return compile_(function, kinds)

    monkeypatch.setattr(object_cache, "_compile", counted)
    return names


def test_a_kernel_is_compiled_once_and_then_loaded(folder: Path, compilations: list[str]) -> None:
    expected = widened(gather_gemm.widen)
    first, second = widened(fresh()), widened(fresh())
    assert compilations == ["widen"]
    assert [file.name for file in folder.iterdir()] == ["gather_gemm.widen.o"]
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[:100], lambda b: b[:500] + bytes([b[500] ^ 1]) + b[501:]]
)
def test_a_damaged_file_is_made_again(
    folder: Path, compilations: list[str], damage: Callable[[bytes], bytes]
) -> None:
    expected = widened(fresh())
    file = folder / "gather_gemm.widen.o"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    np.testing.assert_array_equal(widened(fresh()), expected)
    assert compilations == ["widen", "widen"]
    assert widened(fresh()) is not None
    assert compilations == ["widen", "widen"]


def test_without_a_writable_folder_kernels_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LNS_OPS_CACHE", str(tmp_path / "file"))
    np.testing.assert_array_equal(widened(fresh()), widened(gather_gemm.widen))
    widened(fresh())
    assert compilations == ["widen", "widen"]


def test_the_home_folder_serves_where_the_package_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (tmp_path / "package").touch()
    monkeypatch.setattr(object_cache, "__file__", str(tmp_path / "package" / "object_cache.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LNS_OPS_CACHE", raising=False)
    widened(fresh())
    widened(fresh())
    assert compilations == ["widen"]
    assert [file.name for file in (tmp_path / "home").rglob("*.o")] == ["gather_gemm.widen.o"]


def test_another_copy_of_the_package_finds_what_one_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LNS_OPS_CACHE", raising=False)
    for copy in ("first", "second"):
        monkeypatch.setattr(object_cache, "__file__", str(tmp_path / copy / "object_cache.py"))
        widened(fresh())
        assert len(list((tmp_path / "first" / "__pycache__").rglob("*.o"))) == 1
    assert compilations == ["widen"]


PACKAGE = Path(lns_ops.__file__).parent


def imported(path: Path) -> set[Path]:
    """The files of this package that a file imports modules or names from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    files = (
        PACKAGE.parent / Path(*name.split(".")).with_suffix(".py")
        for name in names
        if name.startswith("lns_ops.")
    )
    return {file for file in files if file.exists()}


def makers_of_kernels() -> list[Path]:
    """The files that import the decorator of kernels, or its class."""
    made = re.compile(
        r"^from lns_ops\.cpu\.compiler\.object_cache import .*\b(?:kernel|Kernel)\b", re.MULTILINE
    )
    return [file for file in sorted(PACKAGE.rglob("*.py")) if made.search(file.read_text())]


def test_all_that_a_kernel_may_be_made_of_names_its_folder() -> None:
    makers = makers_of_kernels()
    assert {kernel.function.__module__ for kernel in gc.get_objects() if type(kernel) is Kernel} - {
        __name__
    } <= {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in makers}
    reached, new = set(makers), set(makers)
    while new:
        new = {file for maker in new for file in imported(maker)} - reached
        reached |= new
    assert len(reached) > 15
    assert sorted(reached - set(object_cache.sources())) == []


def test_a_changed_source_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "lns_ops"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(object_cache, "_PACKAGE", copy)
    assert object_cache._folder_name.__wrapped__() == object_cache._folder_name()
    names = []
    for source in object_cache.sources():
        source.write_text(source.read_text() + "\n")
        names.append(object_cache._folder_name.__wrapped__())
    assert len({*names, object_cache._folder_name()}) == len(names) + 1


PRODUCT = """
import numpy as np
from lns_ops import cpu
from lns_ops.format import lns12
x = np.arange(400, dtype=np.int16).reshape(20, 20)
print(cpu.matmul(x, x, lns12).astype(np.int64).sum(), cpu.add(x, x, lns12).astype(np.int64).sum())
"""


@pytest.mark.slow
def test_two_processes_may_compile_at_once(folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PRODUCT]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    x = np.arange(400, dtype=np.int16).reshape(20, 20)
    sums = [
        int(result.astype(np.int64).sum())
        for result in (ref.matmul(x, x, lns12), ref.add(x, x, lns12))
    ]
    assert printed == [f"{sums[0]} {sums[1]}\n"] * 2
    assert all(file.suffix == ".o" for file in folder.iterdir())


def test_threads_that_meet_at_the_first_use(folder: Path, compilations: list[str]) -> None:
    kernel = fresh()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: widened(kernel), range(4)))
    assert compilations == ["widen"]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


# each has its own version of the vector kernel
@pytest.mark.parametrize("fmt", [lns12, lns16], ids=str)
def test_numbas_dispatcher_takes_over_with_the_same_results(
    fmt: LNSFormat, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Callable[..., int], kinds: tuple[Any, ...]) -> bytes:
        raise AttributeError("no such thing in this numba")

    monkeypatch.setattr(object_cache, "_compile", refuse)
    for module in (elementwise, gather_gemm, avx512, avx2, small):
        for kernel in filter(lambda value: isinstance(value, Kernel), vars(module).values()):
            monkeypatch.setattr(kernel, "_code", {})
    rng = np.random.default_rng(0)
    x, y = (ref.encode(rng.standard_normal((20, 20)), fmt) for _ in range(2))
    with pytest.warns(UserWarning, match="no such thing in this numba"):
        product = cpu.matmul(x, y, fmt)
    with pytest.warns(UserWarning, match="no such thing in this numba"):
        total = cpu.add(x, y, fmt)
    np.testing.assert_array_equal(product, ref.matmul(x, y, fmt))
    np.testing.assert_array_equal(total, ref.add(x, y, fmt))


def test_arrays_unlike_the_signature_are_refused() -> None:
    out = np.zeros(CODES.size, np.int32)
    numbers = (lns12.bias, lns12.field_mask, 0, 10)
    for x in (
        CODES.astype(np.int32),
        CODES.astype(">i2"),
        CODES[::2],
        CODES.reshape(10, 10),
        CODES[:1].reshape(1, 1),
    ):
        with pytest.raises(
            TypeError, match=r"kernel gather_gemm.widen: arrays of .*; needs contiguous one-dim"
        ):
            gather_gemm.widen.code((x, out))(x, out, *numbers)
    assert not out.any()


def test_another_layout_of_arrays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for bytes_off in (8, -8):
        monkeypatch.setattr(object_cache, "ARRAY_HEADER", object.__basicsize__ + bytes_off)
        with pytest.raises(RuntimeError, match="not where kernels read them"):
            object_cache._check_array_layout.__wrapped__()


def allocating(x: gather_gemm._I32, y: gather_gemm._I32, start: int, stop: int) -> int:
    """A kernel that allocates memory, which kernels must not do."""
    x[0] = np.empty(stop, np.int32)[0]
    return 0


def test_a_kernel_that_allocates_is_not_compiled() -> None:
    with pytest.raises(TypingError):
        object_cache._compile(allocating, (np.dtype(np.int32), np.dtype(np.int32), int, int))
