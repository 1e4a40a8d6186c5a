"""Formats whose values share a scale in blocks along the last dimension."""
