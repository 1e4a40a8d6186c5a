"""Import the whole package as soon as torch is imported, and not before.

The formats (:mod:`lns_ops.formats`) and the definition of the arithmetic (:mod:`lns_ops.spec`) are
plain Python and NumPy. A program that only checks a format's name, such as the driver of a study,
then saves 1.8 s of start-up and 290 MB of memory for torch and numba. The other parts need torch,
and must be imported as soon as torch is: ``torch.load`` reads LNSTensors only after
:mod:`lns_ops.tensor` has registered them as safe, and ``torch.ops.lns_ops`` has no operators
before its import.

So the first import of torch, or of another part of this package, triggers the import of the whole
package. The only hook that Python has for this is a finder on ``sys.meta_path``
(https://docs.python.org/3/reference/import.html#the-meta-path); ours finds no modules itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

WITHOUT_TORCH = ("_loading", "format", "formats", "reference", "spec")
"""The parts of this package that do not import torch."""


class _Follower(MetaPathFinder):
    """A finder that calls ``load`` once, after the import of a module that needs the whole package.

    It stays on ``sys.meta_path``, because another thread may be iterating over that list.
    """

    def __init__(self, load: Callable[[], None]) -> None:
        self._load, self._done = load, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, with a loader that calls ``load`` when it is done.

        If the module is never imported, ``load`` is not called.
        """
        package, _, part = fullname.partition(".")
        ours = package == "lns_ops" and part.partition(".")[0] not in WITHOUT_TORCH
        if self._done or (fullname != "torch" and not ours):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader, may_fail=fullname == "torch")
        return spec

    def _follow(self, loader: object, may_fail: bool) -> None:
        """Wrap a loader's ``exec_module``. Nested imports are not wrapped, because they would see
        this package half imported.

        An import of torch never fails because of this package (for example if a library is missing,
        or another thread imports the package at the same time). The first access to a name of the
        package tries the import again and raises the error.
        """
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[attr-defined]
            first, self._done = not self._done, True  # another thread may have been first
            try:
                execute(module)
            except BaseException:
                self._done = not first
                raise
            if first:
                with suppress(Exception) if may_fail else nullcontext():
                    self._load()

        loader.exec_module = exec_module  # type: ignore[attr-defined]


def load_with_torch(load: Callable[[], None]) -> None:
    """Call ``load`` now if torch is imported, else right after torch or a dependent part is."""
    if "torch" in sys.modules:
        load()
    else:
        sys.meta_path.insert(0, _Follower(load))
