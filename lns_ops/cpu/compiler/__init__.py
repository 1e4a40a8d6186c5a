"""Compilation of kernels to cached machine code, and the threads that run it."""
