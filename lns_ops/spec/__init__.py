"""Definition of the arithmetic, which needs only NumPy: formats, Gaussian logarithms, reference."""
