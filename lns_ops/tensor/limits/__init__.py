"""Warnings of losses at the limits of a format: factors near 1, small gradients, large counts."""
