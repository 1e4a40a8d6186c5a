"""Which packages are installed; all else is in ``pyproject.toml``, which cannot say that ``conf/``
becomes the package ``study.conf``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["study*", "trainers*", "lns_ops*"]), "study.conf"],
    package_dir={"study.conf": "conf"},
)
