"""Definition of the arithmetic on NumPy alone: formats, Gaussian logarithms and the reference."""
