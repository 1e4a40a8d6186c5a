"""Protection against library settings in the current folder, which may be untrusted."""

from __future__ import annotations

import os.path
import threading

MATPLOTLIB = "matplotlibrc"
"""File in the current folder that matplotlib reads instead of the user's settings (matplotlib
3.11)."""
_LOADING = threading.Lock()


def load_matplotlib() -> None:
    """Import matplotlib, if it is not imported yet, without the settings in the current folder.

    Such settings can change pictures and run LaTeX, until matplotlib 3.10 also Python code, and a
    pipe in the place of the file would block the process. matplotlib has no public way to ignore
    the file, and a change of the current folder would affect all threads.
    """
    with _LOADING:
        exists = os.path.exists
        os.path.exists = lambda path: path != MATPLOTLIB and exists(path)
        try:
            import matplotlib  # noqa: F401
        finally:
            os.path.exists = exists
