"""Warnings of what the limits of a format lose: factors near 1, small gradients, large counts."""
