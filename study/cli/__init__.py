"""The command line: argparse and printing; the work is done in the packages beside this one."""

from study.cli.entry import main

__all__ = ["main"]
