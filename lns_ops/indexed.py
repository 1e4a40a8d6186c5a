"""Table look-ups and sums by index on codes, for custom operations.

They are defined in :mod:`lns_ops.functional.indexed`.
"""

from lns_ops.functional.indexed import index_sum, lookup, power

__all__ = ["index_sum", "lookup", "power"]
