"""The command line: argparse and what it prints; what it does is in the packages beside this
one."""

from study.cli.entry import main

__all__ = ["main"]
