"""Alias of the package ``study`` for scripts: ``import lns_study as study``.

Both names give the same module object. A file ``study.py`` beside a script shadows the installed
package, so ``import study`` would import that file. This module has a unique name, so it is found;
it raises an ImportError that names any file that shadows one of our packages.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

PACKAGES = ("study", "trainers", "lns_ops")


def _refuse_namesakes(ours: Path) -> None:
    """Check that no other file or folder shadows one of our packages.

    Args:
        ours: folder that has the packages.

    Raises:
        ImportError: Python would import another file in place of one of :data:`PACKAGES`.
    """
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is not None and found != ours / name / "__init__.py":
            what = found.parent if found.name == "__init__.py" else found
            raise ImportError(
                f"{what}: has the name of a package of lns-study, {name}, and Python would import"
                " it in place of the package; rename it"
            )


_refuse_namesakes(Path(__file__).resolve().parent)

if TYPE_CHECKING:
    from study import *  # noqa: F403
else:
    import study

    sys.modules[__name__] = study
