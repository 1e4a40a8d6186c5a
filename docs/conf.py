"""How Sphinx makes the site: Markdown by MyST, the theme Furo, reference pages written from
the code."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import generate  # noqa: E402 (found by the line above)

generate.write(HERE / "reference")

project = "lns-study"
author = "the authors of lns-study"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
myst_heading_anchors = 3
exclude_patterns = ["_ext", "_build"]
html_theme = "furo"
html_title = "lns-study"
html_copy_source = False
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # names that no page has; links between pages stay strict
