"""Machine code of the kernels: compiled once by numba, stored as object files, loaded by llvmlite.

Why not numba's own cache: a process spends 0.4 s on numba's registries before it loads anything,
and every call spends 3 microseconds on the types of its arguments. Here a kernel's annotations are
its signature, so a call only collects addresses and numbers, and the loaded file is plain machine
code that does not need numba.

Method. The entry of a kernel is a C function with one argument, a pointer to 64-bit words: the
array objects, then the numbers. The entry reads addresses and sizes from the array objects, because
asking numpy for an address takes longer than many kernels. numba compiles it (``numba.cfunc``). A
few lines of LLVM around it return its result, or -1 if it ever raises, and unused code is dropped.
LLVM's object file must not refer to external symbols, which holds for kernels that neither allocate
nor raise (:func:`lns_ops.cpu.compiler.intrinsics.scratch` is their memory). ctypes calls it without
the GIL.

Files: ``kernels-HASH/NAME.o`` in $LNS_OPS_CACHE (only there, if set), or in ``__pycache__`` beside
this file and in ``~/.cache/lns_ops``, wherever it can write. The first serves other users of an
installation, the second other copies, such as those of launched studies. HASH covers the sources
of kernels (:func:`sources`), the versions of the compilers, and the processor. A file starts with
its own SHA-256; a damaged file is compiled again. Writes are atomic, so processes may race. If no
folder is writable, every process compiles for itself.

Limits: only public interfaces of numba, llvmlite and numpy are used, except for numba's option
``_nrt`` (no reference counts). If a change in these libraries breaks this, a kernel warns once and
runs through numba's dispatcher and cache, with the same results.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, c_char_p, c_int64, c_void_p, cast, string_at
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import llvmlite
import numba
import numpy as np
from llvmlite import binding as llvm
from numpy.typing import NDArray

from lns_ops._compat import NO_REFERENCE_COUNTS, openmp_team
from lns_ops.cpu.compiler.intrinsics import ARRAY_HEADER, argument_readers, helper, processor

_ENTRY = "lns_ops_entry"
_PACKAGE = Path(__file__).parents[2]
_MADE_OF = ("_compat.py", "cpu/compiler/*.py", "cpu/kernels/*.py", "cpu/simd/*.py", "spec/*.py")
"""The files of the package with kernels, and with tables that are compiled into them."""
_DIGEST = hashlib.sha256().digest_size

_WRAPPER = """
target triple = "{triple}"
target datalayout = "{layout}"
declare i32 @"{inner}"(ptr, ptr, ptr)
define i64 @{entry}(ptr %arguments) {{
  %result = alloca i64
  %error = alloca ptr
  store i64 0, ptr %result
  %status = call i32 @"{inner}"(ptr %result, ptr %error, ptr %arguments)
  %value = load i64, ptr %result
  %raised = icmp ne i32 %status, 0
  %returned = select i1 %raised, i64 -1, i64 %value
  ret i64 %returned
}}
"""


class _Process:
    """The machine code that this process has loaded.

    It is never unloaded; a forked child uses its parent's.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._engine: Any = None
        self._libraries: list[Any] = []

    def after_fork(self) -> None:
        """Replace the lock in a child, because another thread of the parent may hold it."""
        self.lock = threading.RLock()

    def load(self, name: str, machine_code: bytes) -> int:
        """Link an object file and return the address of its entry."""
        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            self._engine = llvm.create_lljit_compiler(suppress_errors=True)
        # The C library provides the functions that copy memory.
        library = (
            llvm.JITLibraryBuilder()
            .add_object_img(machine_code)
            .add_current_process()
            .export_symbol(_ENTRY)
        )
        self._libraries.append(library.link(self._engine, f"{name} {len(self._libraries)}"))
        return int(self._libraries[-1][_ENTRY])


_PROCESS = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _PROCESS.after_fork())


class Kernel:
    """A function on flat arrays and numbers, called through :meth:`code`.

    Its annotations are its signature: ``NDArray[dtype]`` is a contiguous one-dimensional array,
    ``int`` is a 64-bit integer, ``bool`` a truth value. One parameter may be ``bool | None``; for
    None the kernel has separate machine code, selected by the argument's type. There are at least
    two arrays and two numbers; the result is a nonnegative integer.
    """

    def __init__(self, function: Callable[..., int]) -> None:
        self.function = function
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self._code: dict[bool, Callable[..., int]] = {}

    def code(self, args: tuple[Any, ...]) -> Callable[..., int]:
        """Return the function to call with arguments like ``args``; load or compile it if needed.

        ``args`` may be a prefix of the arguments. A call raises ``TypeError`` if an array does not
        match the signature.
        """
        choice = self._choice
        absent = choice is not None and args[choice] is None
        return self._code.get(absent) or self._prepare(absent)

    @cached_property
    def _kinds(self) -> tuple[Any, ...]:
        """The kind of each parameter: an array's dtype, or a type."""
        hints = get_type_hints(self.function)
        del hints["return"]
        return tuple(_kind(hint) for hint in hints.values())

    @cached_property
    def _choice(self) -> int | None:
        """The position of the parameter that may be None."""
        return next((i for i, kind in enumerate(self._kinds) if NoneType in get_args(kind)), None)

    def _prepare(self, absent: bool) -> Callable[..., int]:
        with _PROCESS.lock:
            if absent not in self._code:
                try:
                    self._code[absent] = self._native(absent)
                # for example a new version of numba, numpy or llvmlite, or another platform
                except Exception as error:
                    warnings.warn(
                        f"kernel {self.name} runs through numba's dispatcher, which starts slowly:"
                        f" {error!r}",
                        stacklevel=2,
                    )
                    self._code[absent] = numba.njit(nogil=True, cache=True)(self.function)
            return self._code[absent]

    def _native(self, absent: bool) -> Callable[..., int]:
        _check_array_layout()
        name = f"{self.name}-none" if absent else self.name
        chosen = NoneType if absent else bool
        kinds = tuple(chosen if i == self._choice else kind for i, kind in enumerate(self._kinds))
        address = _load_or_compile(name, partial(_compile, self.function, kinds))
        return _caller(self.name, address, kinds)


kernel = Kernel
"""The decorator that creates a :class:`Kernel`."""


def _kind(hint: Any) -> Any:
    """Return a hint's array dtype, or the hint itself.

    ``NDArray[T]`` is an alias from numpy 2.5 on, before that ``ndarray[..., dtype[T]]``.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return np.dtype(get_args(args[1])[0])
    return np.dtype(args[0]) if origin is get_origin(NDArray[np.int16]) else hint


_CALLER = """
def call({parameters}):
    if {unlike}:
        refuse({parameters})
    result = entry(pack({words}))
    if result < 0:
        refuse({parameters})
    return result

def shared(bounds, threads, {parameters}):
    if {unlike}:
        refuse({parameters})
    result = share(address, pack({words}), bounds, threads)
    if result < 0:
        refuse({parameters})
    return result

call.shared = shared
"""
"""The source of a caller, generated per kernel as dataclasses generate ``__init__``.

Loops over the arguments would take longer than many kernels. ``shared`` lets the OpenMP threads
call the entry for one range of ``bounds`` after the other, in place of the last two numbers.
"""
_SHARE = """
target triple = "{triple}"
target datalayout = "{layout}"
define void @{entry}(ptr %job) {{
start:
  %entry = load ptr, ptr %job
  %at = getelementptr i64, ptr %job, i64 1
  %given = load ptr, ptr %at
  %count_at = getelementptr i64, ptr %job, i64 2
  %count = load i64, ptr %count_at
  %bounds_at = getelementptr i64, ptr %job, i64 3
  %bounds = load ptr, ptr %bounds_at
  %ranges_at = getelementptr i64, ptr %job, i64 4
  %ranges = load i64, ptr %ranges_at
  %next = getelementptr i64, ptr %job, i64 5
  %result = getelementptr i64, ptr %job, i64 6
  %words = alloca i64, i64 %count
  %first = sub i64 %count, 2
  %second = sub i64 %count, 1
  %from = getelementptr i64, ptr %words, i64 %first
  %to = getelementptr i64, ptr %words, i64 %second
  br label %copy
copy:
  %i = phi i64 [0, %start], [%after, %copy]
  %source = getelementptr i64, ptr %given, i64 %i
  %word = load volatile i64, ptr %source
  %target = getelementptr i64, ptr %words, i64 %i
  store i64 %word, ptr %target
  %after = add i64 %i, 1
  %more = icmp ult i64 %after, %count
  br i1 %more, label %copy, label %take
take:
  %range = atomicrmw add ptr %next, i64 1 seq_cst
  %left = icmp ult i64 %range, %ranges
  br i1 %left, label %work, label %end
work:
  %low_at = getelementptr i64, ptr %bounds, i64 %range
  %low = load i64, ptr %low_at
  %high_at = getelementptr i64, ptr %low_at, i64 1
  %high = load i64, ptr %high_at
  store i64 %low, ptr %from
  store i64 %high, ptr %to
  %found = call i64 %entry(ptr %words)
  %before = atomicrmw or ptr %result, i64 %found seq_cst
  br label %take
end:
  ret void
}}
"""
"""The code that each thread of a team runs on a job. The job's words are the address of a kernel's
entry, the address and number of the kernel's words, the address of the bounds, the number of
ranges, the next range, and the OR of the results. Loads are volatile; otherwise LLVM would call
memcpy."""


def _caller(name: str, address: int, kinds: tuple[Any, ...]) -> Callable[..., int]:
    """Return the function that packs arguments into the words that an entry reads.

    The words are the array objects, then the numbers.
    """
    arrays = [i for i, kind in enumerate(kinds) if isinstance(kind, np.dtype)]
    numbers = [i for i, kind in enumerate(kinds) if kind is int or kind is bool]

    def refuse(*args: Any) -> None:
        found = ", ".join(f"{args[i].dtype} of strides {args[i].strides}" for i in arrays)
        wanted = ", ".join(str(kinds[i]) for i in arrays)
        raise TypeError(
            f"kernel {name}: arrays of {found}; needs contiguous one-dimensional ones of {wanted}"
        )

    names: dict[str, Any] = {f"t{i}": kinds[i] for i in arrays}
    names |= {
        "entry": CFUNCTYPE(c_int64, c_void_p)(address),
        "address": address,
        "share": share,
        "refuse": refuse,
        "pack": struct.Struct(f"{len(arrays) + len(numbers)}q").pack,
    }
    source = _CALLER.format(
        parameters=", ".join(f"x{i}" for i in range(len(kinds))),
        unlike=" or ".join(f"x{i}.dtype is not t{i}" for i in arrays),
        words=", ".join([*(f"id(x{i})" for i in arrays), *(f"x{i}" for i in numbers)]),
    )
    exec(source, names)
    call: Callable[..., int] = names["call"]
    return call


@lru_cache(maxsize=1)
def _check_array_layout() -> None:
    """Check that the fields of numpy's ``PyArrayObject`` are where entries read them.

    These are an array's address, dimension, shape and strides.

    Raises:
        RuntimeError: the fields have other offsets.
    """
    array = np.empty((3, 5), np.int16)
    address, dimensions, shape, strides = struct.unpack(
        "qi4xqq", string_at(id(array) + ARRAY_HEADER, 32)
    )
    # Pointers are followed only if the fields before them are correct.
    right = (address, dimensions) == (array.ctypes.data, 2)
    if not right or struct.unpack("4q", string_at(shape, 16) + string_at(strides, 16)) != (
        *array.shape,
        *array.strides,
    ):
        raise RuntimeError(
            f"numpy {np.__version__}: the fields of its arrays are not where kernels read them;"
            " install a CPython version of numpy with known fields, for example pip install"
            " numpy==2.4.6"
        )


def sources() -> list[Path]:
    """Return the source files of kernels.

    If any of them changes, all machine code is compiled again.
    """
    return sorted(file for pattern in _MADE_OF for file in _PACKAGE.glob(pattern))


@lru_cache(maxsize=1)
def _folder_name() -> str:
    parts = [
        sys.version,
        numba.__version__,
        llvmlite.__version__,
        np.__version__,
        llvm.get_default_triple(),
        *processor(),
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sources():
        digest.update(source.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}"


def _folders() -> Iterator[Path]:
    if chosen := os.environ.get("LNS_OPS_CACHE"):
        yield Path(chosen) / _folder_name()
        return
    yield Path(__file__).parent / "__pycache__" / _folder_name()
    yield (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "lns_ops"
        / _folder_name()
    )


def _load_or_compile(name: str, compiled: Callable[[], bytes]) -> int:
    """Return the address of the kernel's entry, from the first folder with an undamaged file.

    Otherwise the kernel is compiled and stored.
    """
    for folder in _folders():
        try:
            stored = (folder / f"{name}.o").read_bytes()
        except OSError:
            continue
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return _PROCESS.load(name, stored[_DIGEST:])
    machine_code = compiled()
    address = _PROCESS.load(name, machine_code)
    _store(f"{name}.o", hashlib.sha256(machine_code).digest() + machine_code)
    return address


def _store(name: str, content: bytes) -> None:
    """Write a file atomically to every writable folder."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"{name}.{uuid.uuid4().hex}"
            temporary.write_bytes(content)
            temporary.replace(folder / name)
        except OSError:
            continue


def share(address: int, words: bytes, bounds: bytes, threads: int) -> int:
    """Let a team of OpenMP threads call a kernel for every range; return the OR of the results.

    Args:
        address: address of the kernel's entry.
        words: the words that the entry reads; the last two are for the bounds of a range.
        bounds: bounds of consecutive ranges, 64 bits each, one more than there are ranges.
        threads: number of threads of the team, including the caller's.
    """
    job = (c_int64 * 7)(
        address, cast(c_char_p(words), c_void_p).value or 0, len(words) // 8,
        cast(c_char_p(bounds), c_void_p).value or 0, len(bounds) // 8 - 1, 0, 0,
    )  # fmt: skip
    team = openmp_team()
    assert team is not None
    team(_share_entry(), job, threads, 0)
    return job[6]


@lru_cache(maxsize=1)
def _share_entry() -> int:
    """Return the address of :data:`_SHARE`'s machine code."""
    with _PROCESS.lock:
        return _load_or_compile("share", _compile_share)


def _compile_share() -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_default_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine()
    text = _SHARE.format(triple=triple, layout=machine.target_data, entry=_ENTRY)
    return _emit(llvm.parse_assembly(text))


def _compile(function: Callable[..., int], kinds: tuple[Any, ...]) -> bytes:
    """Return the object file of a kernel's entry.

    Raises:
        RuntimeError: the file refers to external symbols.
    """
    kernel, (fit, arguments) = (
        helper(function),
        argument_readers([_numba_type(kind) for kind in kinds]),
    )

    def entry(words: Any) -> Any:
        return kernel(*arguments(words)) if fit(words) else -1

    int64 = numba.types.int64
    callback = numba.cfunc(
        int64(numba.types.CPointer(int64)), error_model="numpy", **NO_REFERENCE_COUNTS
    )(entry)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(callback.inspect_llvm())
    # The callback calls numba's own form of the function and prints exceptions; only the inner
    # function is used.
    inner = callback.native_name.removeprefix("cfunc.")
    wrapper = _WRAPPER.format(
        triple=module.triple, layout=module.data_layout, inner=inner, entry=_ENTRY
    )
    module.link_in(llvm.parse_assembly(wrapper))
    return _emit(module)


def _numba_type(kind: Any) -> Any:
    if isinstance(kind, np.dtype):
        return numba.types.Array(numba.from_dtype(kind), 1, "C")
    if kind is NoneType:
        return numba.types.none
    return numba.types.int64 if kind is int else numba.types.boolean


def _emit(module: Any) -> bytes:
    """Return machine code of the entry and of the functions that it calls."""
    for value in [*module.functions, *module.global_variables]:
        if not value.is_declaration and value.name != _ENTRY:
            value.linkage = "internal"
    name, features = processor()
    machine = llvm.Target.from_default_triple().create_target_machine(
        name, features, opt=3, jit=True
    )
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    declared = (
        value.name
        for value in [*module.functions, *module.global_variables]
        if value.is_declaration
    )
    missing = [symbol for symbol in declared if not symbol.startswith("llvm.")]
    if missing:
        raise RuntimeError(
            f"the kernel needs {', '.join(missing)}: kernels must neither allocate nor raise"
        )
    return bytes(machine.emit_object(module))
