"""What the arithmetic is: formats, Gaussian logarithms and the reference in plain integers, on
NumPy alone."""
