"""Formats in which blocks along the last dimension share a scale."""
