"""Which packages are installed; all else is in ``pyproject.toml``, which cannot say that ``conf/``
becomes the package ``study.conf``.

An editable installation finds ``conf/`` in its checkout. Without the package that lies elsewhere it
is one line, the checkout's path, which type checkers follow as well.
"""

import sys

from setuptools import find_packages, setup

PACKAGES = find_packages(include=["study*", "trainers*", "lns_ops*"])
MODULES = ["lns_study"]

if "editable_wheel" in sys.argv:
    setup(packages=PACKAGES, py_modules=MODULES, package_dir={"": "."})
else:
    packages = [*PACKAGES, "study.conf"]
    setup(packages=packages, py_modules=MODULES, package_dir={"study.conf": "conf"})
