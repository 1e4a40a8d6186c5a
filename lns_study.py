"""The package ``study`` for scripts: ``import lns_study as study``.

It is the same module. Python imports a file beside a script in place of an installed package of the
same name, so ``import study`` beside a ``study.py`` imports that file. This module, whose name
nobody else uses, finds such files first and names them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

PACKAGES = ("study", "trainers", "lns_ops")


def _refuse_namesakes(ours: Path) -> None:
    """Refuse a file or folder that Python would import in place of a package of ours.

    Args:
        ours: folder that has the packages.

    Raises:
        ImportError: there is one.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is not None and found != ours / name / "__init__.py":
            what = found.parent if found.name == "__init__.py" else found
            raise ImportError(
                f"{what}: has the name of a package of lns-study, {name}, and Python would import"
                " it in its place; rename it"
            )


_refuse_namesakes(Path(__file__).resolve().parent)

if TYPE_CHECKING:
    from study import *  # noqa: F403
else:
    import study

    sys.modules[__name__] = study
