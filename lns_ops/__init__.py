"""Logarithmic number system arithmetic for torch.

>>> import torch, lns_ops
>>> x = lns_ops.LNSTensor.from_float(torch.tensor([1.0, 2.0, 3.0]), lns_ops.lns12)
>>> (x * x).sum()
LNSTensor(13.8987, fmt=lns12)

The arithmetic is specified in :mod:`lns_ops.reference` and the formats in :mod:`lns_ops.format`.
:func:`convert_` turns a torch module into an LNS module, and :mod:`lns_ops.optim` has its
optimizers.

``import lns_ops`` alone imports the formats and the specification, without torch. The rest is
imported together with torch, or when one of its names is first used (:mod:`lns_ops._loading`).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from lns_ops._loading import load_with_torch

if TYPE_CHECKING:
    from lns_ops._public import *  # noqa: F403
    from lns_ops._public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if "." not in name and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        if name == "__all__" or not name.startswith("_"):
            _load()
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    _load()
    return sorted(globals())


def _load() -> None:
    """Import everything, and bind the public names here."""
    public = importlib.import_module(f"{__name__}._public")
    names = ("__all__", *public.__all__)
    globals().update({name: getattr(public, name) for name in names})


load_with_torch(_load)
