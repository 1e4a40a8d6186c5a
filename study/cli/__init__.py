"""The command line: argument parsing and printing; the other packages do the work."""

from study.cli.entry import main

__all__ = ["main"]
