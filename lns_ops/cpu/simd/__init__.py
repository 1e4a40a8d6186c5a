"""Kernels for AVX-512 and AVX2, with the tables of Gaussian logarithms in vector registers."""
