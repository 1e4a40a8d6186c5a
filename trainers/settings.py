"""Settings that libraries would take from the current folder, which may be a stranger's."""

from __future__ import annotations

import os.path
import threading

MATPLOTLIB = "matplotlibrc"
"""File in the current folder that matplotlib reads before it looks for the user's own settings
(matplotlib 3.11)."""
_LOADING = threading.Lock()


def load_matplotlib() -> None:
    """Import matplotlib, unless this process has, without settings of the current folder.

    Such settings run LaTeX, and until matplotlib 3.10 they run Python code. They change what
    pictures show. A pipe in the place of the file would block the process. matplotlib has no public
    way to look elsewhere, and every thread would see a change of the current folder.
    """
    with _LOADING:
        exists = os.path.exists
        os.path.exists = lambda path: path != MATPLOTLIB and exists(path)
        try:
            import matplotlib  # noqa: F401
        finally:
            os.path.exists = exists
