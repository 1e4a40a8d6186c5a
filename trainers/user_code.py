"""Find, hash, load and call the user's code, which configs name as ``package.module:name`` or
``file.py:name``.

A file is loaded by its path under a private module name, so it cannot shadow another module. If a
node of a Ray cluster lacks the file, a copy that the study sent is used (:data:`SENT`). Its folder
is appended to ``sys.path``, so it can import modules from the same folder. Every trial reloads
files (:func:`forget`), so changes made by an earlier trial are lost. A module is imported as usual.
Finding and hashing code does not run it. The digest of code covers its imports from the same folder
(:func:`code_files`).

Functions are called on copies of their arguments, with the random numbers of torch, NumPy and
Python seeded.

Errors are ``ValueError`` and have the key, the file and line, the rule and the remedy.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trainers.text import describe_error, nearest

DIGEST_LENGTH = 12
"""Number of hex digits of a code digest (SHA-256)."""
LISTED = 20
"""Maximum number of a module's names that an error lists."""
PRIVATE = "_lns_study_user_"
"""Prefix of the names of modules that are loaded from files."""
SENT = "lns_study_user_files"
"""Folder on ``sys.path`` with the files that a study sent to a node of a Ray cluster."""
INSTALLED = {"site-packages", "dist-packages"}
"""Names of folders with installed packages, which are identified by their versions."""
MISSING = "missing"
"""Digest of a package that a node lacks."""
_FOLDERS: set[str] = set()
"""Folders of the loaded files."""
_APPENDED: set[str] = set()
"""The folders among them that were appended to ``sys.path``."""
_BEFORE: set[str] = set()
"""Names of the modules in ``sys.modules`` before the first file was loaded."""


def names_code(name: str) -> bool:
    """Return whether ``name`` refers to the user's code, not to a built-in choice."""
    return ":" in name


def without_folder(name: str) -> str:
    """Return ``name`` without the folder of its file; a digest identifies the code."""
    return name.rpartition("/")[2]


def placeless(part: dict[str, Any]) -> dict[str, Any]:
    """Return a section of a config with :func:`without_folder` applied to its ``name``."""
    return part | {"name": without_folder(part["name"])}


def split_name(key: str, name: str) -> tuple[str, str]:
    """Split ``place:attribute``.

    Raises:
        ValueError: ``name`` does not have that form.
    """
    place, _, attribute = name.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not attribute.isidentifier() or not (place.endswith(".py") or is_module):
        raise ValueError(
            f"{key}={name!r}: must be file.py:name or package.module:name; use for example"
            f" {key}=net.py:make_net"
        )
    return place, attribute


def find_source(key: str, name: str) -> Path:
    """Return the file with ``name``'s code, without running the file or its packages.

    Raises:
        ValueError: the file or module does not exist.
    """
    place, _ = split_name(key, name)
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file() and not (path := sent_copy(path)).is_file():
            raise ValueError(
                f"{key}={name!r}: there is no file {path}; give its path relative to the study's"
                " file, or an absolute one"
            )
        return path.resolve()
    specs = _specs(place)
    spec = specs[-1] if specs else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ValueError(
            f"{key}={name!r}: there is no module {place} in this Python ({sys.executable}); install"
            " its package here, or name a file: net.py:make_net"
        )
    return Path(spec.origin).resolve()


def _specs(place: str, folders: list[str] | None = None) -> list[ModuleSpec]:
    """Find a module on ``sys.path``, or in ``folders``, without importing its packages.

    Returns:
        Specs of its packages, outermost first, and of the module; empty if it does not exist.
    """
    found: list[ModuleSpec] = []
    for name in place.split("."):
        searched = list(found[-1].submodule_search_locations or ()) if found else folders
        try:
            spec = (
                importlib.util.find_spec(name)
                if searched is None
                else PathFinder.find_spec(name, searched)
            )
        except ValueError:  # __main__ of a script
            spec = None
        if spec is None:
            return []
        found.append(spec)
    return found


def _package(place: str) -> Path:
    """Return the folder of a module's outermost regular package; without one, the module's file."""
    spec = next(spec for spec in _specs(place) if spec.origin is not None)
    assert spec.origin is not None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def place_of_sent(folder: Path) -> str:
    """Return the name of the subfolder of :data:`SENT` for files of ``folder``."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:DIGEST_LENGTH]


def sent_copy(path: Path) -> Path:
    """Return the copy of a file that a study sent to this node; ``path`` if there is none here."""
    inner = Path(SENT) / place_of_sent(path.parent) / path.name
    return next((copy for entry in sys.path if (copy := Path(entry) / inner).is_file()), path)


def digest_source(key: str, name: str) -> str:
    """Return the digest of ``name``'s code that is part of a trial's identity.

    It is the start of the SHA-256 of its file, or, with several :func:`code_files`, over all.

    Raises:
        ValueError: the file or module does not exist, or a file cannot be read.
    """
    root, files = code_files(key, name)
    if len(files) == 1:
        return hashlib.sha256(files[0].read_bytes()).hexdigest()[:DIGEST_LENGTH]
    return digest_files(root, files)


def code_files(key: str, name: str) -> tuple[Path, list[Path]]:
    """Return the files of ``name``'s code: its own file, the ``__init__`` files of its packages,
    and their direct and indirect imports from the same folder.

    All import statements are considered, also within functions, but only in that folder; imports by
    other means are not found. For an installed module (:data:`INSTALLED`) it is only its own file.

    Returns:
        The common folder, and the sorted files.

    Raises:
        ValueError: the file or module does not exist, or a file cannot be read.
    """
    path = find_source(key, name)
    place, _ = split_name(key, name)
    if place.endswith(".py"):
        root, unseen = path.parent, [path]
    elif INSTALLED & set(path.parts):
        return path.parent, [path]
    else:
        unseen = _origins(place)
        above = unseen[-1].parents
        root = above[min(place.count(".") + (path.stem == "__init__"), len(above) - 1)]
    files: set[Path] = set()
    asked: set[tuple[str, Path]] = set()
    while unseen:
        file = unseen.pop()
        if file in files or not _is_below(file, root):
            continue
        files.add(file)
        for level, imported in _imports_of(key, name, file):
            folder = file.parents[min(level, len(file.parents)) - 1] if level else root
            if (imported, folder) not in asked:
                asked.add((imported, folder))
                unseen += _origins(imported, [str(folder)])
    return root, sorted(files)


def _is_below(file: Path, root: Path) -> bool:
    """Return whether a file is below a folder, but not in an environment's installed packages."""
    if root not in file.parents or not file.is_file():
        return False
    return not INSTALLED & set(file.relative_to(root).parts)


def _origins(imported: str, folders: list[str] | None = None) -> list[Path]:
    """Return the files of a module and of its packages, outermost first.

    The last part of ``imported`` may also be a name that the module defines.
    """
    whole = imported.rpartition(".")[0]
    specs = _specs(imported, folders) or (_specs(whole, folders) if whole else [])
    return [Path(spec.origin) for spec in specs if spec.origin is not None]


def _imports_of(key: str, name: str, file: Path) -> tuple[tuple[int, str], ...]:
    """Return the imports of a file of ``name``'s code, as :func:`_imports` does.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{key}={name!r}: {file}, which its code imports, cannot be read: {error.strerror};"
            " make it readable, or take it away"
        ) from error
    return _imports(source) if file.suffix == ".py" else ()


@lru_cache(maxsize=4096)
def _imports(source: bytes) -> tuple[tuple[int, str], ...]:
    """Return the imports in source code: pairs of the number of leading dots and the dotted name,
    including the name that is imported from a module."""
    try:
        with warnings.catch_warnings(action="ignore"):
            nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # loading it raises the error
        return ()
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(0, each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names]
            found += [(node.level, f"{node.module or ''}.{name}".strip(".*")) for name in names]
    return tuple(dict.fromkeys(each for each in found if each[1]))


def digest_package(name: str) -> str:
    """Return the version of the package of ``package.module:name``, for comparisons between nodes.

    It is :data:`MISSING`, or the start of the SHA-256 over the package's Python files. It includes
    whether the package is installed, because :func:`digest_source` depends on it.
    """
    try:
        path, package = find_source("package", name), _package(split_name("package", name)[0])
        kind = ", installed" if INSTALLED & set(path.parts) else ""
        return f"code {digest_files(package, sorted(package.rglob('*.py')) or [package])}{kind}"
    except (ValueError, OSError):
        return MISSING


def digest_files(root: Path, paths: Iterable[Path]) -> str:
    """Return the start of the SHA-256 over the files' contents and their names below ``root``."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGEST_LENGTH]


def load_code(key: str, name: str, digest: str = "") -> Callable[..., Any]:
    """Import the callable that ``name`` refers to.

    Args:
        key: key of the config, for error messages.
        name: ``file.py:name`` or ``package.module:name``.
        digest: :func:`digest_source` when the study was planned; "" to skip the check.

    Raises:
        ValueError: it cannot be loaded, has changed, or is not callable.
    """
    place, attribute = split_name(key, name)
    path = find_source(key, name)
    if digest and digest_source(key, name) != digest:
        raise ValueError(
            f"{key}={name!r}: {path}, or what it imports from beside it, has changed since the"
            " study was planned, or differs on this machine; run the same command again to plan"
            " its trials again"
        )
    is_file = place.endswith(".py")
    try:
        module = load_file(path) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        described = describe_error(error, path, *([] if is_file else [_package(place)]))
        raise ValueError(
            f"{key}={name!r}: {path} cannot be imported: {described}; mend it there"
        ) from error
    if is_file and len(_FOLDERS) > 1:
        _refuse_mixed(key, name, path)
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if _offers(module, name, value)]
        listed = ", ".join(sorted(known)) if len(known) <= LISTED else f"{len(known)} others"
        raise ValueError(
            f"{key}={name!r}: {path} has no function or class"
            f" {attribute}{nearest(attribute, known)}; it has {listed or 'none'}"
        )
    function: Callable[..., Any] = found
    return function


def _refuse_mixed(key: str, name: str, path: Path) -> None:
    """Reject a file whose sibling import is ambiguous: another folder has a module of the same
    name.

    Python has one module per name, so one of two files would get the other's module.

    Raises:
        ValueError: an import is ambiguous; the message has both modules' files.
    """
    root, files = code_files(key, name)
    others = {Path(folder) for folder in _FOLDERS} - {root}
    for file in files:
        inner = file.relative_to(root).with_suffix("")
        module = ".".join(inner.parts).removesuffix(".__init__")
        found = _origins(module)
        if file != path and found and found[-1] != file and others & set(found[-1].parents):
            raise ValueError(
                f"{key}={name!r}: {path} imports {module}, and would get {found[-1]} instead of"
                f" {file}, since other code of the trial lies beside that; rename one of them"
            )


def named(key: str, name: str) -> str:
    """Return the description of a loaded function in error messages: key, name, file and line."""
    try:
        return f"{key}={name!r} ({where(find_source(key, name), load_code(key, name))})"
    except ValueError:  # its file was removed since
        return f"{key}={name!r}"


def where(path: Path, function: Callable[..., Any]) -> str:
    """Return a file and the first line of its function, or of its class's constructor, as text."""
    made = inspect.unwrap(function)
    for each in (made, getattr(made, "__init__", None)):
        code = getattr(each, "__code__", None)
        if code is not None and Path(code.co_filename).resolve() == path:
            return f"{path}, line {code.co_firstlineno}"
    return str(path)


def call(
    key: str,
    name: str,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    seed: int = 0,
    **offered: Any,
) -> Any:
    """Call ``function`` with ``args``, and with the ``offered`` arguments that match its
    parameters.

    Args:
        key: key of the config, for error messages.
        name: name of the function in the config.
        function: the function or class.
        args: its arguments; it gets a copy.
        seed: seed of the random numbers during the call.
        offered: optional further arguments.

    Raises:
        ValueError: the function does not accept ``args``, needs others, or raises an error.
    """
    path = find_source(key, name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of compiled code
        signature = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_KEYWORD)])
    given = {name: value for name, value in offered.items() if name in signature.parameters}
    arguments = given | deepcopy(dict(args))
    try:
        signature.bind(**arguments)
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"{key}={name!r}: {error} in {called}{signature} ({where(path, function)}), called"
            f" with {', '.join(arguments) or 'no arguments'}; set {key.rpartition('.')[0]}.args, or"
            " give the function defaults"
        ) from None
    try:
        with seeded(seed):
            return function(**arguments)
    except (Exception, SystemExit) as error:
        mend = "change its args" if INSTALLED & set(path.parts) else "mend it there"
        raise ValueError(f"{key}={name!r} raised {describe_error(error, path)}; {mend}") from error


def forget() -> None:
    """Unload the loaded files, and the modules and packages that they imported from their
    folders."""
    if not _FOLDERS:
        return
    for name in [name for name in sys.modules if name.startswith(PRIVATE) or _is_beside(name)]:
        del sys.modules[name]
    sys.path[:] = python_path()
    _FOLDERS.clear()
    _APPENDED.clear()


def python_path() -> list[str]:
    """Return ``sys.path`` without the folders appended for loaded files."""
    return [folder for folder in sys.path if folder not in _APPENDED]


def _is_beside(name: str) -> bool:
    """Return whether a module is in :data:`_FOLDERS`, or in a package there that was loaded
    since."""
    outermost = name.partition(".")[0]
    files = [getattr(sys.modules[name], "__file__", None)]
    if outermost not in _BEFORE:
        files += getattr(sys.modules.get(outermost), "__path__", None) or ()
    return name != "__main__" and any(os.path.dirname(file) in _FOLDERS for file in files if file)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of torch, NumPy and Python, and restore their states afterwards."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            np.random.seed(seed % (1 << 32))
            random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def load_file(path: Path) -> ModuleType:
    """Load a file, by its absolute path, as a module with a private name.

    The module is cached by path and content until :func:`forget`.
    """
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:DIGEST_LENGTH]
    name = f"{PRIVATE}{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.parent)
    if not _FOLDERS:
        _BEFORE.clear()
        _BEFORE.update(sys.modules)
    _FOLDERS.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)
        _APPENDED.add(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with seeded(0):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _offers(module: ModuleType, name: str, value: object) -> bool:
    """Return whether an attribute is a function or class defined in a file, or public in a
    package."""
    return (inspect.isfunction(value) or inspect.isclass(value)) and (
        value.__module__ == module.__name__
        if module.__name__.startswith(PRIVATE)
        else not name.startswith("_")
    )
