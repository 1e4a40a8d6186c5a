"""Analyses of a whole search for check functions: ranks of a key's values, and the chosen value."""

from study.evidence.analyses import chosen, rank

__all__ = ["chosen", "rank"]
