"""``python -m study``: the same command as ``lns-study``."""

from study.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
