"""Names that check functions of claims import, from the modules of :mod:`study.evidence`.

A statement contains the SHA-256 of a check function's file, so these names stay where they are.
"""
