"""Loads the whole package as soon as torch is loaded, and no sooner.

The formats (:mod:`lns_ops.formats`) and the definition of the arithmetic (:mod:`lns_ops.spec`) are
plain Python and NumPy. A program that only checks a format's name, as the one that watches over a
study, need not wait 1.8 s for torch and numba, nor hold their 290 MB. All the rest is of use with
torch alone, and must be there as soon as torch is: ``torch.load`` reads LNSTensors only after
:mod:`lns_ops.tensor` has named them as safe, and ``torch.ops.lns_ops`` has no operators before
that.

So the first import of torch, or of any other part of this package, is followed by the import of
all of it. Python offers no call for that but a finder on ``sys.meta_path``
(https://docs.python.org/3/reference/import.html#the-meta-path); this one finds nothing by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

WITHOUT_TORCH = ("_loading", "format", "formats", "reference", "spec")
"""The parts of this package that import no torch."""


class _Follower(MetaPathFinder):
    """A finder that has ``load`` called once, after the import of what needs the whole package.

    It stays on ``sys.meta_path``, which other threads may walk at the moment.
    """

    def __init__(self, load: Callable[[], None]) -> None:
        self._load, self._done = load, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls ``load`` at its end.

        A module that is looked for may not be imported afterwards; then nothing happens.
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
        """Wrap a loader's ``exec_module``. What it imports in turn is followed no more, as it would
        find this package half loaded.

        An import of torch never fails for this package's sake (a library that is missing, another
        thread that imports it at the same time): the first name asked of it loads it again, and
        raises what is wrong.
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
    """Call ``load`` now if torch is loaded, else as soon as it or a part that needs it is."""
    if "torch" in sys.modules:
        load()
    else:
        sys.meta_path.insert(0, _Follower(load))
