"""Portable kernels: loops with table look-ups that the compiler vectorizes."""
